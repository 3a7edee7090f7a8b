"""Processes of a testbed: start them, know them again, end them, and find what belongs to a simulated node.

A process is known by pid and kernel start time, never by name: other testbeds and real daemons may run beside us.
What belongs to a node is found in three ways, since a crash must take everything along as a power loss does: the step
daemons by the files of the node that they hold open (their own environment is scrubbed), all their descendants, and
processes that were reparented by the node name that slurmd put into their environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from outlast.reliability.model import Noun
from outlast.slurm.errors import TestbedError

POLL_S = 0.03


class Daemon(Noun, frozen=True, kw_only=True):
    """One process that we started."""

    name: str
    pid: int
    started: int
    """Clock ticks after boot, field 22 of /proc/PID/stat: tells a reused pid apart."""


class Process(Noun, frozen=True, kw_only=True):
    pid: int
    name: str
    state: str
    parent: int
    session: int
    started: int


def read_process(pid: int) -> Process | None:
    """One line of /proc/PID/stat; None where the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # the name stands in parentheses and may hold any character, a closing parenthesis too
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return Process(
        pid=pid,
        name=name,
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        started=int(fields[19]),
    )


def list_processes() -> list[Process]:
    """All living processes; zombies left out."""
    found = (read_process(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return [p for p in found if p is not None and p.state not in "ZX"]


def spawn(name: str, argv: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Daemon:
    """Start a daemon in a session of its own, output appended to `log`."""
    with log.open("ab") as out:
        child = subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(env), start_new_session=True, cwd="/"
        )
    seen = read_process(child.pid)
    child.returncode = 0  # it outlives this object on purpose: no warning, no wait at exit
    return Daemon(name=name, pid=child.pid, started=seen.started if seen else 0)


def is_alive(daemon: Daemon) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(daemon.pid, os.WNOHANG)
    seen = read_process(daemon.pid)
    return seen is not None and seen.started == daemon.started and seen.state not in "ZX"


def kill(daemon: Daemon, number: int = signal.SIGKILL) -> None:
    """Send a POSIX signal if this is still the same process."""
    if is_alive(daemon):
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon.pid, number)


def end(daemon: Daemon, *, grace_s: float) -> None:
    """TERM, then KILL after the grace; returns when it is gone."""
    kill(daemon, signal.SIGTERM)
    if not wait_until(lambda: not is_alive(daemon), timeout_s=grace_s):
        kill(daemon)
        if not wait_until(lambda: not is_alive(daemon), timeout_s=5):
            raise TestbedError(f"{daemon.name} (pid {daemon.pid}) is still there 5 s after SIGKILL; end it by hand")


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    """Poll until the condition holds; False where it did not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def find_stepds(directory: Path, nodes: Iterable[str]) -> set[int]:
    """Step daemons of these nodes: they hold their node's log open, or a socket in its spool directory.

    A step's socket is spool/<node>/<node>_<job>.<step>; it is gone before the daemon is, where that waits for a pipe
    that an escaped process holds. /proc/net/unix maps a socket to an inode, /proc/PID/fd both to a process.
    """
    names = list(nodes)
    spools = tuple(f"{directory}/spool/{node}/" for node in names)
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]
    fields = (line.split(maxsplit=7) for line in lines)
    held = {f"socket:[{f[6]}]" for f in fields if len(f) == 8 and f[7].startswith(spools)}
    for node in names:
        log = f"{directory}/log/slurmd-{node}.log"
        held |= {log, f"{log} (deleted)"}
    return {p.pid for p in list_processes() if p.name == "slurmstepd" and _holds(p.pid, held)}


def _holds(pid: int, files: set[str]) -> bool:
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if os.readlink(entry.path) in files:
                    return True
    return False


def read_environment(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def find_tasks(slurm_conf: str, node: str | None = None) -> set[int]:
    """Processes of jobs of this testbed by their environment; of one node, or of all where node is None."""
    ours = f"SLURM_CONF={slurm_conf}".encode()
    found = set()
    for process in list_processes():
        environment = read_environment(process.pid)
        named = {
            v.partition(b"=")[2].decode(errors="replace") for v in environment if v.startswith(b"SLURMD_NODENAME=")
        }
        if ours in environment and (node in named if node is not None else bool(named)):
            found.add(process.pid)
    return found


def find_clients(slurm_conf: str) -> set[int]:
    """srun clients that talk to this testbed: they can outlive a controller that was killed."""
    ours = f"SLURM_CONF={slurm_conf}".encode()
    return {p.pid for p in list_processes() if p.name == "srun" and ours in read_environment(p.pid)}


def with_descendants(roots: Iterable[int]) -> set[int]:
    """These processes, their descendants, and whatever is in a session of theirs: that survives reparenting.

    A session counts as theirs if one of them leads it, or if a step daemon is in it and its leader is gone (the daemon
    was forked twice). A session with a living leader outside is somebody else's, slurmd's for example.
    """
    me, found = os.getpid(), set(roots)
    processes = list_processes()
    living = {p.pid for p in processes}
    while True:
        sessions = {p.session for p in processes if p.pid in found and p.name == "slurmstepd"}
        sessions = {s for s in sessions if s not in living} | found
        more = {p.pid for p in processes if p.parent in found or p.session in sessions} - found - {me}
        if not more:
            return found - {me}
        found |= more


def kill_all(find: Callable[[], set[int]], *, timeout_s: float = 5) -> int:
    """SIGKILL what `find` finds, again and again until it finds nothing (a fork may slip through one pass)."""
    killed: set[int] = set()

    def swept() -> bool:
        found = find()
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        return not found

    if not wait_until(swept, timeout_s=timeout_s):
        raise TestbedError(
            f"processes {sorted(find())} are still there {timeout_s:g} s after SIGKILL; end them by hand"
        )
    return len(killed)
