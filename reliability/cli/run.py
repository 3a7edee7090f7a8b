"""`outlast run`, the supervisor of one run, and `outlast agent`, the holder of one node's ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outlast.reliability.cli.common import overrides, read

if TYPE_CHECKING:
    from outlast.reliability.events import LogEvent
    from outlast.reliability.rundir import RunDir


@click.command()
@click.argument("run_file", type=click.Path(path_type=Path), metavar="[RUN.yaml]", required=False)
@overrides
@click.option("--run-dir", type=click.Path(path_type=Path), help="Go on with the run of this directory instead.")
@click.option("--in-batch", is_flag=True, help="This is the run's batch script: stand by while another supervises.")
@click.option("--successor", is_flag=True, help="Started by agents whose supervisor fell silent.")
@click.option("--epoch", type=click.IntRange(0), default=0, hidden=True, help="Take exactly this epoch or none.")
@click.option("--quiet", is_flag=True, help="Write the event log alone, no lines for a person.")
def run(
    run_file: Path | None,
    settings: tuple[str, ...],
    params_file: Path | None,
    run_dir: Path | None,
    in_batch: bool,
    successor: bool,
    epoch: int,
    quiet: bool,
) -> int:
    """Supervise a run here until it is over.

    \b
    outlast run RUN.yaml              a new run: on the local cluster (cluster.kind: local), or
                                      inside an allocation that you hold already
    outlast run --run-dir DIR         supervise a run that exists, from a head node or after a crash;
                                      its ranks train on meanwhile

    Ctrl-C and SIGTERM outside a batch script end the run: it is your will, and recorded as that.

    Exit codes: 0 finished or stopped, 1 failed or cancelled, 2 wrong use or configuration, 75 another supervisor is
    alive. A run that was held for longer than limits.hold_max_s ends as failed.
    """
    if (run_file is None) == (run_dir is None):
        raise click.UsageError("expected RUN.yaml for a new run, or --run-dir DIR to go on with one")
    if run_dir is not None and (settings or params_file):
        raise click.UsageError("a run that exists keeps what it was frozen with; --set and --params are for new runs")
    place = _open(run_dir) if run_dir is not None else _begin(run_file, settings, params_file)
    why = "successor: the supervisor fell silent" if successor else "batch script" if in_batch else "outlast run"
    from outlast.reliability.cli.compose import run_supervisor

    in_batch = in_batch or bool(run_file and os.environ.get("SLURM_JOB_ID"))
    return run_supervisor(place, why=why, in_batch=in_batch, epoch=epoch, on_event=None if quiet else tell(place))


def _open(path: Path) -> RunDir:
    from outlast.reliability.config import load_frozen
    from outlast.reliability.rundir import RunDir

    run_dir = RunDir(root=path.absolute())
    load_frozen(run_dir)  # a wrong directory is told here, not by a traceback of the loop
    return run_dir


def _begin(run_file: Path | None, settings: tuple[str, ...], params_file: Path | None) -> RunDir:
    from outlast.reliability.freeze import freeze

    assert run_file is not None
    asked = read(run_file, settings, params_file).run
    if asked.cluster.kind == "slurm" and not os.environ.get("SLURM_JOB_ID"):
        raise click.UsageError(
            f"{run_file} asks for Slurm and this is no allocation of yours; "
            f"expected: outlast submit {run_file}, or --set cluster.kind=local"
        )
    run_dir = freeze(asked, Path(asked.run_root))
    if asked.cluster.kind == "slurm":
        _claim_job(run_dir, os.environ["SLURM_JOB_ID"])
    click.echo(f"run {run_dir.name}, run directory {run_dir.root}")
    return run_dir


def _claim_job(run_dir: RunDir, job: str) -> None:
    """Mark this allocation as the run's: supervisors and successors find their jobs by this comment."""
    from outlast.launchers.sbatch import comment
    from outlast.reliability.ports import PortError
    from outlast.slurm.client import SlurmClient
    from outlast.slurm.errors import SlurmError

    try:
        SlurmClient().run(["scontrol", "update", f"JobId={job}", f"Comment={comment(run_dir, feeder=False)}"])
    except SlurmError as error:
        raise PortError(str(error), again=error.again) from error


def tell(run_dir: RunDir) -> Callable[[LogEvent], None]:
    """Prints what a person wants to know of each event; a terminal that is gone does not end the run."""
    from outlast.reliability.config import load_frozen
    from outlast.reliability.narrate import Narrator

    narrator = Narrator(load_frozen(run_dir).train_steps)

    def on_event(event: LogEvent) -> None:
        try:
            for line in narrator.lines(event):
                click.echo(line)
        except (OSError, ValueError):
            return

    return on_event


@click.command(hidden=True)
@click.option("--run-dir", type=click.Path(path_type=Path), required=True, help="The run's directory.")
@click.option("--node", default="", help="This node's name [default: SLURMD_NODENAME].")
def agent(run_dir: Path, node: str) -> int:
    """Hold one node's ranks for a run. Started by the supervisor, once a node; not meant to be typed.

    Exit codes: 0 released, 1 it cannot work here, 2 no node name.
    """
    from outlast.launchers.agent import main
    from outlast.reliability.model import Node
    from outlast.reliability.rundir import RunDir

    return main(RunDir(root=run_dir.absolute()), Node(node) if node else None)
