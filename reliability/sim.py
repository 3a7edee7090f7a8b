"""A simulated world for the real supervisor: virtual time, agents and training without processes.

The loop, the log (real files), judging, deciding and driving are the real ones; only what lies behind the ports and
the switchboard is made up: what nodes, ranks and jobs do here, how a supervisor sees it in sim_ports.py. Minutes of a
run take milliseconds, and a fault is a sentence:

    world.at_step(24, lambda w: w.xid(Node("a"), 79))

A test may stop the supervisor at any line of its log and start a successor.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outlast.reliability import model as m
from outlast.reliability import wire
from outlast.reliability.inbox import Done, Stacked
from outlast.reliability.model import JobId, Node, Rank
from outlast.reliability.ports import Allocation

if TYPE_CHECKING:
    from outlast.reliability.sim_ports import SimBoard


class SimLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer; threads run at once, in line."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - handed on as an executor does
            future.set_exception(error)
        return future


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: SimLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("the simulated world waits for nothing: a deadlock")
        self._loop.now_s += max(0.0, timeout)
        return super().select(0)


class SimClock:
    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop

    def wall_s(self) -> float:
        return self.loop.now_s + 1_700_000_000.0

    def mono_s(self) -> float:
        return self.loop.now_s


@dataclass
class SimNode:
    """One node: its agent, and the ranks of the attempt that it holds."""

    name: Node
    job: JobId
    alive: bool = True
    incarnation: str = "i1"
    attempt: int = 0
    state: str = "idle"
    ranks: tuple[wire.RankSpec, ...] = ()
    heard: int = 0
    outbox: list[wire.Heard] = field(default_factory=list)
    done: dict[int, wire.Done] = field(default_factory=dict)
    slurm_state: str = "mixed"
    flags: tuple[str, ...] = ()
    reason: str = ""
    stuck: set[Rank] = field(default_factory=set)
    broken: bool = False
    """Its hardware is really bad: the only kind of node that may be drained."""


@dataclass
class Gang:
    """The ranks of one attempt, as far as they train together."""

    attempt: int
    layout: m.Layout
    nodes: list[Node] = field(default_factory=list)
    step: int = 0
    born_s: float = 0.0
    training: bool = False
    dead: bool = False
    steps: list[m.StepSeen] = field(default_factory=list)
    moved_s: float = 0.0
    finished: bool = False
    saving: int = 0
    saved_s: float = 0.0


Fault = Callable[["SimWorld"], None]


class SimWorld:
    """Nodes, scheduler and store. The supervisor sees it through `SimBoard`, `SimCluster` and `SimStore`."""

    STEP_S, START_S, SAVE_EVERY, SAVE_S, BEAT_S = 0.3, 2.0, 10, 0.7, 0.25

    def __init__(self, loop: SimLoop, nodes: str, target: int, may_drain: bool = True) -> None:
        self.loop, self.target, self.may_drain = loop, target, may_drain
        self.nodes = {Node(n): SimNode(Node(n), JobId("1")) for n in nodes}
        self.allocations = [Allocation(job=JobId("1"), nodes=tuple(self.nodes), state="RUNNING")]
        self.gang: Gang | None = None
        self.lineage: dict[int, int] = {}
        """train_step -> attempt that did it last."""
        self.durable: dict[int, str] = {}
        """train_step -> '' or what is wrong with it."""
        self.set_aside: set[int] = set()
        self.step_faults: list[tuple[int, Fault]] = []
        self.calls: list[str] = []
        self.drained: list[tuple[Node, str]] = []
        self.attempts: list[tuple[int, tuple[Node, ...]]] = []
        self.board: SimBoard | None = None
        self.silent_scheduler = False

    # -- faults as sentences

    def at_step(self, train_step: int, fault: Fault) -> SimWorld:
        self.step_faults.append((train_step, fault))
        return self

    def xid(self, node: Node, code: int, gpu: str = "0000:3b:00") -> None:
        if code in (79, 95):
            self.nodes[node].broken = True
        self.tell(node, m.XidSeen(node=node, at_s=self.loop.now_s, code=code, gpu=gpu))

    def gpu(self, node: Node, field: str, now: int, gpu: str = "0000:3b:00", source: str = "nvml") -> None:
        """A state of a GPU that turned bad."""
        if field in ("lost", "remap_failed", "recovery_action"):
            self.nodes[node].broken = True
        change = m.GpuChanged(node=node, at_s=self.loop.now_s, source=source, gpu=gpu, field=field, before=0, now=now)
        self.tell(node, change)

    def kill_rank(self, rank: int, *, exception: str = "", posix_signal: int | None = None, code: int = 1) -> None:
        gang = self.gang
        if gang is None or gang.dead:
            return
        gang.dead = True
        for node in gang.nodes:
            for spec in self.nodes[node].ranks:
                mine = spec.placement.rank == rank
                self._exit(node, spec, exception, posix_signal if mine else None, code, primary=mine)

    def _exit(
        self, node: Node, spec: wire.RankSpec, exception: str, posix: int | None, code: int, *, primary: bool
    ) -> None:
        self.tell(
            node,
            m.RankExited(
                node=node,
                at_s=self.loop.now_s + (0.0 if primary else 0.05),
                attempt=self.nodes[node].attempt,
                rank=spec.placement.rank,
                exit_code=None if posix else code,
                posix_signal=posix,
                exception=exception if primary else "",
                error_class="app_exception" if primary and exception else "" if primary else "peer_died",
                phase="train",
                train_step=self.gang.step if self.gang else 0,
            ),
        )

    def crash(self, node: Node) -> None:
        """Power loss: agent and ranks gone, the scheduler notices later."""
        victim = self.nodes[node]
        if not victim.alive:
            return
        victim.alive, victim.slurm_state = False, "down"
        if self.gang and node in self.gang.nodes:
            self.gang.dead = True
        if self.board is not None:
            self.board.gone(node, "connection closed")

    def hang(self, rank: int) -> None:
        for node in self.nodes.values():
            if any(s.placement.rank == rank for s in node.ranks):
                node.stuck.add(Rank(rank))

    def admin_drain(self, node: Node, reason: str) -> None:
        self.nodes[node].flags, self.nodes[node].reason = ("drain",), reason

    # -- what agents do

    def tell(self, node: Node, signal: m.Signal) -> None:
        agent = self.nodes[node]
        if not agent.alive:
            return
        agent.heard += 1
        agent.outbox.append(wire.Heard(number=agent.heard, signal=signal))
        if self.board is not None:
            self.board.deliver(node)

    def obey(self, node: Node, command: Any) -> None:
        """An agent takes a command; a repeated one is the same one."""
        agent = self.nodes[node]
        if command.command in agent.done:
            self._answer(agent, agent.done[command.command])
            return
        match command:
            case wire.Gate(attempt=attempt):
                outcome = m.GateOutcome.WELL
                self.tell(
                    node,
                    m.GateSeen(node=node, at_s=self.loop.now_s, attempt=attempt, outcome=outcome, free_port=29500),
                )
                self._answer(agent, wire.Done(command=command.command, ok=True))
            case wire.StartRanks():
                self._start(agent, command)
            case wire.StopRanks(attempt=attempt, save_first=saves):
                if saves and self.gang and not self.gang.dead and self.gang.attempt == attempt:
                    self.durable.setdefault(self.gang.step, "")
                self.loop.call_later(0.2, self._stopped, agent, attempt, command.command)
            case wire.CollectStacks(attempt=attempt):
                self._stacks(agent, attempt)
                self._answer(agent, wire.Done(command=command.command, ok=True))
            case wire.Leave():
                agent.alive = False
                if self.board is not None:
                    self.board.gone(node, "left")

    def _answer(self, agent: SimNode, done: wire.Done) -> None:
        agent.done[done.command] = done
        if self.board is not None and agent.alive:
            self.board.events.put_nowait(Done(agent.name, agent.incarnation, done))

    def _start(self, agent: SimNode, command: wire.StartRanks) -> None:
        if command.attempt < agent.attempt or (command.attempt == agent.attempt and agent.state == "clear"):
            self._answer(agent, wire.Done(command=command.command, ok=False, why="an older attempt"))
            return
        if agent.attempt != command.attempt:
            assert agent.state != "running", f"{agent.name}: attempt {command.attempt} started over a running one"
            agent.attempt, agent.ranks, agent.state = command.attempt, command.ranks, "running"
            agent.stuck.clear()
            if self.gang is None or self.gang.attempt != command.attempt:
                self.gang = Gang(command.attempt, command.layout, born_s=self.loop.now_s, moved_s=self.loop.now_s)
                self.gang.step = max((int(s.env.get("RESTORE", "0")) for s in command.ranks), default=0)
                self.attempts.append((command.attempt, ()))
            self.gang.nodes.append(agent.name)
            self.attempts[-1] = (command.attempt, tuple(self.gang.nodes))
            for spec in command.ranks:
                self.tell(
                    agent.name,
                    m.RankPlaced(
                        node=agent.name,
                        at_s=self.loop.now_s,
                        attempt=command.attempt,
                        rank=spec.placement.rank,
                        pid=100 + spec.placement.rank,
                    ),
                )
        self._answer(agent, wire.Done(command=command.command, ok=True))

    def _stopped(self, agent: SimNode, attempt: int, command: int) -> None:
        if not agent.alive:
            return
        if agent.attempt == attempt and agent.state == "running":
            agent.state, agent.ranks = "clear", ()
            if self.gang and self.gang.attempt == attempt:
                self.gang.dead = True
        self._answer(agent, wire.Done(command=command, ok=True))

    def _stacks(self, agent: SimNode, attempt: int) -> None:
        for spec in agent.ranks:
            stuck = spec.placement.rank in agent.stuck
            stack = wire.RankStack(
                attempt=attempt,
                rank=spec.placement.rank,
                process_state="T" if stuck else "S",
                waiting=not stuck,
                phase="train",
                train_step=self.gang.step if self.gang else 0,
                stack="main\nall_reduce",
            )
            if self.board is not None:
                self.board.events.put_nowait(Stacked(agent.name, stack))

    # -- time

    async def live(self) -> None:
        """Trains and beats until cancelled."""
        while True:
            self._train()
            self._beat()
            await asyncio.sleep(self.BEAT_S)

    def _train(self) -> None:
        gang = self.gang
        if gang is None or gang.dead or gang.finished:
            return
        world = sum(len(self.nodes[n].ranks) for n in gang.nodes)
        if world < gang.layout.world_size or self.loop.now_s < gang.born_s + self.START_S:
            gang.moved_s = self.loop.now_s
            return
        gang.training = True
        while not gang.dead and gang.moved_s + self.STEP_S <= self.loop.now_s:
            if any(self.nodes[n].stuck for n in gang.nodes):
                return
            self._one_step(gang)
            if gang.finished:
                return

    def _one_step(self, gang: Gang) -> None:
        gang.moved_s += self.STEP_S
        gang.step += 1
        if gang.saving and gang.moved_s > gang.saved_s + self.SAVE_S:
            self.durable.setdefault(gang.saving, "")
            gang.saving = 0
        save = gang.step % self.SAVE_EVERY == 0
        if save:
            gang.saving, gang.saved_s = gang.step, gang.moved_s
        self.lineage[gang.step] = gang.attempt
        gang.steps.append(
            m.StepSeen(
                train_step=gang.step,
                age_s=gang.moved_s,
                step_s=self.STEP_S,
                loss=1.0 / gang.step,
                samples_from=(gang.step - 1) * 8,
                samples_to=gang.step * 8,
            )
        )
        for at, fault in tuple(self.step_faults):
            if gang.step >= at:
                self.step_faults.remove((at, fault))
                fault(self)
        if gang.step >= self.target and not gang.dead:
            gang.finished = True
            if gang.saving:
                self.durable.setdefault(gang.saving, "")
            for node in gang.nodes:
                for spec in self.nodes[node].ranks:
                    self._exit(node, spec, "", None, 0, primary=True)

    def _beat(self) -> None:
        for agent in self.nodes.values():
            if agent.alive and self.board is not None:
                self.board.beat(agent, self._summary(agent))

    def _summary(self, agent: SimNode) -> wire.Beat:
        gang = self.gang
        if agent.state != "running" or gang is None or agent.attempt != gang.attempt:
            return wire.Beat(attempt=agent.attempt if agent.state == "clear" else 0, state=agent.state)
        through = self.board.through if self.board is not None else 0
        newest_s = self.loop.now_s
        if not any(s.reports for s in agent.ranks):
            newest_s = newest_s - wire.STAND_IN_S if any(s.stands_in for s in agent.ranks) else 0.0
        fresh = tuple(
            m.StepSeen(**{**{f: getattr(s, f) for f in s.__struct_fields__}, "age_s": self.loop.now_s - s.age_s})
            for s in gang.steps
            if s.train_step > through and s.age_s <= newest_s  # age_s: when it ended, until it is told
        )
        return wire.Beat(
            attempt=gang.attempt,
            state="running",
            warm=True,
            ranks_alive=0 if gang.finished or gang.dead else len(agent.ranks),
            phase="train" if gang.training else "load",
            step_min=gang.step,
            step_max=gang.step,
            stalled_s=self.loop.now_s - gang.moved_s,
            durable_step=max((s for s, why in self.durable.items() if not why), default=-1),
            steps=fresh,
            finished=gang.finished,
        )
