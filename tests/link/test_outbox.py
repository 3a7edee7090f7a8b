"""Signals kept for a supervisor: in order, bounded, nothing lost in silence. Commands: once, in the same words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.launchers.answers import KEPT, Answers
from outlast.launchers.outbox import MAX_SIGNAL_BYTES, SOURCE, Outbox
from outlast.reliability.model import Node, Rank, RankExited, Signal, SourceBlind, XidSeen
from outlast.reliability.wire import Done, RankStack

N = Node("n1")


def xid(code: int, at_s: float = 1.0, gpu: str = "0000:3b:00") -> XidSeen:
    return XidSeen(node=N, at_s=at_s, code=code, gpu=gpu)


def blind(n: int) -> SourceBlind:
    return SourceBlind(node=N, at_s=float(n), source="kmsg", why="rotated")


def exited(rank: int) -> RankExited:
    return RankExited(node=N, at_s=1.0, attempt=1, rank=Rank(rank), exit_code=1)


def signals(box: Outbox) -> list[Signal]:
    box.reconnect(0)
    return [h.signal for h in box.take()]


def test_each_is_sent_once_a_connection_and_again_on_the_next_until_it_is_logged() -> None:
    box = Outbox(N)
    box.add(exited(0))
    box.add(exited(1))
    assert [h.number for h in box.take()] == [1, 2] and box.take() == []
    box.ack(1)
    box.add(exited(2))
    assert [h.number for h in box.take()] == [3]
    box.reconnect(1)
    assert [h.number for h in box.take()] == [2, 3]
    box.reconnect(3)
    assert len(box) == 0 and box.take() == []
    assert box.add(exited(4)) == 4


def test_a_storm_keeps_its_first_lines_and_says_how_many_went() -> None:
    box = Outbox(N, limit=100)
    box.add(xid(79))
    box.add(exited(3))
    for n in range(10_000):
        box.add(xid(31 if n % 2 else 79, at_s=2.0 + n))
    kept = signals(box)
    assert len(kept) <= 100
    assert kept[0] == xid(79) and exited(3) in kept and any(isinstance(s, XidSeen) and s.code == 31 for s in kept)
    lost = sum(s.lost for s in kept if isinstance(s, SourceBlind))
    assert lost + sum(not isinstance(s, SourceBlind) for s in kept) == 10_002
    assert sum(isinstance(s, SourceBlind) for s in kept) == 1


def test_what_decides_least_goes_first_and_a_sent_count_is_not_changed() -> None:
    box = Outbox(N, limit=8)
    for n in range(8):
        box.add(blind(n) if n < 4 else exited(n))
    box.add(exited(8))
    told = [h.signal for h in box.take()]
    assert [s for s in told if isinstance(s, RankExited)] == [exited(n) for n in range(4, 9)]
    assert [s.lost for s in told if isinstance(s, SourceBlind) and s.source == SOURCE] == [2]
    for n in range(9, 12):
        box.add(exited(n))
    told = signals(box)
    assert next(s.lost for s in told if isinstance(s, SourceBlind) and s.source == SOURCE) == 2


def test_the_count_of_the_lost_survives_the_next_overflow() -> None:
    box = Outbox(N, limit=8)
    for n in range(100):
        box.add(exited(n))
    kept = signals(box)
    assert sum(s.lost for s in kept if isinstance(s, SourceBlind)) + sum(isinstance(s, RankExited) for s in kept) == 100
    for n in range(100, 200):  # what was told before was sent meanwhile, and stays as it was told
        box.add(exited(n))
    kept = signals(box)
    assert sum(s.lost for s in kept if isinstance(s, SourceBlind)) + sum(isinstance(s, RankExited) for s in kept) == 200


def test_what_cannot_be_sent_is_told_instead() -> None:
    box = Outbox(N)
    box.add(RankExited(node=N, at_s=5.0, attempt=1, rank=Rank(0), last_words="\udcff"))
    box.add(RankExited(node=N, at_s=6.0, attempt=1, rank=Rank(0), last_words="x" * (MAX_SIGNAL_BYTES + 1)))
    first, second = signals(box)
    assert isinstance(first, SourceBlind) and "could not be encoded" in first.why and first.lost == 1
    assert isinstance(second, SourceBlind) and "too large" in second.why


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(0, 50).map(lambda n: ("add", n)),
            st.just(("take", 0)),
            st.integers(0, 5).map(lambda n: ("ack", n)),
            st.integers(0, 5).map(lambda n: ("reconnect", n)),
        ),
        max_size=60,
    )
)
def test_whatever_happens_each_signal_is_logged_kept_or_counted(steps: list[tuple[str, int]]) -> None:
    """The other end logs what it gets, by number, as the switchboard does."""
    box, added, logged, top = Outbox(N, limit=12), 0, 0, 0
    lost = 0
    for what, n in steps:
        if what == "add":
            box.add(exited(n))
            added += 1
        elif what == "take":
            for heard in box.take():
                if heard.number > top:
                    top = heard.number
                    logged += not isinstance(heard.signal, SourceBlind)
                    lost += heard.signal.lost if isinstance(heard.signal, SourceBlind) else 0
        elif what == "ack":
            box.ack(max(0, top - n))
        else:
            box.reconnect(max(0, top - n))
        assert len(box) <= 13
    box.reconnect(top)
    for heard in box.take():
        logged += not isinstance(heard.signal, SourceBlind)
        lost += heard.signal.lost if isinstance(heard.signal, SourceBlind) else 0
    # a signal that was sent and then dropped before its ack counts on both sides: never fewer than there were
    assert logged <= added <= logged + lost


def test_a_command_begins_once_and_its_answers_are_remembered() -> None:
    answers = Answers()
    assert answers.begin((1, 7)) and not answers.begin((1, 7)) and answers.begin((2, 7))
    stack = RankStack(attempt=1, rank=Rank(0), process_state="S", stack="a\udcffb")
    assert answers.add((1, 7), stack) == RankStack(attempt=1, rank=Rank(0), process_state="S", stack="a\\udcffb")
    done = Done(command=7, ok=True)
    answers.add((1, 7), done)
    assert [type(a) for a in answers.said((1, 7))] == [RankStack, Done]
    assert answers.said((2, 7)) == ()


def test_old_answers_are_forgotten_and_running_commands_are_not() -> None:
    answers = Answers()
    answers.begin((1, 0))
    for n in range(1, 3 * KEPT):
        answers.begin((1, n))
        answers.add((1, n), Done(command=n, ok=True))
    assert len(answers._said) <= KEPT + 1
    assert not answers.begin((1, 0)) and answers.said((1, 3 * KEPT - 1))
