"""The process group that saves are agreed in: gloo, of all ranks, and a name for what one Saver does in it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from outlast.checkpoint.errors import CheckpointError


def require_all(group: dist.ProcessGroup) -> dist.ProcessGroup:
    if dist.get_world_size(group) != dist.get_world_size():
        raise CheckpointError(
            f"process_group has {dist.get_world_size(group)} ranks of {dist.get_world_size()}: give one of all ranks"
        )
    return group


def make_group(timeout_s: float) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise CheckpointError("no process group: call torch.distributed.init_process_group first (one rank too)")
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    if not isinstance(group, dist.ProcessGroup):
        raise CheckpointError(f"torch.distributed.new_group gave {group!r} for a group of all ranks")
    return group


def agree_on_session(group: dist.ProcessGroup) -> str:
    """A name for this Saver that no other has, the same on all ranks."""
    said = [os.urandom(8).hex()]
    dist.broadcast_object_list(said, src=0, group=group)
    return said[0]
