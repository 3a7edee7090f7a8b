"""The warm process: it has imported torch and Megatron once, and forks ranks that start without imports.

    agent ==socketpair== warm --fork--> rank, rank, ...      (rank.py takes over in the child)

One for each agent, alive across attempts. It stays single-threaded, touches no CUDA (a CUDA context does not
survive a fork), opens no files and decides nothing. It is a child subreaper: what escapes from a rank is adopted
here. While it imports it dies with its agent; once it serves, the end of the socket makes it kill every descendant
before it exits, so that a dead agent leaves nothing behind. If it dies itself, its ranks die with it (PDEATHSIG).
Run as `python -m outlast.launchers.warm FD AGENT_PID [MODULE ...]`; a module of ours may have a `preload()`.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from outlast.launchers import rank as rank_start
from outlast.launchers import reap
from outlast.launchers.warm_wire import (
    PACKET_BYTES,
    ForkFailed,
    ForkRank,
    FromWarm,
    RankEnded,
    RankForked,
    WarmReady,
    encoder,
    fork_decoder,
)

_LAST_KILL_S = 10.0


@dataclass(kw_only=True)
class Warm:
    """The serving process's state."""

    talk: socket.socket
    agent: int
    wake: tuple[int, int]
    """Pipe that SIGCHLD writes into (read end, write end)."""
    ranks: dict[int, ForkRank] = field(default_factory=dict)
    """Living ranks by pid."""

    def say(self, message: FromWarm) -> None:
        self.talk.send(encoder.encode(message))

    def own_fds(self) -> tuple[int, ...]:
        """What a rank must not inherit: else the pair's end would never be seen."""
        return (self.talk.fileno(), *self.wake)


def main() -> int:
    """Import, then serve until the agent's end of the socket is closed."""
    fd, agent = int(sys.argv[1]), int(sys.argv[2])
    preloads = sys.argv[3:]
    if not reap.die_with_parent(agent):
        return 1
    reap.become_subreaper()
    # Slurm sends TERM to all processes of a step: the agent alone decides how its ranks end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    began = time.monotonic()
    failed = tuple(why for name in preloads if (why := preload(name)))
    # the parent's pages stay shared with the ranks: the collector must not write into them
    gc.collect()
    gc.freeze()
    warm = Warm(talk=socket.socket(fileno=fd), agent=agent, wake=os.pipe())
    threads = len(os.listdir("/proc/self/task"))
    warm.say(WarmReady(import_s=time.monotonic() - began, threads=threads, failed=failed))
    return serve(warm)


def preload(name: str) -> str:
    """Import a module, and call its `preload` where it is ours; '' or why it failed. Never raises."""
    try:
        loaded = importlib.import_module(name)
        if name.startswith("outlast.") and hasattr(loaded, "preload"):
            loaded.preload()
    except (Exception, SystemExit) as e:  # noqa: BLE001 (a stranger's import may raise anything)
        return f"{name}: {type(e).__name__}: {e}"[:500]
    return ""


def serve(warm: Warm) -> int:
    """Fork on request and reap, in one thread. PDEATHSIG is lifted: the end of the socket is what ends it now."""
    for end in warm.wake:
        os.set_blocking(end, False)
    signal.set_wakeup_fd(warm.wake[1], warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if not reap.die_with_parent(warm.agent, 0):
        return 1
    with selectors.DefaultSelector() as selector:
        selector.register(warm.talk, selectors.EVENT_READ)
        selector.register(warm.wake[0], selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select(timeout=5.0)}
            try:
                if warm.wake[0] in ready:
                    _drain(warm.wake[0])
                _reap(warm)
                if warm.talk in ready and not _answer(warm, selector):
                    break
            except OSError:
                break  # the agent is gone: there is nobody left to tell
    _kill_all()
    return 0


def _answer(warm: Warm, selector: selectors.BaseSelector) -> bool:
    """Take one request; False where the agent has closed its end."""
    data, fds, _, _ = socket.recv_fds(warm.talk, PACKET_BYTES, 4)
    if not data:
        return False
    request = fork_decoder.decode(data)
    try:
        _fork(warm, request, fds[0], selector)
    finally:
        for fd in fds:
            os.close(fd)
    return True


def _fork(warm: Warm, request: ForkRank, output: int, selector: selectors.BaseSelector) -> None:
    warm_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError as e:
        warm.say(ForkFailed(attempt=request.attempt, rank=request.rank, why=f"fork: {e}"))
        return
    if pid == 0:
        fds = warm.own_fds()
        selector.close()
        rank_start.become(request, output=output, warm_pid=warm_pid, close_fds=fds)
    warm.ranks[pid] = request
    proc = reap.read_proc(pid)
    ticks = proc.start_ticks if proc else 0
    warm.say(RankForked(attempt=request.attempt, rank=request.rank, pid=pid, start_ticks=ticks))


def _reap(warm: Warm) -> None:
    """Collect all dead children: ranks are reported, adopted strangers are only buried."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        request = warm.ranks.pop(pid, None)
        if request is not None:
            code = os.waitstatus_to_exitcode(status)
            warm.say(RankEnded(attempt=request.attempt, rank=request.rank, pid=pid, status=code))


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def _kill_all() -> None:
    """Nothing of ours may outlive the agent: kill what is below us until nothing is."""
    me = os.getpid()

    def tree() -> Sequence[reap.Proc]:
        _bury()
        return reap.descendants(me, reap.snapshot())

    reap.end_tree(tree, (), term_grace_s=0.0, kill_grace_s=_LAST_KILL_S)


def _bury() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main())
