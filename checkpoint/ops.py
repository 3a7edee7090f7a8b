"""The few operations on files that a durable write is made of, as a port, and the real half of it.

Everything that changes a directory of checkpoints goes through `Ops`, so that a test can record the operations, drop
what was not synced, and open what a power loss would have left after each one. Nothing here decides an order.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import xxhash

from outlast.checkpoint.manifest import FileEntry

BUFFER_BYTES = 1 << 20
Buffer = bytes | bytearray | memoryview


class Sink(Protocol):
    """One file that is being written."""

    def write(self, data: Buffer, /) -> int:
        """Takes all of it."""

    def sync(self) -> None:
        """What was written is on stable storage when this returns."""

    def close(self) -> None: ...


class Ops(Protocol):
    """Each call is one step; an OSError leaves it undone or done, never half."""

    def make_dir(self, path: Path) -> None:
        """Parents are there; a directory that is there already is fine."""

    def create(self, path: Path) -> Sink:
        """A new file; FileExistsError where the name is taken: two writers never share a file."""

    def rename(self, old: Path, new: Path) -> None:
        """Atomic; replaces a file, never a directory that is not empty."""

    def remove(self, path: Path) -> None: ...

    def remove_dir(self, path: Path) -> None: ...

    def sync_dir(self, path: Path) -> None:
        """The names in this directory are on stable storage when this returns."""


class _RealSink:
    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=BUFFER_BYTES)  # noqa: SIM115 -- closed by close()

    def write(self, data: Buffer, /) -> int:
        return self._file.write(data)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class RealOps:
    """The file system."""

    def make_dir(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> Sink:
        return _RealSink(path)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_dir(self, path: Path) -> None:
        os.rmdir(path)

    def sync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class HashedFile:
    """A write-only stream that counts and hashes what passes, on its way into a sink.

    The hash is of the bytes as they were meant, before any disk had them: a file that reads back differently is found.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hash = xxhash.xxh3_128()
        self._size_bytes = 0

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        self._sink.write(view)
        self._hash.update(view)
        self._size_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._size_bytes

    def flush(self) -> None:
        """Nothing: the sink buffers, and sync() is what makes a file durable."""

    def entry(self) -> FileEntry:
        return FileEntry(size_bytes=self._size_bytes, xxh3_128=self._hash.hexdigest())
