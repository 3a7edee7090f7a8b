"""The few operations on files that a durable write is made of, as a port, and the real half of it.

Everything that changes a directory of checkpoints goes through `Ops`, so that a test can record the operations, drop
what was not synced, and open what a power loss would have left after each one. Nothing here decides an order.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path
from typing import Final, Protocol

import xxhash

from outlast.checkpoint.manifest import FileEntry

BUFFER_BYTES = 1 << 20
PAGE_BYTES: Final = 4096
DIRECT_FROM_BYTES: Final = 1 << 20
"""Below it the page cache is as quick."""
UNKNOWN_TO_IT: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
Buffer = bytes | bytearray | memoryview
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Sink(Protocol):
    """One file that is being written."""

    def write(self, data: Buffer, /) -> int:
        """Takes all of it."""

    def sync(self) -> None:
        """What was written is on stable storage when this returns."""

    def close(self) -> None: ...


class BlockSink(Protocol):
    """One file that is being written in whole pages, by several threads at once."""

    def write_at(self, pages: memoryview, at_bytes: int, /) -> None:
        """Takes all of it."""

    def sync(self) -> None:
        """Cut to its size, and what was written is on stable storage when this returns."""

    def close(self) -> None: ...


class Ops(Protocol):
    """Each call is one step; an OSError leaves it undone or done, never half."""

    def make_dir(self, path: Path) -> None:
        """Parents are there; a directory that is there already is fine."""

    def create(self, path: Path) -> Sink:
        """A new file; FileExistsError where the name is taken: two writers never share a file."""

    def create_blocks(self, path: Path, size_bytes: int) -> BlockSink:
        """A new file of that size, for memory that begins at a page. Room is taken before the first byte is written,
        where the file system can: a full disk is met here."""

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


class _RealBlockSink:
    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path, self._size_bytes = path, size_bytes
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            if size_bytes >= DIRECT_FROM_BYTES:
                self._be_direct(True)
            if size_bytes and _libc.fallocate(self._fd, 0, 0, size_bytes) != 0:
                self._refuse(ctypes.get_errno())
        except OSError:
            os.close(self._fd)
            raise

    def _refuse(self, number: int) -> None:
        if number not in UNKNOWN_TO_IT:
            raise OSError(number, os.strerror(number), str(self._path))

    def _be_direct(self, wanted: bool) -> bool:
        """Past the page cache, where the file system can: not every one does."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        except OSError:
            return False
        return True

    def write_at(self, pages: memoryview, at_bytes: int, /) -> None:
        done = 0
        while done < pages.nbytes:
            try:
                done += os.pwrite(self._fd, pages[done:], at_bytes + done)
            except OSError as e:
                # blocks larger than ours, or a write that was cut short inside one: the page cache takes anything
                if e.errno == errno.EINVAL and fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DIRECT:
                    self._be_direct(False)
                    continue
                raise OSError(e.errno, e.strerror, str(self._path)) from e

    def sync(self) -> None:
        os.ftruncate(self._fd, self._size_bytes)
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class RealOps:
    """The file system."""

    def make_dir(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> Sink:
        return _RealSink(path)

    def create_blocks(self, path: Path, size_bytes: int) -> BlockSink:
        return _RealBlockSink(path, size_bytes)

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
