"""What a run's log says to a person: state, lineage, incidents; also when the log is incomplete or hostile."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.reliability import model as m
from outlast.reliability.actions import (
    Action,
    Advise,
    Drain,
    EndRun,
    Feed,
    Grow,
    Hold,
    LeaveIt,
    Requeue,
    RestartInPlace,
    RollBack,
    Shrink,
    Swap,
    Wait,
)
from outlast.reliability.attempt import State
from outlast.reliability.events import AttemptPlanned, Judged, LogEvent, Outcome, StepsDone
from outlast.reliability.history import fold
from outlast.reliability.model import Node, OperatorAsked
from outlast.reliability.verdict import Kind, Scope, Verdict
from outlast.reliability.wording import duration, tell_action, tell_signal, visible

New = Callable[[], Any]
STATES = {*map(str, State), "waiting", "held", "restarting", "finished", "stopped", "cancelled", "failed"}


def test_the_demo_in_numbers(demo_events: tuple[LogEvent, ...]) -> None:
    view = fold(demo_events)
    assert (view.state, view.step, view.target, view.attempt) == ("finished", 60, 60, 4)
    assert (view.in_use, view.spare_now, view.convicted) == (0, 1, (Node("a"), Node("c")))
    assert [s.train_step for s in view.steps] == list(range(1, 61))
    assert view.steps[-1].step_s == 0.45
    assert [(a.first_step, a.last_step) for a in view.attempts] == [(1, 22), (21, 34), (31, 48), (41, 60)]
    assert view.samples is not None and view.samples.once and view.samples.total == 480


def test_an_incident_names_evidence_actions_and_what_came_after(demo_events: tuple[LogEvent, ...]) -> None:
    view = fold(demo_events)
    swap, _, shrink = view.incidents
    assert swap.evidence[0].text == "kmsg a 0000:3b:00 XID 79 GPU has fallen off the bus."
    assert [act.text for act in swap.acts] == ["swap a -> c"]
    assert (swap.attempt, swap.next_attempt, swap.restored_step) == (1, 2, 20)
    assert [(act.ok, act.detail) for act in shrink.acts] == [(True, ""), (False, "no scheduler")]
    assert view.incident(3) is shrink
    assert view.incident(4) is None


def test_while_it_trains_the_spare_is_counted_apart(demo_events: tuple[LogEvent, ...]) -> None:
    begun = next(i for i, e in enumerate(demo_events) if isinstance(e.body, StepsDone))
    view = fold(demo_events[: begun + 3])
    assert (view.state, view.in_use, view.spare_now) == ("training", 2, 1)


def test_a_held_run_says_why_until_a_person_continues_it(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 3)
    verdict = Verdict(key="k", kind=Kind.APP_FAULT, scope=Scope.TRAIN_STEP, rule="r", because="b", stops=True)
    story.judge(1, verdict)
    story.act(Hold(why="the same exception three times"), 1)
    story.stop(1)
    assert (fold(story.events).state, fold(story.events).why) == ("held", "the same exception three times")
    story.see(OperatorAsked(at_s=0, what="continue", who="me"))
    assert fold(story.events).state == "restarting"


def test_samples_that_were_skipped_or_doubled_are_named(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 3)
    story.train(1, 5, 6)
    samples = fold(story.events).samples
    assert samples is not None and not samples.once
    assert samples.problem == "train_step 5 begins at sample 32, expected 24"


def test_what_a_later_attempt_took_back_is_not_in_the_lineage(new_story: New) -> None:
    story = new_story()
    story.open()
    story.begin(1, ("a", "b"))
    story.train(1, 1, 25)
    story.stop(1)
    story.begin(2, ("a", "b"), restore_step=10)
    story.train(2, 11, 12)
    assert fold(story.events).step == 12


@pytest.mark.parametrize("seed", range(12))
def test_any_part_of_a_log_in_any_order_gives_a_view(demo_events: tuple[LogEvent, ...], seed: int) -> None:
    dice = random.Random(seed)
    part = dice.sample(demo_events, k=dice.randrange(0, len(demo_events)))
    unplanned = [event for event in demo_events if not isinstance(event.body, AttemptPlanned)]
    without_outcomes = [event for event in part if not isinstance(event.body, Outcome)]
    for events in (part, unplanned, without_outcomes):
        view = fold(events)
        told = [event.body for event in events]
        assert view.state in STATES
        assert {i.number for i in view.incidents} <= {b.incident for b in told if isinstance(b, Judged)}
        named = {b.plan.attempt if isinstance(b, AttemptPlanned) else getattr(b, "attempt", 0) for b in told}
        done = {s.train_step for b in told if isinstance(b, StepsDone) for s in b.steps}
        assert {a.plan.attempt for a in view.attempts} <= named
        assert {s.train_step for s in view.steps} <= done
        assert all(a.to_s >= a.from_s for a in view.attempts)


# ---------------------------------------------------------------- words


@given(st.text())
def test_visible_text_steers_no_terminal(text: str) -> None:
    seen = visible(text)
    assert not any(
        c != "\n" and c != "\t" and (ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u200b") for c in seen
    )
    assert len(seen) <= 6 * 4000


def test_every_signal_and_action_is_one_line() -> None:
    node = Node("a\x1b[2J\n")
    signals: list[m.Signal] = [
        m.XidSeen(node=node, at_s=0, code=63, caused_by=48, text="a\nb"),
        m.SourceBlind(node=node, at_s=0, source="kmsg", why="EPIPE", lost=3),
        m.RankExited(node=node, at_s=0, attempt=1, rank=m.Rank(1), posix_signal=9, exception="a\nb"),
        m.RankPlaced(node=node, at_s=0, attempt=1, rank=m.Rank(1), pid=7),
        m.AgentJoined(node=node, at_s=0, job=m.JobId("1"), incarnation="x"),
        m.AgentLost(node=node, at_s=0, silent_s=15, why="lease"),
        m.NoProgress(at_s=0, attempt=1, stalled_s=90, limit_s=60, suspect=m.Rank(3), node=node, how="stopped (T)"),
        m.NodeState(node=node, at_s=0, state="idle", flags=("drain",), reason="DIMM\x07", reason_user="root"),
        m.JobState(job=m.JobId("1"), at_s=0, state="TIMEOUT", reason="x"),
        m.GateSeen(node=node, at_s=0, attempt=1, outcome=m.GateOutcome.FAULT, findings=("no room\n", "b")),
        m.NodeNotClear(node=node, at_s=0, attempt=1, pids=(1, 2), why="GPU memory in use"),
        m.CheckpointSeen(at_s=0, train_step=10, verified=False, path="p", why="short file"),
        m.OperatorAsked(at_s=0, what="drain", who="root", node=node, note="x"),
    ]
    actions: list[Action] = [
        LeaveIt(why="w\n"),
        RestartInPlace(why="w"),
        Swap(out=(node,), into=(), why="w", at_checkpoint=True),
        Shrink(out=tuple(Node(f"n{i}") for i in range(12)), layout=m.Layout(dp=2), feed=2, why="w"),
        Grow(layout=m.Layout(), why="w"),
        Requeue(exclude=(node,), why="w"),
        RollBack(quarantine=10, why="w"),
        Hold(why="w"),
        Wait(until_s=1e300, why="w"),
        Drain(node=node, reason="w"),
        Advise(node=node, command="c", why="w"),
        Feed(nodes=1, exclude=(), why="w"),
        EndRun(outcome="stopped", why="w"),
    ]
    for text in (*map(tell_signal, signals), *map(tell_action, actions)):
        assert text and "\n" not in text and "\x1b" not in text and "\x07" not in text


DURATIONS = [
    (None, "-"),
    (0.0, "0 s"),
    (0.031, "31 ms"),
    (0.31, "0.31 s"),
    (2.14, "2.1 s"),
    (71, "71 s"),
    (119.6, "2 min"),
    (725, "12 min 5 s"),
    (3599.9, "1 h"),
    (7440, "2 h 4 min"),
    (86399, "1 d"),
    (262800, "3 d 1 h"),
    (86400 * 1000, "1000 d"),
]


@pytest.mark.parametrize(("seconds_s", "words"), DURATIONS)
def test_durations_as_people_say_them(seconds_s: float | None, words: str) -> None:
    assert duration(seconds_s) == words
