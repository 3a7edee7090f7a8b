"""The commit of a checkpoint that Megatron-LM wrote itself: read, hashed, fsynced, then manifest.json and COMMITTED.

    rank 0, before the save      what has this train_step's name already is set aside: no two saves share a directory
    last rank, all files there   a thread: every file read and hashed, then fsynced; the marker last; then the recorder

In a thread of one rank: reading, hashing and fsync give up the interpreter lock, so training goes on. Files are read
back before the fsync, since on a network file system that is what brings other nodes' writes to the server. What is
hashed is what was read back, not what was meant: unlike our own writer's, such a hash cannot show what went wrong
before it. The process does not end before the thread: a last save is committed too.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from outlast.checkpoint.commit import commit, write_tracker
from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.manifest import OURS, DataFrontier, FileEntry, Manifest
from outlast.checkpoint.names import TRACKER
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.prints import FILE, Prints, write_prints

CHUNK_BYTES: Final = 4 << 20
ALWAYS: Final = ("common.pt", ".metadata", "metadata.json")
SHOWN_S: Final = 60.0
"""A network file system may show another node's new file this much later."""
TRACKER_S: Final = 5.0
PRINTS_S: Final = 60.0
POLL_S: Final = 0.05
_SHARD: Final = re.compile(rb"__[0-9]{1,7}_[0-9]{1,5}\.distcp")


@dataclass(frozen=True, kw_only=True)
class Save:
    """A save of Megatron-LM's that is final: everything that the manifest says but the files."""

    directory: Path
    manifest: Manifest
    prints: Future[Prints | None] | None = None
    """There soon after the files: they are counted while Megatron-LM writes."""


def start(save: Save, on_durable: Callable[[int], None]) -> threading.Thread:
    """Commit it beside training. on_durable(train_step) is called in the thread, once the marker is on disk."""
    thread = threading.Thread(target=_work, args=(save, on_durable), name=f"outlast-commit-{save.manifest.train_step}")
    thread.start()
    return thread


def _work(save: Save, on_durable: Callable[[int], None]) -> None:
    began_s = time.monotonic()
    try:
        commit_files(save)
    except (CheckpointError, OSError) as e:
        sys.stderr.write(f"outlast: {save.directory} is not committed and will not be restored: {e}\n")
        return
    step = save.manifest.train_step
    on_durable(step)
    sys.stdout.write(f"outlast: checkpoint {step} committed ({time.monotonic() - began_s:.2f} s beside training)\n")


def commit_files(save: Save, *, shown_s: float = SHOWN_S, tracker_s: float = TRACKER_S) -> None:
    """Raises CheckpointError or OSError where it cannot be made true; the directory then stays uncommitted."""
    files = {name: hash_file(save.directory / name) for name in list_files(save.directory, shown_s=shown_s)}
    manifest = _with_files(save.manifest, files)
    _store_prints(save)  # first, so that what is committed has them
    _await_tracker(save.directory.parent, save.manifest.train_step, tracker_s)
    commit(RealOps(), save.directory, manifest)


def _store_prints(save: Save) -> None:
    try:
        prints = save.prints.result(PRINTS_S) if save.prints is not None else None
        if prints is not None:
            write_prints(RealOps(), save.directory, prints)
    except (OSError, TimeoutError) as e:  # without them a checkpoint is whole
        sys.stderr.write(f"outlast: fingerprints of {save.directory} not stored: {e or type(e).__name__}\n")


def list_files(directory: Path, *, shown_s: float) -> list[str]:
    """Every file of the checkpoint, relative; waits for those that its index names and that are not seen yet."""
    until = time.monotonic() + shown_s
    while missing := [name for name in ALWAYS if not (directory / name).exists()] or _missing_shards(directory):
        if time.monotonic() > until:
            raise CheckpointError(f"{', '.join(missing[:5])} not there after {shown_s:.0f} s", path=str(directory))
        time.sleep(POLL_S)
    return sorted(_walk(directory))


def _missing_shards(directory: Path) -> list[str]:
    # the index is a pickle of torch's; its file names stand in it as plain text, which is all that is wanted here
    named = {name.decode() for name in _SHARD.findall((directory / ".metadata").read_bytes())}
    return sorted(name for name in named if not (directory / name).exists())


def _walk(directory: Path) -> list[str]:
    found = []
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            relative = path.relative_to(directory).as_posix()
            if relative not in (*OURS, FILE) and not name.endswith(".tmp") and path.is_file():
                found.append(relative)
    return found


def hash_file(path: Path) -> FileEntry:
    """Its size and hash as it lies there, and on stable storage when this returns."""
    digest, size, chunk = xxhash.xxh3_128(), 0, bytearray(CHUNK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while read := file.readinto(chunk):
            digest.update(memoryview(chunk)[:read])
            size += read
        os.fsync(file.fileno())
    return FileEntry(size_bytes=size, xxh3_128=digest.hexdigest())


def _with_files(manifest: Manifest, files: dict[str, FileEntry]) -> Manifest:
    return Manifest(
        schema=manifest.schema,
        train_step=manifest.train_step,
        samples=manifest.samples,
        layout=manifest.layout,
        files=files,
        parents=manifest.parents,
        data_frontier=DataFrontier(consumed=manifest.samples),
        made_at_s=time.time(),
        made_by=manifest.made_by,
    )


def _await_tracker(root: Path, train_step: int, limit_s: float) -> None:
    """Rank 0 writes it at about this time, without a barrier. Where it does not come, we write it.

    Nobody here believes it; but Megatron-LM without us would begin anew where there is none.
    """
    until = time.monotonic() + limit_s
    while not _says(root / TRACKER, train_step):
        if time.monotonic() > until:
            write_tracker(RealOps(), root, train_step)
            return
        time.sleep(POLL_S)


def _says(tracker: Path, train_step: int) -> bool:
    try:
        text = tracker.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return False
    return text.isdigit() and int(text) >= train_step
