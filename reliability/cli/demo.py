"""`outlast demo`: break a small real training run on purpose and compare it with an undisturbed one."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from outlast.reliability.cli.root import DONE, FAILED


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output; progress goes to stderr.")
@click.option("--slurm", is_flag=True, help="On a real Slurm cluster of this host (see outlast testbed), not locally.")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=Path("runs"), show_default=True,
    help="Where the two run directories go.",
)  # fmt: skip
def demo(as_json: bool, slurm: bool, directory: Path) -> int:
    """Break a small real training run on purpose and watch it end with the right result.

    A GPT of 0.25 M parameters trains 60 train_steps on two of three nodes (process groups on this machine), tensor
    parallel 2 x data parallel 2. A GPU falls off the bus (an XID 79 line in node a's kernel log), the script raises an
    exception, a node dies with no spare left. Every fault is simulated; judging, restarting, saving and restoring
    are the real thing. An undisturbed run made in the same call is the reference.

    Exit codes: 0 the losses agree (bit for bit while the layout is the same) and each sample was consumed once, 1 they
    do not, or a run did not end, 75 (with --slurm) Slurm does not answer.
    """
    from outlast.reliability.cli.demo_run import Demo
    from outlast.reliability.cli.demo_tell import as_data, tell

    def say(text: str) -> None:
        click.echo(text, err=as_json)

    outcome = Demo(directory, slurm=slurm, say=say).run()
    if as_json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(as_data(outcome)), indent=1) + b"\n")
    else:
        tell(outcome, say)
    return DONE if outcome.right else FAILED
