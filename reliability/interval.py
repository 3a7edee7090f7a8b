"""When to save. Pure: what was measured goes in, a time and its reason come out; the caller has the clock.

    how often    Young/Daly: sqrt(2 x stall x time between failures), a little less, inside the user's bounds and never
                 more often than a save becomes durable
    before an end that is known (walltime, preemption)   the last train_step from which a save still becomes durable:
                 deadline - p95(time to durable) - margin, and one train_step earlier where the next one would pass it
    on a hint    "this node will be taken out": at the next train_step

Not here: what a save costs (the trainer measures it), what failed (the event log knows), the saving itself.
Sources: J. W. Young, CACM 17(9) 1974; J. T. Daly, Future Generation Computer Systems 22, 2006, equation 37.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from outlast.reliability.model import Noun

PRIOR_FAILURES: Final = 1.0
"""How much the guess counts beside what was seen: as much as one failure."""


class Bounds(Noun, frozen=True, kw_only=True):
    """What the user allows."""

    least_s: float = 0.0
    most_s: float = 3600.0
    """No more than this is ever lost, whatever the arithmetic says."""


class Seen(Noun, frozen=True, kw_only=True):
    """What this run has shown so far."""

    stalls_s: tuple[float, ...] = ()
    """Training time lost to each of the last saves: the hold, and the excess of train_steps until it was durable."""
    durable_s: tuple[float, ...] = ()
    """From the beginning of each of the last saves until it was durable."""
    failures: int = 0
    """Ends of attempts that cost a restore."""
    watched_s: float = 0.0
    """Time over which these failures were counted."""


class Interval(Noun, frozen=True, kw_only=True):
    every_s: float
    because: str


def failure_rate_per_s(failures: int, watched_s: float, *, guess_s: float) -> float:
    """Failures a second, from what was seen and a guess of the time between two.

    The guess counts as one failure in that time, so that a young run neither divides by zero nor believes one bad hour.
    """
    return (failures + PRIOR_FAILURES) / (max(watched_s, 0.0) + PRIOR_FAILURES * guess_s)


def optimal_interval_s(stall_s: float, between_failures_s: float) -> float:
    """Daly's higher-order optimum of the time from the end of one save to the beginning of the next."""
    if stall_s >= 2 * between_failures_s:
        return between_failures_s
    x = stall_s / (2 * between_failures_s)
    return max(math.sqrt(2 * stall_s * between_failures_s) * (1 + math.sqrt(x) / 3 + x / 9) - stall_s, 0.0)


def plan_interval(seen: Seen, bounds: Bounds, *, guess_between_s: float, guess_stall_s: float) -> Interval:
    """How often to save now. The guesses stand in for what this run has not shown yet."""
    stall_s = median(seen.stalls_s) if seen.stalls_s else guess_stall_s
    between_s = 1 / failure_rate_per_s(seen.failures, seen.watched_s, guess_s=guess_between_s)
    best_s = optimal_interval_s(stall_s, between_s)
    because = f"a save costs {stall_s:.2f} s, a failure comes every {between_s / 3600:.1f} h: best {best_s:.0f} s"
    durable_s = p95(seen.durable_s) if seen.durable_s else 0.0
    if best_s < durable_s:
        best_s, because = durable_s, f"{because}; a save takes {durable_s:.1f} s to be durable, and one is in flight"
    if best_s < bounds.least_s:
        best_s, because = bounds.least_s, f"{because}; bounded from below"
    if best_s > bounds.most_s:
        best_s, because = bounds.most_s, f"{because}; bounded from above"
    return Interval(every_s=best_s, because=because)


class Due(Noun, frozen=True, kw_only=True):
    """Save at this train_step's end."""

    because: str
    last: bool = False
    """There will be no time for another: the run ends after it."""


class Moment(Noun, frozen=True, kw_only=True):
    """The end of a train_step. Times are seconds of one clock that does not jump."""

    now_s: float
    saved_s: float
    """When the last save began, or training did."""
    unsaved_steps: int
    """Train_steps since then: 0 right after a save."""
    step_s: float
    """What the next train_step will probably take (its p95)."""
    deadline_s: float | None = None
    """When this allocation ends; None where nobody knows."""
    hint: str = ""
    """Why somebody asks for a save now: "gpu-117 will be taken out"."""


def latest_start_s(deadline_s: float, durable_s: float, margin_s: float) -> float:
    """The last moment to begin a save that shall be durable before the deadline."""
    return deadline_s - durable_s - margin_s


def judge_save(
    moment: Moment, seen: Seen, interval: Interval, *, margin_s: float, guess_durable_s: float
) -> Due | None:
    """Whether a save is due at this train_step's end, and why; None: train on."""
    if not moment.unsaved_steps:
        return None
    if moment.deadline_s is not None:
        durable_s = p95(seen.durable_s) if seen.durable_s else guess_durable_s
        start_s = latest_start_s(moment.deadline_s, durable_s, margin_s)
        if moment.now_s + moment.step_s > start_s:
            left_s = moment.deadline_s - moment.now_s
            return Due(
                because=f"{left_s:.0f} s to the deadline; a save takes {durable_s:.1f} s, margin {margin_s:.0f} s",
                last=True,
            )
    if moment.hint:
        return Due(because=moment.hint)
    if moment.now_s - moment.saved_s >= interval.every_s:
        return Due(because=interval.because)
    return None


def p95(samples: Sequence[float]) -> float:
    """The nearest-rank 95th percentile; of fewer than twenty, the largest."""
    ordered = sorted(samples)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


def median(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
