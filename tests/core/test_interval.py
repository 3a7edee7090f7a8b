"""When to save: the optimum is one, bounds hold, and no deadline is met too late."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outlast.reliability.interval import (
    Bounds,
    Interval,
    Moment,
    Seen,
    failure_rate_per_s,
    judge_save,
    latest_start_s,
    optimal_interval_s,
    p95,
    plan_interval,
)

HOUR = 3600.0
GUESS = {"guess_between_s": 24 * HOUR, "guess_stall_s": 1.0}
EVERY_MINUTE = Interval(every_s=60.0, because="test")


def waste(every_s: float, stall_s: float, between_s: float, restart_s: float = 60.0) -> float:
    """Daly's exact expected wall time for a second of work (his equation 20)."""
    return between_s * math.exp(restart_s / between_s) * (math.exp((every_s + stall_s) / between_s) - 1) / every_s


@given(stall_s=st.floats(0.01, 600), between_s=st.floats(600, 1e7), other=st.floats(0.1, 10))
def test_no_other_interval_is_much_better(stall_s: float, between_s: float, other: float) -> None:
    assume(stall_s < between_s / 2)
    best_s = optimal_interval_s(stall_s, between_s)
    assume(best_s > 0)
    assert waste(best_s, stall_s, between_s) <= waste(best_s * other, stall_s, between_s) * 1.002


def test_it_is_close_to_young_where_saves_are_cheap() -> None:
    assert optimal_interval_s(1.0, 24 * HOUR) == pytest.approx(math.sqrt(2 * 24 * HOUR), rel=0.01)
    assert optimal_interval_s(0.0, HOUR) == 0.0
    assert optimal_interval_s(3 * HOUR, HOUR) == HOUR


@given(failures=st.integers(0, 1000), watched_s=st.floats(0, 1e9), guess_s=st.floats(1, 1e8))
def test_a_rate_is_always_one_and_grows_with_failures(failures: int, watched_s: float, guess_s: float) -> None:
    rate = failure_rate_per_s(failures, watched_s, guess_s=guess_s)
    assert 0 < rate < failure_rate_per_s(failures + 1, watched_s, guess_s=guess_s)


def test_a_rate_follows_what_is_seen() -> None:
    young = failure_rate_per_s(0, 0.0, guess_s=24 * HOUR)
    assert 1 / young == pytest.approx(24 * HOUR)
    one_bad_hour = failure_rate_per_s(1, HOUR, guess_s=24 * HOUR)
    assert 1 / one_bad_hour == pytest.approx(12.5 * HOUR)
    long = failure_rate_per_s(100, 100 * HOUR, guess_s=24 * HOUR)
    assert 1 / long == pytest.approx(1.2 * HOUR, rel=0.05)


seen = st.builds(
    Seen,
    stalls_s=st.lists(st.floats(0, 1e4), max_size=9).map(tuple),
    durable_s=st.lists(st.floats(0, 1e4), max_size=9).map(tuple),
    failures=st.integers(0, 100),
    watched_s=st.floats(0, 1e8),
)


@given(seen=seen, least_s=st.floats(0, 1e4), more_s=st.floats(0, 1e5))
def test_bounds_hold(seen: Seen, least_s: float, more_s: float) -> None:
    bounds = Bounds(least_s=least_s, most_s=least_s + more_s)
    interval = plan_interval(seen, bounds, **GUESS)
    assert bounds.least_s <= interval.every_s <= bounds.most_s
    assert interval.because


def test_more_failures_more_saves_and_slower_saves_fewer() -> None:
    calm = Seen(stalls_s=(0.5,), failures=0, watched_s=100 * HOUR)
    rough = Seen(stalls_s=(0.5,), failures=50, watched_s=100 * HOUR)
    slow = Seen(stalls_s=(20.0,), failures=50, watched_s=100 * HOUR)
    calm_s, rough_s, slow_s = (plan_interval(one, Bounds(most_s=1e9), **GUESS).every_s for one in (calm, rough, slow))
    assert rough_s < calm_s and rough_s < slow_s


def test_a_save_is_not_begun_while_the_last_one_is_in_flight() -> None:
    interval = plan_interval(Seen(stalls_s=(0.001,), durable_s=(90.0,)), Bounds(), **GUESS)
    assert interval.every_s == 90.0 and "in flight" in interval.because


@settings(max_examples=25)
@given(
    durable_s=st.lists(st.floats(0.1, 100), min_size=1, max_size=30),
    step_s=st.floats(0.1, 30),
    deadline_s=st.floats(100, 10_000),
    margin_s=st.floats(0, 60),
)
def test_a_deadline_is_met_whenever_there_was_time(
    durable_s: list[float], step_s: float, deadline_s: float, margin_s: float
) -> None:
    """Train_steps one after the other; the first due save is begun late enough and never too late."""
    known = Seen(durable_s=tuple(durable_s))
    never = Interval(every_s=1e9, because="")
    latest_s = latest_start_s(deadline_s, p95(durable_s), margin_s)
    assume(latest_s > 2 * step_s)
    now_s, steps, due = 0.0, 0, None
    while due is None:
        now_s, steps = now_s + step_s, steps + 1
        moment = Moment(now_s=now_s, saved_s=0.0, unsaved_steps=steps, step_s=step_s, deadline_s=deadline_s)
        due = judge_save(moment, known, never, margin_s=margin_s, guess_durable_s=1.0)
    assert due.last and now_s <= latest_s
    assert now_s + step_s > latest_s  # not a train_step earlier than needed


def test_what_makes_a_save_due_and_what_does_not() -> None:
    def ask(now_s: float, **what: object) -> str:
        moment = Moment(**{"now_s": now_s, "saved_s": 0.0, "unsaved_steps": 5, "step_s": 2.0, **what})  # type: ignore[arg-type]
        due = judge_save(moment, Seen(durable_s=(10.0,)), EVERY_MINUTE, margin_s=20.0, guess_durable_s=1.0)
        return due.because if due else ""

    assert ask(59.0) == "" and ask(60.0) == "test"
    assert ask(1.0, hint="gpu-117 will be taken out") == "gpu-117 will be taken out"
    assert ask(1.0, hint="again", unsaved_steps=0) == ""
    assert ask(10.0, deadline_s=43.0) == "" and "33 s to the deadline" in ask(11.5, deadline_s=44.5, step_s=3.5)
    # past the last moment it is still tried: late is better than never
    assert "1 s to the deadline" in ask(41.0, deadline_s=42.0)


def test_percentiles() -> None:
    assert p95([3.0]) == 3.0 and p95([1.0, 9.0, 2.0]) == 9.0
    assert p95([float(i) for i in range(100)]) == 94.0
