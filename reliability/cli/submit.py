"""`outlast submit`: check, freeze, hand to Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from outlast.reliability.cli.common import overrides, read
from outlast.reliability.cli.root import AGAIN, FAILED, WRONG

if TYPE_CHECKING:
    from outlast.reliability.rundir import RunDir
    from outlast.reliability.runfile import RunFile


@click.command()
@click.argument("run_file", type=click.Path(path_type=Path), metavar="[RUN.yaml]", required=False)
@overrides
@click.option("--run-dir", type=click.Path(path_type=Path), help="Go on with this run: its job has ended, it has not.")
@click.option("--dry-run", is_flag=True, help="Check RUN.yaml and print the batch script; freeze and submit nothing.")
def submit(
    run_file: Path | None, settings: tuple[str, ...], params_file: Path | None, run_dir: Path | None, dry_run: bool
) -> int:
    """Check RUN.yaml, freeze it and submit it to Slurm.

    The frozen run file, what the run is made of (identity.json) and everything that happens to it lie in the run
    directory, RUN_ROOT/<name>-NNNN. RUN.yaml may change or go after this.

    A run whose job ended before it did (walltime, a preemption that Slurm does not queue again) goes on in a new job
    with --run-dir: from its newest checkpoint that verifies, without the nodes it had convicted.

    Exit codes: 0 submitted, 1 Slurm refuses the job, 2 RUN.yaml cannot be used, 75 Slurm does not answer.
    """
    from outlast.reliability.freeze import freeze
    from outlast.reliability.site_policy import read_rows, site_file

    if (run_file is None) == (run_dir is None) or (run_dir is not None and (settings or params_file or dry_run)):
        raise click.UsageError("expected RUN.yaml for a new run, or --run-dir DIR alone to go on with one")
    if run_dir is not None:
        return _go_on(run_dir)
    assert run_file is not None
    asked = read(run_file, settings, params_file).run
    if asked.cluster.kind != "slurm":
        click.echo(f"{run_file}: $.cluster.kind: found {asked.cluster.kind}, expected slurm; or: outlast run", err=True)
        return WRONG
    if asked.cluster.accept_user_facility and (cluster := _name_cluster()) != (testbed := _name_testbed()):
        click.echo(
            f"{run_file}: $.cluster.accept_user_facility: found true on cluster {cluster}, expected false: any root "
            f"process could then convict a node. It is for {testbed} alone (outlast testbed start)",
            err=True,
        )
        return WRONG
    if dry_run:
        if site := site_file(asked):
            read_rows(site)
        click.echo(_script(asked))
        return 0
    return _hand_in(freeze(asked, Path(asked.run_root)), asked)


def _name_cluster() -> str:
    """Slurm's name of this cluster; 'unknown' where it does not answer."""
    from outlast.slurm.client import SlurmClient
    from outlast.slurm.commands import show_config_argv
    from outlast.slurm.errors import SlurmError
    from outlast.slurm.parsers import parse_config

    try:
        return parse_config(SlurmClient().run(show_config_argv())).get("ClusterName", "unknown")
    except SlurmError:
        return "unknown"


def _name_testbed() -> str:
    from outlast.slurm.testbed_conf import CLUSTER

    return CLUSTER


def _go_on(place: Path) -> int:
    """Another job for a run that is not over and has no job."""
    from outlast.launchers.slurm_cluster import LIVE, SlurmCluster
    from outlast.reliability.config import load_frozen
    from outlast.reliability.eventlog import read_events
    from outlast.reliability.events import RunEnded
    from outlast.reliability.rundir import RunDir

    run_dir = RunDir(root=place.absolute())
    asked = load_frozen(run_dir)
    ended = [e.body for e in read_events(run_dir.events).events if isinstance(e.body, RunEnded)]
    if ended:
        click.echo(f"{run_dir.name} is over: {ended[0].outcome} ({ended[0].why}); nothing to go on with", err=True)
        return WRONG
    live = [a.job for a in SlurmCluster(run_dir, asked).allocations() if a.state in LIVE and not a.feeder]
    if live:
        click.echo(f"{run_dir.name} has job {', '.join(live)} still; see: outlast status {run_dir.name}", err=True)
        return WRONG
    return _hand_in(run_dir, asked)


def _hand_in(run_dir: RunDir, asked: RunFile) -> int:
    from outlast.launchers.slurm_cluster import submit as hand_in
    from outlast.slurm.errors import SlurmError

    try:
        job = hand_in(run_dir, asked)
    except SlurmError as error:
        click.echo(f"not submitted: {error}\nthe run directory {run_dir.root} is there and holds no job", err=True)
        return AGAIN if error.again else FAILED
    nodes = asked.cluster.nodes + asked.cluster.spares
    spare = f" ({asked.cluster.spares} spare)" if asked.cluster.spares else ""
    click.echo(f"run {run_dir.name}, job {job}, {nodes} nodes{spare}, attempts log: {run_dir.root}")
    return 0


def _script(asked: object) -> str:
    """The batch script as it would be, with the run directory's number left open."""
    import sys

    from outlast.launchers.sbatch import render_run
    from outlast.launchers.slurm_cluster import read_template
    from outlast.reliability.rundir import RunDir
    from outlast.reliability.runfile import RunFile

    assert isinstance(asked, RunFile)
    run_dir = RunDir(root=Path(asked.run_root) / f"{asked.name}-NNNN")
    return render_run(read_template("run.sbatch"), run_dir, asked, python=sys.executable)
