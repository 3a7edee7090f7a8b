"""A child process that works for its parent and can always be told from a dead or a stuck one.

    parent                                   child
    Background(job | argv) -- fork | exec -> job(link)
    stage(), result()   <------------------- link.report(stage, bytes)
    answer(bytes)       -------------------> link.wait(), link.wait_next()
    end()               -- KILL ---------->

The parent never blocks on the child: marks travel through a pipe that is read without waiting, and contents through
memory files, since a pipe holds 64 KiB and a stopped reader would stop the writer. The child ignores TERM: the parent
decides whether what is in flight is finished. It stays in the process tree it was started in. Without `outlives` it
ends with its parent (PR_SET_PDEATHSIG); with it, it may finish what it has when its parent dies, and watches the
parent's own parent instead (link.watch). No torch here.

The kernel sends the death signal when the *thread* that forked ends, so fork from a thread that lives as long as the
process: the training thread.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Final

from outlast.checkpoint.errors import CheckpointError

PR_SET_PDEATHSIG: Final = 1
REAP_S: Final = 5.0
WORDS_CHARS: Final = 4000
IGNORED: Final = (signal.SIGTERM, signal.SIGINT)
NONE: Final = -1
_libc = ctypes.CDLL(None, use_errno=True)


class Stage(StrEnum):
    """How far a child is. Each but WORKING is one byte in the pipe."""

    WORKING = "w"
    HALFWAY = "h"
    """Its own part is done; result() has it; it waits, for an answer or for others, or is gone."""
    DONE = "d"
    FAILED = "f"


class Link:
    """The child's end."""

    def __init__(self, marks: int, answers: int, out_fd: int, in_fd: int, parent: int, guardian: int) -> None:
        """parent, guardian: pidfds; NONE where there is no such process."""
        self._marks, self._answers, self._out_fd, self._in_fd = marks, answers, out_fd, in_fd
        self._parent, self._guardian = parent, guardian

    @property
    def fds(self) -> tuple[int, ...]:
        """What an exec must pass on; `Link(*fds)` is the same link there."""
        return (self._marks, self._answers, self._out_fd, self._in_fd, self._parent, self._guardian)

    def report(self, stage: Stage, content: bytes = b"") -> None:
        """Content first, then the mark: a mark that was read vouches for its content."""
        _overwrite(self._out_fd, content)
        with suppress(BrokenPipeError):  # a parent that is gone needs no marks
            os.write(self._marks, stage.value.encode())

    def wait(self, timeout_s: float) -> bytes:
        """The parent's answer."""
        ready, _, _ = select.select([self._answers], [], [], timeout_s)
        if not ready or not os.read(self._answers, 1):
            raise CheckpointError(f"the other ranks' part did not come within {timeout_s:.0f} s")
        return _read_all(self._in_fd)

    def wait_next(self) -> bytes | None:
        """The parent's next answer, however long it takes; None when the parent is gone and has left none."""
        ready = _wait_any((self._answers, self._parent))
        if self._answers in ready and os.read(self._answers, 1):
            return _read_all(self._in_fd)
        return None

    def wait_for(self, fd: int, timeout_s: float) -> bool:
        """Whether fd is readable; False when the parent is gone and it is not, or the time is over."""
        return fd in _wait_any((fd, self._parent), timeout_s)

    def watch(self, outlive_s: float) -> None:
        """From now on end this process when the guardian dies, or outlive_s after the parent has."""

        def stand_guard() -> None:
            ready = _wait_any((self._parent, self._guardian))
            if self._guardian not in ready:
                _wait_any((self._guardian,), outlive_s)
            os._exit(3)

        threading.Thread(target=stand_guard, name="guard", daemon=True).start()


class Background:
    """The parent's end. Create it in a thread that outlives the job; call end() in every case."""

    def __init__(
        self,
        job: Callable[[Link], None] | None = None,
        *,
        name: str,
        argv: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        outlives: bool = False,
    ) -> None:
        """Either job, run in a fork of this process, or argv, run afresh with the link's fds as further words."""
        self._marks, child_marks = os.pipe()
        child_answers, self._answers = os.pipe()
        self._out_fd = os.memfd_create(f"{name}-out")
        self._in_fd = os.memfd_create(f"{name}-in")
        self._stage = Stage.WORKING
        self._exit: str | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        os.set_blocking(self._marks, False)
        parent, guardian = _open_process(os.getpid()), _open_process(os.getppid())
        link = Link(child_marks, child_answers, self._out_fd, self._in_fd, parent, guardian)
        try:
            self._pid = self._fork(job, link, outlives) if job else self._spawn(argv, link, pass_fds)
        finally:
            for fd in (child_marks, child_answers, parent, guardian):
                if fd != NONE:
                    os.close(fd)

    def _fork(self, job: Callable[[Link], None], link: Link, outlives: bool) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # a signal between the fork and the child's own setting would run the parent's handlers in the child
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            pid = os.fork()
            if pid == 0:
                for fd in (self._marks, self._answers):
                    os.close(fd)
                _live(job, link, 0 if outlives else parent, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _spawn(self, argv: Sequence[str], link: Link, pass_fds: Sequence[int]) -> int:
        # blocked in the child too, until it has its own setting: see ignore_signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            self._popen = subprocess.Popen(
                [*argv, *map(str, link.fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=[fd for fd in (*link.fds, *pass_fds) if fd != NONE],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._popen.pid

    @property
    def pid(self) -> int:
        return self._pid

    def stage(self) -> Stage:
        """How far it is now. A child that is gone before its last mark has FAILED; result() says how."""
        self._reap()  # first: marks of a child that is gone are all in the pipe by then
        self._read_marks()
        if self._exit is not None and self._stage is Stage.WORKING:
            self.fail(f"the writer process {self._exit}")
        return self._stage

    def is_gone(self) -> bool:
        self._reap()
        return self._exit is not None

    def how_it_ended(self) -> str:
        """'' while it lives."""
        self._reap()
        return self._exit or ""

    def result(self) -> bytes:
        """What came with the last mark; for FAILED, words in UTF-8."""
        return _read_all(self._out_fd)

    def answer(self, content: bytes) -> None:
        """To a child that waits. From here it is WORKING again, until its next mark or its end."""
        self._read_marks()  # what it said before belongs to what was before
        _overwrite(self._in_fd, content)
        self._stage = Stage.WORKING
        with suppress(BrokenPipeError):  # it died just now: stage() will say so
            os.write(self._answers, b"a")

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
        self._marks = self._answers = self._out_fd = self._in_fd = NONE
        self._exit = self._exit or "could not be killed"

    def fail(self, words: str) -> None:
        self._stage = Stage.FAILED
        _overwrite(self._out_fd, words.encode())

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
            pid, self._exit = self._pid, "is gone (somebody else reaped it)"
        else:
            if pid:
                code = os.waitstatus_to_exitcode(status)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                self._exit = how
        if pid and self._popen is not None:
            self._popen.returncode = 0  # so that it does not wait for the pid once more


def ignore_signals(mask: Iterable[int] | None = None) -> None:
    """In the child: TERM and INT are the parent's affair. Then let through what was blocked around the start."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if mask is None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    else:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def put_in_words(error: BaseException) -> bytes:
    """What a parent is told of it: the facts of an expected error, the traceback of a bug."""
    expected = isinstance(error, (CheckpointError, OSError))
    words = f"{type(error).__name__}: {error}" if expected else "".join(traceback.format_exception(error))
    return words[-WORDS_CHARS:].encode("utf-8", "replace")


def _live(job: Callable[[Link], None], link: Link, dies_with: int, mask: Iterable[int]) -> None:
    """The forked child's whole life; never returns."""
    code = 1
    try:
        if dies_with:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != dies_with:
                os._exit(1)  # it died before the line above
        ignore_signals(mask)
        gc.disable()  # collecting would touch the parent's objects, CUDA ones too
        job(link)
        code = 0
    except BaseException as e:  # noqa: BLE001 -- the end of the process: all that is left is to tell the parent
        link.report(Stage.FAILED, put_in_words(e))
    finally:
        os._exit(code)


def _open_process(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:  # a parent outside our pid namespace, or dead
        return NONE


def _wait_any(fds: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Those that are readable (a pidfd: the process has ended)."""
    poll = select.poll()  # select() cannot take fds beyond 1023
    for fd in fds:
        if fd != NONE:
            poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


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
