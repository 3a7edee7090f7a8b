"""What one rank has to write in one save, whoever planned it: megatron_plan.py or dcp_plan.py. No file is touched here.

Both plan for PyTorch's DCP files, so the index is one and the same; Megatron adds common.pt and metadata.json to it.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from outlast.checkpoint.staged_prints import Counting

INDEX: Final = ".metadata"


@dataclass(frozen=True)
class Planned:
    """All of a plan that does not change from save to save."""

    looks: tuple[Any, ...]
    """Everything that a plan is made from, as plain values: equal looks, equal plan."""
    distribution: Any
    """Which rank writes what of the replicas; the planner's own."""
    file_name: str
    items: list[WriteItem]
    index: Metadata | None
    """The shard index without its storage part; rank 0 alone has it."""
    format_file: bytes | None = None
    """metadata.json, where the format has one."""
    counting: Counting | None = None
    """By which fingerprints are taken of what is staged; None where they are taken otherwise."""


@dataclass(frozen=True)
class Share:
    """This rank's part of one save, as the live state: it must be copied before that changes."""

    planned: Planned
    data: list[io.BytesIO | torch.Tensor]
    """One for each of planned.items."""
    common: bytes | None
    """common.pt; rank 0 alone has it, and only where the format has one."""


class Asked:
    """How many ranks say yes to each: asked, and on its way. Making one is collective; only answer() waits."""

    def __init__(self, group: dist.ProcessGroup, *flags: bool) -> None:
        self._counts = torch.tensor(flags, dtype=torch.int64)
        work = dist.all_reduce(self._counts, group=group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._work = work

    def answer(self) -> tuple[int, ...]:
        """Waits for it. RuntimeError where a rank is gone."""
        self._work.wait()
        return tuple(self._counts.tolist())


def add_up(group: dist.ProcessGroup, *flags: bool) -> tuple[int, ...]:
    """How many ranks say yes to each."""
    return Asked(group, *flags).answer()


def pickle_index(index: Metadata, results: list[WriteResult]) -> bytes:
    """`.metadata`: where each item of all ranks lies; the same for every save of one layout."""
    whole = replace(
        index,
        version=CURRENT_DCP_VERSION,
        storage_data={result.index: result.storage_data for result in results},
        storage_meta=StorageMeta(),
    )
    if hasattr(index, "all_local_plans"):  # Megatron's addition, for its cache
        whole.all_local_plans = index.all_local_plans  # type: ignore[attr-defined]
    return pickle.dumps(whole)
