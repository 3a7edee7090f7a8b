"""What one save is to write, laid out on every rank and agreed on by all of them, before anything is copied.

    state -- looks as the last one? -- one sum over the ranks --+-- everywhere yes: the last plan, the last places
                                                                +-- anywhere no: plan together, exchange places

A rank fills its state into the last plan before it asks the others, so that a save of a state that looks as the last
one costs one small collective. Nothing here touches a file or copies a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.image import Image
from outlast.checkpoint.planning import fill_plan, plan_anew, prepare_state
from outlast.checkpoint.share import Planned, Share, add_up
from outlast.checkpoint.staged_prints import Counting, Staged
from outlast.checkpoint.stager import Stager

OVERLAP_FROM_BYTES: Final = 32 << 20
"""A smaller share is copied at once: a thread beside the training costs as much."""


@dataclass(frozen=True)
class Draft:
    """One rank's part of a save, agreed on."""

    image: Image
    """Of the live state: it must be copied, or written, before that changes."""
    short: str
    """Why it does not fit into this rank's staging memory; '' where it does."""
    short_ranks: int
    """How many ranks it does not fit on."""
    overlaps: bool
    """Whether a copy beside the training pays: on any rank, so the same on all."""
    counting: Counting | None
    """How fingerprints of it are taken; None where the saver does not."""

    def list_staged(self) -> list[Staged]:
        """Its tensors, in the order of the plan's."""
        pieces = self.image.pieces[0] if self.image.pieces else []
        return [Staged(one.at_bytes, one.data) for one in pieces if isinstance(one.data, torch.Tensor)]


class Drafter:
    """Keeps what was agreed on for the last save."""

    def __init__(self, group: dist.ProcessGroup, stager: Stager) -> None:
        self._group, self._stager = group, stager
        self._planned: Planned | None = None

    def draft(
        self, state: dict[str, Any], directory: Path, content_metadata: dict[str, Any] | None, refused: str = ""
    ) -> Draft:
        """Collective. `state` is changed as Megatron's save does.

        refused: why there can be no save, told by the rank that knows; raises CheckpointError with it on all ranks.
        """
        prepared = prepare_state(state, content_metadata)
        share: Share | None = None
        image, moved, short = Image(), False, ""
        if self._planned is not None and self._planned.looks == prepared.looks:
            share = fill_plan(prepared, self._planned, self._group)
            image, moved, short = self._stager.lay_out(share)
        changed, failed, moved_ranks, short_ranks, large_ranks = add_up(
            self._group, share is None, bool(refused), moved, bool(short), image.size_bytes >= OVERLAP_FROM_BYTES
        )
        if failed:
            raise CheckpointError(_tell_all(self._group, refused))
        if changed or share is None:
            share = plan_anew(prepared, directory, self._group)
            self._planned = share.planned
            image, moved, short = self._stager.lay_out(share)
            large = image.size_bytes >= OVERLAP_FROM_BYTES
            moved_ranks, short_ranks, large_ranks = add_up(self._group, moved, bool(short), large)
        if moved_ranks:
            self._stager.exchange(share, image)
        return Draft(image, short, short_ranks, bool(large_ranks), share.planned.counting)


def _tell_all(group: dist.ProcessGroup, words: str) -> str:
    said: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(said, words, group=group)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
