"""`outlast ckpt`: the checkpoints of a run, or of any directory of them.

What reads tensors is in ckpt_tensors.py, what speaks with an object store in ckpt_tiers.py.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from outlast.checkpoint.catalogue import NAMED, Row, State, look_at, survey, total_bytes
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.prints import read_prints
from outlast.checkpoint.retention import list_leases
from outlast.checkpoint.store import Store
from outlast.checkpoint.tiers import read_tier
from outlast.checkpoint.verify import read_manifest
from outlast.reliability.cli.ckpt_words import CheckpointWord, explained, find_one, find_root, progress, require_whole
from outlast.reliability.cli.common import RunName, as_json
from outlast.reliability.cli.root import AGAIN, DONE, FAILED
from outlast.reliability.cli.show import ago, print_json, print_table, visible

_LATER: Final = {
    "diff": "ckpt_tensors",
    "export": "ckpt_tensors",
    "reshard": "ckpt_tensors",
    "upload": "ckpt_tiers",
    "fetch": "ckpt_tiers",
    "import": "ckpt_import",
}
"""Commands that import much, and the module of each."""


class CkptGroup(click.Group):
    """Imports what reads tensors or speaks with an object store when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted((*super().list_commands(ctx), *_LATER))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _LATER:
            module = importlib.import_module(f"outlast.reliability.cli.{_LATER[cmd_name]}")
            command = getattr(module, cmd_name.replace("import", "import_"))
            assert isinstance(command, click.Command)
            return command
        return super().get_command(ctx, cmd_name)


@click.group(cls=CkptGroup)
def ckpt() -> None:
    """Look at a run's checkpoints, verify, compare, keep, remove, export them.

    RUN is a run or the path of a directory of checkpoints. CHECKPOINT is RUN/TRAIN_STEP, the path of one, or RUN
    alone for the newest committed one.

    \b
    outlast ckpt ls lm-7b-0007
    outlast ckpt verify lm-7b-0007/1200
    outlast ckpt promote lm-7b-0007/1200 best-eval
    outlast ckpt upload lm-7b-0007/1200

    Exit codes: 0 good, 1 a checkpoint is bad or two differ where they should not, 2 wrong use, 75 try again.
    """


@ckpt.command()
@click.argument("run", type=RunName())
@click.option("--verify", "hashes", is_flag=True, help="Read all of them through and check every hash.")
@as_json
@explained
def ls(run: str, hashes: bool, as_json: bool) -> int:
    """The checkpoints of RUN, oldest first: train_step, age, size, state, names and leases.

    States: committed (its marker fits its manifest, every file has its size), verified (with --verify: every hash
    too), unfinished, broken, unreadable, quarantined. What made room for a later save of its train_step is in aside/.
    Tiers: local, copied, shared, remote: how far it has come. What lies in local/ has its shards on the nodes.

    Exit codes: 0 listed, 1 one is broken, 2 no such run, 75 one could not be read.
    """
    rows = _survey(find_root(run), hashes=hashes)
    if as_json:
        print_json({"checkpoints": rows})
    else:
        _print_rows(rows)
    return _judge(rows)


def _survey(root: Path, *, hashes: bool) -> list[Row]:
    rows = list(survey(root))
    if not hashes:
        return rows
    whole = [row for row in rows if row.state is State.COMMITTED]
    with progress("verify", sum(row.size_bytes for row in whole)) as on_bytes:
        return list(survey(root, on_bytes=on_bytes))


def _judge(rows: Sequence[Row]) -> int:
    states = {row.state for row in rows}
    if State.BROKEN in states:
        return FAILED
    return AGAIN if State.UNREADABLE in states else DONE


def _print_rows(rows: Sequence[Row]) -> None:
    if not rows:
        click.echo("no checkpoints")
        return
    now_s = time.time()
    cells = [
        (
            row.name,
            ago(now_s - row.made_at_s) if row.made_at_s else "-",
            _size(row.size_bytes),
            row.state,
            row.tier or "-",
            " ".join((*row.names, *(f"lease:{who}" for who in row.leases))),
        )
        for row in rows
    ]
    print_table(("CHECKPOINT", "AGE", "SIZE", "STATE", "TIER", "NAMES"), cells, right=(1, 2))
    for row in rows:
        if row.why and row.state is not State.UNFINISHED:
            click.echo(visible(f"{row.name}: {row.why}"))


def _size(size_bytes: int) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= size:
            return f"{size_bytes / size:.2f} {unit}"
    return f"{size_bytes} B"


@ckpt.command()
@click.argument("checkpoint", type=CheckpointWord())
@as_json
@explained
def show(checkpoint: str, as_json: bool) -> int:
    """One checkpoint's manifest: step, samples, layout, files, what it was made from; names and fingerprints.

    Exit codes: 0 shown, 1 it has no manifest that holds, 2 no such checkpoint, 75 it could not be read.
    """
    one = find_one(checkpoint)
    manifest = read_manifest(one.path)
    prints = read_prints(one.path)
    leases = list_leases(one.root).get(one.train_step, ())
    if as_json:
        print_json(
            {
                "path": str(one.path),
                "manifest": manifest,
                "fingerprints": prints,
                "leases": leases,
                "tier": read_tier(one.path),
            }
        )
        return DONE
    counted = f"{len(prints.tensors)} tensors ({prints.scheme})" if prints else "none"
    for name, value in (*_facts(manifest), ("fingerprints", counted), ("leases", ", ".join(leases) or "none")):
        click.echo(f"{name:<13} {visible(value)}")
    if (tier := read_tier(one.path)) is not None:
        click.echo(f"{'tier':<13} {visible(f'{tier.tier} {tier.where}')}")
    rows = [(name, f"{e.size_bytes:,}", e.xxh3_128) for name, e in sorted(manifest.files.items())]
    print_table(("FILE", "BYTES", "XXH3_128"), rows, right=(1,))
    return DONE


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.made_at_s)) if manifest.made_at_s else "-"
    frontier = manifest.data_frontier
    return [
        ("train_step", str(manifest.train_step)),
        ("samples", f"{manifest.samples:,} ({len(frontier.skipped)} ranges skipped of {frontier.consumed:,})"),
        ("layout", f"{manifest.layout} ({manifest.layout.world_size} ranks)"),
        ("made", f"{made} by {manifest.made_by or '-'}"),
        ("size", f"{_size(total_bytes(manifest))} in {len(manifest.files)} files"),
        ("identity", ", ".join(f"{k} {v}" for k, v in _identity(manifest) if v) or "none"),
        ("pins", ", ".join(f"{k} {v}" for k, v in sorted(manifest.pins.items())) or "none"),
        ("parents", ", ".join(manifest.parents) or "none"),
    ]


def _identity(manifest: Manifest) -> tuple[tuple[str, str], ...]:
    one = manifest.identity
    return ("rng", one.rng), ("code", one.code), ("data", one.data)


@ckpt.command()
@click.argument("checkpoint", type=CheckpointWord())
@click.option("--all", "everything", is_flag=True, help="Every checkpoint of RUN.")
@as_json
@explained
def verify(checkpoint: str, everything: bool, as_json: bool) -> int:
    """Read a checkpoint through: marker, manifest, the size and hash of every file.

    Exit codes: 0 whole, 1 not whole, 2 no such checkpoint, 75 it could not be read.
    """
    if everything:
        rows = [row for row in _survey(find_root(checkpoint), hashes=True) if row.state is not State.UNFINISHED]
    else:
        one = find_one(checkpoint)
        size_bytes = look_at(one.path, one.train_step).size_bytes
        with progress(f"verify {one.path.name}", size_bytes) as on_bytes:
            rows = [look_at(one.path, one.train_step, on_bytes=on_bytes)]
    if as_json:
        print_json({"checkpoints": rows})
    else:
        for row in rows:
            told = _size(row.size_bytes) if row.state is State.VERIFIED else row.why
            click.echo(visible(f"{row.name}: {row.state}: {told}"))
    unfinished = not everything and rows[0].state is State.UNFINISHED
    return FAILED if unfinished else _judge(rows)


@ckpt.command()
@click.argument("run", type=RunName())
@click.option("--keep-last", type=click.IntRange(1), required=True, help="How many of the newest stay.")
@click.option(
    "--keep-every", type=click.IntRange(1), default=None, help="Also the first at or after each multiple of it."
)
@click.option("--keep", type=int, multiple=True, metavar="TRAIN_STEP", help="Also this one; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@as_json
@explained
def prune(run: str, keep_last: int, keep_every: int | None, keep: tuple[int, ...], dry_run: bool, as_json: bool) -> int:
    """Remove old checkpoints. Named and leased ones stay, and so does the newest that verifies, whatever is asked.

    Nothing in quarantine is touched. A prune that is cut short is finished by the next one.

    Exit codes: 0 done, 2 wrong use, 75 the directory did not answer.
    """
    store = Store(find_root(run))
    act = store.plan_prune if dry_run else store.prune
    gone = act(keep_last, keep=keep, keep_every=keep_every or 0)
    if as_json:
        print_json({"removed": [] if dry_run else gone, "would_remove": gone if dry_run else []})
        return DONE
    for step in gone:
        click.echo(f"{'would remove' if dry_run else 'removed'} train_step {step}")
    stay = len(store.durable_steps()) - (len(gone) if dry_run else 0)
    click.echo(f"{len(gone)} {'would go' if dry_run else 'removed'}, {stay} stay")
    return DONE


@ckpt.command()
@click.argument("checkpoint", type=CheckpointWord())
@click.argument("name", metavar="NAME")
@click.option("--undo", is_flag=True, help="Take the name away again.")
@explained
def promote(checkpoint: str, name: str, undo: bool) -> int:
    """Give a checkpoint a name: it is verified now, listed with it, and never pruned while it has it.

    Exit codes: 0 done, 1 it is not whole, 2 wrong use or the name is taken, 75 it could not be read.
    """
    one = find_one(checkpoint)
    store = Store(one.root)
    if not name or not all(c.isalnum() or c in "-_" for c in name):
        raise click.UsageError(f"name {name!r}: use letters, digits, '-' and '_'")
    if undo:
        store.release(one.train_step, f"{NAMED}{name}")
        click.echo(f"{one.path.name} has no name {name} any more")
        return DONE
    holders = [step for step, who in list_leases(one.root).items() if f"{NAMED}{name}" in who]
    if holders and holders != [one.train_step]:
        raise click.UsageError(f"{name} is the name of train_step {holders[0]}; take it away there first (--undo)")
    # the lease first: it must not be pruned while it is read
    store.lease(one.train_step, f"{NAMED}{name}")
    try:
        require_whole(one)
    except BaseException:
        store.release(one.train_step, f"{NAMED}{name}")
        raise
    click.echo(f"{one.path.name} is {name}: verified, and kept until the name is taken away")
    return DONE
