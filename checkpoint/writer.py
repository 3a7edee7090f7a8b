"""Saving: a state dict of all ranks becomes a committed checkpoint while training goes on.

    every rank   save() -- plan together, fork a writer -- train on -- poll() -- train on -- poll() -> train_step
    its writer           write, hash, fsync own shard ......|
    rank 0's writer                                         wait for all, then .metadata, manifest.json, COMMITTED

The writer is a forked child: it sees the state as it was at the fork (copy on write), needs no lock of the trainer's
and dies with its rank (PR_SET_PDEATHSIG). Right comes before fast here; a save costs the fork and the page copies
that follow. Files are what Megatron's `torch_dist` writes, and load without us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from outlast.checkpoint.manifest import DataFrontier, Identity
from outlast.reliability.model import Layout


class Saver:
    """Saves of one training process group, one in flight at a time. All methods are collective unless they say so."""

    def __init__(
        self,
        directory: Path | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        keep_last: int = 0,
        keep: tuple[int, ...] = (),
        on_durable: Callable[[int, float, float], None] | None = None,
        on_failure: str = "raise",
        timeout_s: float = 600.0,
    ) -> None:
        """`directory` holds `iter_%07d` and is seen by all ranks.

        process_group: all ranks, gloo (or able to do object collectives); None makes a gloo group of its own.
        keep_last: rank 0 prunes older checkpoints after each commit; 0 leaves that to the supervisor. keep: train_steps
        never pruned (the one restored from).
        on_durable(train_step, hold_s, durable_s) is called on every rank, inside poll() or finish().
        on_failure: 'raise' CheckpointError on all ranks, or 'skip': log it, keep it in `last_failure`, train on.
        """
        raise NotImplementedError

    def save(
        self,
        sharded_state_dict: dict[str, Any],
        *,
        train_step: int,
        samples: int,
        layout: Layout,
        identity: Identity | None = None,
        pins: Mapping[str, str] | None = None,
        parents: tuple[str, ...] = (),
        data_frontier: DataFrontier | None = None,
        content_metadata: dict[str, Any] | None = None,
    ) -> float:
        """Start a save of this state; returns the seconds that the train loop was held.

        A save still in flight is finished first. Everything that is not a ShardedTensor/ShardedObject goes to
        common.pt from rank 0. When it returns, the state may be changed freely. data_frontier None means
        consumed=samples, nothing skipped.
        """
        raise NotImplementedError

    @property
    def in_flight(self) -> int | None:
        """Train_step of the save in flight; None where there is none. Not collective."""
        raise NotImplementedError

    @property
    def last_failure(self) -> str:
        """Why the last save failed, with on_failure='skip'; '' where it did not. Not collective."""
        raise NotImplementedError

    def poll(self) -> int | None:
        """The train_step that has just become durable, else None. Call it once a train_step on all ranks.

        Costs nothing while no save is in flight, one small all-reduce while one is. Never blocks on a writer.
        """
        raise NotImplementedError

    def finish(self, timeout_s: float | None = None) -> int | None:
        """Wait for the save in flight: its train_step, or None where none was, or where it failed and was skipped."""
        raise NotImplementedError

    def close(self) -> None:
        """End this rank's writer at once; a save in flight stays uncommitted. Not collective. Safe to call twice."""
        raise NotImplementedError
