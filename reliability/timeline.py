"""The event log laid on one clock: what each attempt did and when, in seconds since the run's first line. Pure.

    events.jsonl --> Trace (this) --> goodput.reckon   where the seconds went
                                 \\--> history.look     what people ask

It judges nothing and forgets little. Two lines of one boot are a monotonic difference apart; between machines only
their wall clocks remain, and those may jump, so a difference is never taken as negative. Lines of a fenced writer
(a lower epoch than one already seen) are left out, and a log that lacks its head, its tail or lines in the middle
gives a shorter story, never an exception: this is read when things are already wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outlast.reliability.actions import Action
from outlast.reliability.attempt import Event, State
from outlast.reliability.events import (
    AttemptMoved,
    AttemptPlanned,
    EpochTaken,
    Intent,
    Judged,
    LogEvent,
    Noted,
    Outcome,
    RunEnded,
    RunStarted,
    Seen,
    StepsDone,
)
from outlast.reliability.model import (
    AgentJoined,
    AgentLost,
    CheckpointSeen,
    Layout,
    Node,
    OperatorAsked,
    Plan,
    Signal,
    StepSeen,
)
from outlast.reliability.verdict import Verdict

# The classes below are the accumulators of a fold, so they are not frozen; nothing outside this file writes to them.


@dataclass(kw_only=True)
class Moment:
    """When a line was written."""

    seq: int
    run_s: float
    """Seconds since the run's first line."""
    at_s: float
    """Wall time, for people."""


@dataclass(kw_only=True)
class Move:
    when: Moment
    event: Event
    state: State
    why: str


@dataclass(kw_only=True)
class StepMark:
    finish_s: float
    """When it was finished, in run seconds, as far as its age tells."""
    seen: StepSeen


@dataclass(kw_only=True)
class Act:
    when: Moment
    act: int
    action: Action
    incident: int
    attempt: int
    """The attempt that was the newest when it was intended; 0 before the first."""
    ok: bool | None = None
    """None: no outcome in the log (yet)."""
    detail: str = ""


@dataclass(kw_only=True)
class Case:
    """An incident."""

    when: Moment
    number: int
    verdict: Verdict
    attempt: int
    acts: list[Act] = field(default_factory=list)


@dataclass(kw_only=True)
class Trial:
    """One attempt."""

    plan: Plan
    planned: Moment
    moves: list[Move] = field(default_factory=list)
    steps: dict[int, StepMark] = field(default_factory=dict)
    acts: list[Act] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    continued_s: float | None = None
    """When a person said that the run, held after this attempt, goes on."""

    @property
    def state(self) -> State:
        return self.moves[-1].state if self.moves else State.PLANNED

    def entered_s(self, state: State) -> float | None:
        """When it first came into this state; None where it never did."""
        return next((move.when.run_s for move in self.moves if move.state is state), None)


@dataclass(kw_only=True)
class Gap:
    """Time in which nobody wrote, closed by a new supervisor."""

    from_s: float
    to_s: float
    other_boot: bool
    """True: measured by the wall clocks of two machines."""


@dataclass(kw_only=True)
class Trace:
    """Everything that the log says, in order."""

    started: RunStarted | None = None
    begun: Moment | None = None
    last: Moment | None = None
    ended: RunEnded | None = None
    ended_when: Moment | None = None
    epoch: int = 0
    supervisor: str = ""
    """Node of the newest supervisor."""
    trials: dict[int, Trial] = field(default_factory=dict)
    """By attempt, in the order of their plans."""
    cases: dict[int, Case] = field(default_factory=dict)
    acts: dict[int, Act] = field(default_factory=dict)
    signals: dict[int, tuple[Moment, Signal]] = field(default_factory=dict)
    """By evidence id."""
    notes: list[tuple[Moment, str]] = field(default_factory=list)
    checkpoints: list[tuple[Moment, CheckpointSeen]] = field(default_factory=list)
    agents: set[Node] = field(default_factory=set)
    convicted: set[Node] = field(default_factory=set)
    gaps: list[Gap] = field(default_factory=list)
    _previous: LogEvent | None = None

    @property
    def wall_s(self) -> float:
        """Run seconds to the run's end, or to the last line where it has not ended."""
        last = self.ended_when or self.last
        return last.run_s if last else 0.0

    @property
    def newest(self) -> Trial | None:
        return next(reversed(self.trials.values()), None)

    @property
    def attempt(self) -> int:
        return self.newest.plan.attempt if self.newest else 0

    def add(self, event: LogEvent) -> None:
        """Take one more line."""
        if event.epoch < self.epoch:
            return  # a fenced writer's
        when = self._clock(event)
        self.epoch, self.last, self._previous = event.epoch, when, event
        self._take(event, when)

    def _clock(self, event: LogEvent) -> Moment:
        before, since_s = self._previous, 0.0
        if before is None or self.last is None:
            self.begun = Moment(seq=event.seq, run_s=0.0, at_s=event.at_s)
            return self.begun
        same_boot = before.boot == event.boot
        # an ended run that a new supervisor continues later was not running in between
        if self.ended is None or not isinstance(event.body, EpochTaken):
            since_s = event.mono_s - before.mono_s if same_boot else event.at_s - before.at_s
        when = Moment(seq=event.seq, run_s=self.last.run_s + max(0.0, since_s), at_s=event.at_s)
        if isinstance(event.body, EpochTaken):
            self.gaps.append(Gap(from_s=self.last.run_s, to_s=when.run_s, other_boot=not same_boot))
        return when

    def _take(self, event: LogEvent, when: Moment) -> None:
        match event.body:
            case RunStarted() as started:
                self.started = started
            case EpochTaken(node=node):
                self.supervisor = node
            case Seen(signal=signal):
                self._see(signal, when)
            case Judged(incident=number, verdict=verdict):
                self._judge(number, verdict, when)
            case Noted(text=text):
                self.notes.append((when, text))
            case RunEnded() as ended:
                self.ended, self.ended_when = ended, when
            case _:
                self._take_act(event, when)

    def _take_act(self, event: LogEvent, when: Moment) -> None:
        match event.body:
            case Intent() as intent:
                self._intend(intent, when)
            case Outcome(act=act, ok=ok, detail=detail):
                if known := self.acts.get(act):
                    known.ok, known.detail = ok, detail
            case AttemptPlanned(plan=plan):
                self._plan(plan, when)
            case AttemptMoved(attempt=attempt, event=what, state=state, why=why):
                self._trial(attempt, when).moves.append(Move(when=when, event=what, state=state, why=why))
            case StepsDone(attempt=attempt, steps=steps):
                self._step(self._trial(attempt, when), steps, when)

    def _see(self, signal: Signal, when: Moment) -> None:
        self.signals[when.seq] = (when, signal)
        match signal:
            case AgentJoined(node=node):
                self.agents.add(node)
            case AgentLost(node=node):
                self.agents.discard(node)
            case OperatorAsked(what="continue"):
                if self.newest:
                    self.newest.continued_s = when.run_s
            case CheckpointSeen():
                self.checkpoints.append((when, signal))

    def _judge(self, number: int, verdict: Verdict, when: Moment) -> None:
        if verdict.convicts and verdict.node is not None:
            self.convicted.add(verdict.node)
        if case := self.cases.get(number):
            case.verdict = verdict  # more became known of the same incident
            return
        case = Case(when=when, number=number, verdict=verdict, attempt=self.attempt)
        self.cases[number] = case
        if self.newest:
            self.newest.cases.append(case)

    def _intend(self, intent: Intent, when: Moment) -> None:
        if intent.act in self.acts:
            return
        act = Act(when=when, act=intent.act, action=intent.action, incident=intent.incident, attempt=self.attempt)
        self.acts[intent.act] = act
        if case := self.cases.get(intent.incident):
            case.acts.append(act)
        if self.newest:
            self.newest.acts.append(act)

    def _plan(self, plan: Plan, when: Moment) -> None:
        if known := self.trials.get(plan.attempt):
            known.plan = plan
        else:
            self.trials[plan.attempt] = Trial(plan=plan, planned=when)
            self.ended = self.ended_when = None  # continued

    def _trial(self, attempt: int, when: Moment) -> Trial:
        """The attempt; one whose plan is missing from the log is taken as planned now."""
        if attempt not in self.trials:
            self._plan(
                Plan(attempt=attempt, layout=Layout(), nodes=(), ranks=(), why="its plan is not in the log"), when
            )
        return self.trials[attempt]

    def _step(self, trial: Trial, steps: Iterable[StepSeen], when: Moment) -> None:
        for seen in steps:
            if seen.train_step not in trial.steps:  # a supervisor that took over may hear a step again
                trial.steps[seen.train_step] = StepMark(finish_s=when.run_s - max(0.0, seen.age_s), seen=seen)


def trace(events: Iterable[LogEvent]) -> Trace:
    """All lines at once."""
    done = Trace()
    for event in events:
        done.add(event)
    return done
