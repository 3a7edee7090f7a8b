"""Whom a hang is due to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.monitors.hang import StackFacts, find
from outlast.reliability.model import Rank


def rank(number: int, state: str = "S", waiting: bool | None = True, step: int = 10) -> StackFacts:
    return StackFacts(rank=Rank(number), process_state=state, waiting=waiting, train_step=step)


@pytest.mark.parametrize(
    ("ranks", "suspect", "how"),
    [
        ([rank(0), rank(1, "T"), rank(2)], 1, "stopped"),
        ([rank(0), rank(1, "T", False), rank(2, waiting=False)], 1, "stopped"),
        ([rank(0), rank(1), rank(2, "")], 2, "dead"),
        ([rank(0), rank(1, "Z"), rank(2, "T")], 2, "stopped"),
        ([rank(0), rank(1, "D", None), rank(2)], 1, "stuck in the kernel"),
        ([rank(0), rank(1, "R", False), rank(2)], 1, "waits for nobody while 2 others wait"),
        ([rank(0), rank(1, "R", False), rank(2, waiting=None)], 1, "could not be told"),
        ([rank(0), rank(1, step=9), rank(2)], 1, "train_step 9"),
        ([rank(0, waiting=False), rank(1, waiting=False, step=8), rank(2)], 1, "train_step 8"),
    ],
)
def test_one_rank_stands_out(ranks: list[StackFacts], suspect: int, how: str) -> None:
    found, why = find(ranks)
    assert found == suspect and how in why


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([], "no rank answered"),
        ([rank(0), rank(1)], "wait for each other"),
        ([rank(0, "T"), rank(1, "T"), rank(2)], "alike"),
        ([rank(0, "T"), rank(1, "T")], "every rank"),
        ([rank(0, step=9), rank(1, step=9), rank(2)], "no single rank"),
        ([rank(0)], "the only rank"),
        ([rank(0, waiting=None), rank(1, waiting=None)], "could not be told"),
    ],
)
def test_an_unclear_picture_names_nobody(ranks: list[StackFacts], why: str) -> None:
    found, said = find(ranks)
    assert found is None and why in said


FACTS = st.builds(
    StackFacts,
    rank=st.integers(0, 9).map(Rank),
    process_state=st.sampled_from(["R", "S", "D", "T", "t", "Z", "X", "", "?"]),
    waiting=st.sampled_from([True, False, None]),
    train_step=st.integers(-1, 5),
)


@given(st.lists(FACTS, max_size=10, unique_by=lambda f: f.rank), st.randoms())
def test_the_order_of_answers_does_not_matter(ranks: list[StackFacts], random: object) -> None:
    found, why = find(ranks)
    assert why
    assert found is None or found in {r.rank for r in ranks}
    assert find(sorted(ranks, key=lambda r: -r.rank))[0] == found
