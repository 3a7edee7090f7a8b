"""What one rank has to write of a PyTorch DCP state dict: planned with all ranks, written by nobody yet.

    {"model": ..., "optimizer": ...}      DTensor (FSDP2, tensor parallel), ShardedTensor, plain tensors (DDP), objects
        -- Stateful asked, nested dicts flattened as DCP does --> items of DCP's own planner
        -- each written once, by the one of its holders that has least to write so far (dcp_sharing.py) --> Share

Names, places and the index are those of torch's DefaultSavePlanner, so plain torch.distributed.checkpoint reads it.
Shards that are not one block of the whole are refused by name: DCP would write them to a wrong place without a word.
A state that looks like the last one on every rank is filled into the plan of that.

Pinned to torch 2.13: _DistWrapper, which tells all ranks of one's error, is not its public interface.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

from outlast.checkpoint.dcp_places import Place, place_shard
from outlast.checkpoint.dcp_sharing import share_out
from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.fingerprint import Block, whole
from outlast.checkpoint.share import Planned, Share
from outlast.checkpoint.staged_prints import Counting, Kind

_FORMAT: Final = "dcp"


@dataclass(frozen=True)
class Prepared:
    """A state as DCP's planner sees it, not yet shared out."""

    planner: DefaultSavePlanner
    looks: tuple[Any, ...]

    @property
    def flat(self) -> dict[str, Any]:
        flat: dict[str, Any] = self.planner.state_dict
        return flat


def prepare_state(state: dict[str, Any]) -> Prepared:
    """Not collective, but for what a Stateful's own state_dict() does."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(ask_stateful(state), is_coordinator=dist.get_rank() == 0)
    with torch.no_grad():
        looks = tuple(_describe(name, value) for name, value in planner.state_dict.items())
    return Prepared(planner, (_FORMAT, *looks))


def ask_stateful(state: dict[str, Any]) -> dict[str, Any]:
    """As torch.distributed.checkpoint.save does it: at the top only."""
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}


def fill_plan(prepared: Prepared, planned: Planned) -> Share:
    """This state in a plan that was made for its looks. Not collective."""
    with torch.no_grad():
        data = [prepared.planner.resolve_data(item) for item in planned.items]
    return Share(planned=planned, data=data, common=None)


def plan_anew(prepared: Prepared, group: dist.ProcessGroup) -> Share:
    """Collective; touches no file. Raises CheckpointError on all ranks where one cannot be saved."""
    together = _DistWrapper(group, True, 0)
    index: list[Metadata] = []

    def plan_own() -> SavePlan:
        with torch.no_grad():
            plan = prepared.planner.create_local_plan()
            for item in plan.items:
                _refuse_unwritable(item, prepared.flat[item.index.fqn])
        return plan

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        shared, metadata = prepared.planner.create_global_plan(share_out(plans))
        index.append(metadata)
        rows = {name: row for row, name in enumerate(_list_kinds(metadata))}
        return [replace(plan, storage_data=_Rows.of(plan, rows)) for plan in shared]

    try:
        plan: SavePlan = together.reduce_scatter("plan", plan_own, plan_all)
    except CheckpointException as e:
        raise CheckpointError(_put_in_words(e)) from e
    prepared.planner.finish_plan(plan)
    items = sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO)
    with torch.no_grad():
        counting = _count_by(prepared, items, plan.storage_data, index[0] if index else None)
    planned = Planned(
        looks=prepared.looks,
        distribution=None,
        file_name=f"__{dist.get_rank()}_0{DEFAULT_SUFFIX}",
        items=items,
        index=index[0] if index else None,
        counting=counting,
    )
    return fill_plan(prepared, planned)


def place_of(value: Any) -> Place:
    """Where this rank's part of a tensor or DTensor lies in the whole."""
    if not isinstance(value, DTensor):
        return Place(blocks=(whole(value.shape),))
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Place()
    return place_shard(tuple(value.shape), tuple(mesh.shape), coordinate, value.placements)


# ---------------------------------------------------------------- what a plan is made from


def _describe(name: str, value: Any) -> tuple[Any, ...]:
    """Equal descriptions on every rank, equal plans."""
    if isinstance(value, DTensor):
        local = value.to_local()
        where = (value.device_mesh, value.placements, tuple(value.shape))
        return (name, "dtensor", local.dtype, local.layout, tuple(local.shape), local.requires_grad, *where)
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        cuts = tuple((tuple(one.metadata.shard_offsets), tuple(one.metadata.shard_sizes)) for one in shards)
        return (name, "sharded", value.dtype, tuple(value.size()), cuts)
    if hasattr(value, "__create_write_items__"):
        return (name, object())  # it makes its own items: planned anew each time
    if isinstance(value, torch.Tensor):
        return (name, "tensor", value.dtype, value.layout, tuple(value.shape), value.requires_grad, value.is_meta)
    return (name, "object")


def _refuse_unwritable(item: WriteItem, value: Any) -> None:
    if item.tensor_data is None or isinstance(value, ShardedTensor):
        return
    name, chunk = item.index.fqn, item.tensor_data.chunk
    local = value.to_local() if isinstance(value, DTensor) else value
    if local.is_meta or local.layout != torch.strided or local.is_quantized:
        what = "on the meta device" if local.is_meta else f"{local.layout}{', quantized' * local.is_quantized}"
        raise CheckpointError(f"{name}: a tensor {what}; expected plain strided data")
    if not isinstance(value, DTensor):
        return
    place = place_of(value)
    if place.scattered:
        raise CheckpointError(
            f"{name}: {value.placements} on a mesh {tuple(value.device_mesh.shape)} makes a shard of "
            f"several blocks of {list(value.shape)}; DCP can store one"
        )
    found = (tuple(chunk.offsets), tuple(chunk.sizes))
    if place.blocks and found != (place.blocks[0].offset, place.blocks[0].extent):
        raise CheckpointError(f"{name}: torch would store its shard as {found}; by its placements it is {place.blocks}")


def _put_in_words(error: CheckpointException) -> str:
    return "; ".join(
        f"rank {rank}: {e if isinstance(e, CheckpointError) else f'{type(e).__name__}: {e}'}"
        for rank, (e, _) in sorted(error.failures.items())
    )


# ---------------------------------------------------------------- what fingerprints need


@dataclass(frozen=True)
class _Rows:
    """Sent to each rank with its plan."""

    numbers: dict[str, int]
    count: int

    @classmethod
    def of(cls, plan: SavePlan, rows: dict[str, int]) -> _Rows:
        return cls({item.index.fqn: rows[item.index.fqn] for item in plan.items if item.index.fqn in rows}, len(rows))


def _list_kinds(index: Metadata) -> dict[str, Kind]:
    """All tensors of the checkpoint, in one order."""
    return {
        name: Kind(dtype=str(entry.properties.dtype).removeprefix("torch."), shape=tuple(entry.size))
        for name, entry in sorted(index.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }


def _count_by(prepared: Prepared, items: list[WriteItem], rows: _Rows, index: Metadata | None) -> Counting:
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    return Counting(
        rows=tuple(rows.numbers[item.index.fqn] for item in tensors),
        places=tuple(_place_item(item, prepared.flat[item.index.fqn]) for item in tensors),
        count=rows.count,
        kinds=_list_kinds(index) if index is not None else {},
    )


def _place_item(item: WriteItem, value: Any) -> Place:
    assert item.tensor_data is not None, "a tensor's"
    if isinstance(value, torch.Tensor) and value.dtype.is_complex:
        return Place(why_not="complex numbers")
    if isinstance(value, ShardedTensor):  # what it says of itself is all that there is
        chunk = item.tensor_data.chunk
        shape = tuple(item.tensor_data.size)
        return Place(blocks=(Block(shape=shape, offset=tuple(chunk.offsets), extent=tuple(chunk.sizes)),))
    return place_of(value)
