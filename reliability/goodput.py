"""The ledger: where each second of a run went, by name, summing to its wall time. Pure.

Every run second between the first line of the log and the run's end is painted exactly once, left to right, so the
names sum to the wall time by construction, for any log and any part of one. It is not a performance profile: `train`
is the time from one finished train_step to the next, whatever the program did in it.

    wait       no attempt: agents join, a spare or the scheduler is waited for, a held run waits for a person
    gate start load first_step    the attempt's states of the same names; load includes choosing the checkpoint
    train      up to a finished train_step that counts
    save       the train loop stood still for a checkpoint (or its end was waited for)
    lost_work  train_steps done again later, and a step that was given up half-way on purpose
    detect     from the last finished train_step until the stop was asked, where a fault ended the attempt
    stop       until every node is proven empty
    other      what none of these explains: bookkeeping, and wall clocks of two machines that disagree
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from outlast.reliability.actions import Grow, Hold, Requeue, RestartInPlace, RollBack, Shrink, Swap, Wait
from outlast.reliability.attempt import Event, State
from outlast.reliability.events import LogEvent
from outlast.reliability.model import NoProgress, Noun, RankPlaced
from outlast.reliability.timeline import Case, StepMark, Trace, Trial, trace
from outlast.reliability.verdict import Kind, Scope

STATES: Final = (
    "train",
    "lost_work",
    "detect",
    "stop",
    "gate",
    "start",
    "load",
    "first_step",
    "save",
    "wait",
    "other",
)
ROLE: Final = "train"
"""Runs of several parts will have more roles; today's log knows one."""

_STARTING_UP: Final = {
    State.PLANNED: "gate",
    State.GATING: "gate",
    State.STARTING: "start",
    State.LOADING: "load",
    State.FIRST_STEP: "first_step",
}


class Span(Noun, frozen=True, kw_only=True):
    """A stretch of run time with one name; attempt 0 before the first."""

    from_s: float
    to_s: float
    state: str
    attempt: int


class Entry(Noun, frozen=True, kw_only=True):
    role: str
    state: str
    seconds_s: float


class Ledger(Noun, frozen=True, kw_only=True):
    """Seconds by (role, state); they sum to `wall_s`."""

    wall_s: float
    entries: tuple[Entry, ...]
    unsure_s: float = 0.0
    """How much of the wall time only the clocks of two different machines could measure."""

    def seconds(self, state: str) -> float:
        return math.fsum(e.seconds_s for e in self.entries if e.state == state)

    @property
    def effective(self) -> float:
        """Effective training time ratio: seconds of train_steps that count, of all seconds; 0 for an empty run."""
        return self.seconds("train") / self.wall_s if self.wall_s > 0 else 0.0

    def flat(self) -> dict[str, float]:
        """For JSON: seconds by name, and wall_s."""
        return {**{state: self.seconds(state) for state in STATES}, "wall_s": self.wall_s}


class Cost(Noun, frozen=True, kw_only=True):
    """What one incident cost."""

    incident: int
    lost_steps: int = 0
    """Finished train_steps that had to be done again."""
    lost_s: float = 0.0
    recovery_s: float | None = None
    """From the first sign of it to the next finished train_step; None: not yet, or nothing was stopped."""
    rank_s: float = 0.0
    """(lost_s + recovery_s) x ranks."""


def ledger(events: Iterable[LogEvent]) -> Ledger:
    """The ledger of a log, or of any part of one."""
    run = trace(events)
    return reckon(run, spans(run))


def reckon(run: Trace, painted: Sequence[Span]) -> Ledger:
    """The sums of a painted run."""
    parts: dict[str, list[float]] = {state: [] for state in STATES}
    for span in painted:
        parts[span.state].append(span.to_s - span.from_s)
    entries = tuple(Entry(role=ROLE, state=state, seconds_s=math.fsum(parts[state])) for state in STATES)
    unsure_s = math.fsum(gap.to_s - gap.from_s for gap in run.gaps if gap.other_boot)
    return Ledger(wall_s=run.wall_s, entries=entries, unsure_s=unsure_s)


# ---------------------------------------------------------------- painting


@dataclass(kw_only=True)
class _Brush:
    """Moves to the right only, so that no second is painted twice and none is left out."""

    end_s: float
    at_s: float = 0.0
    attempt: int = 0
    spans: list[Span] = field(default_factory=list)

    def to(self, until_s: float, state: str) -> None:
        until_s = min(until_s, self.end_s)
        if not until_s > self.at_s:
            return
        from_s = self.at_s
        if self.spans and (self.spans[-1].state, self.spans[-1].attempt) == (state, self.attempt):
            from_s = self.spans.pop().from_s
        self.spans.append(Span(from_s=from_s, to_s=until_s, state=state, attempt=self.attempt))
        self.at_s = until_s


def spans(run: Trace) -> tuple[Span, ...]:
    """The whole run, painted: contiguous, from 0 to its wall time."""
    trials = list(run.trials.values())
    brush = _Brush(end_s=run.wall_s)
    brush.to(trials[0].planned.run_s if trials else run.wall_s, "wait")
    for index, (trial, lost_above) in enumerate(zip(trials, _lost_above(trials), strict=True)):
        later = trials[index + 1] if index + 1 < len(trials) else None
        brush.attempt = trial.plan.attempt
        brush.end_s = later.planned.run_s if later else run.wall_s
        _paint(brush, run, trial, later, lost_above)
    return tuple(brush.spans)


def _lost_above(trials: Sequence[Trial]) -> list[float]:
    """For each attempt the train_step above which some later attempt began again."""
    limits, limit = [], math.inf
    for trial in reversed(trials):
        limits.append(limit)
        limit = min(limit, trial.plan.restore_step)
    return limits[::-1]


def _paint(brush: _Brush, run: Trace, trial: Trial, later: Trial | None, lost_above: float) -> None:
    steps = _in_order(trial)
    stop_s = trial.entered_s(State.STOPPING)
    _start_up(brush, run, trial, steps, lost_above)
    if steps:
        _train(brush, run, steps, lost_above)
        brush.to(steps[-1].finish_s + steps[-1].seen.save_s, "save")
    if stop_s is None:
        # still at it; or its end is not in the log, though a later attempt is
        brush.to(brush.end_s, "detect" if later else "train")
        return
    if steps:
        _tail(brush, run, trial, steps[-1], stop_s)
    ended_s = trial.entered_s(State.ENDED)
    _with_absences(brush, run, trial, brush.end_s if ended_s is None else ended_s, "stop")
    _between(brush, run, trial)


def _in_order(trial: Trial) -> list[StepMark]:
    """Its finished train_steps, none finished before the ranks were started."""
    floor_s = trial.entered_s(State.STARTING) or trial.planned.run_s
    marks = [trial.steps[number] for number in sorted(trial.steps)]
    return [StepMark(finish_s=max(floor_s, mark.finish_s), seen=mark.seen) for mark in marks]


def _start_up(brush: _Brush, run: Trace, trial: Trial, steps: Sequence[StepMark], lost_above: float) -> None:
    """From the plan to the first finished train_step, by the attempt's states."""
    stop_s = trial.entered_s(State.STOPPING)
    train_s = trial.entered_s(State.TRAINING)
    ends = [s for s in (train_s, stop_s) if s is not None]
    until_s = steps[0].finish_s if steps else min(ends, default=brush.end_s)
    first = "lost_work" if steps and steps[0].seen.train_step > lost_above else "first_step"
    sign_s = math.inf if steps else _first_sign_s(run, trial)
    state = State.PLANNED
    for move in trial.moves:
        if move.state not in _STARTING_UP:
            break
        _until_sign(
            brush, min(move.when.run_s, until_s), sign_s, first if state is State.FIRST_STEP else _STARTING_UP[state]
        )
        state = move.state
    if not steps and _ending(trial) is Event.RANKS_FINISHED:  # a program that tells no steps, and did its work
        placed = [
            when.run_s
            for when, s in run.signals.values()
            if isinstance(s, RankPlaced) and s.attempt == trial.plan.attempt
        ]
        brush.to(min(max(placed, default=0.0), until_s), _STARTING_UP[state])
        brush.to(until_s, "train")
    if steps and state is not State.FIRST_STEP:  # a program without phases: its first step's own time tells
        brush.to(until_s - steps[0].seen.step_s, _STARTING_UP[state])
        state = State.FIRST_STEP
    _until_sign(brush, until_s, sign_s, first if state is State.FIRST_STEP else _STARTING_UP[state])


def _until_sign(brush: _Brush, until_s: float, sign_s: float, state: str) -> None:
    """To `until_s`; from the first sign of a fault on, that is detection."""
    brush.to(min(until_s, sign_s), state)
    brush.to(until_s, "detect")


def _train(brush: _Brush, run: Trace, steps: Sequence[StepMark], lost_above: float) -> None:
    """From finish to finish. A supervisor's absence is no hole here: the steps' own ages bridge it."""
    jumps = [gap for gap in run.gaps if gap.other_boot]
    for before, mark in itertools.pairwise(steps):
        brush.to(min(before.finish_s + before.seen.save_s, mark.finish_s), "save")
        for gap in jumps:
            if gap.from_s < mark.finish_s and gap.to_s > before.finish_s:
                # two machines' clocks: what the steps themselves cannot fill is not training time
                own_s = (mark.seen.train_step - before.seen.train_step) * mark.seen.step_s
                surplus_s = mark.finish_s - brush.at_s - own_s
                brush.to(brush.at_s + min(surplus_s, gap.to_s - gap.from_s), "other")
        brush.to(mark.finish_s, "lost_work" if mark.seen.train_step > lost_above else "train")


def _tail(brush: _Brush, run: Trace, trial: Trial, last: StepMark, stop_s: float) -> None:
    """From the last finished train_step to the moment that the end was known or asked for."""
    if _ending(trial) is Event.RANKS_FINISHED:
        for when, seen in run.checkpoints:
            if seen.train_step == last.seen.train_step and seen.verified:
                brush.to(min(when.run_s, stop_s), "save")
        brush.to(stop_s, "stop")
    elif _ended_by_fault(trial, stop_s):
        _with_absences(brush, run, trial, stop_s, "detect")
    else:
        brush.to(stop_s, "lost_work")


def _with_absences(brush: _Brush, run: Trace, trial: Trial, until_s: float, state: str) -> None:
    """To `until_s`; where the allocation itself was gone, the time without a supervisor was spent in the queue."""
    gone = any(case.verdict.scope is Scope.ALLOCATION for case in trial.cases)
    if gone or any(isinstance(act.action, Requeue) for act in trial.acts):
        for gap in run.gaps:
            if brush.at_s < gap.to_s and gap.from_s < until_s:
                brush.to(gap.from_s, state)
                brush.to(min(gap.to_s, until_s), "wait")
    brush.to(until_s, state)


def _between(brush: _Brush, run: Trace, trial: Trial) -> None:
    """From an attempt's end to the next plan: waiting where we said so, else choosing what to restore."""
    idle = "load"
    if run.ended is not None and trial is run.newest:
        idle = "other"
    waiting = False
    for act in trial.acts:
        match act.action:
            case Wait() | Hold() | Requeue():
                brush.to(act.when.run_s, "wait" if waiting else idle)
                waiting = True
            case Swap() | Shrink() | RestartInPlace() | Grow() | RollBack():
                brush.to(act.when.run_s, "wait" if waiting else idle)
                waiting = False
    if waiting and trial.continued_s is not None:
        brush.to(trial.continued_s, "wait")
        waiting = False
    brush.to(brush.end_s, "wait" if waiting else idle)


# ---------------------------------------------------------------- why an attempt ended, and what that cost


def _ending(trial: Trial) -> Event | None:
    """What brought it into STOPPING; None while nothing did."""
    return next((move.event for move in trial.moves if move.state is State.STOPPING), None)


def _ended_by_fault(trial: Trial, stop_s: float) -> bool:
    """False where a person or a plan of ours (grow back, swap at a checkpoint) ended it; unknown counts as a fault."""
    causes = [case.verdict for case in trial.cases if case.when.run_s <= stop_s]
    if any(v.stops and not v.at_checkpoint and not v.ends and v.kind is not Kind.OPERATOR_ACTION for v in causes):
        return True
    planned = any(
        isinstance(act.action, Grow) or (isinstance(act.action, Swap) and act.action.at_checkpoint)
        for act in trial.acts
        if act.when.run_s <= stop_s
    )
    return not (planned or any(v.ends or v.at_checkpoint or v.kind is Kind.OPERATOR_ACTION for v in causes))


def _stopping_case(trial: Trial) -> Case | None:
    """The incident that ended this attempt: the first that stops it, at once or at a checkpoint."""
    return next((case for case in trial.cases if case.verdict.stops or case.verdict.at_checkpoint), None)


def sign_s(run: Trace, case: Case) -> float:
    """When the first evidence of an incident was in the log, in run seconds; for a hang, when it began.

    Evidence from before the attempt (the same fault in an earlier one) does not count.
    """
    trial = run.trials.get(case.attempt)
    floor_s = trial.planned.run_s if trial else 0.0
    times = [case.when.run_s]
    for seq in case.verdict.evidence:
        if seq in run.signals:
            when, signal = run.signals[seq]
            stalled_s = signal.stalled_s if isinstance(signal, NoProgress) else 0.0
            if when.run_s >= floor_s:
                times.append(max(floor_s, when.run_s - stalled_s))
    return min(times)


def _first_sign_s(run: Trace, trial: Trial) -> float:
    case = _stopping_case(trial)
    return math.inf if case is None or case.verdict.ends else sign_s(run, case)


def costs(run: Trace, painted: Sequence[Span]) -> tuple[Cost, ...]:
    """What each incident cost, in their order; the incident that ended an attempt bears all of its loss."""
    lost_s: dict[int, float] = {}
    for span in painted:
        if span.state == "lost_work":
            lost_s[span.attempt] = lost_s.get(span.attempt, 0.0) + span.to_s - span.from_s
    after = _after(list(run.trials.values()))
    return tuple(
        _cost(run, case, lost_s.get(case.attempt, 0.0), *after.get(case.attempt, (None, None)))
        for case in run.cases.values()
    )


def _after(trials: Sequence[Trial]) -> dict[int, tuple[Trial | None, float | None]]:
    """For each attempt the next one, and when a later one finished its first train_step."""
    known: dict[int, tuple[Trial | None, float | None]] = {}
    following, again_s = None, None
    for trial in reversed(trials):
        known[trial.plan.attempt] = (following, again_s)
        following = trial
        if trial.steps:
            again_s = min(mark.finish_s for mark in trial.steps.values())
    return known


def _cost(run: Trace, case: Case, lost_s: float, following: Trial | None, again_s: float | None) -> Cost:
    trial = run.trials.get(case.attempt)
    if trial is None or following is None or _stopping_case(trial) is not case:
        return Cost(incident=case.number)
    lost_steps = max(0, max(trial.steps, default=0) - following.plan.restore_step)
    recovery_s = None if again_s is None else max(0.0, again_s - sign_s(run, case))
    rank_s = (lost_s + (recovery_s or 0.0)) * trial.plan.layout.world_size
    return Cost(incident=case.number, lost_steps=lost_steps, lost_s=lost_s, recovery_s=recovery_s, rank_s=rank_s)
