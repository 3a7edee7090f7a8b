"""Which rank writes what of a DCP state: each item once, replicas by the one of their holders with least to write.

    what one rank alone holds is its own;   then the largest replica first, to the least loaded of its holders

torch's own distribution counts a rank's own items as it meets them, so replicas that come first in the state are shared
out as if nobody had anything else to write. It also takes items of one name for replicas whatever is in them, and keeps
one: here tensors of one name must agree in shape and dtype over all ranks. Objects are written by their lowest rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from outlast.checkpoint.errors import CheckpointError


def share_out(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The same plans, every item in one of them. Raises CheckpointError where ranks mean different things by a name."""
    _require_agreement(plans)
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders[item.index].append(rank)
            items.setdefault(item.index, item)
    writers = _choose_writers(holders, items, len(plans))
    return [
        replace(plan, items=[item for item in plan.items if writers[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _choose_writers(
    holders: dict[MetadataIndex, list[int]], items: dict[MetadataIndex, WriteItem], ranks: int
) -> dict[MetadataIndex, int]:
    load_bytes = [0] * ranks
    writers: dict[MetadataIndex, int] = {}
    shared: list[MetadataIndex] = []
    for index, held_by in holders.items():
        if len(held_by) > 1 and items[index].tensor_data is not None:
            shared.append(index)
            continue
        writers[index] = held_by[0]
        load_bytes[held_by[0]] += _size_bytes(items[index])
    for index in sorted(shared, key=lambda one: _size_bytes(items[one]), reverse=True):
        writer = min(holders[index], key=lambda rank: load_bytes[rank])
        writers[index] = writer
        load_bytes[writer] += _size_bytes(items[index])
    return writers


def _size_bytes(item: WriteItem) -> int:
    return item.tensor_storage_size() or 1


def _require_agreement(plans: Sequence[SavePlan]) -> None:
    wholes: dict[str, tuple[str, int]] = {}
    parts: dict[MetadataIndex, tuple[str, int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            _compare(wholes.setdefault(item.index.fqn, (_name_whole(item), rank)), _name_whole(item), rank, item)
            _compare(parts.setdefault(item.index, (_name_part(item), rank)), _name_part(item), rank, item)


def _compare(first: tuple[str, int], found: str, rank: int, item: WriteItem) -> None:
    what, whose = first
    if what != found:
        raise CheckpointError(
            f"{item.index.fqn}: rank {whose} has {what}, rank {rank} {found}: one name means one tensor. "
            "Put what each rank has of its own under a name of its own"
        )


def _name_whole(item: WriteItem) -> str:
    data = item.tensor_data
    if data is None:
        return "an object"
    return f"{item.type.name.lower()} {data.properties.dtype}{list(data.size)}"


def _name_part(item: WriteItem) -> str:
    data = item.tensor_data
    return "an object" if data is None else f"a part {list(data.chunk.sizes)} at {list(data.chunk.offsets)}"
