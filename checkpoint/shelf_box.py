"""The directory of one node in which parts of local checkpoints lie: its own ranks', and a peer's copies.

    LOCAL_DIR/RUN/iter_0000120/__3_0.distcp ...     named only when whole; `.NAME.PID.tmp` before

Files have the names that they have in the checkpoint, so own parts and copies of others lie side by side, and a
directory that has all of them, the index and the marker is an ordinary checkpoint. Nothing here is believed: each
reader compares with the manifest.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Final

from outlast.checkpoint.commit import write_file
from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.manifest import FileEntry, Found
from outlast.checkpoint.names import name_step, parse_step
from outlast.checkpoint.ops import HashedFile, RealOps
from outlast.checkpoint.shelf_wire import DATA_MAX_BYTES, unsafe_name
from outlast.checkpoint.verify import find_files, hash_open_file

SPARE_BYTES: Final = 64 << 20
_TMP: Final = ".tmp"


class Box:
    def __init__(self, root: Path) -> None:
        """`root` is this run's and this node's own."""
        self.root = root
        self._ops = RealOps()

    def claim(self) -> None:
        """Make it, for this user alone. CheckpointError where it is somebody else's, or could become so."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            itself, above = os.lstat(self.root), os.stat(self.root.parent)
        except OSError as e:
            raise CheckpointError(f"{self.root}: {e.strerror}; expected a place that this node can write") from e
        if not stat.S_ISDIR(itself.st_mode) or itself.st_uid != os.getuid():
            raise CheckpointError(f"{self.root}: not a directory of this user's; remove it")
        if itself.st_mode & 0o077:
            os.chmod(self.root, 0o700)
        # in a directory that all may write to, sticky or not ours, another one could be put in its place
        loose = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
        if above.st_uid not in (os.getuid(), 0) or loose:
            raise CheckpointError(f"{self.root.parent}: belongs to another user, or all may write to it; name another")

    def directory(self, train_step: int) -> Path:
        return self.root / name_step(train_step)

    def steps(self) -> tuple[int, ...]:
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return ()
        return tuple(sorted(step for name in names if (step := parse_step(name)) is not None))

    def put(self, train_step: int, name: str, entry: FileEntry, pieces: Iterator[bytes]) -> None:
        """Keep a file: written under a temporary name, compared with `entry`, named. Raises CheckpointError."""
        if why := unsafe_name(name):
            raise CheckpointError(f"file name {name[:80]!r} {why}; nothing was written")
        directory = self.directory(train_step)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._require_room(entry.size_bytes)
        draft = directory / f".{name}.{os.getpid()}-{threading.get_ident()}{_TMP}"
        draft.unlink(missing_ok=True)

        def fill(out: HashedFile) -> None:
            for piece in pieces:
                out.write(piece)

        try:
            found = write_file(self._ops, draft, fill)
            if found != entry:
                raise CheckpointError(
                    f"{name} of train_step {train_step}: {found.size_bytes:,} bytes, xxh3_128 {found.xxh3_128} came; "
                    f"{entry.size_bytes:,}, {entry.xxh3_128} were announced",
                    path=str(directory / name),
                )
            self._ops.rename(draft, directory / name)
            self._ops.sync_dir(directory)
        finally:
            draft.unlink(missing_ok=True)

    @contextmanager
    def reading(self, train_step: int, name: str) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Size and content. FileNotFoundError, or OSError where it is no plain file."""
        if unsafe_name(name):
            raise FileNotFoundError(name)
        fd = os.open(self.directory(train_step) / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise OSError(f"{name}: not a regular file")
            yield info.st_size, _pieces(file, info.st_size)

    def look(self, train_step: int, names: Iterable[str]) -> dict[str, FileEntry]:
        """Those of these files that are here, read through and hashed."""
        wanted = [name for name in names if not unsafe_name(name)]
        found = find_files(self.directory(train_step), wanted, hash_fd=lambda fd, _path: hash_open_file(fd))
        return {name: entry for name, one in found.items() if (entry := _as_entry(one)) is not None}

    def keep_only(self, steps: Collection[int]) -> tuple[int, ...]:
        """Remove all other checkpoints' parts; the train_steps that went."""
        gone = tuple(step for step in self.steps() if step not in steps)
        for step in gone:
            shutil.rmtree(self.directory(step), ignore_errors=True)
        return gone

    def clear_drafts(self) -> None:
        """What a shelf that died left half received. Only before anything is being received."""
        for draft in self.root.glob(f"iter_*/.*{_TMP}"):
            with suppress(OSError):
                draft.unlink()

    def _require_room(self, size_bytes: int) -> None:
        info = os.statvfs(self.root)
        free_bytes = info.f_bavail * info.f_frsize
        if free_bytes < size_bytes + SPARE_BYTES:
            raise CheckpointError(
                f"{self.root}: {free_bytes:,} bytes free, {size_bytes:,} were to come", path=str(self.root)
            )


def _pieces(file: FileIO, size_bytes: int) -> Iterator[bytes]:
    left = size_bytes
    while left:
        piece = file.read(min(DATA_MAX_BYTES, left))
        if not piece:
            raise CheckpointError("a part became shorter while it was read")
        left -= len(piece)
        yield piece


def _as_entry(found: Found) -> FileEntry | None:
    if found.refused or found.xxh3_128 is None:
        return None
    return FileEntry(size_bytes=found.size_bytes, xxh3_128=found.xxh3_128)
