"""`outlast testbed`: a real Slurm cluster in one directory of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from outlast.reliability.cli.common import as_json
from outlast.reliability.cli.show import print_json, print_table

if TYPE_CHECKING:
    from outlast.slurm.testbed import Testbed

_DEFAULT: Final = "/tmp/outlast-testbed"
_FAULTS: Final = ("crash", "kill-slurmd", "start", "drain", "undrain", "kill-slurmctld", "restart-slurmctld")
_WHOLE: Final = ("kill-slurmctld", "restart-slurmctld")

directory = click.option(
    "--dir", "place", type=click.Path(path_type=Path), default=_DEFAULT, show_default=True, help="Where it lives."
)


@click.group()
def testbed() -> None:
    """A real Slurm cluster in one directory of this machine, for trying things.

    \b
      outlast testbed start
      export SLURM_CONF=...              (printed by start)
      outlast submit RUN.yaml
      outlast testbed fault crash n2     (its slurmd, steps and ranks are killed)
      outlast testbed stop

    Exit codes: 0 done, 1 it cannot be done (the message says why, and where the logs are), 2 wrong use.
    """


@testbed.command()
@directory
@click.option("--nodes", type=click.IntRange(1, 64), default=8, show_default=True, help="Each is a slurmd here.")
@click.option("--gpus", type=click.IntRange(0, 16), default=0, show_default=True, help="Pretended GPUs a node.")
@click.option("--accounting/--no-accounting", default=True, show_default=True, help="With slurmdbd and MariaDB.")
def start(place: Path, nodes: int, gpus: int, accounting: bool) -> int:
    """Start it; returns when every node answers. Ready in a few seconds.

    Needs Debian's slurm-wlm, munge and, for accounting, slurmdbd and mariadb-server. Needs no root. Asked again for the
    same, it says what is there already.

    Exit codes: 0 it answers, 1 it cannot be started.
    """
    from outlast.slurm.errors import SlurmError
    from outlast.slurm.testbed import start as begin

    try:
        bed = begin(place, nodes=nodes, gpus=gpus, accounting=accounting)
    except (SlurmError, OSError) as error:
        return _complain(error)
    click.echo(f"{len(bed.nodes)} nodes: {' '.join(bed.nodes)}\nexport SLURM_CONF={bed.slurm_conf}")
    return 0


@testbed.command()
@directory
@click.option("--keep", is_flag=True, help="Keep its state, so that start goes on where it was.")
def stop(place: Path, keep: bool) -> int:
    """End its jobs and daemons and remove its directory.

    Exit codes: 0 stopped, 1 something is left, or there is no testbed.
    """
    from outlast.slurm.errors import SlurmError

    try:
        bed = _load(place)
        bed.stop() if keep else bed.destroy()
    except (SlurmError, OSError) as error:
        return _complain(error)
    click.echo(f"stopped; state kept in {place}" if keep else f"stopped; {place} removed")
    return 0


@testbed.command()
@directory
@as_json
def status(place: Path, as_json: bool) -> int:
    """Its daemons and nodes, and the SLURM_CONF to use it by.

    Exit codes: 0 all alive, 1 something is not, or there is no testbed.
    """
    from outlast.slurm.errors import SlurmError

    try:
        seen = _load(place).status()
    except (SlurmError, OSError) as error:
        return _complain(error)
    if as_json:
        print_json(seen)
    else:
        rows = [
            (name, "alive" if alive else "dead", seen.nodes.get(name.removeprefix("slurmd-"), ""))
            for name, alive in seen.daemons.items()
        ]
        print_table(("DAEMON", "PROCESS", "NODE STATE"), rows)
        click.echo(f"export SLURM_CONF={seen.slurm_conf}")
    return 0 if all(seen.daemons.values()) else 1


@testbed.command()
@click.argument("kind", type=click.Choice(_FAULTS))
@click.argument("node", default="")
@directory
def fault(kind: str, node: str, place: Path) -> int:
    """Break it, or mend what was broken.

    \b
      crash NODE           its slurmd, steps and processes are killed at once
      kill-slurmd NODE     the daemon alone
      start NODE           its slurmd again
      drain NODE, undrain NODE
      kill-slurmctld, restart-slurmctld

    Exit codes: 0 done, 1 it cannot be done, 2 no such node or fault.
    """
    from outlast.slurm.errors import SlurmError
    from outlast.slurm.testbed import fault as break_it

    if bool(node) == (kind in _WHOLE):
        raise click.UsageError(f"{kind} takes {'no node' if kind in _WHOLE else 'a node, such as n2'}")
    try:
        break_it(_load(place), kind, node)
    except (SlurmError, OSError) as error:
        return _complain(error)
    click.echo(f"{kind} {node}".rstrip() + ": done")
    return 0


def _load(place: Path) -> Testbed:
    from outlast.slurm.testbed import load

    return load(place)


def _complain(error: Exception) -> int:
    click.echo(f"testbed: {error}", err=True)
    return 1
