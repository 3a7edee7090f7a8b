"""`outlast submit`: check, freeze, hand to Slurm."""

from __future__ import annotations

from pathlib import Path

import click

from outlast.reliability.cli.common import overrides, read
from outlast.reliability.cli.root import AGAIN, FAILED, WRONG


@click.command()
@click.argument("run_file", type=click.Path(path_type=Path), metavar="RUN.yaml")
@overrides
@click.option("--dry-run", is_flag=True, help="Check RUN.yaml and print the batch script; freeze and submit nothing.")
def submit(run_file: Path, settings: tuple[str, ...], params_file: Path | None, dry_run: bool) -> int:
    """Check RUN.yaml, freeze it and submit it to Slurm.

    The frozen run file, what the run is made of (identity.json) and everything that happens to it lie in the run
    directory, RUN_ROOT/<name>-NNNN. RUN.yaml may change or go after this.

    Exit codes: 0 submitted, 1 Slurm refuses the job, 2 RUN.yaml cannot be used, 75 Slurm does not answer.
    """
    from outlast.launchers.slurm_cluster import submit as hand_in
    from outlast.reliability.freeze import freeze
    from outlast.slurm.errors import SlurmError

    asked = read(run_file, settings, params_file).run
    if asked.cluster.kind != "slurm":
        click.echo(f"{run_file}: $.cluster.kind: found {asked.cluster.kind}, expected slurm; or: outlast run", err=True)
        return WRONG
    if dry_run:
        click.echo(_script(asked))
        return 0
    run_dir = freeze(asked, Path(asked.run_root))
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
