"""Resumed at every save: the same layout goes on bit for bit, another one follows the reference and drops no sample."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.megatron]

STEPS, EVERY, BATCH = 20, 4, 8
STABLE = ("--train-steps", str(STEPS), "--lr", "5e-4")
"""Low enough a learning rate that rounding, after a change of layout, does not grow from step to step."""
HOME = (("--tp", "2"), 4)
OTHERS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("--tp", "2"), 2),
    ((), 2),
    (("--pp", "2"), 4),
    (("--tp", "2", "--micro-batch", "2"), 4),
)
"""Layout and ranks: fewer replicas, no tensor parallelism, pipeline stages, larger micro batches."""


@dataclass(frozen=True)
class Whole:
    """The undisturbed run, in the layout HOME."""

    losses: dict[int, float]
    digests: list[str]
    checkpoints: Path


@pytest.fixture(scope="module")
def whole(fork_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("whole")
    done = fork_ranks(*HOME[0], *STABLE, *saved_in(root), ranks=HOME[1]).checked()
    assert list(done.losses) == list(range(1, STEPS + 1)) and done.losses[STEPS] < done.losses[1]
    return Whole(done.losses, done.digests, root)


def saved_in(root: Path) -> tuple[str, ...]:
    return "--save-every", str(EVERY), "--checkpoint-dir", str(root)


def named(train_step: int) -> str:
    return f"iter_{train_step:07d}"


@pytest.mark.parametrize("train_step", range(EVERY, STEPS, EVERY))
def test_in_the_same_layout_it_is_bit_identical(fork_ranks: Any, whole: Whole, train_step: int) -> None:
    restore = ("--restore-dir", str(whole.checkpoints / named(train_step)))
    resumed = fork_ranks(*HOME[0], *STABLE, *restore, ranks=HOME[1]).checked()
    assert resumed.losses == {step: whole.losses[step] for step in range(train_step + 1, STEPS + 1)}
    assert resumed.digests == whole.digests


def test_in_another_layout_after_every_save_each_sample_is_consumed_once(
    fork_ranks: Any, whole: Whole, tmp_path: Path
) -> None:
    """One run that changes its layout at each save, from one checkpoint of its own to the next."""
    checkpoints, restore, losses, lines = tmp_path / "ck", (), {}, []
    for turn, (layout, ranks) in enumerate((HOME, *OTHERS)):
        log = tmp_path / f"samples{turn}"
        until = ("--train-steps", str((turn + 1) * EVERY))
        attempt = fork_ranks(
            *STABLE,
            *until,
            *layout,
            *restore,
            *saved_in(checkpoints),
            ranks=ranks,
            env={"OUTLAST_SAMPLE_LOG": str(log)},
        ).checked()
        assert list(attempt.losses) == list(range(turn * EVERY + 1, (turn + 1) * EVERY + 1))
        losses |= attempt.losses
        lines += [json.loads(line) for path in sorted(log.glob("*.jsonl")) for line in path.read_text().splitlines()]
        restore = ("--restore-dir", str(checkpoints / named((turn + 1) * EVERY)))
    for step in range(1, STEPS + 1):
        read = sorted(s for line in lines if line["train_step"] == step for s in line["samples"])
        assert read == list(range((step - 1) * BATCH, step * BATCH))
        assert abs(losses[step] - whole.losses[step]) <= 1e-5 * whole.losses[step], f"train_step {step}"
    assert losses != whole.losses, "a change of layout that changes no bit has not happened"
