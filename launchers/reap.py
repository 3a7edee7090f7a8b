"""Process trees from /proc, and the bounded ladder that ends one: TERM, KILL, orphans, then a report.

    TERM every rank's group -- grace --> KILL every descendant, again and again -- grace --> leftovers, named

Killed must mean dead: a descendant counts wherever it has gone (other session, other group, double fork), since the
agent and the warm process are child subreapers and adopt what escapes. A process is a pid *and* its start time; a
pid that was given to someone else is never hit. Nothing here knows of runs or attempts. Linux only, standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Proc:
    """One process as /proc/PID/stat shows it."""

    pid: int
    ppid: int
    group: int
    state: str
    """R S D T t Z ..."""
    threads: int
    start_ticks: int
    """Clock ticks since boot: with the pid, the identity of a process."""

    @property
    def empty(self) -> bool:
        """A zombie without living threads: it holds nothing but its number."""
        return self.state in "ZX" and self.threads <= 1


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """How a ladder ended. `left` is empty where it is proven that nothing of the tree remains."""

    left: tuple[Proc, ...]
    termed: int
    killed: int
    seen: frozenset[int]
    """Pids that belonged to the tree at any look: whose GPU memory must be free too."""

    @property
    def why(self) -> str:
        """'' or the leftovers, for a person."""
        if not self.left:
            return ""
        what = ", ".join(f"pid {p.pid} in state {p.state}" for p in self.left[:8])
        return f"{len(self.left)} processes outlived SIGKILL: {what}"


def become_subreaper() -> None:
    """Adopt all descendants whose own parents die."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, posix_signal: int = signal.SIGKILL) -> bool:
    """Have the kernel send posix_signal when the parent's forking thread ends; False where it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, posix_signal)
    return os.getppid() == parent


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def read_proc(pid: int) -> Proc | None:
    """One process; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return parse_stat(f.read())
    except OSError:
        return None


def parse_stat(raw: bytes) -> Proc | None:
    """A line of /proc/PID/stat. The command name may hold blanks and brackets: fields count from the last ')'."""
    try:
        head, _, tail = raw.rpartition(b")")
        fields = tail.split()
        return Proc(
            pid=int(head.split(b" ", 1)[0]),
            state=fields[0].decode("ascii"),
            ppid=int(fields[1]),
            group=int(fields[2]),
            threads=int(fields[17]),
            start_ticks=int(fields[19]),
        )
    except (ValueError, IndexError):
        return None


def snapshot() -> dict[int, Proc]:
    """All processes of the machine that can be seen, by pid."""
    found = (read_proc(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {p.pid: p for p in found if p is not None}


def descendants(root: int, procs: Mapping[int, Proc], *, spare: Collection[int] = ()) -> list[Proc]:
    """All below root, parents first; a pid in spare is left out with everything below it."""
    children: dict[int, list[Proc]] = {}
    for proc in procs.values():
        children.setdefault(proc.ppid, []).append(proc)
    found: list[Proc] = []
    todo = [root]
    while todo:
        below = [p for p in children.get(todo.pop(), ()) if p.pid not in spare]
        found += below
        todo += [p.pid for p in below]
    return found


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    proc = read_proc(pid)
    return proc is not None and proc.start_ticks == start_ticks and not proc.empty


def send(proc: Proc, posix_signal: int) -> bool:
    """Signal this very process; False where it is gone or the pid is another's by now."""
    try:
        fd = os.pidfd_open(proc.pid)
    except OSError:
        return False
    try:
        now = read_proc(proc.pid)
        if now is None or now.start_ticks != proc.start_ticks:
            return False
        signal.pidfd_send_signal(fd, posix_signal)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def end_tree(
    tree: Callable[[], Iterable[Proc]],
    leaders: Sequence[Proc],
    *,
    term_grace_s: float,
    kill_grace_s: float,
    hurry: Callable[[], bool] = lambda: False,
) -> Cleared:
    """The ladder over `tree()`, which is asked anew at each look. Blocks for both graces at most.

    leaders: processes that lead a group and get TERM with it. hurry() true ends the TERM grace early.
    """
    seen: set[int] = set()
    termed = sum(_term_group(leader) for leader in leaders)
    until = time.monotonic() + (term_grace_s if termed else 0.0)
    while (left := _look(tree, seen)) and time.monotonic() < until and not hurry():
        time.sleep(_POLL_S)
    killed: set[tuple[int, int]] = set()
    until = time.monotonic() + kill_grace_s
    while left:
        killed.update((p.pid, p.start_ticks) for p in left if send(p, signal.SIGKILL))
        time.sleep(_POLL_S)
        left = _look(tree, seen)
        if time.monotonic() >= until:
            break
    return Cleared(left=tuple(left), termed=termed, killed=len(killed), seen=frozenset(seen))


def _look(tree: Callable[[], Iterable[Proc]], seen: set[int]) -> list[Proc]:
    for _ in range(2):  # empty counts only twice: a process may fork and end between our listing and our reading
        now = list(tree())
        seen.update(p.pid for p in now)
        if left := [p for p in now if not p.empty]:
            return left
    return []


def _term_group(leader: Proc) -> bool:
    """TERM to the group, then CONT, as Slurm does: a stopped process cannot act on TERM."""
    if not is_alive(leader.pid, leader.start_ticks):
        return False
    try:
        os.killpg(leader.pid, signal.SIGTERM)
        os.killpg(leader.pid, signal.SIGCONT)
    except OSError:
        # not a group leader (yet): a rank that was forked this instant
        return send(leader, signal.SIGTERM)
    return True


def reap_strays(seen: frozenset[int]) -> frozenset[int]:
    """Collect dead children that nobody waits for: those in `seen`, dead at the last look too. Returns the others."""
    me = os.getpid()
    dead = frozenset(p.pid for p in snapshot().values() if p.ppid == me and p.state == "Z")
    for pid in dead & seen:
        with contextlib.suppress(OSError):
            os.waitpid(pid, os.WNOHANG)
    return dead - seen


def marked(key: str, prefix: str) -> list[tuple[Proc, str]]:
    """Processes of this user that were started with `key=prefix...` in their environment, and the whole value.

    Forked children count: they show the environment of the program they were forked from. Finds what an agent that
    died together with its whole tree of parents left behind.
    """
    want = f"{key}={prefix}".encode()
    found = []
    for proc in snapshot().values():
        with contextlib.suppress(OSError), open(f"/proc/{proc.pid}/environ", "rb") as f:
            for word in f.read().split(b"\0"):
                if word.startswith(want):
                    found.append((proc, word.partition(b"=")[2].decode(errors="replace")))
    return found
