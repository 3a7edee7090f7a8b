"""What one rank has to write for Megatron's `torch_dist` format, planned with all ranks but written by nobody yet.

Megatron's own asynchronous path is left out on purpose. It hands results over through a queue in a spawned Manager
process (seconds a rank to start, and the waits on it never look whether the writer lives), and rank 0 writes
`common.pt` in the middle of the collectives, where a full disk on one rank leaves the others waiting. Here planning
is Megatron's (save_preprocess, planner, shard index) and touches no file; every byte goes through ops.py in the
writer process, where an error on one rank is that rank's answer.

Pinned to megatron-core 0.16: the names below are not its public interface.
"""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.serialization import _CONTENT_METADATA_KEY  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.strategies.torch import (  # type: ignore[import-untyped]
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    SerializationFormat,
    _write_item,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from outlast.checkpoint.commit import Reach, write_bytes, write_file
from outlast.checkpoint.manifest import FileEntry
from outlast.checkpoint.ops import HashedFile, Ops

INDEX: Final = ".metadata"
BACKEND: Final = "torch_dist"


class _Planner(FileSystemWriterAsync):  # type: ignore[misc]  # megatron has no types
    """Takes part in planning as Megatron's writer does, and keeps this rank's items instead of writing them."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.file_name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        # bytes before tensors, as Megatron orders them
        ordered = sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO)
        self.items = [(item, _hold_still(planner.resolve_data(item))) for item in ordered]


@dataclass(frozen=True)
class Share:
    """This rank's part of one save, as memory that the fork keeps as it is now."""

    file_name: str
    items: list[tuple[WriteItem, io.BytesIO | torch.Tensor]]
    common: bytes | None
    """common.pt; rank 0 alone has it."""
    index: Metadata | None
    """The shard index without its storage part; rank 0 alone has it."""
    planner: _Planner


@dataclass(frozen=True)
class Written:
    """What a rank's writer reports: its files, and where each item lies in them."""

    files: dict[str, FileEntry]
    results: list[WriteResult]


def plan_save(
    state: dict[str, Any], directory: Path, group: dist.ProcessGroup, content_metadata: dict[str, Any] | None
) -> Share:
    """Collective. No file is touched but the directory, which is there. `state` is changed as Megatron's save does."""
    if content_metadata is not None:
        state[_CONTENT_METADATA_KEY] = content_metadata
    sharded, common = save_preprocess(state, True, None)
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    planner = _Planner(str(directory), thread_count=1)
    planned, *_ = save_state_dict_async_plan(
        mcore_to_pyt_state_dict(flat, False),
        planner,
        group,
        0,
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )
    first = dist.get_rank() == 0
    return Share(
        file_name=planner.file_name,
        items=planner.items,
        common=_pickle_common(common) if first else None,
        index=planned[1] if first else None,
        planner=planner,
    )


def _hold_still(data: io.BytesIO | torch.Tensor) -> io.BytesIO | torch.Tensor:
    """Data that a fork snapshots: in this process's own memory, on the CPU."""
    if isinstance(data, io.BytesIO):
        return data
    tensor = data.detach()
    if tensor.device.type != "cpu":
        return tensor.to("cpu")
    # shared memory is not copied on write: the child would see the trainer's later changes (torn checkpoints)
    return tensor.clone() if tensor.is_shared() else tensor  # type: ignore[no-untyped-call]


def _pickle_common(common: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(common, stream)
    return stream.getvalue()


def write_share(ops: Ops, directory: Path, share: Share, reach: Reach) -> Written:
    """In the writer process: this rank's files, durable but for their names in the directory."""
    torch.set_num_threads(1)  # the thread pools did not come along through the fork
    files: dict[str, FileEntry] = {}
    results: list[WriteResult] = []

    def fill(stream: HashedFile) -> None:
        for n, (item, data) in enumerate(share.items):
            if n == (len(share.items) + 1) // 2:
                reach("write.half")
            results.append(_write_one(stream, share, item, data))

    reach("write.begin")
    ops.make_dir(directory)  # there already; on network file systems this also makes it visible to this node
    if share.items:
        files[share.file_name] = write_file(ops, directory / share.file_name, fill, reach)
    if share.common is not None:
        files[COMMON_STATE_FNAME] = write_bytes(ops, directory / COMMON_STATE_FNAME, share.common)
    ops.sync_dir(directory)
    reach("write.done")
    return Written(files=files, results=results)


def _write_one(stream: HashedFile, share: Share, item: WriteItem, data: io.BytesIO | torch.Tensor) -> WriteResult:
    if isinstance(data, torch.Tensor) and data.untyped_storage().nbytes() != data.numel() * data.element_size():
        data = data.clone()  # torch.save would write the whole storage of a view
    # the stream has what _write_item uses: write, tell, flush
    out = cast(io.IOBase, stream)
    return _write_item(share.planner.transforms, out, data, item, share.file_name, SerializationFormat.TORCH_SAVE)


def write_index(ops: Ops, directory: Path, share: Share, written: list[Written]) -> dict[str, FileEntry]:
    """On rank 0's writer, when all shards are there: `.metadata`, then `metadata.json`, Megatron's own last file."""
    index = share.index
    assert index is not None, "rank 0 planned it"
    index.version = CURRENT_DCP_VERSION
    index.storage_data = {r.index: r.storage_data for one in written for r in one.results}
    index.storage_meta = share.planner.storage_meta()
    config = json.dumps(asdict(CheckpointingConfig(BACKEND, 1))).encode()
    return {
        INDEX: write_bytes(ops, directory / INDEX, pickle.dumps(index)),
        CONFIG_FNAME: write_bytes(ops, directory / CONFIG_FNAME, config),
    }
