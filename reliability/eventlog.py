"""The event log on disk: `events.jsonl`, one JSON object a line, appended and fsynced by one writer.

    append   encode -> read it back -> one write(2) of the whole line -> fsync -> only now it has happened
             stage: the first half, for lines that belong together; commit: the second half, once for all of them
    open     read all -> cut a torn tail (kept aside in events.torn-<n>) -> go on with the next number

What a reader believes is one rule, the same for replay, status and report (see `_Believer`):
- a line whose epoch is lower than one that was seen before it is a fenced writer's: ignored;
- a line whose number is not above the last one *replaces* everything from that number on. So an append that failed
  half way (disk full, fsync error) has not happened, whatever bytes it left: the next append bears the same number.
  It also settles the line that an old supervisor slipped in between its successor's reading and first writing;
- a line that cannot be read is skipped and counted. It never stops a run.

Never truncated after opening: a stopped writer that wakes up must not be able to cut off its successor's lines.
`append` returns the event as a reader will read it, so that a live state and a replayed one cannot differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from outlast.reliability.events import Body, LogEvent
from outlast.reliability.ports import Clock

MAX_BATCH: Final = 256
"""Lines of one commit; a line that claims to replace more than this is damaged, not a retry."""


class EventLogError(Exception):
    """An event is not in the log. `again`: the same append may be tried later (disk full, file system away)."""

    def __init__(self, what: str, *, again: bool) -> None:
        super().__init__(what)
        self.again = again


class Replay(NamedTuple):
    """What a log says, and what in it could not be believed, in words for a person."""

    events: list[LogEvent]
    problems: list[str]


class Increment(NamedTuple):
    """What is new. `afresh`: forget what was read before, `events` begins with the first line again."""

    events: list[LogEvent]
    afresh: bool


class _Belief(Enum):
    NEXT = auto()
    REPLACES = auto()
    FENCED = auto()
    DAMAGED = auto()


class _Believer:
    """The rule of the module's head, line by line. Holds numbers only, no events."""

    def __init__(self) -> None:
        self.epoch = self.last_seq = 0
        self.unreadable: list[int] = []
        self.fenced = self.replaced = self.missing = 0

    def judge(self, event: LogEvent) -> _Belief:
        if event.epoch < self.epoch:
            self.fenced += 1
            return _Belief.FENCED
        belief = _Belief.NEXT
        if event.seq <= self.last_seq:
            if event.seq < 1 or self.last_seq - event.seq >= MAX_BATCH:
                return _Belief.DAMAGED
            belief = _Belief.REPLACES
            self.replaced += self.last_seq - event.seq + 1
        else:
            self.missing += event.seq - self.last_seq - 1
        self.last_seq, self.epoch = event.seq, event.epoch
        return belief

    def read(self, line: bytes, number: int) -> tuple[LogEvent, _Belief] | None:
        """The event of a line and what to do with it; None for an empty or unreadable line."""
        if line.isspace():
            return None
        try:
            event = _DECODER.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.unreadable.append(number)
            return None
        belief = self.judge(event)
        if belief is _Belief.DAMAGED:
            self.unreadable.append(number)
            return None
        return event, belief

    def problems(self, path: Path) -> list[str]:
        said = []
        if self.unreadable:
            where = ", ".join(map(str, self.unreadable[:5])) + (" ..." if len(self.unreadable) > 5 else "")
            said.append(f"{path}: {len(self.unreadable)} lines cannot be read and were skipped (line {where})")
        if self.missing:
            said.append(f"{path}: {self.missing} event numbers are missing")
        if self.fenced:
            said.append(f"{path}: {self.fenced} lines of a supervisor that had been replaced were ignored")
        return said


def boot_id() -> str:
    """First 8 characters of this boot's id: monotonic times of different boots must not be compared."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]


def read_events(path: Path) -> Replay:
    """The log as it stands, for status and report: writes nothing, and leaves a line alone that is still growing."""
    try:
        return _read(path)[0]
    except FileNotFoundError:
        return Replay([], [])
    except OSError as error:
        raise EventLogError(f"{path}: cannot be read: {error}", again=True) from error


class Follower:
    """Reads what is new, for `status --watch`. Writes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._believer = _Believer()
        self._offset = self._lines = self._inode = 0

    def read(self) -> Increment:
        """The events since the last call; EventLogError(again=True) where the file cannot be read just now."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                afresh = self._lines > 0 and (status.st_ino != self._inode or status.st_size < self._offset)
                if afresh:
                    self._restart()
                self._inode = status.st_ino
                begun = self._lines > 0
                file.seek(self._offset)
                events, replaced = self._take(file)
        except FileNotFoundError:
            afresh = self._lines > 0
            self._restart()
            return Increment([], afresh)
        except OSError as error:
            raise EventLogError(f"{self.path}: cannot be read: {error}", again=True) from error
        if replaced and begun:
            self._restart()
            return Increment(self.read().events, True)
        return Increment(events, afresh)

    def problems(self) -> list[str]:
        return self._believer.problems(self.path)

    def _restart(self) -> None:
        self._believer = _Believer()
        self._offset = self._lines = self._inode = 0

    def _take(self, lines: Iterable[bytes]) -> tuple[list[LogEvent], bool]:
        """New events, and whether one of them may replace an event that an earlier call has given out."""
        events: list[LogEvent] = []
        beyond = False
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            self._lines += 1
            beyond |= _collect(events, self._believer.read(line, self._lines))
        return events, beyond


class EventLog:
    """The one writer. Made by `open`."""

    def __init__(self, path: Path, epoch: int, *, clock: Clock, boot: str, guard: Callable[[], None] | None) -> None:
        self.path, self.epoch = path, epoch
        self._clock, self._boot, self._guard = clock, boot, guard
        self._fd = -1
        self._next_seq = 1
        self._staged: list[bytes] = []
        self._size_bytes = 0
        self._ragged = False

    @classmethod
    def open(
        cls, path: Path, epoch: int, *, clock: Clock, boot: str, guard: Callable[[], None] | None = None
    ) -> tuple[Self, Replay]:
        """The log, ready for appending, and what it holds. The epoch must have been taken before.

        `guard` is called before each commit; what it raises (Fenced) goes through, and nothing is written.
        """
        log = cls(path, epoch, clock=clock, boot=boot, guard=guard)
        try:
            log._connect(os.O_CREAT)
            replay, kept_bytes, tail, highest = _read(path)
            log._size_bytes = kept_bytes
            if tail:
                replay.problems.append(log._cut(kept_bytes, tail))
        except OSError as error:
            log.close()
            raise EventLogError(f"{path}: cannot be opened: {error}", again=True) from error
        if highest > epoch:
            log.close()
            raise EventLogError(
                f"{path}: found lines of epoch {highest}, this is epoch {epoch}: another supervises", again=False
            )
        log._next_seq = replay.events[-1].seq + 1 if replay.events else 1
        return log, replay

    def append(self, body: Body) -> LogEvent:
        """One event, durable when this returns. EventLogError: it is not in the log."""
        return self.append_many((body,))[0]

    def append_many(self, bodies: Sequence[Body]) -> tuple[LogEvent, ...]:
        """All of them or none, in one write and one fsync; at most MAX_BATCH."""
        events = self.stage(bodies)
        self.commit()
        return events

    def stage(self, bodies: Sequence[Body]) -> tuple[LogEvent, ...]:
        """With numbers and times, as a reader will read them; in the log only after `commit`."""
        if len(bodies) > self.room:
            found = len(self._staged) + len(bodies)
            raise EventLogError(f"{self.path}: found {found} events, expected <= {MAX_BATCH}", again=False)
        first = self._next_seq + len(self._staged)
        lines = [self._encode(body, first + i) for i, body in enumerate(bodies)]
        events = tuple(self._read_back(line) for line in lines)
        self._staged += lines
        return events

    @property
    def room(self) -> int:
        """How many more may be staged before a commit."""
        return MAX_BATCH - len(self._staged)

    def drop(self) -> None:
        """Forget what is staged: it has not happened."""
        self._staged = []

    def commit(self) -> None:
        """All that is staged, in one write and one fsync. EventLogError: none of it is in the log, nor staged."""
        lines, self._staged = self._staged, []
        if not lines:
            return
        if self._guard is not None:
            self._guard()
        try:
            self._write(b"".join(lines))
        except OSError as error:
            self._ragged = True
            # a new descriptor next time: this one may be stale for ever, or have told its only error
            self.close()
            raise EventLogError(f"{self.path}: event {self._next_seq} not written: {error}", again=True) from error
        self._next_seq += len(lines)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _encode(self, body: Body, seq: int) -> bytes:
        event = LogEvent(
            seq=seq,
            at_s=self._clock.wall_s(),
            mono_s=self._clock.mono_s(),
            boot=self._boot,
            epoch=self.epoch,
            body=body,
        )
        try:
            return _ENCODER.encode(event) + b"\n"
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise EventLogError(f"{self.path}: event {seq} cannot be written as JSON: {error}", again=False) from error

    def _read_back(self, line: bytes) -> LogEvent:
        try:
            return _DECODER.decode(line)
        except (msgspec.MsgspecError, ValueError) as error:
            said = line[:200].decode("utf-8", "replace")
            raise EventLogError(
                f"{self.path}: a line that no reader could read: {error}: {said}", again=False
            ) from error

    def _write(self, lines: bytes) -> None:
        if self._fd < 0:
            self._connect(0)
        status = os.fstat(self._fd)
        if status.st_nlink == 0 or status.st_size < self._size_bytes:
            raise OSError(f"found {status.st_size} bytes, expected {self._size_bytes}: was it removed or cut?")
        # a newline ends whatever a failed append left; an empty line is nothing to a reader
        data = b"\n" + lines if self._ragged else lines
        written = os.write(self._fd, data)
        if written != len(data):
            raise OSError(f"{written} of {len(data)} bytes written")
        os.fsync(self._fd)
        self._ragged = False
        self._size_bytes = status.st_size + written

    def _connect(self, flags: int) -> None:
        new = bool(flags & os.O_CREAT) and not self.path.exists()
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
        if new:
            _sync_directory(self.path.parent)

    def _cut(self, kept_bytes: int, tail: bytes) -> str:
        """Move the bytes after the last newline aside. Where that fails they stay, ended by the next append."""
        try:
            aside = _keep_aside(self.path, tail)
            if os.fstat(self._fd).st_size != kept_bytes + len(tail):
                raise OSError("it is still being written to")
        except OSError as error:
            self._ragged = True
            return f"{self.path}: ends in an unfinished line ({len(tail)} bytes), which could not be moved: {error}"
        os.ftruncate(self._fd, kept_bytes)
        os.fsync(self._fd)
        return f"{self.path}: an unfinished last line ({len(tail)} bytes) was moved to {aside.name}"


def _read(path: Path) -> tuple[Replay, int, bytes, int]:
    """What the log says, how many bytes its whole lines take, what follows them, and the highest epoch."""
    believer = _Believer()
    events: list[LogEvent] = []
    kept_bytes = 0
    tail = b""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                tail = line
                break
            kept_bytes += len(line)
            _collect(events, believer.read(line, number))
    return Replay(events, believer.problems(path)), kept_bytes, tail, believer.epoch


def _collect(events: list[LogEvent], said: tuple[LogEvent, _Belief] | None) -> bool:
    """Add an event as its belief says; True where it may replace one that is not in `events` any more."""
    if said is None:
        return False
    event, belief = said
    if belief is _Belief.FENCED:
        return False
    while belief is _Belief.REPLACES and events and events[-1].seq >= event.seq:
        events.pop()
    events.append(event)
    return belief is _Belief.REPLACES and len(events) == 1


def _keep_aside(path: Path, tail: bytes) -> Path:
    for n in range(1, 1000):
        aside = path.with_name(f"{path.stem}.torn-{n}")
        try:
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        try:
            if os.write(fd, tail) != len(tail):
                raise OSError(f"{aside}: written in part only")
            os.fsync(fd)
        finally:
            os.close(fd)
        _sync_directory(path.parent)
        return aside
    raise OSError(f"{path}: a thousand torn lines are kept already")


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[LogEvent]] = msgspec.json.Decoder(LogEvent)
