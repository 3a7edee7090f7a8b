"""A simulated world for the real supervisor: virtual time, agents, a scheduler and a store without processes.

The loop, the log (real files), judging, deciding and driving are the real ones; only what lies behind the ports and
the switchboard is made up here. Minutes of a run take milliseconds, and a fault is a sentence:

    world.at_step(24, lambda w: w.xid(Node("a"), 79))

A test may stop the supervisor at any line of its log and start a successor.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outlast.reliability import model as m
from outlast.reliability import wire
from outlast.reliability.inbox import Beaten, Done, Event, Gone, Heard, Joined, Stacked
from outlast.reliability.model import JobId, Node, Rank
from outlast.reliability.ports import Allocation, BadCheckpoint, Choice, PortError, Restore
from outlast.reliability.switchboard import NOBODY, Session


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
        reports = any(s.reports for s in agent.ranks)
        fresh = tuple(
            m.StepSeen(**{**{f: getattr(s, f) for f in s.__struct_fields__}, "age_s": self.loop.now_s - s.age_s})
            for s in gang.steps
            if s.train_step > through
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
            steps=fresh if reports else (),
            finished=gang.finished,
        )


class SimBoard:
    """The switchboard's face, without sockets."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.through = 0
        self._sessions: dict[Node, Session] = {}
        self.acked: dict[Node, int] = {}
        world.board = self
        for agent in world.nodes.values():
            self.connect(agent)

    def connect(self, agent: SimNode) -> None:
        if not agent.alive:
            return
        self._sessions[agent.name] = Session(
            node=agent.name, job=agent.job, incarnation=agent.incarnation, address="127.0.0.1", connected=True
        )
        self._sessions[agent.name].heard_mono_s = self.world.loop.now_s
        hello = wire.Hello(
            node=agent.name,
            job=agent.job,
            incarnation=agent.incarnation,
            pid=1,
            address="127.0.0.1",
            attempt=agent.attempt if agent.state == "running" else 0,
            highest_epoch=0,
        )
        self.events.put_nowait(Joined(hello))
        self.deliver(agent.name)

    def deliver(self, node: Node) -> None:
        """Everything unacknowledged, in order; the supervisor's fold makes a repeated one harmless."""
        agent = self.world.nodes[node]
        for heard in agent.outbox:
            if heard.number > self.acked.get(node, 0):
                self.acked[node] = heard.number
                self.events.put_nowait(Heard(node, agent.incarnation, heard.number, heard.signal))

    def beat(self, agent: SimNode, beat: wire.Beat) -> None:
        session = self._sessions.get(agent.name)
        if session is None:
            self.connect(agent)
            session = self._sessions[agent.name]
        session.beat, session.heard_mono_s = beat, self.world.loop.now_s
        self.events.put_nowait(Beaten(agent.name, beat))

    def gone(self, node: Node, why: str) -> None:
        session = self._sessions.get(node)
        if session is not None and session.connected:
            session.connected = False
            self.events.put_nowait(Gone(node, why))

    # what the supervisor calls

    def sessions(self) -> tuple[Session, ...]:
        return tuple(self._sessions.values())

    def session(self, node: Node) -> Session | None:
        return self._sessions.get(node)

    def command(self, node: Node, message: wire.FromSupervisor) -> bool:
        if self.world.nodes[node].alive:
            self.world.loop.call_later(0.01, self._obey, node, message)
        return True

    def _obey(self, node: Node, message: wire.FromSupervisor) -> None:
        if self.world.nodes[node].alive and self.world.board is self:
            self.world.obey(node, message)

    def ack(self, node: Node, incarnation: str, number: int) -> None:
        agent = self.world.nodes[node]
        agent.outbox = [h for h in agent.outbox if h.number > number]

    def set_roster(self, nodes: Sequence[Node]) -> None:
        pass

    def steps_through(self, attempt: int, train_step: int) -> None:
        self.through = train_step if self.world.gang and self.world.gang.attempt == attempt else 0

    async def emptied(self, timeout_s: float, *, but: Node = NOBODY) -> bool:
        await asyncio.sleep(0.1)
        return True


class SimCluster:
    """The scheduler's half of the world."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world

    def _answer(self, what: str) -> None:
        self.world.calls.append(what)
        if self.world.silent_scheduler:
            raise PortError("slurmctld does not answer", again=True)

    def allocations(self) -> tuple[Allocation, ...]:
        self._answer("allocations")
        return tuple(self.world.allocations)

    def launch_agents(self, allocation: Allocation, nodes: Sequence[Node]) -> None:
        self._answer("launch " + " ".join(nodes))

    def node_states(self, nodes: Sequence[Node]) -> tuple[m.NodeState, ...]:
        self._answer("node_states")
        return tuple(
            m.NodeState(node=n, at_s=self.world.loop.now_s, state=s.slurm_state, flags=s.flags, reason=s.reason)
            for n in nodes
            if (s := self.world.nodes.get(n)) is not None
        )

    def job_states(self, jobs: Sequence[JobId]) -> tuple[m.JobState, ...]:
        return ()

    def may_drain(self) -> bool:
        return self.world.may_drain

    def drain(self, node: Node, reason: str) -> str:
        self._answer(f"drain {node}")
        victim = self.world.nodes[node]
        if "drain" in victim.flags:
            if not victim.reason.startswith("outlast:"):
                raise PortError(f"{node} carries a reason of the admin's", again=False)
            return "already drained by us"
        victim.flags, victim.reason = ("drain",), reason
        self.world.drained.append((node, reason))
        return "draining"

    def feed(self, nodes: int, exclude: Sequence[Node]) -> JobId:
        """A feeder whose nodes are there 5 s later."""
        self._answer(f"feed {nodes}")
        job = JobId(str(len(self.world.allocations) + 1))
        names = tuple(Node(f"f{job}{i}") for i in range(nodes))
        pending = Allocation(job=job, nodes=(), state="PENDING", feeder=True)
        self.world.allocations.append(pending)

        def granted() -> None:
            at = self.world.allocations.index(pending)
            self.world.allocations[at] = Allocation(job=job, nodes=names, state="RUNNING", feeder=True)
            for name in names:
                self.world.nodes[name] = SimNode(name, job)

        self.world.loop.call_later(5.0, granted)
        return job

    def requeue(self, job: JobId, exclude: Sequence[Node]) -> None:
        self._answer(f"requeue {job} without {' '.join(exclude)}")

    def release(self, node: Node, job: JobId) -> str:
        """What still runs on the node is gone with it."""
        self._answer(f"release {node}")
        allocations = self.world.allocations
        for at, allocation in enumerate(allocations):
            if allocation.job == job and node in allocation.nodes:
                if node == allocation.batch_node:
                    raise PortError(f"{node} runs the batch script", again=False)
                kept = tuple(n for n in allocation.nodes if n != node)
                allocations[at] = msgspec.structs.replace(allocation, nodes=kept)
                self.world.crash(node)
        return "released"

    def cancel(self, job: JobId) -> None:
        self._answer(f"cancel {job}")


class SimStore:
    """The checkpoint store's half of the world."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world

    def choose(self, *, quarantined: Sequence[int]) -> Choice:
        passed: list[BadCheckpoint] = []
        for step in sorted(self.world.durable, reverse=True):
            why = self.world.durable[step]
            if step in quarantined or step in self.world.set_aside:
                continue
            if not why:
                return Choice(restore=Restore(train_step=step, path=f"iter_{step}"), passed_over=tuple(passed))
            passed.append(BadCheckpoint(train_step=step, path=f"iter_{step}", why=why))
        return Choice(restore=None, passed_over=tuple(passed))

    def quarantine(self, train_step: int, why: str) -> None:
        self.world.set_aside.add(train_step)
        self.world.durable.pop(train_step, None)

    def durable_steps(self) -> tuple[int, ...]:
        return tuple(sorted(self.world.durable))

    def prune(self, keep_last: int, *, keep: Sequence[int], keep_every: int = 0) -> tuple[int, ...]:
        return ()
