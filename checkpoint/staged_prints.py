"""Fingerprints of what a save has staged, taken beside training and stored when it is durable.

    copy whole -- thread: each of this rank's items, straight from the staging memory -- durable: one sum over all ranks
                                                                                      -- rank 0: fingerprints.json

Each item is written by one rank alone, so each element is counted once. Where an item lies in its tensor is told by
dcp_places.py, not by the index that is written: a fault in that does not agree with itself. A save that was written at
once, without staging memory, is counted in the hold.

Without fingerprints a checkpoint is whole: whatever fails here is told in the log and costs no save.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from outlast.checkpoint.dcp_places import Place
from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.fingerprint import SCHEME, Bits, Part, part_of
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.prints import Prints, TensorPrint, write_prints
from outlast.checkpoint.raw_bits import raw_bits

log = logging.getLogger(__name__)

_UNSIGNED: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is known of a tensor without its values."""

    dtype: str
    """As torch names it: float32, bfloat16."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Counting:
    """How this rank's tensors are counted; the same for every save of one plan."""

    rows: tuple[int, ...]
    """Of each tensor of this rank's items, in their order: its number among all tensors of the checkpoint."""
    places: tuple[Place, ...]
    """Of each: where it lies in its tensor."""
    count: int
    """Of all tensors."""
    kinds: dict[str, Kind]
    """All tensors in the order of their numbers; rank 0 alone has it."""


@dataclass(frozen=True)
class Staged:
    """A tensor of this rank in staging memory, or, where there was no room, the live one."""

    at_bytes: int
    tensor: torch.Tensor


class StagedPrints:
    """The fingerprints of one save at a time, of one rank. `store` is collective."""

    def __init__(self, group: dist.ProcessGroup, *, wanted: bool) -> None:
        self._group, self._wanted = group, wanted
        self._thread: threading.Thread | None = None
        self._stop = False
        self._sums: np.ndarray[Any, np.dtype[np.uint64]] | None = None
        self._counting: Counting | None = None

    def expect(
        self, counting: Counting | None, list_staged: Callable[[], list[Staged]], memory: memoryview | None
    ) -> None:
        """What will be staged. memory: the staging memory; None: the live tensors are counted now."""
        self.drop()
        if counting is None or not self._wanted:
            return
        self._counting, self._stop = counting, False
        if memory is None:
            self._count(counting, list_staged, None)
        else:
            self._thread = threading.Thread(
                target=self._count, args=(counting, list_staged, memory), name="fingerprints", daemon=True
            )

    def begin(self) -> None:
        """The copy is whole."""
        if self._thread is not None:
            self._thread.start()

    def is_done(self) -> bool:
        """Whether store() would not wait."""
        return self._thread is None or not self._thread.is_alive()

    def drop(self) -> None:
        """Leave off: nobody needs them."""
        self._stop = True
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._thread = self._sums = self._counting = None

    def store(self, directory: Path, train_step: int) -> None:
        """Add up over all ranks, and write them beside the manifest. Collective."""
        if self._counting is None:
            return
        if self._thread is not None:
            self._thread.join()
        counting, own = self._counting, self._sums
        if own is None:
            own = np.zeros((counting.count, 3), np.uint64)
        sums = torch.from_numpy(own.view(np.int64))  # sums wrap around the same way
        try:
            dist.all_reduce(sums, group=self._group)
        except RuntimeError as e:
            raise CheckpointError(f"the ranks could not add up the fingerprints of a save: {e}") from e
        self.drop()
        if dist.get_rank() == 0:
            _write(directory, _as_prints(counting.kinds, sums.numpy().view(np.uint64), train_step))

    def _count(self, counting: Counting, list_staged: Callable[[], list[Staged]], memory: memoryview | None) -> None:
        sums = np.zeros((counting.count, 3), np.uint64)
        try:
            for row, place, one in zip(counting.rows, counting.places, list_staged(), strict=True):
                if place.why_not:
                    sums[row, 2] = 1
                    continue
                part = Part()
                for piece in count_blocks(_bits_of(one, memory), place):
                    part += piece
                    if self._stop:
                        return
                sums[row] += np.array([part.total, part.elements, 0], np.uint64)
        except Exception as e:  # noqa: BLE001 -- in a thread of its own: it must be told somewhere, and fails no save
            log.warning("no fingerprints of this save: %s: %s", type(e).__name__, e)
            return
        self._sums = sums


def count_blocks(bits: Bits, place: Place) -> Iterator[Part]:
    """The parts of a rank's own flat tensor that lies at this place."""
    at = 0
    for block in place.blocks:
        yield part_of(bits[at : at + block.size], block)
        at += block.size


def _bits_of(one: Staged, memory: memoryview | None) -> Bits:
    if memory is None:
        return raw_bits(one.tensor.detach().reshape(-1))
    count, width = one.tensor.numel(), one.tensor.element_size()
    bits: Bits = np.frombuffer(memory, _UNSIGNED[width], count, one.at_bytes)
    return bits


def _as_prints(kinds: Mapping[str, Kind], sums: np.ndarray[Any, np.dtype[np.uint64]], train_step: int) -> Prints:
    tensors: dict[str, TensorPrint] = {}
    left_out: dict[str, str] = {}
    for (name, kind), (total, elements, unplaced) in zip(kinds.items(), sums.tolist(), strict=True):
        if unplaced:
            left_out[name] = "complex numbers" if "complex" in kind.dtype else "where its parts lie is not known here"
        elif elements != kind.elements:
            left_out[name] = f"its parts over all ranks have {elements:,} elements of {kind.elements:,}"
        else:
            tensors[name] = TensorPrint(dtype=kind.dtype, shape=kind.shape, fingerprint=f"{total:016x}")
    return Prints(scheme=SCHEME, train_step=train_step, tensors=tensors, left_out=left_out)


def _write(directory: Path, prints: Prints) -> None:
    try:
        write_prints(RealOps(), directory, prints)
    except OSError as e:
        log.warning("fingerprints of %s not stored: %s", directory.name, e)
