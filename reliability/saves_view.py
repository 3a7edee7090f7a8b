"""What each save cost and how long it took to be durable, as people ask for it. Pure: the trace of a log in, rows out.

    lost time = the hold, and what the train_steps took longer than usual until the save was durable

A save that holds the loop for a moment and then slows it down is no cheaper than one that stands still: both are time
that no train_step had. The usual is the median of the attempt's own steps.
"""

from __future__ import annotations

import bisect
import statistics

from outlast.reliability.interval import median, p95
from outlast.reliability.model import CheckpointSeen, Noun
from outlast.reliability.timeline import Trace, Trial


class SaveView(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """One checkpoint that became durable."""

    train_step: int
    attempt: int
    at_s: float
    """Wall time at which the log heard of it."""
    hold_s: float
    """How long the train loop stood still."""
    lost_s: float
    """The hold, and the excess of train_steps until it was durable."""
    durable_s: float


class SavesView(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """All of them, and how often the newest attempt saves."""

    saves: tuple[SaveView, ...] = ()
    lost_s: float = 0.0
    """Over all of them."""
    lost_median_s: float = 0.0
    lost_p95_s: float = 0.0
    durable_median_s: float = 0.0
    durable_p95_s: float = 0.0
    every: int = 0
    """Train_steps between saves that the newest attempt began with, where computed; 0: as the run file says."""
    because: str = ""


def look_at_saves(run: Trace) -> SavesView:
    saves = tuple(_view(run, when.run_s, when.at_s, seen) for when, seen in run.checkpoints if seen.verified)
    newest = run.newest.plan if run.newest else None
    every, because = (newest.save_every, newest.save_because) if newest else (0, "")
    if not saves:
        return SavesView(every=every, because=because)
    lost, durable = [s.lost_s for s in saves], [s.durable_s for s in saves]
    return SavesView(
        saves=saves,
        lost_s=sum(lost),
        lost_median_s=median(lost),
        lost_p95_s=p95(lost),
        durable_median_s=median(durable),
        durable_p95_s=p95(durable),
        every=every,
        because=because,
    )


def _view(run: Trace, run_s: float, at_s: float, seen: CheckpointSeen) -> SaveView:
    trial = next((t for t in reversed(run.trials.values()) if t.planned.run_s <= run_s), None)
    return SaveView(
        train_step=seen.train_step,
        attempt=trial.plan.attempt if trial else 0,
        at_s=at_s,
        hold_s=seen.hold_s,
        lost_s=seen.hold_s + (_excess_s(trial, seen) if trial else 0.0),
        durable_s=seen.durable_s,
    )


def _excess_s(trial: Trial, seen: CheckpointSeen) -> float:
    """What the train_steps after the save took longer than this attempt's usual, until it was durable."""
    marks = sorted(trial.steps)
    if seen.train_step not in trial.steps or len(marks) < 3:
        return 0.0
    usual_s = statistics.median(trial.steps[n].seen.step_s for n in marks)
    began_s = trial.steps[seen.train_step].finish_s - seen.hold_s
    excess_s = 0.0
    for n in marks[bisect.bisect_right(marks, seen.train_step) :]:
        step = trial.steps[n]
        if step.finish_s - step.seen.step_s >= began_s + seen.durable_s:
            break
        excess_s += max(0.0, step.seen.step_s - usual_s)
    return excess_s
