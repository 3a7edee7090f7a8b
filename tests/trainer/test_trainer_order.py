"""Which samples a train_step sees depends on (seed, samples consumed) alone: tested without a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.launchers.trainer_order import microbatches, rank_ordinals, sample_at


@given(samples=st.integers(1, 300), seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_each_epoch_holds_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    first = epoch * samples
    seen = [sample_at(ordinal, seed=seed, samples=samples) for ordinal in range(first, first + samples)]
    assert sorted(seen) == list(range(samples))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        return [sample_at(number * 500 + place, seed=seed, samples=500) for place in range(500)]

    assert epoch(0, 1) != epoch(1, 1)
    assert epoch(0, 1) != epoch(0, 2)
    assert epoch(0, 1) != list(range(500))
    # no tail of the corpus is left to the end: the first tenth of an epoch already reaches over all of it
    assert max(epoch(0, 1)[:50]) > 400
    assert min(epoch(0, 1)[:50]) < 100


def test_the_order_is_pinned() -> None:
    # a change here breaks every run that is restored across it
    assert [sample_at(o, seed=1234, samples=1000) for o in (0, 1, 2, 999, 1000)] == PINNED


PINNED = [519, 679, 944, 350, 898]


LAYOUTS = st.sampled_from([(1, 1), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1), (3, 8), (6, 2)])
"""(dp, micro_batch); global batch 48 or a multiple."""


@given(layout=LAYOUTS, consumed=st.integers(0, 10_000), factor=st.integers(1, 3))
def test_a_step_reads_the_next_global_batch_in_any_layout(layout: tuple[int, int], consumed: int, factor: int) -> None:
    dp, micro_batch = layout
    global_batch = 48 * factor
    in_order = [
        ordinal
        for microbatch in range(microbatches(global_batch=global_batch, micro_batch=micro_batch, dp=dp))
        for dp_rank in range(dp)
        for ordinal in rank_ordinals(consumed, microbatch=microbatch, micro_batch=micro_batch, dp=dp, dp_rank=dp_rank)
    ]
    assert in_order == list(range(consumed, consumed + global_batch))


@given(
    steps=st.lists(st.sampled_from([(1, 4), (2, 4), (4, 1), (3, 8)]), min_size=1, max_size=20),
    batch=st.sampled_from([24, 48]),
)
def test_resizes_and_restores_consume_every_sample_once(steps: list[tuple[int, int]], batch: int) -> None:
    consumed, read = 0, []
    for dp, micro_batch in steps:  # each train_step in another layout, as after a restore
        for dp_rank in range(dp):
            for microbatch in range(microbatches(global_batch=batch, micro_batch=micro_batch, dp=dp)):
                read += rank_ordinals(consumed, microbatch=microbatch, micro_batch=micro_batch, dp=dp, dp_rank=dp_rank)
        consumed += batch
    assert sorted(read) == list(range(len(steps) * batch))


def test_a_batch_that_does_not_divide_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"global batch 8 is not a multiple of micro batch 2 x dp 3.*--micro-batch"):
        microbatches(global_batch=8, micro_batch=2, dp=3)
    with pytest.raises(ValueError, match="not a multiple"):
        microbatches(global_batch=2, micro_batch=4, dp=1)
    with pytest.raises(ValueError, match="at least one sample"):
        sample_at(0, seed=1, samples=0)
