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
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

import msgspec
import yaml

from outlast.launchers import adapt, gpu_news, node_env, reap, stacks
from outlast.launchers.agent_log import AgentLog
from outlast.launchers.election import Election
from outlast.launchers.held import HeldRank
from outlast.launchers.keeper import Keeper
from outlast.launchers.link import AgentLink, Command, Introduction, Say
from outlast.launchers.logs import Pump
from outlast.launchers.nest import Nest, NestError
from outlast.launchers.node_gate import look_at_node, rank_marker
from outlast.launchers.recorder import NODE_ENV
from outlast.launchers.shelf_keeper import ShelfKeeper
from outlast.launchers.successor import Successor
from outlast.monitors.kmsg import KernelLog
from outlast.reliability.fence import FenceError, highest
from outlast.reliability.frames import parse_secret
from outlast.reliability.model import GateSeen, JobId, Node, Signal
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile
from outlast.reliability.wire import (
    Beat,
    CollectStacks,
    Done,
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
LAST_WORD_S = 60.0
FLUSH_S = 3.0
LAST_TERM_S = 5.0
"""Grace for ranks when the agent itself is told to end: Slurm's KillWait follows."""


class Agent:
    """What an agent does, whoever brings the commands. `ended` is set once it should leave."""

    def __init__(
        self,
        run_dir: RunDir,
        run: RunFile,
        node: Node,
        keeper: Keeper,
        *,
        hear: Callable[[Signal], None],
        address: str = "127.0.0.1",
        nest: Path | None = None,
    ) -> None:
        self.run_dir, self.run, self.node, self.keeper = run_dir, run, node, keeper
        self.hear, self.address = hear, address
        self.rank_marker = rank_marker(nest) if nest else ""
        self.ended = asyncio.Event()
        self.exit_code = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def beat(self, logged: tuple[int, int]) -> Beat:
        """What the link sends each second."""
        self.keeper.look()
        return self.keeper.beat(logged)

    async def handle(self, message: Command, say: Say) -> Done:
        """Carry a command out. Commands may overlap; what `say` sends goes out before the answer."""
        match message:
            case Gate():
                return await self._gate(message)
            case StartRanks():
                return await self.keeper.start(message)
            case StopRanks():
                return await self.keeper.stop(message)
            case CollectStacks():
                return await self._stacks(message, say)
            case Leave():
                return await self._leave(message)

    async def work(self, *more: Coroutine[None, None, None]) -> int:
        """Everything that goes on beside the link, until `ended`; then all below this agent is ended."""
        for task in (self._look_on(), self._reap_on(), self._kernel_log(), *more):
            self.begin(task)
        for source in gpu_news.sources(self.run, self.node, self.keeper.helpers):
            self.begin(gpu_news.pass_on(source, self.hear))
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

    async def _gate(self, asked: Gate) -> Done:
        held = self.keeper.held
        if held.state in ("idle", "clear"):
            held.state = "gating"
        limit_s, gpus = self.run.limits.gate_timeout_s, self.run.cluster.gpus_per_node
        found = await look_at_node(
            self.address,
            gpus=gpus,
            timeout_s=limit_s,
            helpers=self.keeper.helpers,
            run_dir=self.run_dir.root,
            marker=self.rank_marker,
        )
        if held.state == "gating":
            held.state = "clear" if held.attempt else "idle"
        self.hear(
            GateSeen(
                node=self.node,
                at_s=time.time(),
                attempt=asked.attempt,
                outcome=found.outcome,
                findings=found.findings,
                free_port=found.free_port,
            )
        )
        return Done(command=asked.command, ok=True)

    async def _stacks(self, asked: CollectStacks, say: Say) -> Done:
        """All ranks, a few at a time: a node may have as many ranks as cores."""
        held = self.keeper.held
        if asked.attempt != held.attempt:
            why = f"this node holds attempt {held.attempt}, not {asked.attempt}"
            return Done(command=asked.command, ok=False, why=why)
        self.keeper.look()
        gate = asyncio.Semaphore(STACKS_AT_ONCE)

        async def one(rank: HeldRank) -> None:
            async with gate:
                directory = self.run_dir.rank(rank.attempt, rank.rank)
                say(await stacks.collect(rank, now_mono_s=time.monotonic(), directory=directory))

        await asyncio.gather(*(one(rank) for rank in held.ranks.values()))
        return Done(command=asked.command, ok=True)

    async def _leave(self, asked: Leave) -> Done:
        """Stop what is held; then `work` ends, once the answer is under way."""
        limits = self.run.limits
        stop = StopRanks(
            command=asked.command,
            attempt=self.keeper.held.attempt,
            term_grace_s=limits.term_grace_s,
            kill_grace_s=limits.kill_grace_s,
            why=asked.why,
        )
        done = await self.keeper.stop(stop)
        asyncio.get_running_loop().call_soon(self.end, 0, f"released: {asked.why}")
        return done

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
        path = self.run.cluster.kernel_log.replace("%run", str(self.run_dir.root))
        if not path:
            return
        accept = node_env.believes_user_space(self.run, os.environ)
        async for found in KernelLog(path, self.node, accept_user_facility=accept).signals():
            self.hear(found)


async def serve(run_dir: RunDir, run: RunFile, secret: bytes, me: Introduction, nest: Nest) -> int:
    """One agent's life, from the parts to its exit code."""
    pump = Pump()
    keeper = Keeper(
        run,
        run_dir,
        me.node,
        nest,
        pump,
        modules=adapt.for_run(run).preload(run),
        hear=lambda s: link.report(s),
        on_change=lambda: link.beat_now(),
    )
    agent = Agent(run_dir, run, me.node, keeper, hear=lambda s: link.report(s), address=me.address, nest=nest.root)
    link = AgentLink(
        run_dir=run_dir,
        secret=secret,
        me=me,
        beat=lambda: agent.beat(link.logged),
        handle=agent.handle,
        note=log.info,
        lease_s=run.limits.lease_s,
    )
    successor = Successor(run_dir, me.node, keep=keeper.helpers.add)
    election = _election(run_dir, me.node, link, run.limits.lease_s, successor)
    end_on_signals(agent)
    talking = [asyncio.create_task(_again(part)) for part in (link.run, election.run)]
    shelf = _shelf(run_dir, run, me, keeper)
    code = await agent.work(*(shelf.keep(),) if shelf else ())
    if shelf:
        shelf.close()
    if code == 0:
        await _until(lambda: not successor.alive, LAST_WORD_S)  # the run's last supervisor may be our own child
    await _part(link, talking)
    await asyncio.to_thread(pump.close, 2.0)
    return code


def _shelf(run_dir: RunDir, run: RunFile, me: Introduction, keeper: Keeper) -> ShelfKeeper | None:
    if not run.tiers.local_dir:
        return None
    topology = os.environ.get("SLURM_TOPOLOGY_ADDR", "")
    return ShelfKeeper(run_dir, run, me.node, me.address, keep=keeper.helpers.add, topology=topology)


def _election(run_dir: RunDir, me: Node, link: AgentLink, lease_s: float, successor: Successor) -> Election:
    """What starts a successor here when the lease has lapsed and it is this agent's turn."""

    async def succeed(epoch: int) -> None:
        log.warning("starting a supervisor for epoch %d: pid %d", epoch, successor.start(epoch))

    return Election(run_dir=run_dir, me=me, lease=link, lease_s=lease_s, start_successor=succeed, note=log.info)


async def _part(link: AgentLink, talking: list[asyncio.Task[None]]) -> None:
    """Let the last words out, then hang up."""
    if link.connected:
        await link.flush(FLUSH_S)
    for task in talking:
        task.cancel()
    await asyncio.wait(talking, timeout=1.0)


async def _again(part: Callable[[], Awaitable[None]]) -> None:
    """A fault of ours in the link must not leave the ranks without one."""
    while True:
        try:
            await part()
        except Exception:
            log.exception("a part of the agent failed and begins anew")
        await asyncio.sleep(1.0)


async def _until(condition: Callable[[], bool], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not condition() and time.monotonic() < until:
        await asyncio.sleep(0.05)


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


def main(run_dir: RunDir, node: Node | None = None) -> int:
    """`outlast agent`. Does not return: threads that hang in a file system must not keep a finished agent alive."""
    chosen = node or Node(os.environ.get("SLURMD_NODENAME") or os.environ.get(NODE_ENV, ""))
    if not chosen:
        sys.stderr.write("outlast agent: SLURMD_NODENAME is not set: found no node name; give one with --node\n")
        os._exit(2)
    code, log_file = 1, AgentLog(run_dir, chosen)
    try:
        run = msgspec.convert(yaml.safe_load(run_dir.run_file.read_bytes()), RunFile)
        secret = parse_secret(run_dir.secret.read_text())
        become_agent(chosen, run_dir)
        nest = Nest(run_dir.root, chosen)
        job = JobId(os.environ.get("SLURM_JOB_ID", "local"))
        incarnation = f"{os.getpid()}-{secrets.token_hex(4)}"
        me = Introduction(node=chosen, job=job, incarnation=incarnation, address=own_address(run_dir))
        log.info("agent %s of node %s at %s, job %s", incarnation, chosen, me.address, job)
        go_quiet()
        code = asyncio.run(serve(run_dir, run, secret, me, nest))
        nest.close()
    except (NestError, OSError, ValueError, yaml.YAMLError) as e:
        log.error("cannot work here: %s", e)
        sys.stderr.write(f"outlast agent: {run_dir.root}: node {chosen}: {e}\n")
    except Exception:
        log.exception("the agent failed")
    log_file.close(1.0)
    os._exit(code)


def own_address(run_dir: RunDir) -> str:
    """The address of this node on the way to the supervisor; loopback where nobody supervises yet."""
    try:
        seat = highest(run_dir)
        if seat is None:
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((seat.host, seat.port))  # sends nothing: it only chooses the route
            return str(probe.getsockname()[0])
    except (OSError, FenceError):
        return "127.0.0.1"
