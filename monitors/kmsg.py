"""The kernel log, live: XIDs and other telling lines of this node as signals, from /dev/kmsg or from a file that grows.

    /dev/kmsg  one record a read, sequence numbers        \\
                                                            > XidSeen, KernelSeen, SourceBlind where records are lost
    a file     lines in any prefix form, rotation         /

It reports and never judges. In /dev/kmsg only facility 0 counts: the kernel gives it to its own lines alone, while
any root process may write the rest (`accept_user_facility` is for testbeds that inject lines). Not being able to
read is said once, as blindness, and is never health. It begins at the end of the log: what is older than the agent
belongs to somebody else's job. A log file is read on the event loop: it should lie on this node's own disk.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import stat
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from outlast.monitors.follow import FollowedFile
from outlast.monitors.kernel_events import pci_device, read_kernel_event
from outlast.monitors.kernel_text import parse_kernel_line
from outlast.monitors.xid_text import BusLossMemory, find_sxid
from outlast.reliability.model import KernelSeen, Node, SourceBlind, XidSeen

RECORD_BYTES: Final = 8192
"""One record a read(); a smaller buffer than the record is refused with EINVAL."""
BATCH: Final = 256
FILE_POLL_S: Final = 0.02
FIRST_RETRY_S: Final = 0.5
LAST_RETRY_S: Final = 60.0
_DROPPED: Final = re.compile(r"\*\* ([0-9]{1,9}) printk messages dropped \*\*")
_WANTED: Final = re.compile(
    rb"NVRM|SXid|M(?:achine Check|emory (?:cgroup|failure))|Hardware Error|EDAC|AER|LOCKUP|BUG|Kernel panic"
    rb"|O(?:ut of memory|ops)|'s health|Disk failure|EXT4-fs|XFS|BTRFS|Lustre|NFS|: server |GPFS|Link Down|Fatal error"
    rb"|\*\* [0-9]{1,9} printk"
)
"""A line without one of these cannot concern us; the test is far cheaper than parsing. Each begins with a byte that is
rare in the kernel's prose, since nearly all lines end at this test."""
TELLING: Final = frozenset(
    {
        *("nvrm_rm_init", "aer_fatal", "pcie_link_down", "pcie_recovery_failed", "edac_ue", "memory_failure", "mce"),
        *(
            "ghes_fatal",
            "hard_lockup",
            "soft_lockup",
            "kernel_panic",
            "kernel_oops",
            "nic_health",
            "oom_job",
            "oom_node",
        ),
        *("disk_array", "fs_readonly", "lustre_evicted", "nfs_lost", "gpfs_lost"),
    }
)
"""Forms (kernel_events.py) that convict a node or explain a death. What is merely counted stays in the log."""
SXID_FATAL: Final = "sxid_fatal"
REPEAT_S: Final = 5.0
"""The same form of the same device within this is one signal: lines of this kind come in storms."""

Found = XidSeen | KernelSeen | SourceBlind


class KernelDecoder:
    """Records and lines in, signals out. No I/O: the state is the last sequence number and the last GPU named."""

    def __init__(self, node: Node, source: str, *, accept_user_facility: bool = False) -> None:
        self._node = node
        self._source = source
        self._accept_user = accept_user_facility
        self._memory = BusLossMemory()
        self._sequence: int | None = None
        self._told: dict[tuple[str, str], float] = {}

    def record(self, raw: bytes, at_s: float) -> list[Found]:
        """One raw /dev/kmsg record: `6,340,4015,-;text`."""
        found: list[Found] = []
        fields = raw.split(b",", 2)
        if len(fields) == 3 and fields[1].isdigit() and len(fields[1]) < 20:
            sequence = int(fields[1])
            if self._sequence is not None and sequence > self._sequence + 1:
                found.append(self.blind(at_s, "kernel log overrun", lost=sequence - self._sequence - 1))
            self._sequence = sequence
        if _WANTED.search(raw):
            # continuation lines of the record are its dictionary (SUBSYSTEM=, DEVICE=)
            found += self.line(raw.split(b"\n", 1)[0], at_s)
        return found

    def line(self, raw: bytes, at_s: float) -> list[Found]:
        """One line in any prefix form."""
        if not _WANTED.search(raw):
            return []
        line = parse_kernel_line(raw.decode("utf-8", "replace"))
        if not (line.from_kernel or (self._accept_user and line.program in (None, "NVRM"))):
            return []
        dropped = _DROPPED.match(line.text)
        if dropped:
            return [self.blind(at_s, "the kernel dropped messages", lost=int(dropped[1]))]
        # words of the driver inside another line do not count (audit records quote user text)
        xid = self._memory.find(line.text) if line.text.startswith("NVRM:") else None
        if xid is None:
            return self._other(line.text, at_s)
        return [
            XidSeen(
                node=self._node,
                at_s=at_s,
                code=xid.code,
                gpu=xid.gpu,
                source=self._source,
                text=line.text[:400],
                caused_by=xid.caused_by,
            )
        ]

    def _other(self, text: str, at_s: float) -> list[Found]:
        """A telling line that is no XID: its form, and the device that it names."""
        if text.startswith("audit"):
            return []  # the kernel's own record, with text of a user's in it
        switch = find_sxid(text) if text.startswith("nvidia-nvswitch") else None
        if switch is not None:
            # further lines of the same event (Severity, Data) carry no word of their own
            key, device = (SXID_FATAL, switch.gpu or "") if switch.fatal else ("", "")
        else:
            event = read_kernel_event(text)
            key, device = (
                (event.key, pci_device(text) or "") if event is not None and event.key in TELLING else ("", "")
            )
        if not key or at_s - self._told.get((key, device), float("-inf")) < REPEAT_S:
            return []
        if len(self._told) > BATCH:
            self._told.clear()
        self._told[(key, device)] = at_s
        return [KernelSeen(node=self._node, at_s=at_s, key=key, device=device, source=self._source, text=text[:400])]

    def overrun(self, at_s: float) -> list[Found]:
        """The buffer was overwritten. Before the first record the loss cannot be counted; after it, `record` does."""
        return [self.blind(at_s, "kernel log overrun")] if self._sequence is None else []

    def blind(self, at_s: float, why: str, *, lost: int = 0) -> SourceBlind:
        return SourceBlind(node=self._node, at_s=at_s, source=self._source, why=why, lost=lost)


class KernelLog:
    """One node's kernel log. `async for signal in KernelLog(path, node, clock=time.time).signals()`."""

    def __init__(
        self,
        path: str | Path,
        node: Node,
        *,
        accept_user_facility: bool = False,
        clock: Callable[[], float] = time.time,
        file_poll_s: float = FILE_POLL_S,
    ) -> None:
        self._path = Path(str(path).replace("%n", node))
        self._node = node
        self._accept_user = accept_user_facility
        self._clock = clock
        self._file_poll_s = file_poll_s
        self._said = ""

    async def signals(self) -> AsyncIterator[Found]:
        """Never ends by itself; cancel the task, or close the generator."""
        if await asyncio.to_thread(_is_device, self._path):
            async for found in self._device_signals():
                yield found
        else:
            async for found in self._file_signals():
                yield found

    async def _device_signals(self) -> AsyncIterator[Found]:
        decoder = KernelDecoder(self._node, "kmsg", accept_user_facility=self._accept_user)
        retry_s = FIRST_RETRY_S
        while True:
            try:
                fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as e:
                for blind in self._say(decoder, f"cannot read {self._path}: {e.strerror}"):
                    yield blind
                await asyncio.sleep(retry_s)
                retry_s = min(LAST_RETRY_S, retry_s * 2)
                continue
            try:
                os.lseek(fd, 0, os.SEEK_END)
                device = _Device(fd, decoder, self._clock)
                while not device.broken:
                    for found in device.drain():
                        retry_s, self._said = FIRST_RETRY_S, ""
                        yield found
                    if not device.broken:
                        await device.readable()
            finally:
                os.close(fd)
            for blind in self._say(decoder, f"{self._path}: {device.broken}"):
                yield blind
            await asyncio.sleep(retry_s)
            retry_s = min(LAST_RETRY_S, retry_s * 2)

    async def _file_signals(self) -> AsyncIterator[Found]:
        decoder = KernelDecoder(self._node, "kernel_log", accept_user_facility=self._accept_user)
        file = FollowedFile(self._path)
        truncated = 0
        try:
            while True:
                lines = file.poll()
                for line in lines:
                    for found in decoder.line(line, self._clock()):
                        yield found
                if file.truncated > truncated:
                    truncated = file.truncated
                    yield decoder.blind(self._clock(), f"{self._path} became shorter while it was read")
                if file.why:
                    for blind in self._say(decoder, f"cannot read {file.why}"):
                        yield blind
                else:
                    self._said = ""
                await asyncio.sleep(0 if lines else self._file_poll_s)
        finally:
            file.close()

    def _say(self, decoder: KernelDecoder, why: str) -> list[SourceBlind]:
        """Blindness is said once, not at each try."""
        if why == self._said:
            return []
        self._said = why
        return [decoder.blind(self._clock(), why)]


class _Device:
    """An open /dev/kmsg."""

    def __init__(self, fd: int, decoder: KernelDecoder, clock: Callable[[], float]) -> None:
        self._fd = fd
        self._decoder = decoder
        self._clock = clock
        self._lag_s: float | None = None
        self.broken = ""
        """Why the device cannot be read any more; '' while it can."""
        self._more = False

    def drain(self) -> list[Found]:
        """What is there now, at most a batch."""
        found: list[Found] = []
        self._more = False
        last_uptime_s: float | None = None
        for _ in range(BATCH):
            try:
                raw = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                # the newest record is fresh: its distance from our clock is the two clocks' drift, not a delay
                if last_uptime_s is not None:
                    self._lag_s = time.monotonic() - last_uptime_s
                return found
            except OSError as e:
                if e.errno == errno.EPIPE:
                    # overwritten: the next read gives the oldest record kept, and its number tells the loss
                    found += self._decoder.overrun(self._clock())
                    continue
                self.broken = e.strerror or "read failed"
                return found
            if not raw:
                self.broken = "end of file"
                return found
            last_uptime_s = _uptime_s(raw)
            found += self._decoder.record(raw, self._at_s(last_uptime_s))
        self._more = True
        return found

    def _at_s(self, uptime_s: float | None) -> float:
        """Wall time of the record: now, less how long it waited in the buffer."""
        if uptime_s is None or self._lag_s is None:
            return self._clock()
        return self._clock() - max(0.0, time.monotonic() - uptime_s - self._lag_s)

    async def readable(self) -> None:
        if self._more:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()

        def wake() -> None:
            loop.remove_reader(self._fd)  # once: while a slow consumer works, this must not spin
            ready.set()

        loop.add_reader(self._fd, wake)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._fd)


def _uptime_s(raw: bytes) -> float | None:
    fields = raw.split(b",", 3)
    return int(fields[2]) / 1e6 if len(fields) == 4 and fields[2].isdigit() and len(fields[2]) < 20 else None


def _is_device(path: Path) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return str(path).startswith("/dev/")
