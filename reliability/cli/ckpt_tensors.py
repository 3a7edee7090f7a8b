"""`outlast ckpt diff | export | reshard`: the commands that read tensors, and so need torch (imported when run)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from outlast.checkpoint.catalogue import total_bytes
from outlast.checkpoint.verify import read_manifest
from outlast.reliability.cli.ckpt_words import (
    CheckpointWord,
    explained,
    find_one,
    progress,
    refuse_missing,
    require_whole,
)
from outlast.reliability.cli.common import as_json
from outlast.reliability.cli.root import DONE, FAILED
from outlast.reliability.cli.show import print_json, print_table, visible

if TYPE_CHECKING:
    from outlast.checkpoint.comparing import Summary, TensorDiff

_SHOWN = 40
"""Rows of a table for a person; --json has all."""

_unverified = click.option("--no-verify", is_flag=True, help="Believe the files without reading their hashes first.")


@click.command()
@click.argument("first", type=CheckpointWord())
@click.argument("second", type=CheckpointWord())
@click.option("--exact", is_flag=True, help="Exit 1 wherever anything differs, also over different train_steps.")
@_unverified
@as_json
@explained
def diff(first: str, second: str, exact: bool, no_verify: bool, as_json: bool) -> int:
    """Which tensors of two checkpoints differ, by how much, and where NaN or infinities are.

    Two checkpoints of one train_step should be the same; of two train_steps the weights should have moved: a "new"
    checkpoint that is bit for bit the old one is a fault. Two tensors are in memory at a time.

    Exit codes: 0 as it should be, 1 not (or, with --exact, anything differs), 2 wrong use, 75 could not be read.
    """
    try:
        from outlast.checkpoint.comparing import compare, summarise
        from outlast.checkpoint.tensors import Tensors
    except ImportError as e:
        return refuse_missing(e)
    one, other = find_one(first), find_one(second)
    for each in (one, other):
        require_whole(each, hashes=not no_verify)
    a, b = Tensors(one.path), Tensors(other.path)
    with progress("compare", len(a.tensors.keys() | b.tensors.keys()), unit="tensors") as advance:
        rows = list(compare(a, b, lambda _name: advance(1)))
    summary = summarise(a, b, rows)
    if as_json:
        print_json({"summary": summary, "tensors": rows})
    else:
        _print_diff(rows, summary)
    return DONE if summary.is_good and not (exact and summary.differing) else FAILED


def _print_diff(rows: list[TensorDiff], summary: Summary) -> None:
    wrong = [row for row in rows if not (row.is_same and row.is_finite)]
    if wrong:
        print_table(("TENSOR", "DIFFERING", "LARGEST", "NOT FINITE"), [_cells(row) for row in wrong[:_SHOWN]])
    if len(wrong) > _SHOWN:
        click.echo(f"... and {len(wrong) - _SHOWN} more (--json has all)")
    click.echo(f"{'' if summary.is_good else 'BAD: '}{summary.verdict}")


def _cells(row: TensorDiff) -> tuple[str, str, str, str]:
    if row.only_in:
        return row.name, f"only in the {row.only_in}", "", ""
    if row.change:
        return row.name, row.change, "", ""
    odd = " ".join(f"{n} NaN" for n in row.nans if n) + " ".join(f" {n} inf" for n in row.infinities if n)
    return row.name, f"{row.differing:,} of {row.elements:,}", f"{row.largest:.3g}", odd.strip()


@click.command()
@click.argument("checkpoint", type=CheckpointWord())
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torch"]),
    default="safetensors",
    show_default=True,
    help="safetensors: a directory of files; torch: one file of torch.save.",
)
@click.option("--optimizer", is_flag=True, help="The optimizer's tensors too.")
@click.option(
    "--shard-gb", type=click.FloatRange(0.001), default=5.0, show_default=True, help="Largest safetensors file."
)
@_unverified
@as_json
@explained
def export(
    checkpoint: str, output: Path, form: str, optimizer: bool, shard_gb: float, no_verify: bool, as_json: bool
) -> int:
    """The model of CHECKPOINT, gathered from its shards, as files that other programs read.

    Names are those of Megatron's modules, values and dtypes as stored. Every tensor that has a fingerprint is checked
    against it on the way. Nothing is overwritten.

    Exit codes: 0 written, 1 it is not whole or cannot be written so, 2 wrong use, 75 it could not be read.
    """
    try:
        from outlast.checkpoint.exporting import export_safetensors, export_torch, list_model
        from outlast.checkpoint.tensors import Tensors
    except ImportError as e:
        return refuse_missing(e)
    one = find_one(checkpoint)
    require_whole(one, hashes=not no_verify)
    tensors = Tensors(one.path)
    with progress("export", len(list_model(tensors, optimizer=optimizer)), unit="tensors") as advance:
        if form == "torch":
            done = export_torch(tensors, output, optimizer=optimizer, on_tensor=lambda _: advance(1))
        else:
            done = export_safetensors(
                tensors,
                output,
                optimizer=optimizer,
                shard_bytes=int(shard_gb * 1e9),
                on_tensor=lambda _: advance(1),
            )
    if as_json:
        print_json(done)
    else:
        checked = f"{done.checked} checked by fingerprint" if done.checked else "none has a fingerprint"
        click.echo(f"{output}: {done.tensors} tensors, {done.size_bytes:,} bytes, {checked}: {', '.join(done.files)}")
    return DONE


@click.command()
@click.argument("checkpoint", type=CheckpointWord())
@click.option("--to", "target", type=click.Path(path_type=Path), help="Write a verified, committed copy below here.")
@as_json
@explained
def reshard(checkpoint: str, target: Path | None, as_json: bool) -> int:
    """Whether CHECKPOINT loads into any other layout as it lies there; with --to, a verified copy elsewhere.

    A checkpoint in Megatron's torch_dist or PyTorch's DCP format names tensors by global position: each rank of any
    layout reads its ranges, so there is nothing to cut anew. The optimizer's part is looked at too: one that was
    saved in the coordinates of its buffers does not follow, and is refused by name.

    Exit codes: 0 it loads into any layout (and was copied), 1 it does not, 2 wrong use, 75 it could not be read.
    """
    try:
        from outlast.checkpoint.ops import RealOps
        from outlast.checkpoint.resharding import copy_checkpoint, judge_reshardable
        from outlast.checkpoint.tensors import Tensors
    except ImportError as e:
        return refuse_missing(e)
    one = find_one(checkpoint)
    require_whole(one, hashes=False)
    judged = judge_reshardable(Tensors(one.path))
    copied = ""
    if target is not None and not judged.problems:
        with progress("copy", total_bytes(read_manifest(one.path))) as on_bytes:
            copied = str(copy_checkpoint(one.path, target, RealOps(), on_bytes=on_bytes))
    if as_json:
        print_json({"verdict": judged.verdict, "found": judged, "copied_to": copied})
    else:
        for problem in judged.problems[:_SHOWN]:
            click.echo(visible(problem))
        click.echo(f"{one.path.name}: {judged.verdict}" + (f"; copied to {copied}" if copied else ""))
    return FAILED if judged.problems else DONE
