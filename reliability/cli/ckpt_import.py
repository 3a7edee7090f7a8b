"""`outlast ckpt import`: a snapshot of torchsnapshot becomes a checkpoint of ours."""

from __future__ import annotations

from pathlib import Path

import click

from outlast.reliability.cli.ckpt_words import explained, refuse_missing
from outlast.reliability.cli.common import as_json
from outlast.reliability.cli.root import DONE
from outlast.reliability.cli.show import print_json


@click.command("import")
@click.argument("snapshot", type=click.Path(path_type=Path))
@click.argument("root", metavar="DIRECTORY", type=click.Path(file_okay=False, path_type=Path))
@click.option("--train-step", type=click.IntRange(0), required=True, help="Which train_step it is of.")
@click.option("--samples", type=click.IntRange(0), default=0, show_default=True, help="Samples consumed by then.")
@as_json
@explained
def import_(snapshot: Path, root: Path, train_step: int, samples: int, as_json: bool) -> int:
    """Read a torchsnapshot SNAPSHOT and commit it as a checkpoint in DIRECTORY, a directory of checkpoints.

    Names are the snapshot's, joined by dots, as torch.distributed.checkpoint has them. Rank 0's values are taken, and
    all shards of sharded tensors. torchsnapshot is not needed. A snapshot has no hashes: that its bytes are the ones
    that were saved cannot be told, only that none is missing.

    Exit codes: 0 committed, 1 it cannot be imported, 2 wrong use, 75 it could not be read.
    """
    try:
        from outlast.checkpoint.snapshot_import import import_snapshot
    except ImportError as e:
        return refuse_missing(e)
    made = import_snapshot(snapshot, root, train_step=train_step, samples=samples)
    if as_json:
        print_json({"path": str(made), "train_step": train_step})
    else:
        click.echo(f"{made}: committed")
    return DONE
