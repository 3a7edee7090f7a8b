"""Who supervises: `epochs/<n>` in the run directory, taken by exclusive creation; the highest number counts.

    take    write .taking-<...>, fsync -> link(2) to epochs/<n>, which fails if it is there -> fsync the directory
    check   is there a higher number than mine? asked before every command to the scheduler and every line in the log

Not a lock: nobody waits and nobody has to let go. A supervisor that was only stopped for a while finds, when it runs
on, that a higher epoch exists, and ends without an action. The file is complete before it has its name, so a reader
never sees half a seat, and link(2) is exclusive on NFS too, where O_EXCL once was not.

A client of a shared file system may remember a directory's content for a minute. So the holder also writes its number
*in place* into `epochs/latest`, which every reader opens anew (close-to-open consistency makes that current), and
nobody asks for a name that may not exist yet, since that answer would be remembered too.

All calls block: on the event loop's thread only where the file system may stop the caller.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from outlast.reliability.rundir import RunDir
from outlast.reliability.wire import Seat

_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")
_LATEST: Final = "latest"
_MAX_SEAT_BYTES: Final = 64 * 1024


class FenceError(Exception):
    """It cannot be told who supervises: do nothing, and look again. `again` tells whether looking can help."""

    def __init__(self, what: str, *, again: bool) -> None:
        super().__init__(what)
        self.again = again


class Fenced(FenceError):
    """Another supervisor holds a higher epoch, or won the race for this one. End without an action."""

    def __init__(self, what: str, *, held: int, found: int) -> None:
        super().__init__(what, again=False)
        self.held, self.found = held, found


def highest_number(run_dir: RunDir) -> int:
    """The highest epoch that was taken, readable or not; 0 where there is none. FenceError where it cannot be told."""
    return max(_numbers(run_dir.epochs), default=0)


def highest(run_dir: RunDir) -> Seat | None:
    """The seat of the highest epoch whose file can be read as one; None where nobody supervised yet."""
    for number in sorted(_numbers(run_dir.epochs), reverse=True):
        seat = _read_seat(run_dir.epochs / str(number))
        if seat is not None and seat.epoch == number:
            return seat
    return None


def take(run_dir: RunDir, seat: Seat) -> Seat:
    """Take an epoch and return the seat as it now stands: seat.epoch where that is above 0, else the next free one.

    Fenced where another was faster: it supervises, and taking the next number would only throw it out again.
    """
    number = highest_number(run_dir) + 1
    if seat.epoch and seat.epoch < number:
        raise Fenced(
            f"{run_dir.epochs}: found epoch {number - 1}, wanted to take {seat.epoch}: another supervisor has begun",
            held=seat.epoch,
            found=number - 1,
        )
    taken = msgspec.structs.replace(seat, epoch=seat.epoch or number)
    try:
        won = _link(run_dir.epochs, taken)
    except OSError as error:
        raise FenceError(f"{run_dir.epochs}: epoch {taken.epoch} cannot be taken: {error}", again=True) from error
    if not won:
        raise Fenced(
            f"{run_dir.epochs}: epoch {taken.epoch} was taken by another supervisor a moment ago",
            held=0,
            found=taken.epoch,
        )
    return taken


class Fence:
    """The check of one supervisor against its own seat."""

    def __init__(self, run_dir: RunDir, seat: Seat) -> None:
        self.run_dir, self.seat = run_dir, seat

    def check(self) -> None:
        """Return where this epoch is the highest; Fenced where it is not, FenceError where that cannot be told."""
        held, found = self.seat.epoch, highest_number(self.run_dir)
        if found > held:
            raise Fenced(
                f"{self.run_dir.epochs}: found epoch {found}, this supervisor holds {held}: "
                "another has taken over; ending without an action",
                held=held,
                found=found,
            )
        if found < held:
            raise FenceError(
                f"{self.run_dir.epochs}: found epoch {found} as the highest, expected our own {held}: "
                "was the run directory replaced or restored?",
                again=True,
            )


def _numbers(epochs: Path) -> set[int]:
    try:
        names = os.listdir(epochs)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise FenceError(f"{epochs}: cannot be listed: {error}", again=True) from error
    found = {int(name) for name in names if _NUMBER.fullmatch(name)}
    if _LATEST in names and (number := _read_latest(epochs)) and number not in found:
        # ahead of a remembered listing, or garbage: the name itself tells, and it is older than the hint
        with suppress(OSError):
            os.stat(epochs / str(number))
            found.add(number)
    return found


def _read_latest(epochs: Path) -> int:
    """What the last taker wrote; 0 for anything but a number: it is a hint, the names are the truth."""
    try:
        text = _read(epochs / _LATEST).decode("ascii", "replace").strip()
    except OSError:
        return 0
    digits = text.lstrip("0")
    return int(digits) if _NUMBER.fullmatch(digits) else 0


def _read_seat(path: Path) -> Seat | None:
    try:
        return msgspec.json.decode(_read(path), type=Seat)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _read(path: Path) -> bytes:
    # not blocking: a FIFO of that name must not hold up a takeover
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(fd, _MAX_SEAT_BYTES)
    finally:
        os.close(fd)


def _link(epochs: Path, seat: Seat) -> bool:
    """Create epochs/<n> with the whole seat in it; False where the name is taken."""
    epochs.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = epochs / f".taking-{seat.epoch}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    name = epochs / str(seat.epoch)
    try:
        _write(draft, msgspec.json.encode(seat) + b"\n", os.O_CREAT | os.O_EXCL)
        try:
            os.link(draft, name)
        except FileExistsError:
            # a server's answer that got lost makes the client ask twice: then the name is there because it is ours
            if os.stat(draft).st_nlink != 2:
                return False
        _sync_directory(epochs)
    finally:
        with suppress(OSError):
            os.unlink(draft)
    # in place, never by rename: a name that keeps its file is looked at anew when it is opened
    with suppress(OSError):
        _write(epochs / _LATEST, b"%09d\n" % seat.epoch, os.O_CREAT)
    return True


def _write(path: Path, data: bytes, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
    try:
        if os.write(fd, data) != len(data):
            raise OSError(f"{path}: written in part only")
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
