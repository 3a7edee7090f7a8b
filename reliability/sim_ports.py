"""The simulated world as a supervisor sees it: the faces of the switchboard, the scheduler and the checkpoint store.

What happens there is in sim.py. Each stands beside a real half behind the same port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from outlast.reliability import model as m
from outlast.reliability import wire
from outlast.reliability.inbox import Beaten, Event, Gone, Heard, Joined
from outlast.reliability.model import JobId, Node
from outlast.reliability.ports import Allocation, BadCheckpoint, Choice, PortError, Restore
from outlast.reliability.sim import SimNode, SimWorld
from outlast.reliability.switchboard import NOBODY, Session


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
        self.world.calls.append(f"prune {keep_last} every {keep_every} keep {list(keep)}")
        return ()
