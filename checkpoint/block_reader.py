"""Reads a rank's share of a checkpoint's files, block by block, into its ring, and hashes it on the way.

    threads      pread block -> slot                      several in flight, past the page cache where that can be
    one thread   hash the slots of whole files, in order
    loop         READ, HASHED, TAKEN -> which slots may be used again; FILLED -> whoever takes something out

A slot is used again when everybody who takes something out of it has, and it is hashed: what is hashed are the very
bytes that were taken. A read that does not come back cannot be taken back either: its thread is left behind. No torch.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import xxhash

from outlast.checkpoint.manifest import FileEntry, Found, check
from outlast.checkpoint.node_memory import SLOTS, Kind, Message, Shared
from outlast.checkpoint.ops import PAGE_BYTES
from outlast.checkpoint.read_plan import BLOCK_BYTES, FileRead, Reads, holds
from outlast.checkpoint.verify import open_below

IN_FLIGHT_ON_NODE: Final = 16
HASH_BYTES: Final = 8 << 20
"""The interpreter lock is given up for each."""


@dataclass
class _File:
    """One file while it is read."""

    read: FileRead
    path: Path
    number: int
    left: int
    """Blocks that are not read yet."""
    fd: int = -1
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, directory: Path) -> int:
        with self.lock:
            if self.fd < 0:
                self.fd = open_below(directory, self.read.name)
                if os.fstat(self.fd).st_size != self.read.size_bytes:
                    raise _Short(f"{self.read.name}: not of the size that it had a moment ago")
                _be_direct(self.fd, True)
            return self.fd

    def done_one(self) -> None:
        with self.lock:
            self.left -= 1
            if not self.left:
                os.close(self.fd)


class _Short(Exception):
    """A file ends before its time."""


@dataclass
class _Job:
    """One block on its way."""

    file: _File
    block: int
    slot: int
    size_bytes: int
    is_first: bool
    is_last: bool
    began_s: float = 0.0
    ready: bool = False


class BlockReader:
    """This rank's reads. All methods but the threads' own are called by one loop."""

    def __init__(
        self, directory: Path, reads: Reads, entries: Mapping[str, FileEntry], shared: Shared, names: Sequence[str]
    ) -> None:
        self.problems: list[str] = []
        """What is wrong with the files."""
        self.errors: list[str] = []
        """What could not be read, which says nothing of what is in it."""
        self._directory, self._entries, self._shared = directory, entries, shared
        numbers = {name: number for number, name in enumerate(names)}
        self._jobs = self._list_jobs(reads, numbers)
        self._next = next(self._jobs, None)
        self._free = list(range(SLOTS))
        self._order: deque[_Job] = deque()
        self._owed: dict[int, int] = {}  # slot -> who has not taken or hashed it yet
        self._by_slot: dict[int, _Job] = {}
        self._to_read: SimpleQueue[_Job | None] = SimpleQueue()
        self._to_hash: SimpleQueue[_Job | None] = SimpleQueue()
        in_flight = min(SLOTS - 2, max(2, -(-IN_FLIGHT_ON_NODE // max(1, reads.readers))))
        self._threads = [self._start(self._read_jobs) for _ in range(in_flight if reads.files else 0)]
        self._threads += [self._start(self._hash_jobs) for _ in range(any(read.hashed for read in reads.files))]

    def _list_jobs(self, reads: Reads, numbers: Mapping[str, int]) -> Iterator[_Job]:
        for read in reads.files:
            blocks = [block for begin, end in read.runs for block in range(begin, end)]
            file = _File(read, self._directory / read.name, numbers[read.name], len(blocks))
            for n, block in enumerate(blocks):
                size_bytes = min(BLOCK_BYTES, read.size_bytes - block * BLOCK_BYTES)
                yield _Job(file, block, -1, size_bytes, n == 0, n == len(blocks) - 1)

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="outlast-restore", daemon=True)
        thread.start()
        return thread

    @property
    def done(self) -> bool:
        return self._next is None and not self._by_slot

    def fill(self) -> None:
        """Begin reading into every slot that is free."""
        while self._free and self._next is not None:
            job, self._next = self._next, next(self._jobs, None)
            job.slot = self._free.pop()
            self._by_slot[job.slot] = job
            self._order.append(job)
            self._to_read.put(job)

    def on_read(self, message: Message) -> None:
        """A block is there: to be hashed and taken, in the order of the file."""
        self._by_slot[message.slot].ready = True
        while self._order and self._order[0].ready:
            self._publish(self._order.popleft())

    def _publish(self, job: _Job) -> None:
        read = job.file.read
        takers = [rank for rank, runs in read.takers.items() if holds(runs, job.block)]
        self._owed[job.slot] = len(takers) + read.hashed
        if read.hashed:
            self._to_hash.put(job)
        filled = Message(
            kind=Kind.FILLED,
            sender=self._shared.rank,
            slot=job.slot,
            file=job.file.number,
            block=job.block,
            size_bytes=job.size_bytes,
        )
        for rank in takers:
            self._shared.tell(rank, filled)

    def on_released(self, message: Message) -> None:
        """Somebody needs a slot no longer."""
        self._owed[message.slot] -= 1
        if not self._owed[message.slot]:
            del self._owed[message.slot], self._by_slot[message.slot]
            self._free.append(message.slot)
            self.fill()

    def find_stuck(self, limit_s: float) -> str:
        """'' where every read comes back in time, else which does not."""
        now_s = time.monotonic()
        for job in list(self._by_slot.values()):
            if not job.ready and job.began_s and now_s - job.began_s > limit_s:
                return f"{job.file.read.name}: no answer for {limit_s:g} s at byte {job.block * BLOCK_BYTES:,}"
        return ""

    def close(self) -> None:
        """Ends the threads that can be ended; waits for none."""
        for _ in self._threads:
            self._to_read.put(None)
        self._to_hash.put(None)

    # ------------------------------------------------------------------ in the threads

    def _read_jobs(self) -> None:
        while (job := self._to_read.get()) is not None:
            job.began_s = time.monotonic()
            try:
                fd = job.file.open(self._directory)
                _read_block(fd, self._shared.ring.slot(job.slot), job.block * BLOCK_BYTES, job.size_bytes)
                job.file.done_one()
            except OSError as e:
                self.errors.append(f"{job.file.read.name}: cannot be read ({e.strerror})")
                return self._say(Kind.FAILED, job)
            except _Short as e:
                self.problems.append(str(e) or f"{job.file.read.name}: ends before its time (truncated)")
                return self._say(Kind.FAILED, job)
            except Exception as e:  # noqa: BLE001 -- the loop waits for this block
                self.errors.append(f"{job.file.read.name}: {type(e).__name__}: {e}")
                return self._say(Kind.FAILED, job)
            self._say(Kind.READ, job)

    def _hash_jobs(self) -> None:
        digest = xxhash.xxh3_128()
        while (job := self._to_hash.get()) is not None:
            if job.is_first:
                digest.reset()
            slot = self._shared.ring.slot(job.slot)
            for at in range(0, job.size_bytes, HASH_BYTES):
                digest.update(slot[at : min(at + HASH_BYTES, job.size_bytes)])
            if job.is_last:
                self._compare(job.file.read, digest.hexdigest())
            self._say(Kind.HASHED, job)

    def _compare(self, read: FileRead, digest: str) -> None:
        found = {read.name: Found(size_bytes=read.size_bytes, xxh3_128=digest)}
        self.problems += check({read.name: self._entries[read.name]}, found)

    def _say(self, kind: Kind, job: _Job) -> None:
        self._shared.tell(self._shared.rank, Message(kind=kind, sender=self._shared.rank, slot=job.slot))


def _read_block(fd: int, slot: memoryview, at_bytes: int, size_bytes: int) -> None:
    """Raises _Short where the file ends inside, OSError."""
    asked = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES  # whole pages: what is past the page cache is read in no others
    done = 0
    while done < size_bytes:
        try:
            count = os.preadv(fd, [slot[done:asked]], at_bytes + done)
        except OSError as e:
            # blocks larger than ours, or a read that was cut short inside one: the page cache takes anything
            if e.errno == errno.EINVAL and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                _be_direct(fd, False)
                continue
            raise
        if not count:
            raise _Short
        done += count


def _be_direct(fd: int, wanted: bool) -> None:
    """Past the page cache, where the file system can: not every one does."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError:
        return
