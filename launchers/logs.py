"""Output of ranks: read from their pipes, kept on the shared file system within bounds, the last words in memory.

    rank pipes --pump thread--> last 64 KiB in memory, a bounded queue --writer thread--> attempts/NNNN/ranks/RRRRR/log

Two threads, since a shared file system may hang or be full: the writer may wait for it for ever, the pump never
does. What does not fit the queue is dropped and counted, in a line of the log itself. So a rank never blocks on its
output and a heartbeat never waits for a disk. Rotation keeps the first part (how it began) and the latest two:
`log.1` the first, `log.2` the part before the present one, `log`. Nothing here reads meaning into what ranks say.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

TAIL_BYTES = 64 * 1024
QUEUE_BYTES = 4 * 1024 * 1024
"""Per rank, while the file system is slower than the rank."""
_READ_BYTES = 64 * 1024
_RETRY_S = 1.0
_SHOWN = {**{i: f"\\x{i:02x}" for i in range(32)}, 127: "\\x7f"}
del _SHOWN[9], _SHOWN[10]


def visible(raw: bytes) -> str:
    """Text with control characters as `\\x1b`; line ends and tabs stay. What is not UTF-8 is shown the same way."""
    text = raw.replace(b"\r\n", b"\n").decode("utf-8", errors="backslashreplace").translate(_SHOWN)
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(kw_only=True, eq=False)
class RankLog:
    """One rank's output. Made and read by the agent, fed by the pump, written by the writer."""

    directory: Path
    limit_bytes: int
    fd: int
    tail: bytearray = field(default_factory=bytearray)
    ended: bool = False
    """The pipe is closed at its other end, by the rank and all its children."""
    last_mono_s: float = field(default_factory=time.monotonic)
    queue: deque[bytes] = field(default_factory=deque)
    queued_bytes: int = 0
    dropped_bytes: int = 0
    """Not written yet as a marker."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, data: bytes) -> None:
        """Keep the end in memory and queue it for the file."""
        self.last_mono_s = time.monotonic()
        with self.lock:
            self.tail += data
            del self.tail[:-TAIL_BYTES]
            if self.queued_bytes + len(data) > QUEUE_BYTES:
                self.dropped_bytes += len(data)
            else:
                self.queue.append(data)
                self.queued_bytes += len(data)

    def last_bytes(self) -> bytes:
        with self.lock:
            return bytes(self.tail)


class Pump:
    """Reads all pipes in one thread, and writes files in another. `close` ends both."""

    def __init__(self) -> None:
        self._logs: set[RankLog] = set()
        self._by_fd: dict[int, RankLog] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._closing = threading.Event()
        self._more = threading.Event()
        self._reader = threading.Thread(target=self._pump, name="rank output", daemon=True)
        self._writer = threading.Thread(target=self._write, name="rank logs", daemon=True)
        self._reader.start()
        self._writer.start()

    def add(self, fd: int, directory: Path, limit_bytes: int) -> RankLog:
        """Take over the read end of a rank's pipe."""
        os.set_blocking(fd, False)
        log = RankLog(directory=directory, limit_bytes=limit_bytes, fd=fd)
        with self._lock:
            self._by_fd[fd] = log
        self._poke()
        return log

    def settle(self, log: RankLog, timeout_s: float) -> None:
        """Wait until all that was in the pipe has been taken: after a rank's death, before its last words."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and not log.ended and _readable(log.fd):
            time.sleep(0.005)

    def close(self, timeout_s: float) -> None:
        """End both threads; what the file system does not take in time is lost."""
        self._closing.set()
        self._poke()
        self._more.set()
        self._reader.join(timeout_s)
        self._writer.join(timeout_s)

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def _pump(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(timeout=1.0):
                if key.fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                    self._adopt()
                else:
                    self._pump_one(key.data)
            self._more.set()

    def _adopt(self) -> None:
        with self._lock:
            new = {fd: log for fd, log in self._by_fd.items() if log not in self._logs}
        for fd, log in new.items():
            self._logs.add(log)
            self._selector.register(fd, selectors.EVENT_READ, log)

    def _pump_one(self, log: RankLog) -> None:
        """One read for each ready pipe and round: a flood of one rank does not starve the others."""
        try:
            data = os.read(log.fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            log.take(data)
            return
        self._selector.unregister(log.fd)
        with self._lock:
            del self._by_fd[log.fd]
        log.ended = True  # first: nobody may ask about a number that is another file's by then
        os.close(log.fd)

    def _write(self) -> None:
        files: dict[int, _LogFile] = {}
        while True:
            self._more.wait(1.0)
            self._more.clear()
            last = self._closing.is_set()
            for log in list(self._logs):
                file = files.setdefault(id(log), _LogFile(log))
                file.write_queue()
                if log.ended and not log.queue:
                    file.close()
                    del files[id(log)]
                    self._logs.discard(log)
            if last:
                return


class _LogFile:
    """The file of one rank, on the writer's thread alone. Errors are counted, never raised."""

    def __init__(self, log: RankLog) -> None:
        self._log = log
        self._fd = -1
        self._part_bytes = max(4096, log.limit_bytes // 3)
        self._size = 0
        self._retry_at = 0.0
        self._rotated_away = 0

    def write_queue(self) -> None:
        """Write what is queued; nothing while the file system has just refused."""
        log = self._log
        if time.monotonic() < self._retry_at:
            return
        while log.queue or log.dropped_bytes:
            with log.lock:
                data = log.queue.popleft() if log.queue else b""
                log.queued_bytes -= len(data)
                dropped, log.dropped_bytes = log.dropped_bytes, 0
            try:
                # dropped while the queue was full, which is after what is in the queue
                self._append(data)
                if dropped and not log.queue:
                    self._append(f"\n[outlast: {dropped} bytes of output dropped here]\n".encode())
                    dropped = 0
            except OSError:
                dropped += len(data)
                self._retry_at = time.monotonic() + _RETRY_S
            if dropped:
                with log.lock:
                    log.dropped_bytes += dropped
            if self._retry_at > time.monotonic():
                self.close()
                return

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def _append(self, data: bytes) -> None:
        if not data:
            return
        if self._fd < 0:
            self._log.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(self._path("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._fd).st_size
        if self._size and self._size + len(data) > self._part_bytes:
            self._rotate()
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._size += len(data)

    def _rotate(self) -> None:
        self.close()
        first, before, now = self._path("log.1"), self._path("log.2"), self._path("log")
        note = b""
        if not first.exists():
            os.rename(now, first)
        else:
            if before.exists():
                self._rotated_away += before.stat().st_size
                note = f"[outlast: {self._rotated_away} bytes of output left out between log.1 and log.2]\n".encode()
            os.rename(now, before)
        self._fd = os.open(now, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.write(self._fd, note) if note else 0

    def _path(self, name: str) -> Path:
        return self._log.directory / name


def _readable(fd: int) -> bool:
    try:
        with selectors.PollSelector() as poll:
            poll.register(fd, selectors.EVENT_READ)
            return bool(poll.select(0))
    except (OSError, ValueError, KeyError):
        return False
