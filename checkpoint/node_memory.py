"""What the ranks of one node share during a restore: a ring of memory each, and a mailbox each.

    rank 0   ring |slot|slot|slot|   mailbox <- messages of all ranks of the node
    rank 1   ring |slot|slot|slot|   mailbox <-

Both have no name that a killed process could leave behind: a memory file and a pipe, which the others open through
/proc by process and number, and know again by their inode. Where that is not possible (other containers, other
users) the ranks are not neighbours, and each reads for itself. A message is smaller than what a pipe takes at once,
so messages never mix, and the kernel orders them with the memory that they speak of. No torch here.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from outlast.checkpoint.large_pages import SharedMemory
from outlast.checkpoint.read_plan import BLOCK_BYTES

SLOTS: Final = 8
_MESSAGE: Final = struct.Struct("<BxHIIII")
_AT_ONCE: Final = _MESSAGE.size * 2048


class Kind(IntEnum):
    """What a message says."""

    READ = 1
    """Its slot has been filled from the disk; a rank's own thread to itself."""
    HASHED = 2
    """Its slot has been hashed; a rank's own thread to itself."""
    FILLED = 3
    """Take what you need out of the sender's slot."""
    TAKEN = 4
    """The sender has taken what it needs out of your slot."""
    TICK = 5
    """The sender is still at it."""
    LEFT = 6
    """The sender has all it needs and owes nothing."""
    FAILED = 7
    """The sender gives up; so must you."""


@dataclass(frozen=True, kw_only=True)
class Message:
    kind: Kind
    sender: int
    slot: int = 0
    file: int = 0
    """Its number among the checkpoint's files."""
    block: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Offer:
    """How others find what a rank shares."""

    node: str
    pid: int
    ring_fd: int
    ring_inode: int
    box_fd: int
    box_inode: int


class Ring:
    """Slots of one block each; their pages are there from their first use."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("outlast-restore")
        os.ftruncate(self.fd, SLOTS * BLOCK_BYTES)
        self._memory: SharedMemory | None = None
        self._lock = threading.Lock()
        self._used: set[int] = set()

    def slot(self, number: int) -> memoryview:
        begin, end = number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES
        with self._lock:
            if self._memory is None:
                self._memory = SharedMemory(self.fd, SLOTS * BLOCK_BYTES, writable=True)
            memory, is_new = self._memory, number not in self._used
            self._used.add(number)
        if is_new:
            memory.fault_in(begin, end)
        return memory.view[begin:end]

    def close(self) -> None:
        """The memory stays for as long as a thread that is stuck in a read has it."""
        self._memory = None
        os.close(self.fd)


class Mailbox:
    """A pipe of messages. Others write into it, its owner reads."""

    def __init__(self) -> None:
        self._out, self.fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def wait(self, timeout_s: float) -> list[Message]:
        """All that has come; [] where nothing did in time."""
        ready, _, _ = select.select([self._out], [], [], timeout_s)
        raw = os.read(self._out, _AT_ONCE) if ready else b""
        return [_decode(fields) for fields in _MESSAGE.iter_unpack(raw)]

    def close(self) -> None:
        os.close(self._out)
        os.close(self.fd)


def _decode(fields: tuple[int, ...]) -> Message:
    kind, slot, sender, file, block, size_bytes = fields
    return Message(kind=Kind(kind), sender=sender, slot=slot, file=file, block=block, size_bytes=size_bytes)


def post(fd: int, message: Message) -> None:
    """Into a mailbox. BlockingIOError where its owner has not read thousands of them; a closed one is no error."""
    raw = _MESSAGE.pack(message.kind, message.slot, message.sender, message.file, message.block, message.size_bytes)
    with suppress(BrokenPipeError):
        os.write(fd, raw)


class Shared:
    """What this rank offers, and what it has opened of its neighbours."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ring, self.box = Ring(), Mailbox()
        self._boxes: dict[int, int] = {rank: self.box.fd}
        self._ring_fds: dict[int, int] = {}
        self._rings: dict[int, SharedMemory] = {}

    def offer(self) -> Offer:
        ring, box = os.fstat(self.ring.fd), os.fstat(self.box.fd)
        return Offer(
            node=name_node(),
            pid=os.getpid(),
            ring_fd=self.ring.fd,
            ring_inode=ring.st_ino,
            box_fd=self.box.fd,
            box_inode=box.st_ino,
        )

    def open_all(self, offers: Mapping[int, Offer]) -> frozenset[int]:
        """The ranks that share with this one, itself among them."""
        mine = offers[self.rank].node
        for rank, offer in offers.items():
            if rank != self.rank and offer.node == mine:
                with suppress(OSError):
                    self._open(rank, offer)
        return frozenset(self._boxes)

    def _open(self, rank: int, offer: Offer) -> None:
        ring = _open_of(offer.pid, offer.ring_fd, offer.ring_inode, os.O_RDWR)
        try:
            box = _open_of(offer.pid, offer.box_fd, offer.box_inode, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            os.close(ring)
            raise
        self._ring_fds[rank], self._boxes[rank] = ring, box

    def tell(self, rank: int, message: Message) -> None:
        post(self._boxes[rank], message)

    def slot_of(self, rank: int, number: int) -> memoryview:
        """A slot of a neighbour's ring, or of the own one."""
        if rank == self.rank:
            return self.ring.slot(number)
        if rank not in self._rings:
            self._rings[rank] = SharedMemory(self._ring_fds[rank], SLOTS * BLOCK_BYTES, writable=False)
        return self._rings[rank].view[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]

    def close(self) -> None:
        self._rings.clear()
        for fd in (*self._ring_fds.values(), *(fd for rank, fd in self._boxes.items() if rank != self.rank)):
            os.close(fd)
        self._ring_fds.clear()
        self._boxes.clear()
        self.ring.close()
        self.box.close()


def _open_of(pid: int, number: int, inode: int, flags: int) -> int:
    """Another process's open file. OSError where it is not to be had, or is another one by now."""
    fd = os.open(f"/proc/{pid}/fd/{number}", flags | os.O_CLOEXEC)
    if os.fstat(fd).st_ino != inode:
        os.close(fd)
        raise FileNotFoundError(f"/proc/{pid}/fd/{number}: another file by now")
    return fd


def name_node() -> str:
    """The same for processes that find each other by number: one boot of a kernel, one pid namespace, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"
