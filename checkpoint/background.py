"""A forked child that does one job for its parent and can always be told from a dead or a stuck one.

    parent                          child
    Background(job) ---- fork ----> job(link)
    stage(), result()   <---------- link.report(stage, bytes)
    answer(bytes)       ----------> link.wait()
    end()               -- KILL -->

The parent never blocks on the child: marks travel through a pipe that is read without waiting, and contents through
memory files, since a pipe holds 64 KiB and a stopped reader would stop the writer. The child lives in the parent's
process tree, ends with it (PR_SET_PDEATHSIG) and ignores TERM: the parent decides whether what is in flight is
finished. No torch here.

The kernel sends the death signal when the *thread* that forked ends, so fork from a thread that lives as long as the
process: the training thread.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final

from outlast.checkpoint.errors import CheckpointError

PR_SET_PDEATHSIG: Final = 1
REAP_S: Final = 5.0
WORDS_CHARS: Final = 4000
IGNORED: Final = (signal.SIGTERM, signal.SIGINT)
_libc = ctypes.CDLL(None, use_errno=True)


class Stage(StrEnum):
    """How far a child is. Each but WORKING is one byte in the pipe."""

    WORKING = "w"
    HALFWAY = "h"
    """Its own part is done; result() has it; it waits for an answer or is gone."""
    DONE = "d"
    FAILED = "f"


class Link:
    """The child's end."""

    def __init__(self, marks: int, answers: int, out_fd: int, in_fd: int) -> None:
        self._marks, self._answers, self._out_fd, self._in_fd = marks, answers, out_fd, in_fd

    def report(self, stage: Stage, content: bytes = b"") -> None:
        """Content first, then the mark: a mark that was read vouches for its content."""
        _overwrite(self._out_fd, content)
        os.write(self._marks, stage.value.encode())

    def wait(self, timeout_s: float) -> bytes:
        """The parent's answer."""
        ready, _, _ = select.select([self._answers], [], [], timeout_s)
        if not ready or not os.read(self._answers, 1):
            raise CheckpointError(f"the other ranks' part did not come within {timeout_s:.0f} s")
        return _read_all(self._in_fd)


class Background:
    """The parent's end. Create it in a thread that outlives the job; call end() in every case."""

    def __init__(self, job: Callable[[Link], None], *, name: str) -> None:
        self._marks, child_marks = os.pipe()
        child_answers, self._answers = os.pipe()
        self._out_fd = os.memfd_create(f"{name}-out")
        self._in_fd = os.memfd_create(f"{name}-in")
        self._stage = Stage.WORKING
        self._exit: str | None = None
        os.set_blocking(self._marks, False)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # a signal between the fork and the child's own setting would run the parent's handlers in the child
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _live(job, Link(child_marks, child_answers, self._out_fd, self._in_fd), parent, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(child_marks)
        os.close(child_answers)

    @property
    def pid(self) -> int:
        return self._pid

    def stage(self) -> Stage:
        """How far it is now. A child that is gone before its last mark has FAILED; result() says how."""
        self._reap()  # first: marks of a child that is gone are all in the pipe by then
        self._read_marks()
        if self._exit is not None and self._stage is Stage.WORKING:
            self._fail(f"the writer process {self._exit}")
        return self._stage

    def is_gone(self) -> bool:
        self._reap()
        return self._exit is not None

    def result(self) -> bytes:
        """What came with the last mark; for FAILED, words in UTF-8."""
        return _read_all(self._out_fd)

    def answer(self, content: bytes) -> None:
        """To a child that is HALFWAY. From here it is WORKING again, until its next mark or its end."""
        _overwrite(self._in_fd, content)
        self._stage = Stage.WORKING
        try:
            os.write(self._answers, b"a")
        except BrokenPipeError:
            self._stage = Stage.WORKING  # it died just now: stage() will say so

    def end(self) -> None:
        """Make sure that it is gone. A child that cannot be killed (stuck in the kernel) is left behind."""
        deadline = time.monotonic() + REAP_S
        self._reap()
        while self._exit is None and time.monotonic() < deadline:
            os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.002)
            self._reap()
        for fd in (self._marks, self._answers, self._out_fd, self._in_fd):
            if fd >= 0:
                os.close(fd)
        self._marks = self._answers = self._out_fd = self._in_fd = -1
        self._exit = self._exit or "could not be killed"

    def _read_marks(self) -> None:
        try:
            marks = os.read(self._marks, 64)
        except BlockingIOError:
            return
        if marks:
            self._stage = Stage(marks[-1:].decode())

    def _reap(self) -> None:
        if self._exit is not None:
            return
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:
            self._exit = "is gone (somebody else reaped it)"
            return
        if pid:
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._exit = how

    def _fail(self, words: str) -> None:
        self._stage = Stage.FAILED
        _overwrite(self._out_fd, words.encode())


def _live(job: Callable[[Link], None], link: Link, parent: int, mask: Iterable[int]) -> None:
    """The child's whole life; never returns."""
    code = 1
    try:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before the line above
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gc.disable()  # collecting would touch the parent's objects, CUDA ones too
        job(link)
        code = 0
    except BaseException as e:  # noqa: BLE001 -- the end of the process: all that is left is to tell the parent
        words = f"{type(e).__name__}: {e}" if isinstance(e, (CheckpointError, OSError)) else traceback.format_exc()
        link.report(Stage.FAILED, words[-WORDS_CHARS:].encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _overwrite(fd: int, content: bytes) -> None:
    os.ftruncate(fd, 0)
    at = 0
    while at < len(content):
        at += os.pwrite(fd, content[at : at + (64 << 20)], at)


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    parts, at = [], 0
    while at < size:
        part = os.pread(fd, min(size - at, 64 << 20), at)
        if not part:
            break
        parts.append(part)
        at += len(part)
    return b"".join(parts)
