"""Megatron's `dist_checkpointing.load`, with our storage reader and with bytes that were compared with their hashes.

What a tensor's name and place are, which shapes may differ, how factories merge: all that stays Megatron's. Only what
touches files is another: the shards go through StreamingReader, `.metadata` and `common.pt` come as checked bytes.

Pinned to megatron-core 0.16: the names below are not its public interface.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.dict_utils import nested_values  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.strategies.torch import (  # type: ignore[import-untyped]
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from outlast.checkpoint.dcp_reader import Sharing, StreamingReader


def load_megatron(
    state: dict[str, Any], directory: Path, reader: StreamingReader, sharing: Sharing, common: bytes, strict: str
) -> Any:
    """What dist_checkpointing.load returns. Collective."""
    return dist_checkpointing.load(state, str(directory), _Shards(reader, sharing), _Common(common), strict=strict)


class _Common(TorchCommonLoadStrategy):  # type: ignore[misc]  # megatron has no types
    """The unsharded part, from bytes."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        return torch.load(io.BytesIO(self._raw), map_location="cpu")


class _Shards(TorchDistLoadShardedStrategy):  # type: ignore[misc]  # megatron has no types
    """The sharded part, as Megatron's own strategy loads it but for the reader."""

    def __init__(self, reader: StreamingReader, sharing: Sharing) -> None:
        super().__init__()
        self._reader, self._sharing = reader, sharing

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> Any:
        tensors = [one for one in nested_values(sharded_state_dict) if isinstance(one, ShardedTensor)]
        planner = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={one.key: one for one in tensors if one.allow_shape_mismatch},
        )
        by_key, flat, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        wanted = mcore_to_pyt_state_dict(by_key, True)
        _load_state_dict(wanted, self._reader, self._sharing.group, planner=planner)
        loaded = {key: _unwrap_pyt_sharded_tensor(value) for key, value in wanted.items()}
        state = _replace_sharded_keys_with_state_dict_keys(loaded, flat, renamed)
        _restore_dict_types(state, sharded_state_dict)
        return state

    def load_tensors_metadata(self, checkpoint_dir: Path, metadata: Metadata | None = None) -> Any:
        return super().load_tensors_metadata(checkpoint_dir, metadata or self._reader.read_metadata())

    def load_sharded_metadata(self, checkpoint_dir: Path) -> dict[str, Any]:
        entries = self._reader.read_metadata().state_dict_metadata
        objects = (
            ShardedObject.empty_from_unique_key(key)
            for key, entry in entries.items()
            if isinstance(entry, BytesStorageMetadata)
        )
        found = {one.unique_key: one for one in objects}
        return {**found, **cast(dict[str, Any], self.load_tensors_metadata(checkpoint_dir))}
