"""What one rank has to write for Megatron's `torch_dist` format: planned with all ranks, written by nobody yet.

Megatron's own asynchronous path is left out on purpose. It hands results over through a queue in a spawned Manager
process (seconds a rank to start, and the waits on it never look whether the writer lives), and rank 0 writes
`common.pt` in the middle of the collectives, where a full disk on one rank leaves the others waiting. Here planning
is Megatron's (save_preprocess, the even distribution of replicas, planner, shard index) and touches no file.

A state that looks like the last one on every rank (names, shapes, cuts, replicas) is filled into the plan of that:
whether it does on all ranks, drafting.py asks them. Replicated shards are written once, by the rank that has least to
write so far (by bytes, over all ranks), as Megatron distributes them.

Pinned to megatron-core 0.16: the names below are not its public interface.
"""

from __future__ import annotations

import copy
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.exchange_utils import (  # type: ignore[import-untyped]
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.serialization import _CONTENT_METADATA_KEY  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # type: ignore[import-untyped]
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.strategies.torch import (  # type: ignore[import-untyped]
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import _clean_metadata_for_serialization  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.validation import (  # type: ignore[import-untyped]
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from outlast.checkpoint.share import Planned, Share

BACKEND: Final = "torch_dist"


class _Planner(FileSystemWriterAsync):  # type: ignore[misc]  # megatron has no types
    """Takes part in planning as Megatron's writer does, and writes nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # theirs makes the directory

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.file_name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        # bytes before tensors, as Megatron orders them
        self.items = sorted(plan.items, key=lambda item: bool(item.type != WriteItemType.BYTE_IO))


@dataclass(frozen=True)
class Prepared:
    """A state as Megatron's save sees it, not yet shared out."""

    sharded: dict[str, Any]
    common: dict[str, Any]
    looks: tuple[Any, ...]


def prepare_state(state: dict[str, Any], content_metadata: dict[str, Any] | None) -> Prepared:
    """Not collective; `state` is changed as Megatron's save does."""
    if content_metadata is not None:
        state[_CONTENT_METADATA_KEY] = _clean_metadata_for_serialization(content_metadata)
    sharded, common = save_preprocess(state, False, None)
    return Prepared(sharded, common, _look_at(sharded))


def fill_plan(prepared: Prepared, planned: Planned, group: dist.ProcessGroup) -> Share:
    """This state in a plan that was made for its looks. Not collective, and leaves `prepared` as it is."""
    planner = _make_planner()
    planner.set_up_planner(_share_out(prepared, planned.distribution, group), is_coordinator=dist.get_rank() == 0)
    return _resolve(prepared, planned, planner)


def plan_anew(prepared: Prepared, directory: Path, group: dist.ProcessGroup) -> Share:
    """Collective; touches no file."""
    validate_sharding_integrity(determine_global_metadata(prepared.sharded)[1], common_state_dict=prepared.common)
    distribution = determine_main_replica_uniform_distribution(prepared.sharded, group)
    planner = _make_planner()
    writer = _Planner(str(directory), thread_count=1)
    flat = _share_out(prepared, distribution, group)
    made, *_ = save_state_dict_async_plan(flat, writer, group, 0, planner=planner)
    index = made[1] if dist.get_rank() == 0 else None
    planned = Planned(prepared.looks, distribution, writer.file_name, writer.items, index, encode_format())
    return _resolve(prepared, planned, planner)


def _make_planner() -> MCoreSavePlanner:
    return MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)


def _share_out(prepared: Prepared, distribution: Any, group: dist.ProcessGroup) -> dict[str, Any]:
    """What is written by this rank, as PyTorch's planner wants it."""
    sharded = dict_list_map_outplace(copy.copy, prepared.sharded)  # the replicas' numbers are changed
    distribute_main_replicas_with_precomputed_distribution(sharded, group, distribution)
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    shared: dict[str, Any] = mcore_to_pyt_state_dict(flat, False)
    return shared


def _resolve(prepared: Prepared, planned: Planned, planner: SavePlanner) -> Share:
    return Share(
        planned=planned,
        data=[planner.resolve_data(item) for item in planned.items],
        common=_pickle_common(prepared.common) if dist.get_rank() == 0 else None,
    )


def _look_at(sharded: dict[str, Any]) -> tuple[Any, ...]:
    """Everything that a plan is made from, as plain values: equal looks, equal plan."""
    return tuple(_describe(base) for base in nested_values(sharded))


def _describe(base: ShardedBase) -> tuple[Any, ...]:
    if not isinstance(base, ShardedTensor):
        return (type(base).__name__, base.key, base.replica_id, base.global_shape, base.global_offset)
    range_ = base.flattened_range
    return (
        base.key,
        base.replica_id,
        base.dtype,
        base.local_shape,
        base.global_shape,
        base.global_offset,
        base.axis_fragmentations,
        base.prepend_axis_num,
        base.allow_shape_mismatch,
        None if range_ is None else (range_.start, range_.stop),
    )


def _pickle_common(common: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(common, stream)
    return stream.getvalue()


def encode_format() -> bytes:
    """`metadata.json`, Megatron's own last file."""
    return json.dumps(asdict(CheckpointingConfig(BACKEND, 1))).encode()
