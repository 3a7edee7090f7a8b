"""The order in which a checkpoint becomes true. Each step is durable before the next begins:

    each file     created, written, hashed, fsynced            by its rank's writer
    names         fsync of every directory that holds one
    manifest.json as .manifest.json.tmp: written, fsynced; renamed; directory fsynced
    COMMITTED     the same, last; it holds the manifest's hash

Whatever dies after whichever step, a checkpoint either has a COMMITTED that fits, and then all of it was on stable
storage before, or it has none and is no checkpoint. `reach` is told the name of each point that was passed: tests
kill there. This module does not decide what is in a manifest, nor when to save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.manifest import MANIFEST, MARKER, FileEntry, Manifest, encode_manifest, encode_marker
from outlast.checkpoint.names import TRACKER
from outlast.checkpoint.ops import HashedFile, Ops

Reach = Callable[[str], None]

POINTS: Final = (
    "write.begin",
    "write.created",
    "write.half",
    "write.unsynced",
    "write.synced",
    "write.done",
    "commit.begin",
    "commit.index",
    "commit.names",
    "commit.manifest_unsynced",
    "commit.manifest_tmp",
    "commit.manifest",
    "commit.marker_unsynced",
    "commit.marker_tmp",
    "commit.marker",
    "commit.durable",
    "commit.tracker",
)
"""Every point in a writer's life, in order; `write.*` on each rank, `commit.*` on rank 0's alone."""


def pass_by(point: str) -> None:
    """The `reach` of ordinary runs."""


def write_file(ops: Ops, path: Path, fill: Callable[[HashedFile], None], reach: Reach = pass_by) -> FileEntry:
    """A new file, on stable storage but for its name: see sync_dir. `fill` writes the content."""
    sink = ops.create(path)
    try:
        reach("write.created")
        stream = HashedFile(sink)
        fill(stream)
        reach("write.unsynced")
        sink.sync()
    finally:
        sink.close()
    reach("write.synced")
    return stream.entry()


def write_bytes(ops: Ops, path: Path, data: bytes) -> FileEntry:
    def fill(stream: HashedFile) -> None:
        stream.write(data)

    return write_file(ops, path, fill)


def commit(
    ops: Ops, directory: Path, manifest: Manifest, reach: Reach = pass_by, *, elsewhere: Collection[str] = ()
) -> None:
    """Make the checkpoint in `directory` true. Its files were written by write_file, by whichever process.

    elsewhere: files of the manifest that are durable in another place (local_tier.py).
    """
    raw = encode_manifest(manifest)
    _refuse_short_files(directory, manifest, elsewhere)
    here = {(directory / path).parent for path in manifest.files if path not in elsewhere}
    for holder in sorted(here | {directory}, reverse=True):
        ops.sync_dir(holder)
    ops.sync_dir(directory.parent)
    reach("commit.names")
    _place(ops, directory, MANIFEST, raw, reach, "commit.manifest")
    _place(ops, directory, MARKER, encode_marker(raw, manifest.train_step), reach, "commit.marker")
    reach("commit.durable")


def write_tracker(ops: Ops, root: Path, train_step: int) -> None:
    """Tell readers that know the framework alone which one is newest. A pointer, so it is never believed here."""
    replace_file(ops, root, TRACKER, f"{train_step}\n".encode())


def replace_file(ops: Ops, directory: Path, name: str, data: bytes) -> None:
    """A small file with this content, old or new at every moment."""
    _place(ops, directory, name, data, pass_by, "")


def _place(ops: Ops, directory: Path, name: str, data: bytes, reach: Reach, point: str) -> None:
    # one temporary name a process: a leftover of a dead one is never in the way and never mistaken for this one
    temporary = directory / f".{name}.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)
    sink = ops.create(temporary)
    try:
        sink.write(data)
        reach(f"{point}_unsynced")
        sink.sync()
    finally:
        sink.close()
    reach(f"{point}_tmp")
    ops.rename(temporary, directory / name)
    reach(point)
    ops.sync_dir(directory)


def _refuse_short_files(directory: Path, manifest: Manifest, elsewhere: Collection[str]) -> None:
    """A last look before the promise: another process may have moved or cut a file since it was written."""
    for path, entry in manifest.files.items():
        if path in elsewhere:
            continue
        try:
            size_bytes = os.lstat(directory / path).st_size
        except FileNotFoundError:
            size_bytes = -1
        if size_bytes != entry.size_bytes:
            found = "missing" if size_bytes < 0 else f"{size_bytes:,} bytes"
            raise CheckpointError(
                f"{directory / path}: {found}, its writer wrote {entry.size_bytes:,}; not committed",
                path=str(directory),
            )
