"""The agent: one process on each node of a run, spares included, alive across attempts.

    supervisor ==link== agent --> gate, StartRanks, StopRanks, stacks      (commands, each answered by Done)
                          |  <-- step records, exits, kernel log           (beats each second, signals at once)
                          +-- warm process -- ranks

It obeys the highest epoch, reports what it sees, and judges nothing. When the supervisor is silent for longer than
the lease, ranks train on, and the election may have this agent start a successor. It never writes to srun's stdout,
and a run directory that is out of reach costs it its log lines, not its ranks. When it ends, however it ends,
everything below it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Coroutine
from typing import Protocol

from outlast.launchers import node_env, reap, stacks
from outlast.launchers.held import HeldRank
from outlast.launchers.keeper import Keeper
from outlast.launchers.node_gate import look_at_node
from outlast.monitors.kmsg import KernelLog
from outlast.reliability.model import GateSeen, Node, Signal
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile
from outlast.reliability.wire import (
    Beat,
    CollectStacks,
    Done,
    FromAgent,
    FromSupervisor,
    Gate,
    Leave,
    StartRanks,
    StopRanks,
)

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""The ring of a step page holds 32 steps: 160 steps a second are not lost."""
STRAYS_S = 5.0
STACKS_AT_ONCE = 4
LAST_TERM_S = 5.0
"""Grace for ranks when the agent itself is told to end: Slurm's KillWait follows."""


class Post(Protocol):
    """The way to whoever supervises; launchers/link.py holds the real one."""

    def hear(self, signal: Signal) -> None:
        """Send a signal, once, also over a reconnect."""

    def send(self, message: FromAgent) -> None:
        """Send an answer, if somebody is connected."""


class Agent:
    """What an agent does, whoever brings the commands. `ended` is set once it should leave."""

    def __init__(
        self, run_dir: RunDir, run: RunFile, node: Node, post: Post, keeper: Keeper, *, address: str = "127.0.0.1"
    ) -> None:
        self.run_dir, self.run, self.node, self.post, self.keeper = run_dir, run, node, post, keeper
        self.address = address
        self.ended = asyncio.Event()
        self.exit_code = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def beat(self, steps_through: int) -> Beat:
        """What the link sends each second."""
        self.keeper.look()
        return self.keeper.beat(steps_through)

    def on_command(self, message: FromSupervisor) -> None:
        """Begin what was asked; the answer is posted when it is done. Commands of one kind may overlap safely."""
        match message:
            case Gate():
                self.begin(self._gate(message))
            case StartRanks():
                self.begin(self._answer(message.command, self.keeper.start(message)))
            case StopRanks():
                self.begin(self._answer(message.command, self.keeper.stop(message)))
            case CollectStacks():
                self.begin(self._stacks(message))
            case Leave():
                self.begin(self._leave(message))
            case _:
                pass  # Welcome and Pulse are the link's own

    async def work(self, *more: Coroutine[None, None, None]) -> int:
        """Everything that goes on beside the link, until `ended`; then all below this agent is ended."""
        for task in (self._look_on(), self._reap_on(), self._kernel_log(), *more):
            self.begin(task)
        self.keeper.start_warm()
        await self.ended.wait()
        for running in self._tasks:
            running.cancel()
        limits = self.run.limits
        await self.keeper.close(
            term_grace_s=min(limits.term_grace_s, LAST_TERM_S),
            kill_grace_s=limits.kill_grace_s,
            why="the agent ends",
        )
        return self.exit_code

    def end(self, exit_code: int, why: str) -> None:
        """Leave: the first reason counts."""
        if not self.ended.is_set():
            log.info("ending: %s", why)
            self.exit_code = exit_code
            self.ended.set()

    def begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Awaitable[None]) -> None:
        """A fault of ours in one task must not end the ranks."""
        try:
            await work
        except Exception:
            log.exception("a task of the agent failed")

    async def _answer(self, command: int, work: Awaitable[Done]) -> None:
        try:
            done = await work
        except Exception as e:
            log.exception("command %d failed", command)
            done = Done(command=command, ok=False, why=f"{type(e).__name__}: {e}")
        self.post.send(done)

    async def _gate(self, asked: Gate) -> None:
        held = self.keeper.held
        if held.state in ("idle", "clear"):
            held.state = "gating"
        found = await look_at_node(self.address, timeout_s=self.run.limits.gate_timeout_s)
        if held.state == "gating":
            held.state = "clear" if held.attempt else "idle"
        self.post.hear(
            GateSeen(
                node=self.node,
                at_s=time.time(),
                attempt=asked.attempt,
                outcome=found.outcome,
                findings=found.findings,
                free_port=found.free_port,
            )
        )
        self.post.send(Done(command=asked.command, ok=True))

    async def _stacks(self, asked: CollectStacks) -> None:
        """All living ranks, a few at a time: a node may have as many ranks as cores."""
        held = self.keeper.held
        if asked.attempt != held.attempt:
            why = f"this node holds attempt {held.attempt}, not {asked.attempt}"
            self.post.send(Done(command=asked.command, ok=False, why=why))
            return
        self.keeper.look()
        gate = asyncio.Semaphore(STACKS_AT_ONCE)

        async def one(rank: HeldRank) -> None:
            async with gate:
                directory = self.run_dir.rank(rank.attempt, rank.rank)
                self.post.send(await stacks.collect(rank, now_mono_s=time.monotonic(), directory=directory))

        await asyncio.gather(*(one(rank) for rank in held.ranks.values()))
        self.post.send(Done(command=asked.command, ok=True))

    async def _leave(self, asked: Leave) -> None:
        limits = self.run.limits
        stop = StopRanks(
            command=asked.command,
            attempt=self.keeper.held.attempt,
            term_grace_s=limits.term_grace_s,
            kill_grace_s=limits.kill_grace_s,
            why=asked.why,
        )
        await self._answer(asked.command, self.keeper.stop(stop))
        self.end(0, f"released: {asked.why}")

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.keeper.look()

    async def _reap_on(self) -> None:
        """Bury what we adopted. A zombie is a stray only at the second look: our own children are waited for."""
        seen: frozenset[int] = frozenset()
        while True:
            await asyncio.sleep(STRAYS_S)
            seen = await asyncio.to_thread(reap.reap_strays, seen)

    async def _kernel_log(self) -> None:
        path = self.run.cluster.kernel_log
        if not path:
            return
        accept = self.run.cluster.accept_user_facility
        async for found in KernelLog(path, self.node, accept_user_facility=accept).signals():
            self.post.hear(found)


def become_agent(node: Node, run_dir: RunDir) -> None:
    """Adopt what escapes, mark what is ours, and clear away what a dead agent of this node left."""
    reap.become_subreaper()
    mine = f"{run_dir.root}:{node}:"
    me = reap.read_proc(os.getpid())
    for proc, value in reap.marked(node_env.TREE_ENV, mine):
        pid, _, ticks = value.removeprefix(mine).partition(":")
        owner_lives = pid.isdigit() and ticks.isdigit() and reap.is_alive(int(pid), int(ticks))
        if not owner_lives and proc.pid != os.getpid():
            log.warning("pid %d is left of a dead agent of this node: killed", proc.pid)
            reap.send(proc, signal.SIGKILL)
    os.environ[node_env.TREE_ENV] = f"{mine}{os.getpid()}:{me.start_ticks if me else 0}"


def end_on_signals(agent: Agent) -> None:
    """TERM and INT end the agent in order; a second one changes nothing."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        agent.end(128 + number, f"POSIX signal {number}")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def go_quiet() -> None:
    """stdout and stderr to nowhere: srun would have to carry them, and blocks where nobody reads."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nowhere, fd)
    os.close(nowhere)
