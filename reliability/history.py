"""What people ask of a run: its state, attempts, train_steps, incidents and the newest numbers. Pure.

`look` turns the trace of a log into one RunView; status, report and explain only lay it out. It does not decide what
was right, and it never guesses: what is not in the log is None or an empty text.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from outlast.reliability.actions import Action, Advise, Drain, Feed, Hold, LeaveIt, Release, Requeue, Wait
from outlast.reliability.attempt import State
from outlast.reliability.events import LogEvent
from outlast.reliability.goodput import Cost, Ledger, Span, costs, reckon, sign_s, spans
from outlast.reliability.model import Layout, Node, Noun, Plan, StepSeen
from outlast.reliability.saves_view import SavesView, look_at_saves
from outlast.reliability.timeline import Act, Case, Trace, Trial, trace
from outlast.reliability.verdict import Verdict
from outlast.reliability.wording import tell_action, tell_signal

_RECENT_STEPS: Final = 50
_EVIDENCE_SHOWN: Final = 40


class EvidenceLine(Noun, frozen=True, kw_only=True):
    seq: int
    """Its evidence id."""
    at_s: float
    text: str


class ActView(Noun, frozen=True, kw_only=True):
    act: int
    at_s: float
    action: Action
    text: str
    ok: bool | None = None
    """None: no outcome yet."""
    detail: str = ""


class IncidentView(Noun, frozen=True, kw_only=True):
    number: int
    at_s: float
    run_s: float
    """When it was judged, in run seconds."""
    sign_s: float
    """When its first sign was logged, in run seconds."""
    attempt: int
    """The attempt that it happened in; 0 before the first."""
    verdict: Verdict
    evidence: tuple[EvidenceLine, ...]
    evidence_left_out: int = 0
    acts: tuple[ActView, ...] = ()
    cost: Cost
    next_attempt: int = 0
    restored_step: int = -1
    """The checkpoint that the next attempt began from; -1 where there was none."""


class AttemptView(Noun, frozen=True, kw_only=True):
    plan: Plan
    state: str
    planned_at_s: float
    from_s: float
    to_s: float
    """In run seconds; up to the next attempt's plan, the run's end, or now."""
    first_step: int = 0
    last_step: int = 0
    """Finished train_steps; 0 where there was none."""
    why_ended: str = ""
    losses: tuple[tuple[int, float], ...] = ()
    """(train_step, loss), also of steps that were done again later."""


class Samples(Noun, frozen=True, kw_only=True):
    """What the final lineage of train_steps consumed."""

    total: int
    """Samples up to the last train_step."""
    once: bool
    """Each exactly once and in order, from sample 0."""
    problem: str = ""


class RunView(Noun, frozen=True, kw_only=True):
    run: str
    state: str
    """waiting, held, an attempt's state, or the outcome: finished stopped cancelled failed."""
    why: str = ""
    """Why it ended, is held or waits; '' else."""
    target: int = 0
    layout: Layout | None = None
    nodes: int = 0
    spares: int = 0
    begun_at_s: float = 0.0
    last_at_s: float = 0.0
    """Wall time of the log's last line."""
    supervisor: str = ""
    epoch: int = 0
    attempts: tuple[AttemptView, ...] = ()
    steps: tuple[StepSeen, ...] = ()
    """The final lineage: each train_step as it was last done, ascending."""
    incidents: tuple[IncidentView, ...] = ()
    spans: tuple[Span, ...] = ()
    ledger: Ledger
    samples: Samples | None = None
    """None where the program does not say which samples a step consumed."""
    in_use: int = 0
    """Nodes of the present attempt."""
    spare_now: int = 0
    """Nodes with an agent that are neither in use nor convicted."""
    convicted: tuple[Node, ...] = ()
    notes: tuple[tuple[float, str], ...] = ()
    saving: SavesView = SavesView()

    @property
    def step(self) -> int:
        return self.steps[-1].train_step if self.steps else 0

    @property
    def loss(self) -> float | None:
        return self.steps[-1].loss if self.steps else None

    @property
    def step_time_s(self) -> float | None:
        """Median of the newest train_steps."""
        recent = [step.step_s for step in self.steps[-_RECENT_STEPS:]]
        return statistics.median(recent) if recent else None

    @property
    def attempt(self) -> int:
        return self.attempts[-1].plan.attempt if self.attempts else 0

    def incident(self, number: int) -> IncidentView | None:
        return next((incident for incident in self.incidents if incident.number == number), None)


def fold(events: Iterable[LogEvent]) -> RunView:
    """The view of a log, or of any part of one."""
    return look(trace(events))


def look(run: Trace) -> RunView:
    started, newest = run.started, run.newest
    state, why = _state(run)
    painted = spans(run)
    used = set(newest.plan.nodes) if newest and newest.state is not State.ENDED and run.ended is None else set()
    steps = _lineage(run)
    return RunView(
        run=started.run if started else "",
        state=state,
        why=why,
        target=started.train_steps if started else 0,
        layout=started.layout if started else None,
        nodes=started.nodes if started else 0,
        spares=started.spares if started else 0,
        begun_at_s=run.begun.at_s if run.begun else 0.0,
        last_at_s=run.last.at_s if run.last else 0.0,
        supervisor=run.supervisor,
        epoch=run.epoch,
        attempts=_attempts(run),
        steps=steps,
        incidents=_incidents(run, painted),
        spans=painted,
        ledger=reckon(run, painted),
        samples=_samples(steps),
        in_use=len(used),
        spare_now=len(run.agents - used - run.convicted),
        convicted=tuple(sorted(run.convicted)),
        notes=tuple((when.at_s, text) for when, text in run.notes),
        saving=look_at_saves(run),
    )


def _state(run: Trace) -> tuple[str, str]:
    """One word, and the reason where a person would ask for one."""
    if run.ended is not None:
        return run.ended.outcome, run.ended.why
    trial = run.newest
    if trial is None:
        waits = [act.action.why for act in run.acts.values() if isinstance(act.action, Wait)]
        return "waiting", waits[-1] if waits else "for its nodes"
    if trial.state is State.ENDED or not trial.moves:
        settled = next((a.action for a in reversed(trial.acts) if not isinstance(a.action, _BESIDE)), None)
        held = isinstance(settled, Hold) and trial.continued_s is None
        if isinstance(settled, Hold | Wait | Requeue) and trial.continued_s is None:
            return ("held" if held else "waiting"), settled.why
        if trial.state is State.ENDED:
            return "restarting", ""
    return str(trial.state), ""


_BESIDE: Final = (Drain, Advise, Feed, Release, LeaveIt)
"""Actions that do not settle how the run goes on."""


def _lineage(run: Trace) -> tuple[StepSeen, ...]:
    """Each train_step as it was last done; what a later attempt has taken back is gone."""
    kept: list[StepSeen] = []
    for trial in run.trials.values():
        newest = [trial.steps[number].seen for number in sorted(trial.steps)]
        taken_back = min([trial.plan.restore_step + 1] + [seen.train_step for seen in newest[:1]])
        while kept and kept[-1].train_step >= taken_back:
            kept.pop()
        kept += newest
    return tuple(kept)


def _samples(steps: Sequence[StepSeen]) -> Samples | None:
    if not steps or any(step.samples_to < 0 for step in steps):
        return None
    expected = 0
    for step in steps:
        if step.samples_from != expected:
            found = f"train_step {step.train_step} begins at sample {step.samples_from}, expected {expected}"
            return Samples(total=steps[-1].samples_to, once=False, problem=found)
        expected = step.samples_to
    return Samples(total=expected, once=True)


# ---------------------------------------------------------------- attempts


def _attempts(run: Trace) -> tuple[AttemptView, ...]:
    trials = list(run.trials.values())
    ends = [*(trial.planned.run_s for trial in trials[1:]), run.wall_s]
    return tuple(_attempt(trial, to_s) for trial, to_s in zip(trials, ends, strict=False))


def _attempt(trial: Trial, to_s: float) -> AttemptView:
    numbers = sorted(trial.steps)
    stopping = next((move.why for move in trial.moves if move.state is State.STOPPING), "")
    losses = ((n, trial.steps[n].seen.loss) for n in numbers)
    return AttemptView(
        plan=trial.plan,
        state=str(trial.state),
        planned_at_s=trial.planned.at_s,
        from_s=trial.planned.run_s,
        to_s=max(trial.planned.run_s, to_s),
        first_step=numbers[0] if numbers else 0,
        last_step=numbers[-1] if numbers else 0,
        why_ended=stopping,
        losses=tuple((number, loss) for number, loss in losses if loss is not None),
    )


# ---------------------------------------------------------------- incidents


def _incidents(run: Trace, painted: Sequence[Span]) -> tuple[IncidentView, ...]:
    order = list(run.trials)
    following = dict(itertools.pairwise(order))
    return tuple(
        _incident(run, case, cost, run.trials.get(following.get(case.attempt, 0)))
        for case, cost in zip(run.cases.values(), costs(run, painted), strict=True)
    )


def _incident(run: Trace, case: Case, cost: Cost, next_trial: Trial | None) -> IncidentView:
    verdict = case.verdict
    known = [seq for seq in verdict.evidence if seq in run.signals]
    lines = []
    for seq in known[:_EVIDENCE_SHOWN]:
        when, signal = run.signals[seq]
        lines.append(EvidenceLine(seq=seq, at_s=when.at_s, text=tell_signal(signal)))
    changed = next_trial if verdict.stops else None
    return IncidentView(
        number=case.number,
        at_s=case.when.at_s,
        run_s=case.when.run_s,
        sign_s=sign_s(run, case),
        attempt=case.attempt,
        verdict=verdict,
        evidence=tuple(lines),
        evidence_left_out=len(verdict.evidence) - len(lines),
        acts=tuple(_act(act) for act in case.acts),
        cost=cost,
        next_attempt=changed.plan.attempt if changed else 0,
        restored_step=changed.plan.restore_step if changed else -1,
    )


def _act(act: Act) -> ActView:
    return ActView(
        act=act.act,
        at_s=act.when.at_s,
        action=act.action,
        text=tell_action(act.action),
        ok=act.ok,
        detail=act.detail,
    )
