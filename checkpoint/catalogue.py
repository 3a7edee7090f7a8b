"""All checkpoints below one directory, as a person asks for them: which are there, whole, needed by whom.

    iter_0000010  iter_0000020  quarantine/iter_0000015  aside/iter_0000020
        -> rows: train_step, state, age, size, names and leases, why it is not to be restored

Reads only, and cheap first: markers, manifests and sizes. Hashes are read where asked for, with a call after each
chunk, so that a progress bar can be drawn. Which one a run restores is store.py's choice, not this list's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from outlast.checkpoint.errors import NotCommitted, NotWhole, StoreError
from outlast.checkpoint.manifest import FileEntry, Manifest
from outlast.checkpoint.names import ASIDE, LOCAL, QUARANTINE, parse_step
from outlast.checkpoint.retention import list_leases
from outlast.checkpoint.store import Reason
from outlast.checkpoint.tiers import Tier, read_tier
from outlast.checkpoint.verify import CHUNK_BYTES, Unreadable, find_files, read_manifest, require
from outlast.reliability.model import Layout, Noun

NAMED: Final = "named-"
"""A lease by this holder is a name that a person gave: `promote`."""

OnBytes = Callable[[int], None]


class State(StrEnum):
    COMMITTED = "committed"
    """Its marker fits its manifest and every file has its size."""
    VERIFIED = "verified"
    """And every hash was read just now."""
    UNFINISHED = "unfinished"
    """No marker: a save that was interrupted, or that is under way."""
    BROKEN = "broken"
    UNREADABLE = "unreadable"
    """The file system did not give it to us, which says nothing of what is in it."""
    QUARANTINED = "quarantined"


class Row(Noun, frozen=True, kw_only=True):
    """One checkpoint."""

    name: str
    """Its directory, below the one that was asked for."""
    train_step: int
    state: State
    size_bytes: int = 0
    """Of the files that its manifest lists; of all that lies there where it has none."""
    made_at_s: float = 0.0
    """By the clock of the node that committed it; 0 where it does not say."""
    samples: int = -1
    layout: Layout | None = None
    names: tuple[str, ...] = ()
    """Given by `promote`."""
    leases: tuple[str, ...] = ()
    """Others that need it."""
    tier: str = ""
    """How far it has come, see tiers.py; '' where it is not committed."""
    why: str = ""
    """What is wrong with it; why it lies in quarantine."""


def survey(root: Path, *, on_bytes: OnBytes | None = None) -> Iterator[Row]:
    """Every checkpoint, oldest first. With `on_bytes` each is read through and its hashes are checked.

    Raises StoreError where the directory itself does not answer.
    """
    leases = list_leases(root)
    for step, name in sorted(_places(root)):
        if name.startswith(f"{LOCAL}/"):
            yield msgspec.structs.replace(look_at_local(root / name, step), name=name)
            continue
        row = look_at(root / name, step, on_bytes=on_bytes)
        if "/" not in name:
            holders = leases.get(step, ())
            row = msgspec.structs.replace(
                row,
                names=tuple(who.removeprefix(NAMED) for who in holders if who.startswith(NAMED)),
                leases=tuple(who for who in holders if not who.startswith(NAMED)),
            )
        elif name.startswith(QUARANTINE):
            row = msgspec.structs.replace(row, state=State.QUARANTINED, why=_read_reason(root / name) or row.why)
        yield msgspec.structs.replace(row, name=name)


def _places(root: Path) -> list[tuple[int, str]]:
    """(train_step, name below root)"""
    try:
        names = os.listdir(root)
    except OSError as e:
        raise StoreError(f"{root}: {e.strerror}. Is this the directory of checkpoints?", again=False) from e
    for folder in (QUARANTINE, ASIDE, LOCAL):
        if folder in names and (root / folder).is_dir():
            names += [f"{folder}/{name}" for name in os.listdir(root / folder)]
    found = ((parse_step(name.rpartition("/")[2].partition(".")[0]), name) for name in names)
    return [(step, name) for step, name in found if step is not None and (root / name).is_dir()]


def look_at(directory: Path, train_step: int, *, on_bytes: OnBytes | None = None) -> Row:
    """One checkpoint, as it lies there."""
    row = Row(name=directory.name, train_step=train_step, state=State.COMMITTED)
    try:
        manifest = read_manifest(directory)
        row = describe(row, manifest, directory)
        check_whole(directory, manifest, on_bytes=on_bytes)
        if manifest.train_step != train_step:
            raise NotWhole(directory.name, (f"its manifest says train_step {manifest.train_step}",))
    except NotWhole as e:
        size_bytes = row.size_bytes or sum(_sizes(directory))
        return msgspec.structs.replace(row, state=_judge(e), why="; ".join(e.problems), size_bytes=size_bytes)
    return row if on_bytes is None else msgspec.structs.replace(row, state=State.VERIFIED)


def look_at_local(directory: Path, train_step: int) -> Row:
    """One whose shards lie on the nodes, as far as it can be seen from here: marker and manifest."""
    row = Row(name=directory.name, train_step=train_step, state=State.COMMITTED)
    try:
        described = describe(row, read_manifest(directory), directory)
    except NotWhole as e:
        return msgspec.structs.replace(row, state=_judge(e), why="; ".join(e.problems))
    return described if read_tier(directory) else msgspec.structs.replace(described, tier=Tier.LOCAL)


def _judge(error: NotWhole) -> State:
    if isinstance(error, NotCommitted):
        return State.UNFINISHED
    return State.UNREADABLE if isinstance(error, Unreadable) else State.BROKEN


def describe(row: Row, manifest: Manifest, directory: Path) -> Row:
    return msgspec.structs.replace(
        row,
        size_bytes=total_bytes(manifest),
        made_at_s=manifest.made_at_s,
        samples=manifest.samples,
        layout=manifest.layout,
        tier=record.tier if (record := read_tier(directory)) else Tier.SHARED,
    )


def total_bytes(manifest: Manifest) -> int:
    return sum(entry.size_bytes for entry in manifest.files.values())


def check_whole(directory: Path, manifest: Manifest, *, on_bytes: OnBytes | None = None) -> None:
    """Sizes, and with `on_bytes` every hash. Raises NotWhole (Unreadable)."""
    require(directory, manifest.files, find_files(directory, manifest.files))
    if on_bytes is not None:
        found = find_files(directory, manifest.files, hash_fd=lambda fd, _path: _hash_file(fd, on_bytes))
        require(directory, manifest.files, found)


def check_file(directory: Path, name: str, entry: FileEntry) -> None:
    """One file by its hash, before its content is believed. Raises NotWhole."""
    require(directory, {name: entry}, find_files(directory, [name], hash_fd=lambda fd, _: _hash_file(fd, _ignore)))


def _hash_file(fd: int, on_bytes: OnBytes) -> str:
    digest = xxhash.xxh3_128()
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    while count := os.readv(fd, [buffer]):
        digest.update(view[:count])
        on_bytes(count)
    return digest.hexdigest()


def _ignore(_count: int) -> None:
    """Nobody watches."""


def _read_reason(path: Path) -> str:
    try:
        return msgspec.json.decode(path.with_name(f"{path.name}.reason").read_bytes(), type=Reason).why
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _sizes(directory: Path) -> Iterable[int]:
    for folder, _, files in os.walk(directory):
        for name in files:
            try:
                yield os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue  # it went meanwhile
