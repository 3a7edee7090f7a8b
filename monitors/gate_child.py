"""Work that may hang, done in a forked child with a deadline. Standard library only.

A mount that does not answer or a GPU library that waits for a dead device cannot be interrupted: the caller stops
waiting and says "unknown". The child holds a lock while it works, so that a gate which runs every few minutes does
not leave one stuck process after the other: while an earlier child is still stuck, no new one is started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

ANSWER_BYTES = 1 << 16


class Child(NamedTuple):
    """A child at work. pid 0: none was started, `why` tells."""

    pid: int
    fd: int
    why: str = ""


def start(name: str, work: Callable[[], str]) -> Child:
    """Fork and do `work` there; its string comes back through a pipe."""
    lock = _lock_file(name)
    if lock == _BUSY:
        return Child(0, -1, "an earlier check of it is still stuck")
    read_fd, write_fd = os.pipe()
    try:
        pid = os.fork()
    except OSError as e:
        os.close(read_fd)
        os.close(write_fd)
        _close(lock)
        return Child(0, -1, f"cannot fork: {e.strerror}")
    if pid == 0:
        _work(work, write_fd)
    os.close(write_fd)
    _close(lock)  # the child keeps its copy: the lock lives as long as it does
    return Child(pid, read_fd)


def _work(work: Callable[[], str], write_fd: int) -> None:
    """In the child; never returns."""
    status = 1
    try:
        answer = work().encode("utf-8", "replace")[:ANSWER_BYTES]
        while answer:
            answer = answer[os.write(write_fd, answer) :]
        status = 0
    except BaseException as e:  # noqa: BLE001 - whatever happens here must not run the parent's code
        with contextlib.suppress(OSError):
            os.write(write_fd, f"!{type(e).__name__}: {e}".encode()[:500])
    finally:
        os._exit(status)


def collect(child: Child, deadline_s: float) -> tuple[str, str]:
    """(answer, why not). `deadline_s` is a time.monotonic() value; a child that is late is killed and left behind."""
    if child.pid == 0:
        return "", child.why
    parts: list[bytes] = []
    try:
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([child.fd], [], [], left_s)[0]:
                os.kill(child.pid, signal.SIGKILL)
                return "", "no answer in time"
            data = os.read(child.fd, ANSWER_BYTES)
            if not data:
                break
            parts.append(data)
    finally:
        os.close(child.fd)
        _reap(child.pid)
    text = b"".join(parts).decode("utf-8", "replace")
    return ("", text[1:]) if text.startswith("!") else (text, "")


def _reap(pid: int) -> None:
    """Take the child's status if it comes soon; one that is stuck in the kernel is left to its parent's reaper."""
    for _ in range(50):
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            return
        time.sleep(0.002)


_BUSY = -2


def _lock_file(name: str) -> int:
    """A descriptor that holds the lock, -1 where there can be none, _BUSY where a stuck child holds it."""
    import fcntl

    place = "/run" if os.geteuid() == 0 and os.access("/run", os.W_OK) else "/dev/shm"
    # the nodes of a testbed are one machine: each has its own lock
    node = os.environ.get("OUTLAST_NODE") or os.environ.get("SLURMD_NODENAME") or ""
    safe = "".join(c if c.isalnum() else "_" for c in f"{node}-{name}")[:120]
    try:
        fd = os.open(f"{place}/outlast-gate-{os.geteuid()}-{safe}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return _BUSY
    return fd


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
