"""The loop of one run: signals in, the log, verdicts, actions, moves of the attempt. The edge around the pure core.

    inbox -> record -> judge -> decide -> intent -> commit -> act -> outcome
                                                      \\-> drive: what the attempt needs next -> commands to agents

What is recorded is in the state at once and in the log with the next commit, one fsync for all that became known
together. Only then is it true: agents are answered, acts begin, commands go out. A commit that fails has not happened,
and the state goes back to the one before.
It keeps nothing that a decision depends on outside the log; a successor replays it and goes on. Where the log cannot
be written it does nothing, says so, and tries again: ranks train on meanwhile. Ports are called in threads with
deadlines (watch.py, acts.py), so that nothing outside can stop the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from outlast.reliability import model as m
from outlast.reliability import planning
from outlast.reliability.actions import (
    Action,
    Advise,
    Drain,
    EndRun,
    Feed,
    Hold,
    LeaveIt,
    Release,
    Requeue,
    RollBack,
    Wait,
)
from outlast.reliability.acts import Acts, call
from outlast.reliability.attempt import Event, State, moved
from outlast.reliability.decide import Situation, decide, grow
from outlast.reliability.driver import Move, drive
from outlast.reliability.ending import EXIT_CODES, wind_down
from outlast.reliability.eventlog import EventLog, EventLogError
from outlast.reliability.events import AttemptMoved, Body, Intent, Judged, LogEvent, Noted, Outcome, RunEnded, Seen
from outlast.reliability.fence import Fence, Fenced, FenceError
from outlast.reliability.hangs import HangWatch
from outlast.reliability.inputs import Inputs
from outlast.reliability.model import Node
from outlast.reliability.pacing import Pacing
from outlast.reliability.parts import Parts
from outlast.reliability.planner import Planner
from outlast.reliability.policy import judge
from outlast.reliability.ports import PortError
from outlast.reliability.rules import RULES
from outlast.reliability.runstate import OpenAct, RunState, advance
from outlast.reliability.saving import last_call
from outlast.reliability.sending import Sender
from outlast.reliability.watch import SiteWatch

TICK_S = 0.25
IDENTITY_S = 600.0
POLICY_S = 60.0
FENCED = 75
_NOW = (Drain, Advise, Feed, Hold, Requeue, RollBack, Release)
"""Actions that are carried out at once, in a task of their own."""


class Supervisor:
    """One run's loop. Built by supervise.py when the epoch is taken and the log is open."""

    def __init__(self, parts: Parts, log: EventLog, fence: Fence, state: RunState) -> None:
        self.parts, self.log, self.fence, self.state = parts, log, fence, state
        self.settled = state
        """The state of what is in the log; `state` is ahead of it by what is recorded and not committed."""
        self.fresh: list[LogEvent] = []
        self.effects: deque[Callable[[], object]] = deque()
        self.inbox: deque[object] = deque()
        self.awake = asyncio.Event()
        self.watch = SiteWatch(parts, self.put)
        self.inputs = Inputs(self)
        self.sender = Sender(self)
        self.acts = Acts(parts.cluster, parts.store, parts.pager, parts.run_dir.name, self.sender.let_go)
        self.hangs = HangWatch(self)
        self.planner = Planner(self)
        self.pacing = Pacing(self)
        self.performing: dict[int, asyncio.Task[None]] = {}
        self.again_at_s: float | None = None
        self.unwritable = ""
        self.errors = 0
        self.terminated = False

    # ------------------------------------------------------------ the loop

    async def run(self) -> int:
        """Until the run is over (its exit code) or another supervisor has taken over (75)."""
        watching = asyncio.create_task(self.watch.forever())
        listening = asyncio.create_task(self._listen())
        comparing = [asyncio.create_task(work()) for work in (self._compare_identity, self._watch_policy)]
        try:
            while True:
                await self._rest()
                try:
                    code = await self._turn()
                except Fenced as fenced:
                    self.say(str(fenced))
                    return FENCED
                if code is not None:
                    return code
        finally:
            self.watch.closing = True
            watching.cancel()
            listening.cancel()
            for task in (*comparing, *self.performing.values()):
                task.cancel()

    async def _turn(self) -> int | None:
        try:
            try:
                self._work()
            except BaseException:
                self.forget()
                raise
            if self.unwritable:
                self.say("the run directory can be written again")
                self.unwritable = ""
            self.errors = 0
            if self.state.ended is not None:
                await wind_down(self)
                return EXIT_CODES[self.state.ended.outcome]
        except EventLogError as error:
            await self._cannot_write(str(error))
        except FenceError as error:
            if isinstance(error, Fenced):
                raise
            await self._cannot_write(str(error))
        except Exception as error:
            self.errors += 1
            self.say(f"internal error {self.errors}: {type(error).__name__}: {error}")
            if self.errors >= 20:
                raise
            await asyncio.sleep(0.5)
        return None

    def _work(self) -> None:
        """One turn: what has come and all that follows from it, committed together before any of it is acted on."""
        self.inputs.take()
        if self.state.ended is None:
            self._judge()
            self._drive()
            self.hangs.look()
            self.planner.look()
            self.pacing.look()
            self._grow()
            self._release()
            self._end()
        self.commit()
        self._perform()
        self._lease()

    async def _rest(self) -> None:
        timeout = TICK_S
        if self.again_at_s is not None:
            timeout = min(timeout, max(0.0, self.again_at_s - self.now_s()))
        if not self.inbox:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self.awake.wait()
        self.awake.clear()

    async def _cannot_write(self, why: str) -> None:
        if not self.unwritable:
            self.say(f"{why}; ranks train on, nothing is decided until it can be written again")
            page = self.acts.page("the run directory cannot be written", why)
            self.performing[-1] = asyncio.create_task(page)
        self.unwritable, self.errors = why, 0
        await asyncio.sleep(1.0)

    async def _listen(self) -> None:
        """Agents' events into the inbox, a bounded number at a time."""
        while True:
            event = await self.parts.board.events.get()
            self.put(event)
            while len(self.inbox) > 10_000:
                await asyncio.sleep(TICK_S)

    def _lease(self) -> None:
        now = self.state.evidence.current
        self.parts.board.set_roster(self.state.evidence.present)
        if now is not None:
            self.parts.board.steps_through(now.plan.attempt, max(0, now.last_step))

    async def _compare_identity(self) -> None:
        """Whether the run is still made of what it began with; an image is hashed beside the loop."""
        if self.parts.identity_changes is not None:
            try:
                self.put(await call(self.parts.identity_changes, timeout_s=IDENTITY_S))
            except (PortError, OSError, ValueError) as error:
                self.put(f"identity.json cannot be compared: {error}")

    async def _watch_policy(self) -> None:
        """What the run is judged by, and a site's file that changed meanwhile: each said once."""
        said: set[str] = set()
        while self.parts.policy_notes is not None:
            try:
                texts = await call(self.parts.policy_notes)
            except (PortError, OSError) as error:  # its thread may never come back: no other is started
                return self.put(f"the site's policy is not compared any more: {error}")
            for text in [t for t in texts if t not in said]:
                self.put(text)
            said |= set(texts)
            await asyncio.sleep(POLICY_S)

    def put(self, item: object) -> None:
        """Something new; taken up in order."""
        self.inbox.append(item)
        self.awake.set()

    def now_s(self) -> float:
        return self.parts.clock.wall_s()

    def say(self, text: str) -> None:
        """A line for whoever looks at the supervisor's own output."""
        stamp = time.strftime("%H:%M:%S", time.gmtime(self.parts.clock.wall_s()))
        sys.stderr.write(f"{stamp} outlast {self.parts.run_dir.name}: {text}\n")
        sys.stderr.flush()

    # ------------------------------------------------------------ the log

    def record(self, *bodies: Body) -> None:
        """Into the state at once, into the log with the next commit."""
        if len(bodies) > self.log.room:
            self.commit()
        for event in self.log.stage(bodies):
            self.state = advance(self.state, event)
            self.fresh.append(event)

    def once_durable(self, effect: Callable[[], object]) -> None:
        """Done when all that is recorded so far is in the log; not at all where that fails."""
        self.effects.append(effect)

    def commit(self) -> None:
        """What is recorded into the log; then what waited for it, then a line to whoever watches."""
        try:
            self.log.commit()
        except BaseException:
            self.forget()
            raise
        self.settled = self.state
        fresh, self.fresh = self.fresh, []
        while self.effects:
            self.effects.popleft()()
        if self.parts.on_event is not None:
            for event in fresh:
                self.parts.on_event(event)

    def forget(self) -> None:
        """What is recorded and not in the log has not happened."""
        self.log.drop()
        self.state = self.settled
        self.fresh.clear()
        self.effects.clear()

    def see(self, *signals: m.Signal) -> None:
        self.record(*(Seen(signal=s) for s in signals))

    def note(self, text: str) -> None:
        self.record(Noted(text=text))

    # ------------------------------------------------------------ judge and decide

    def _judge(self) -> None:
        judgement = judge(
            self.state.evidence,
            now_s=self.now_s(),
            policy=self.parts.policy,
            known=self.state.keys,
            excluded=set(self.state.excluded),
            rules=RULES,
            stopped=self.state.stopped,
            barred=self.state.barred,
            target_steps=self.parts.run.train_steps,
        )
        self.again_at_s = judgement.again_at_s
        for verdict in judgement.verdicts:
            self.record(Judged(incident=len(self.state.incidents) + 1, verdict=verdict))
        if self.watch.asked:  # what this user may do at this site is known
            for number in tuple(self.state.unsettled):
                self._settle(number)

    def _settle(self, number: int) -> None:
        """All intents of this incident; what a supervisor before us already intended is not repeated."""
        verdict = self.state.incidents[number - 1].verdict
        done = self.state.unsettled[number]
        for action in decide(verdict, self.situation(), legal=self.legal):
            if not any(type(action) is type(d) and getattr(action, "node", 0) == getattr(d, "node", 0) for d in done):
                self.intend(action, number)

    def situation(self) -> Situation:
        return planning.situation(self.state, self.watch.site, self.parts.run, now_s=self.now_s())

    def legal(self, layout: m.Layout) -> str:
        return self.parts.starter.legal(self.parts.run, layout)

    def intend(self, action: Action, incident: int = 0) -> None:
        """The intent into the log; an earlier change of the run's ranks that is still open gives way to this one."""
        bodies: list[Body] = []
        if isinstance(action, planning.CHANGES):
            bodies += [
                Outcome(act=a.act, ok=False, detail=f"act {self.state.acts + 1} takes its place")
                for a in self.state.open_acts.values()
                if isinstance(a.action, planning.CHANGES)
            ]
        act = self.state.acts + 1
        bodies.append(Intent(act=act, action=action, incident=incident))
        if isinstance(action, LeaveIt):
            bodies.append(Outcome(act=act, ok=True))
        self.record(*bodies)

    def _perform(self) -> None:
        """Begins what can be done at once. Its intent is in the log."""
        for act in self.state.open_acts.values():
            if act.act not in self.performing and isinstance(act.action, _NOW):
                self.performing[act.act] = asyncio.create_task(self._carry_out(act))

    async def _carry_out(self, act: OpenAct) -> None:
        allocations = self.watch.site.allocations
        try:
            ok, detail = await self.acts.perform(act, self.state, allocations, self.fence.check)
        except FenceError:
            return  # the loop finds the same and ends, or tries again
        self.put(Outcome(act=act.act, ok=ok, detail=detail))

    # ------------------------------------------------------------ the attempt

    def _drive(self) -> None:
        for _ in range(len(State)):
            run, now_s = self.parts.run, self.now_s()
            call_ = last_call(self.state, run, self.watch.site.allocations, now_s)
            wants = drive(self.state, self.sender.views(), now_s=now_s, limits=run.limits, last_call=call_)
            move: Move | None = None
            for want in wants:
                if isinstance(want, Move):
                    move = want
                else:
                    self.once_durable(partial(self.sender.send, want.node, want.what))
            if move is None:
                return
            self.move(move.event, move.why)

    def move(self, event: Event, why: str = "") -> None:
        now = self.state.evidence.current
        assert now is not None, "a move without an attempt"
        bodies: list[Body] = []
        state = moved(now.state, event)
        bodies.append(AttemptMoved(attempt=now.plan.attempt, event=event, state=state, why=why))
        if state is State.TRAINING and now.state is not State.TRAINING:
            where = f"attempt {now.plan.attempt} trains on {' '.join(now.plan.nodes)} ({now.plan.layout})"
            bodies += [
                Outcome(act=a.act, ok=True, detail=where)
                for a in self.state.open_acts.values()
                if isinstance(a.action, (*planning.CHANGES, Wait)) and not isinstance(a.action, Requeue)
            ]
        self.record(*bodies)

    def _grow(self) -> None:
        now = self.state.evidence.current
        if now is None or now.state is not State.TRAINING or self.state.at_checkpoint_from is not None:
            return
        action = grow(self.situation())
        if action is not None and not self.legal(action.layout):
            self.intend(action)

    def _release(self) -> None:
        if self.state.ending is None and not self.state.open(Release):
            action = planning.releasable(self.state, self.watch.site, Node(self.parts.node))
            if action is not None:
                self.intend(action)

    # ------------------------------------------------------------ the end

    def _end(self) -> None:
        state = self.state
        if state.ended is None and state.ending is not None and planning.between_attempts(state):
            ends = state.open(EndRun)
            self.record(
                *(Outcome(act=a.act, ok=True) for a in state.open_acts.values() if a not in ends),
                *(Outcome(act=a.act, ok=True, detail=state.ending.outcome) for a in ends),
                RunEnded(outcome=state.ending.outcome, why=state.ending.why),
            )
        elif state.held and self.now_s() > state.held_s + self.parts.run.limits.hold_max_s and state.ending is None:
            self.intend(EndRun(outcome="failed", why=f"held for too long: {state.held}"))
