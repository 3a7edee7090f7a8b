"""`outlast ckpt upload | fetch`: checkpoints to an object store and back. Its library is loaded when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.names import name_step, parse_step
from outlast.checkpoint.objects import FsspecObjects
from outlast.checkpoint.remote import Remote
from outlast.checkpoint.store import Store
from outlast.reliability.cli.ckpt_words import CheckpointWord, explained, find_one, find_root, progress
from outlast.reliability.cli.common import as_json, find
from outlast.reliability.cli.root import DONE
from outlast.reliability.cli.show import print_json

_URL: Final = click.option(
    "--url", default="", metavar="URL", help="The object store, s3://bucket/prefix. None: the run file's, for this run."
)


def find_remote(word: str, url: str) -> Remote:
    """The object store that is named, or the one of RUN: tiers.remote_url with the run's name below it."""
    if url:
        return Remote(FsspecObjects(url))
    if Path(word).is_dir() and not (Path(word) / "run.yaml").is_file():
        raise click.UsageError(f"{word}: is no run; name the object store with --url")
    from outlast.reliability.config import load_frozen

    run_dir = find(word)
    if not (found := load_frozen(run_dir).tiers.remote_url):
        raise click.UsageError(f"{word}: its run file names no tiers.remote_url; name an object store with --url")
    return Remote(FsspecObjects(f"{found.rstrip('/')}/{run_dir.name}"))


def _split(word: str) -> tuple[str, int | None]:
    """RUN/1200 or RUN/iter_0001200 -> RUN, 1200; RUN -> RUN, None; 1200 -> '', 1200."""
    before, slash, last = word.rstrip("/").rpartition("/")
    step = int(last) if last.isdecimal() and len(last) <= 10 else parse_step(last)
    return (before, step) if step is not None and (slash or last.isdecimal()) else (word, None)


@click.command()
@click.argument("checkpoint", type=CheckpointWord())
@_URL
@click.option(
    "--keep-last", type=click.IntRange(1), default=None, help="Then remove older ones there but the newest N."
)
@as_json
@explained
def upload(checkpoint: str, url: str, keep_last: int | None, as_json: bool) -> int:
    """Copy CHECKPOINT to an object store. COMMITTED goes last; each object is read back and hashed before that.

    What is there and right is not sent again, so an upload that was cut short is finished by the next. Keys and
    endpoint come from the environment or the files that it names, as boto and fsspec take them.

    Exit codes: 0 there and read back, 1 it is not whole, 2 wrong use, 75 the object store did not answer: try again.
    """
    one = find_one(checkpoint)
    remote = find_remote(_split(checkpoint)[0], url)
    total = sum(path.stat().st_size for path in one.path.rglob("*") if path.is_file())
    with progress(f"upload {one.path.name}", total) as on_bytes:
        done = remote.upload(Store(one.root), one.train_step, on_bytes=on_bytes)
    gone = remote.prune(keep_last, verified=one.train_step) if keep_last else ()
    if as_json:
        print_json({"uploaded": done, "removed": gone})
        return DONE
    removed = f"; removed {', '.join(map(str, gone))} there" if gone else ""
    click.echo(
        f"{one.path.name} is in {done.url}: {done.sent_bytes:,} of {done.size_bytes:,} bytes sent, all read back, "
        f"{done.seconds:.1f} s{removed}"
    )
    return DONE


@click.command()
@click.argument("checkpoint", type=CheckpointWord())
@_URL
@click.option(
    "--to", "target", type=click.Path(path_type=Path), default=None, help="A directory. None: RUN's checkpoints."
)
@as_json
@explained
def fetch(checkpoint: str, url: str, target: Path | None, as_json: bool) -> int:
    """Bring CHECKPOINT back from the object store: RUN/TRAIN_STEP, or RUN alone for the newest there.

    With --url and --to, TRAIN_STEP alone is enough.

    It is compared with its manifest while it comes, and gets its name last. One that is here and whole stays; one that
    is broken makes room and lies in aside/.

    Exit codes: 0 here, 1 what is there is not whole, 2 no such checkpoint, 75 the object store did not answer.
    """
    word, step = _split(checkpoint)
    if not word and not (url and target):
        raise click.UsageError(f"{checkpoint}: which run? Expected RUN/{checkpoint}, or --url and --to")
    remote, root = find_remote(word, url), target or find_root(word)
    known = remote.steps()
    if not known or (step is not None and step not in known):
        shown = ", ".join(map(str, known[-8:])) or "nothing"
        raise click.UsageError(f"{checkpoint}: not in {remote.url}, which has {shown}")
    step = known[-1] if step is None else step
    size_bytes = sum(entry.size_bytes for entry in remote.manifest(step).files.values())
    with progress(f"fetch {name_step(step)}", size_bytes) as on_bytes:
        path = remote.fetch(step, root, replace=False, on_bytes=on_bytes)
    if not path.is_dir():
        raise CheckpointError(f"{path}: was taken away meanwhile; fetch it again", path=str(path))
    if as_json:
        print_json({"train_step": step, "path": str(path), "from": remote.url, "size_bytes": size_bytes})
    else:
        click.echo(f"{path}: {size_bytes:,} bytes, as its manifest says")
    return DONE
