"""What the log says of saves: which became durable, what each cost, and how often attempts end without one. Pure.

A part of the evidence (evidence.py folds it): the interval between saves is computed from it (saving.py), and after a
fault that may have spoiled numbers it tells which checkpoints the suspect had a hand in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from outlast.reliability.model import CheckpointSeen, Node, Noun, Plan, StepSeen

KEPT_SAVES: Final = 64
SAVE_FIRST: Final = "save first"
"""Begins the reason of a stop for which the ranks save."""
AFTER_CHECKPOINT: Final = "checkpoint"
"""Begins the reason of a stop that waited for a checkpoint to be durable."""


class SaveFact(Noun, frozen=True, kw_only=True):
    """A checkpoint that became durable."""

    seq: int
    """Log number of the line that said so."""
    train_step: int
    attempt: int
    nodes: tuple[Node, ...]
    """Of the attempt that saved it."""
    hold_s: float
    durable_s: float


class SavesSeen(Noun, frozen=True, kw_only=True):
    saves: tuple[SaveFact, ...] = ()
    """The newest durable checkpoints, oldest first."""
    trained_s: float = 0.0
    """Time spent in train_steps, those that were done again too."""
    failures: int = 0
    """Attempts that ended without having been asked to at a checkpoint, and not because all was done."""


def with_save(seen: SavesSeen, seq: int, plan: Plan | None, checkpoint: CheckpointSeen) -> SavesSeen:
    fact = SaveFact(
        seq=seq,
        train_step=checkpoint.train_step,
        attempt=plan.attempt if plan else 0,
        nodes=plan.nodes if plan else (),
        hold_s=checkpoint.hold_s,
        durable_s=checkpoint.durable_s,
    )
    return msgspec.structs.replace(seen, saves=(*seen.saves, fact)[-KEPT_SAVES:])


def with_steps(seen: SavesSeen, steps: Sequence[StepSeen]) -> SavesSeen:
    return msgspec.structs.replace(seen, trained_s=seen.trained_s + sum(s.step_s + s.save_s for s in steps))


def with_end(seen: SavesSeen, *, finished: bool, stopped: str) -> SavesSeen:
    """An attempt is over and another one follows; `stopped`: the reason of its stop, '' where its ranks ended."""
    planned = finished or stopped.startswith((SAVE_FIRST, AFTER_CHECKPOINT))
    return seen if planned else msgspec.structs.replace(seen, failures=seen.failures + 1)
