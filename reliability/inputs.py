"""Taking up the inbox: each item becomes events, in order. What cannot be logged stays in the inbox.

What an item asks of the world (an answer to an agent, a prune, a launch) is done once its events are in the log; a
repeated signal changes nothing, since folding is idempotent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from outlast.reliability import model as m
from outlast.reliability.actions import Drain, Hold
from outlast.reliability.acts import call
from outlast.reliability.attempt import State
from outlast.reliability.events import Outcome, StepsDone
from outlast.reliability.hangs import Save
from outlast.reliability.inbox import Beaten, Done, Event, Gone, Heard, Joined, Noticed, Stacked
from outlast.reliability.lane import Lane
from outlast.reliability.model import Node
from outlast.reliability.parts import IdentityChanges
from outlast.reliability.ports import Allocation, PortError
from outlast.reliability.watch import Asked, SiteSeen, SiteSilent, changed_node
from outlast.reliability.wire import Beat, Hello, StopRanks

if TYPE_CHECKING:
    from outlast.reliability.supervisor import Supervisor

_TIDY_S = 3600.0
"""Pruning reads the newest checkpoint through once."""
_LONG_S = 600.0
"""A prune that takes longer is worth a word."""
_RECONNECT_S = 3.0
"""A closed connection may be a hiccup: this long before its agent is taken for lost."""


class Terminated:
    """This process was told to end (SIGTERM, Ctrl-C)."""


class Inputs:
    """Turns what arrives into events."""

    def __init__(self, loop: Supervisor) -> None:
        self.loop = loop
        self.began_mono_s = loop.parts.clock.mono_s()
        self.gone_mono_s: dict[Node, float] = {}
        self.gone_why: dict[Node, str] = {}
        self.silent_site = ""
        self.tasks: set[asyncio.Task[None]] = set()
        self.pruning = Lane("the checkpoint store")

    def take(self) -> None:
        """Everything in the inbox, oldest first; an item leaves it when its events are in the log."""
        for item in tuple(self.loop.inbox):
            if isinstance(item, Event):
                self._take_agents(item)
            else:
                self._take_other(item)
            self.loop.once_durable(self.loop.inbox.popleft)
        self._lost_agents()

    def _take_agents(self, event: Event) -> None:
        loop = self.loop
        match event:
            case Heard(node=node, incarnation=incarnation, number=number, signal=signal):
                loop.see(signal)
                loop.once_durable(partial(loop.parts.board.ack, node, incarnation, number))
                if isinstance(signal, (m.RankExited, m.NodeNotClear)):
                    loop.watch.poke()
            case Beaten(beat=beat):
                self._beat(beat)
            case Joined(hello=hello):
                self._joined(hello)
            case Gone(node=node, why=why):
                self.gone_mono_s.setdefault(node, loop.parts.clock.mono_s())
                self.gone_why[node] = why
                loop.watch.poke()
            case Stacked(stack=stack):
                loop.hangs.stack(stack)
            case Done(node=node, incarnation=incarnation, done=done):
                loop.sender.done(node, incarnation, done)
            case Noticed(text=text):
                loop.note(text)
            case _:
                assert_never(event)

    def _take_other(self, item: object) -> None:  # noqa: C901 - a flat dispatch over what can arrive
        """What the scheduler, people and our own tasks say."""
        loop = self.loop
        match item:
            case Outcome() as outcome:
                if outcome.act in loop.state.open_acts:
                    if isinstance(loop.state.open_acts[outcome.act].action, Drain):
                        loop.watch.poke()  # it may be given back as soon as Slurm shows it
                    loop.record(outcome)
            case m.CheckpointSeen() as checkpoint:
                loop.see(checkpoint)
            case SiteSeen() as seen:
                self._site(seen)
            case IdentityChanges() as changes:
                self._identity(changes)
            case SiteSilent(why=why):
                if why != self.silent_site:
                    loop.note(f"the scheduler does not answer: {why}")
                self.silent_site = why
            case Asked() as asked:
                self._asked(asked)
            case Terminated():
                self._terminated()
            case str() as text:
                loop.note(text)
            case _:
                loop.note(f"an item of kind {type(item).__name__} that nobody takes")

    # ------------------------------------------------------------ agents

    def _joined(self, hello: Hello) -> None:
        loop = self.loop
        self.gone_mono_s.pop(hello.node, None)
        facts = loop.state.evidence.node(hello.node)
        if hello.incarnation != facts.incarnation or not facts.present:
            loop.see(
                m.AgentJoined(
                    node=hello.node,
                    at_s=loop.now_s(),
                    job=hello.job,
                    incarnation=hello.incarnation,
                    address=hello.address,
                )
            )
            loop.watch.poke()
        now = loop.state.evidence.current
        if hello.attempt and (now is None or hello.attempt != now.plan.attempt or now.state is State.ENDED):
            limits = loop.parts.run.limits
            stop = StopRanks(
                command=loop.sender.next_number(),
                attempt=hello.attempt,
                term_grace_s=limits.term_grace_s,
                kill_grace_s=limits.kill_grace_s,
                why="left over from an attempt that is over",
            )
            loop.once_durable(partial(loop.parts.board.command, hello.node, stop))

    def _beat(self, beat: Beat) -> None:
        loop = self.loop
        now = loop.state.evidence.current
        if now is None or beat.attempt != now.plan.attempt:
            return
        fresh = tuple(s for s in beat.steps if s.train_step > now.last_step)
        if fresh:
            loop.record(StepsDone(attempt=beat.attempt, steps=fresh))
            now_s = loop.now_s()
            loop.hangs.saves.extend(Save(s.train_step, now_s - s.age_s, s.save_s) for s in fresh if s.save_s > 0)
        saves = loop.state.evidence.saving.saves
        heard = any(s.attempt == beat.attempt and s.train_step == beat.durable_step for s in saves)
        if beat.durable_step > loop.state.evidence.durable_step and not heard:  # one set aside since counts no more
            self._durable(beat.durable_step, beat.durable_s)

    def _durable(self, train_step: int, durable_s: float) -> None:
        loop = self.loop
        held = next((s for s in loop.hangs.saves if s.train_step == train_step), None)
        age_s = max(0.0, loop.now_s() - held.at_s) if held else 0.0
        loop.see(
            m.CheckpointSeen(
                at_s=loop.now_s(),
                train_step=train_step,
                verified=True,
                path=f"iter_{train_step:07d}",
                hold_s=held.save_s if held else 0.0,
                durable_s=durable_s or age_s,
            )
        )
        if self.pruning.busy_s is None or self.pruning.busy_s > _LONG_S:  # else the next one's turn will do
            now, asked = loop.state.evidence.current, loop.parts.run.checkpoint
            keep = [now.plan.restore_step] if now else []
            prune = partial(loop.parts.store.prune, asked.keep_last, keep=keep, keep_every=asked.keep_every)
            self._background(prune, "old checkpoints", self.pruning)

    def _lost_agents(self) -> None:
        """Agents that are gone or silent for too long -- after the scheduler was asked once more."""
        loop = self.loop
        mono_s, limits = loop.parts.clock.mono_s(), loop.parts.run.limits
        for node in loop.state.evidence.present:
            session = loop.parts.board.session(node)
            if session is not None and session.connected:
                silent_s = mono_s - session.heard_mono_s
                since, why, limit = session.heard_mono_s, "its agent is silent", limits.agent_silent_s
            else:
                if session is not None:  # it was connected to us: that it is Gone may be still on its way here
                    self.gone_mono_s.setdefault(node, mono_s)
                since = self.gone_mono_s.get(node, self.began_mono_s)
                why = self.gone_why.get(node, "its agent did not come back")
                limit = min(_RECONNECT_S, limits.agent_silent_s) if node in self.gone_mono_s else limits.agent_silent_s
                silent_s = mono_s - since
            asked = loop.watch.answered_mono_s >= since or silent_s > 2 * limits.agent_silent_s
            if silent_s > limit and asked and not self._job_over(node):
                loop.see(m.AgentLost(node=node, at_s=loop.now_s(), silent_s=silent_s, why=why))

    def _job_over(self, node: Node) -> bool:
        """The scheduler is ending this node's allocation: then its agent's end says nothing about the node."""
        return any(
            node in a.nodes and a.state in ("COMPLETING", "CANCELLED", "PENDING", "TIMEOUT", "PREEMPTED")
            for a in self.loop.watch.site.allocations
        )

    # ------------------------------------------------------------ the scheduler and people

    def _identity(self, changes: IdentityChanges) -> None:
        """Other code, image or parameters than the run began with: held, unless a person has said `continue`."""
        loop = self.loop
        for text in (*changes.fatal, *changes.other):
            loop.note(f"identity: {text}")
        accepted = any(f.ask.what == "continue" for f in loop.state.evidence.asks)
        if changes.fatal and not accepted and not loop.state.held:
            what = "; ".join(changes.fatal)
            loop.intend(Hold(why=f"the run is not made of what it began with: {what}; `outlast continue` accepts it"))

    def _site(self, seen: SiteSeen) -> None:
        loop = self.loop
        self.silent_site = ""
        evidence = loop.state.evidence
        loop.see(*(n for n in seen.nodes if changed_node(evidence.node(n.node).state, n)))
        for allocation in seen.allocations:
            fact = evidence.jobs.get(allocation.job)
            if fact is None or fact.state.state != allocation.state or fact.state.nodes != allocation.nodes:
                loop.see(
                    m.JobState(
                        job=allocation.job,
                        at_s=loop.now_s(),
                        state=allocation.state,
                        reason="feeder" if allocation.feeder else "",
                        nodes=allocation.nodes,
                    )
                )
        grace_s = loop.parts.run.limits.agent_silent_s
        back = loop.parts.clock.mono_s() < self.began_mono_s + grace_s
        known = tuple(loop.state.evidence.present)
        left_out = tuple(loop.state.excluded)
        connected = tuple(n for n in known if back or loop.parts.board.session(n) is not None)
        loop.watch.nodes = known
        for allocation in loop.watch.took(seen, connected, left_out):
            self._launch(allocation)

    def _launch(self, allocation: Allocation) -> None:
        loop = self.loop
        if loop.state.ended is not None or loop.state.ending is not None:
            return

        def launch() -> None:
            loop.fence.check()
            loop.parts.cluster.launch_agents(allocation, allocation.nodes)

        self._background(launch, f"agents on {' '.join(allocation.nodes)}")

    def _asked(self, asked: Asked) -> None:
        loop = self.loop
        known = any(f.ask == asked.ask for f in loop.state.evidence.asks)
        if not known:
            loop.see(asked.ask)
        path: Path = loop.parts.run_dir.requests / asked.name
        self._background(lambda: path.unlink(missing_ok=True), "a request that was taken up")

    def _terminated(self) -> None:
        loop = self.loop
        loop.terminated = True
        if not loop.parts.in_batch and loop.parts.node == "":
            loop.see(m.OperatorAsked(at_s=loop.now_s(), what="cancel", who="the user (this process was told to end)"))
        else:
            loop.watch.poke()  # what the scheduler says of the job decides: cancelled, requeued, time limit

    def _background(self, what: Callable[[], object], about: str, lane: Lane | None = None) -> None:
        """A port call that nothing waits for, once what it follows from is in the log; a failure is noted."""

        async def run() -> None:
            try:
                await (lane.ask(what, timeout_s=_TIDY_S) if lane else call(what))
            except PortError as error:
                self.loop.put(f"{about}: {error}")
            except Exception as error:  # noqa: BLE001 - a thread's fault must not vanish
                self.loop.put(f"{about}: {type(error).__name__}: {error}")

        def begin() -> None:
            task = asyncio.create_task(run())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

        self.loop.once_durable(begin)
