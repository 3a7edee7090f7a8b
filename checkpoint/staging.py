"""The staging memory of one rank: what a save is copied into, and its writer process writes from.

A memory file: it has no name that a killed process could leave behind, is shared with the writer by its descriptor,
and is gone when both are. It is made and prefaulted once, and used again by every save; it only grows. Its size is
bounded twice: by the budget that it was given and by what the machine has left, since a save must never be what
brings a node out of memory. No torch here; what is copied where is image.py's.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.large_pages import SharedMemory
from outlast.checkpoint.ops import PAGE_BYTES

MARGIN_BYTES: Final = 256 << 20
"""What a save leaves to everybody else on the node."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What saves may cost, and what is done where that is not enough."""

    limit_bytes: int | None = None
    """Of staging memory, for this rank; None: what the machine has left."""
    when_short: str = "sync"
    """A state that does not fit is written at once, holding the train loop ('sync'), or not at all ('skip')."""
    when_busy: str = "wait"
    """A save while one is in flight waits for that ('wait'), or is left out ('skip')."""
    outlive_s: float = 30.0
    """How long a writer goes on when its rank is dead."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("when_short", self.when_short, ("sync", "skip")),
            ("when_busy", self.when_busy, ("wait", "skip")),
        ):
            if value not in known:
                raise CheckpointError(f"{name}: {value!r}; expected {known[0]!r} or {known[1]!r}")


@dataclass
class Counts:
    """What became of saves that were asked for; a reason each for what was not done as usual."""

    begun: int = 0
    durable: int = 0
    failed: int = 0
    synchronous: int = 0
    skipped: int = 0
    why: str = ""
    """Why the last one was synchronous or skipped."""


class Staging:
    """One memory file and its mapping in this process."""

    def __init__(self, limit_bytes: int | None, *, ranks_here: int = 1) -> None:
        """limit_bytes: the budget of this rank; None: whatever the machine has. ranks_here: who else will grow now."""
        self.fd = os.memfd_create("outlast-staging")
        self._limit_bytes, self._ranks_here = limit_bytes, ranks_here
        self._memory: SharedMemory | None = None
        self.size_bytes = 0

    def why_not(self, size_bytes: int) -> str:
        """'' where a state of this size fits, else why it does not."""
        if self._limit_bytes is not None and size_bytes > self._limit_bytes:
            return f"needs {size_bytes:,} bytes of staging memory, its budget is {self._limit_bytes:,}"
        more_bytes = (size_bytes - self.size_bytes) * self._ranks_here
        if more_bytes > 0 and (left := read_available_bytes()) < more_bytes + MARGIN_BYTES:
            return f"needs {more_bytes:,} bytes more of staging memory on this node, {left:,} are available"
        return ""

    def grow(self, size_bytes: int) -> memoryview:
        """The memory, at least that large and with its pages there. OSError where the kernel refuses."""
        if self._memory is None or size_bytes > self.size_bytes:
            size_bytes = max(size_bytes, PAGE_BYTES)
            os.ftruncate(self.fd, size_bytes)
            self._memory = SharedMemory(self.fd, size_bytes, writable=True)
            self._memory.fault_in()
            self.size_bytes = size_bytes
        return self._memory.view

    def close(self) -> None:
        self._memory = None
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def read_available_bytes() -> int:
    """What can still be had: the machine's and, where there is one, the control group's."""
    found = [_read_meminfo()]
    with suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        limit_bytes = int((folder / "memory.max").read_text())
        found.append(limit_bytes - int((folder / "memory.current").read_text()))
    return max(0, min(found))


def _read_meminfo() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62
