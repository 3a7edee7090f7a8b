"""What one save is to write, laid out on every rank and agreed on by all of them, before a writer hears of it.

    state -- looks as the last one? -- begin: ask all -- agree --+-- everywhere yes: the last plan, the last places
                                    (copy meanwhile)            +-- anywhere no: plan together, exchange places

A rank fills its state into the last plan before it asks the others, so that a save of a state that looks as the last
one costs one small collective, and even that need not be waited for: such a guess may be copied while the others still
answer, and is nearly always right. Nothing here touches a file or copies a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.image import Image
from outlast.checkpoint.job import Region
from outlast.checkpoint.planning import Prepared, fill_plan, plan_anew, prepare_state
from outlast.checkpoint.share import Asked, Planned, Share, add_up
from outlast.checkpoint.staged_prints import Counting, Staged
from outlast.checkpoint.stager import Stager

OVERLAP_FROM_BYTES: Final = 32 << 20
"""A smaller share is copied at once: a thread beside the training costs as much."""


@dataclass(frozen=True)
class Guess:
    """One rank's part of a save if the state looks as the last one did, everywhere; the question is on its way."""

    prepared: Prepared
    share: Share | None
    """None where this rank knows that it does not."""
    image: Image
    index: tuple[Region, ...]
    short: str
    moved: bool
    asked: Asked
    refused: str

    @property
    def may_be_copied(self) -> bool:
        return self.share is not None and not (self.short or self.moved or self.refused)


@dataclass(frozen=True)
class Draft:
    """One rank's part of a save, agreed on."""

    image: Image
    """Of the live state: it must be copied, or written, before that changes. The guess's own where that was right."""
    index: tuple[Region, ...]
    """On rank 0, where in the image lies what is written after all shards."""
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

    def begin(self, state: dict[str, Any], content_metadata: dict[str, Any] | None, refused: str = "") -> Guess:
        """Collective, but waits for nobody. `state` is changed as Megatron's save does.

        refused: why there can be no save, told by the rank that knows.
        """
        prepared = prepare_state(state, content_metadata)
        share: Share | None = None
        image, moved, short = Image(), False, ""
        if self._planned is not None and self._planned.looks == prepared.looks:
            share = fill_plan(prepared, self._planned, self._group)
            image, moved, short = self._stager.lay_out(share)
        large = image.size_bytes >= OVERLAP_FROM_BYTES
        asked = Asked(self._group, share is None, bool(refused), moved, bool(short), large)
        index = () if short or moved else self._stager.add_index(image)
        return Guess(prepared, share, image, index, short, moved, asked, refused)

    def agree(self, guess: Guess, directory: Path) -> Draft:
        """Collective. Raises CheckpointError with what was refused, on all ranks."""
        share, image, index, short = guess.share, guess.image, guess.index, guess.short
        changed, failed, moved_ranks, short_ranks, large_ranks = guess.asked.answer()
        if failed:
            raise CheckpointError(_tell_all(self._group, guess.refused))
        if changed or share is None:
            share = plan_anew(guess.prepared, directory, self._group)
            self._planned = share.planned
        if changed or moved_ranks:  # laid out anew: what is there has the last index in it
            image, moved, short = self._stager.lay_out(share)
            large = image.size_bytes >= OVERLAP_FROM_BYTES
            moved_ranks, short_ranks, large_ranks = add_up(self._group, moved, bool(short), large)
            if moved_ranks:
                self._stager.exchange(share, image)
            index = () if short else self._stager.add_index(image)
        return Draft(image, index, short, short_ranks, bool(large_ranks), share.planned.counting)


def _tell_all(group: dist.ProcessGroup, words: str) -> str:
    said: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(said, words, group=group)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
