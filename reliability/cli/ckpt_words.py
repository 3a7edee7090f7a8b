"""What the words of `outlast ckpt` mean: RUN, a directory of checkpoints, one checkpoint; and progress on long work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.names import name_step, parse_step
from outlast.checkpoint.store import Store
from outlast.checkpoint.verify import Unreadable
from outlast.reliability.cli.common import RunName, find
from outlast.reliability.cli.root import AGAIN, FAILED
from outlast.reliability.ports import PortError

Command = TypeVar("Command", bound=Callable[..., Any])


class CheckpointWord(RunName):
    """RUN, RUN/TRAIN_STEP or a path."""

    name = "CHECKPOINT"


@dataclass(frozen=True, kw_only=True)
class One:
    """One checkpoint and the directory that it lies in."""

    root: Path
    path: Path
    train_step: int


def find_root(word: str) -> Path:
    """The directory of checkpoints of RUN, or the one that is named by its path."""
    path = Path(word)
    if path.is_dir() and not (path / "run.yaml").is_file():
        if parse_step(path.name) is not None:
            raise click.UsageError(f"{word}: is one checkpoint; expected RUN or a directory of checkpoints")
        return path
    from outlast.reliability.config import load_frozen

    run_dir = find(word)
    place = load_frozen(run_dir).checkpoint.dir
    return Path(place) if place else run_dir.checkpoints


def find_one(word: str) -> One:
    """The checkpoint that is meant: RUN/1200, DIRECTORY/iter_0001200, or RUN alone for the newest committed one."""
    path = Path(word)
    first = path.name.partition(".")[0]  # quarantine/iter_0000010.2
    if path.is_dir() and (step := parse_step(first)) is not None:
        return One(root=path.parent, path=path, train_step=step)
    before, slash, last = word.rstrip("/").rpartition("/")
    step = int(last) if last.isdecimal() and len(last) <= 10 else parse_step(last)
    if slash and step is not None and not path.is_dir():
        root = find_root(before)
        path = root / name_step(step)
        if not path.is_dir():
            raise click.UsageError(
                f"{word}: no checkpoint of train_step {step} in {root}; see outlast ckpt ls {before}"
            )
        return One(root=root, path=path, train_step=step)
    root = find_root(word)
    durable = Store(root).durable_steps()
    if not durable:
        raise click.UsageError(f"{word}: no committed checkpoint in {root}")
    return One(root=root, path=root / name_step(durable[-1]), train_step=durable[-1])


def explained(command: Command) -> Command:
    """What goes wrong with a checkpoint as one message and an exit code: 1 for a fault, 75 for try again."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except CheckpointError as error:
            if isinstance(error, PortError):
                raise  # the command line's own affair: it knows again from never
            click.echo(f"outlast: {error}", err=True)
            return AGAIN if isinstance(error, Unreadable) else FAILED

    return run  # type: ignore[return-value]


@contextmanager
def progress(what: str, total: int, *, unit: str = "bytes") -> Iterator[Callable[[int], None]]:
    """A bar on stderr where a person watches; nothing anywhere else. Called with what was done since the last call."""
    if not sys.stderr.isatty() or not total:
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    done = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def refuse_missing(error: ImportError) -> int:
    """Exit code for a command that needs torch where there is none."""
    click.echo(f"outlast: {error}: this command reads tensors; pip install 'outlast[megatron]'", err=True)
    return FAILED


def require_whole(one: One, *, hashes: bool = True) -> None:
    """Read it through with a bar. Raises NotWhole."""
    from outlast.checkpoint.catalogue import check_whole, total_bytes
    from outlast.checkpoint.verify import read_manifest

    manifest = read_manifest(one.path)
    if manifest.train_step != one.train_step:
        raise NotWhole(one.path.name, (f"its manifest says train_step {manifest.train_step}",))
    with progress(f"verify {one.path.name}", total_bytes(manifest)) as on_bytes:
        check_whole(one.path, manifest, on_bytes=on_bytes if hashes else None)
