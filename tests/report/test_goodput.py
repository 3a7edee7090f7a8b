"""The ledger: every second once, for any log; and the right name for each in logs whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.reliability.actions import Grow, Hold, Requeue, Wait
from outlast.reliability.attempt import Event, State
from outlast.reliability.events import EpochTaken, LogEvent, RunEnded, StepsDone
from outlast.reliability.goodput import STATES, costs, ledger, reckon, spans
from outlast.reliability.model import CheckpointSeen, Layout, Node, OperatorAsked, Rank, RankPlaced, StepSeen
from outlast.reliability.timeline import trace
from outlast.reliability.verdict import Kind, Scope, Verdict

New = Callable[[], Any]
OPENING_S = 0.65
"""Three agents join and the first plan is made."""


def check_sums(events: Sequence[LogEvent]) -> None:
    """The law: contiguous spans from 0 to the wall time, no negative entry, the names sum to the wall time."""
    run = trace(events)
    at_s = 0.0
    for span in spans(run):
        assert span.from_s == at_s
        assert span.to_s > span.from_s
        at_s = span.to_s
    assert at_s == run.wall_s
    book = reckon(run, spans(run))
    assert all(entry.seconds_s >= 0 for entry in book.entries)
    assert [entry.state for entry in book.entries] == list(STATES)
    flat = book.flat()
    wall_s = flat.pop("wall_s")
    assert math.isclose(sum(flat.values()), wall_s, abs_tol=1e-6)
    assert 0 <= book.effective <= 1


def fault(**more: Any) -> Verdict:
    facts: dict[str, Any] = {"kind": Kind.APP_FAULT, "scope": Scope.RANK, "stops": True} | more
    return Verdict(key="k", rule="r", because="b", **facts)


def seconds(story: Any) -> dict[str, float]:
    check_sums(story.events)
    return {k: round(v, 6) for k, v in ledger(story.events).flat().items() if v > 1e-9}


# ---------------------------------------------------------------- the law


def test_every_prefix_of_the_demo_sums(demo_events: tuple[LogEvent, ...]) -> None:
    for length in range(0, len(demo_events) + 1, 3):
        check_sums(demo_events[:length])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_part_of_a_log_in_any_order_sums(demo_events: tuple[LogEvent, ...], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(demo_events), max_size=60))
    moved = [
        msgspec.structs.replace(
            event,
            at_s=event.at_s + data.draw(st.sampled_from([0.0, 0.0, -7200.0, 3600.0])),
            boot=data.draw(st.sampled_from(["b0070001", "b0070001", "other"])),
        )
        for event in chosen
    ]
    check_sums(moved)


STEPS = st.tuples(st.just("steps"), st.integers(1, 12), st.floats(0.01, 3))
ENDS = st.tuples(
    st.sampled_from(["fault", "grow", "hold", "requeue", "takeover"]), st.integers(0, 12), st.floats(0, 50)
)


@settings(max_examples=25, deadline=None)
@given(attempts=st.lists(st.tuples(STEPS, ENDS), min_size=1, max_size=6), cut=st.floats(0, 1))
def test_generated_histories_sum_and_lose_what_is_done_again(new_story: New, attempts: Any, cut: float) -> None:
    story = new_story()
    story.open()
    done = 0
    lost: dict[int, int] = {}
    for number, ((_, count, step_s), (ending, back, pause_s)) in enumerate(attempts, start=1):
        restore = max(0, done - back) if number > 1 else 0
        story.begin(number, ("a", "b"), restore_step=restore)
        story.train(number, restore + 1, restore + count, step_s=step_s)
        done = restore + count
        end_attempt(story, number, ending, pause_s)
        lost[number] = done
    story.say(RunEnded(outcome="failed", why="the story is over"))
    check_sums(story.events)
    check_sums(story.events[: int(cut * len(story.events))])
    run = trace(story.events)
    redone = sum(c.lost_s for c in costs(run, spans(run)))
    assert redone <= reckon(run, spans(run)).seconds("lost_work") + 1e-9


def end_attempt(story: Any, number: int, ending: str, pause_s: float) -> None:
    match ending:
        case "grow":
            story.act(Grow(layout=Layout(tp=2, dp=2), why="nodes are back"), 0)
        case "takeover":
            story.take_over("b", boot=f"boot-{number}", mono_from_s=pause_s, skew_s=-3 * pause_s, after_s=pause_s)
            story.judge(number, fault())
        case _:
            story.judge(number, fault(), after_s=0.3)
    story.stop(number)
    match ending:
        case "hold":
            story.act(Hold(why="three times the same"), number)
        case "requeue":
            story.act(Requeue(exclude=(Node("a"),), why="no nodes"), number)
    story.now_s += pause_s


# ---------------------------------------------------------------- the names


def test_the_demo_is_accounted_to_the_hundredth(demo_events: tuple[LogEvent, ...]) -> None:
    flat = {k: round(v, 2) for k, v in ledger(demo_events).flat().items()}
    assert flat["train"] == 17.80
    assert flat["lost_work"] == 3.50  # 2 + 4 + 8 train_steps of 0.25 s
    assert flat["gate"] == 0.40
    assert flat["start"] == 2.40
    assert flat["first_step"] == 3.52
    assert flat["stop"] == 1.60
    assert flat["other"] <= 0.01 * flat["wall_s"]


def test_what_each_incident_of_the_demo_cost(demo_events: tuple[LogEvent, ...]) -> None:
    run = trace(demo_events)
    swap, restart, shrink = costs(run, spans(run))
    assert (swap.lost_steps, restart.lost_steps, shrink.lost_steps) == (2, 4, 8)
    assert swap.lost_s == pytest.approx(0.5)
    assert swap.recovery_s == pytest.approx(2.2)
    assert swap.rank_s == pytest.approx(4 * 2.7)


def test_a_fault_before_the_first_step_is_detected_from_its_first_sign(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    sign = story.see(OperatorAsked(at_s=0, what="note", who="test"), after_s=1.0)
    story.judge(1, fault(evidence=(sign,)), after_s=2.0)
    story.stop(1)
    names = seconds(story)
    assert names["first_step"] == 1.0
    assert names["detect"] == pytest.approx(2.01)


def test_waiting_for_a_person_is_wait_until_the_run_is_continued(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 5)
    story.judge(1, fault(hold=True))
    story.stop(1)
    story.act(Hold(why="a person is needed"), 1)
    story.see(OperatorAsked(at_s=0, what="continue", who="me"), after_s=100)
    story.begin(2, ("a", "b"), restore_step=0)
    names = seconds(story)
    assert names["wait"] == pytest.approx(OPENING_S + 100.01)
    assert names["load"] == pytest.approx(0.3 + 0.05 + 0.3)


def test_waiting_for_a_spare_is_wait(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 5)
    story.judge(1, fault())
    story.act(Wait(until_s=1e10, why="a spare may come"), 1)
    story.stop(1)
    story.now_s += 40
    story.begin(2, ("a", "b"))
    assert seconds(story)["wait"] == pytest.approx(OPENING_S + 40.05)


def test_a_planned_restart_detects_nothing(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 10)
    story.act(Grow(layout=Layout(tp=2, dp=2), why="nodes are back"), 0)
    story.stop(1)
    story.begin(2, ("a", "b"), restore_step=10)
    names = seconds(story)
    assert "detect" not in names
    assert names["lost_work"] == pytest.approx(0.04, abs=0.01)  # the step that was given up half-way


def test_the_wait_for_the_last_save_is_save(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 60, save_every=0)
    story.see(CheckpointSeen(at_s=0, train_step=60, verified=True, path="p"), after_s=5)
    story.finish(1)
    names = seconds(story)
    assert names["save"] == pytest.approx(5.02)
    assert names["stop"] == pytest.approx(0.4)


def test_steps_hidden_by_a_dead_supervisor_are_training(new_story: New) -> None:
    """Killed at step 5; the ranks went on; the successor hears ten steps with their ages."""
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 5, save_every=0)
    story.take_over("b", boot="b0070001", mono_from_s=story.mono_from_s, skew_s=0, after_s=2.48)
    steps = tuple(StepSeen(train_step=5 + k, step_s=0.25, age_s=0.25 * (10 - k)) for k in range(1, 11))
    story.say(StepsDone(attempt=1, steps=steps))
    names = seconds(story)
    assert names["train"] == pytest.approx(14 * 0.25)
    assert "detect" not in names and "other" not in names


def test_clocks_of_two_machines_that_disagree_show_as_other(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 5, save_every=0)
    story.take_over("b", boot="far", mono_from_s=0, skew_s=3600, after_s=0.23)
    story.say(StepsDone(attempt=1, steps=(StepSeen(train_step=6, step_s=0.25),)))
    names = seconds(story)
    assert names["train"] == pytest.approx(5 * 0.25)
    assert names["other"] == pytest.approx(3600)
    assert ledger(story.events).unsure_s == pytest.approx(3600.23)


def test_a_clock_set_back_takes_no_time_away(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 5)
    before_s = ledger(story.events).wall_s
    story.take_over("b", boot="far", mono_from_s=0, skew_s=-9999, after_s=0.5)
    assert ledger(story.events).wall_s == before_s
    check_sums(story.events)


def test_time_in_the_queue_after_the_allocation_was_lost_is_wait(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 5, save_every=0)
    story.take_over("c", boot="far", mono_from_s=0, skew_s=0, after_s=500)
    story.judge(1, fault(scope=Scope.ALLOCATION))
    story.stop(1)
    names = seconds(story)
    assert names["wait"] == pytest.approx(OPENING_S + 500)
    assert names["detect"] == pytest.approx(0.03)


def test_a_fenced_writer_and_the_time_after_the_end_do_not_count(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 60)
    story.finish(1)
    before = ledger(story.events)
    story.epoch = 0
    story.say(EpochTaken(epoch=0, node="z", pid=1, why="a fenced one"), after_s=9)
    assert ledger(story.events) == before
    story.epoch = 1
    story.say(EpochTaken(epoch=1, node="z", pid=1, why="looked again"), after_s=9)
    assert ledger(story.events) == before


def test_a_run_that_was_stopped_and_continued_was_not_running_in_between(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 10)
    story.stop(1)
    story.say(RunEnded(outcome="stopped", why="asked"))
    before_s = ledger(story.events).wall_s
    story.epoch = 2
    story.say(EpochTaken(epoch=2, node="a", pid=1, why="continued"), after_s=86_400)
    story.begin(2, ("a", "b"), restore_step=10)
    assert ledger(story.events).wall_s == pytest.approx(before_s + 1.05)
    check_sums(story.events)


def test_a_program_without_phases_still_shows_its_first_step(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.events = [e for e in story.events if getattr(e.body, "state", None) not in (State.LOADING, State.FIRST_STEP)]
    story.train(1, 1, 3, save_every=0)
    names = seconds(story)
    assert names["first_step"] == pytest.approx(0.25)
    assert "load" not in names


def test_a_wall_clock_that_is_set_on_one_machine_changes_nothing(demo_events: tuple[LogEvent, ...]) -> None:
    later = [msgspec.structs.replace(e, at_s=e.at_s + 7200) if e.seq > 50 else e for e in demo_events]
    assert ledger(later) == ledger(demo_events)


def test_a_node_that_leaves_at_a_checkpoint_is_not_a_detection(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 10)
    story.judge(1, fault(kind=Kind.HARDWARE_SUSPECT, at_checkpoint=True))
    story.now_s += 0.2
    story.stop(1)
    story.begin(2, ("a", "c"), restore_step=10)
    names = seconds(story)
    assert "detect" not in names
    assert names["lost_work"] == pytest.approx(0.23)  # the step that was given up half-way


def test_a_program_that_tells_no_steps_trained_once_its_ranks_were_placed(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.events = [e for e in story.events if getattr(e.body, "state", None) not in (State.LOADING, State.FIRST_STEP)]
    story.see(RankPlaced(node=Node("a"), at_s=0, attempt=1, rank=Rank(0), pid=1))
    story.move(1, Event.RANKS_FINISHED, after_s=50)
    names = seconds(story)
    assert names["train"] == pytest.approx(50)
    assert names["start"] == pytest.approx(0.9)
