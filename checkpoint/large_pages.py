"""Memory files, mapped so that the kernel can back them with large pages, and faulted in so that it does.

    aligned address |2 MiB|2 MiB|2 MiB|rest|    touch a page of each -- collapse -- fault in what is still missing

A disk takes a block of memory in pieces that lie together: of ordinary pages that is 4 KiB a piece, and the kernel (and
a hypervisor under it) pays for each. Large pages also make a copy no dearer and often cheaper. They are asked
for by MADV_COLLAPSE (Linux 6.1), which needs no setting of the machine's; where it is unknown or refused, or memory
lies in too small pieces to collapse in time, the pages are ordinary ones, and all works the same. No torch here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from typing import Final

LARGE_BYTES: Final = 2 << 20
AT_ONCE_BYTES: Final = 64 << 20
COLLAPSE_S: Final = 5.0
"""At most so long for one faulting in: a machine whose memory is in pieces has to move much to make large pages."""
POPULATE_READ: Final = 22  # MADV_POPULATE_READ and MADV_POPULATE_WRITE of linux/mman.h, since 5.14
POPULATE_WRITE: Final = 23
COLLAPSE: Final = 25  # MADV_COLLAPSE, since 6.1
MAP_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SharedMemory:
    """One mapping of a memory file, from its beginning. It stays for as long as anything refers to `view`."""

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        """The file is at least that large, and size_bytes at least 1. OSError where the kernel refuses."""
        self.size_bytes = size_bytes
        self._writable = writable
        reserved_bytes = size_bytes + LARGE_BYTES
        reserved = _map(None, reserved_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._address = -(-reserved // LARGE_BYTES) * LARGE_BYTES
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        try:
            _map(self._address, size_bytes, access, mmap.MAP_SHARED | MAP_FIXED, fd)
        except OSError:
            _libc.munmap(reserved, reserved_bytes)
            raise
        memory = (ctypes.c_ubyte * size_bytes).from_address(self._address)
        weakref.finalize(memory, _libc.munmap, reserved, reserved_bytes).atexit = False
        view = memoryview(memory).cast("B")
        self.view = view if writable else view.toreadonly()

    def fault_in(self, begin: int = 0, end: int | None = None) -> None:
        """The pages from begin (at a large page) to end (None: all) are there when it returns, large where possible.

        An older kernel leaves them to their first use.
        """
        end = self.size_bytes if end is None else end
        if self._writable:
            self._collapse(begin, end)
        self._advise(begin, end, POPULATE_WRITE if self._writable else POPULATE_READ)

    def _collapse(self, begin: int, end: int) -> None:
        deadline_s = time.monotonic() + COLLAPSE_S
        for start in range(begin, end - LARGE_BYTES + 1, AT_ONCE_BYTES):
            stop = min(start + AT_ONCE_BYTES, end // LARGE_BYTES * LARGE_BYTES)
            for large in range(start, stop, LARGE_BYTES):  # of pages that are all missing none is made
                self._advise(large, large + 1, POPULATE_WRITE)
            self._advise(start, stop, COLLAPSE)  # what it refuses stays as it is
            if time.monotonic() > deadline_s:
                return

    def _advise(self, begin: int, end: int, advice: int) -> int:
        """0 where it was taken."""
        return int(_libc.madvise(self._address + begin, end - begin, advice))


def _map(address: int | None, size_bytes: int, access: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, size_bytes, access, flags, fd, 0)
    if mapped is None or mapped == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {size_bytes:,} bytes: {os.strerror(number)}")
    return int(mapped)
