"""One way in for both kinds of state: Megatron's sharded state dicts, and those of PyTorch's DCP.

    state -- a ShardedTensor or ShardedObject of Megatron's in it? -- yes: megatron_plan.py    no: dcp_plan.py

All ranks must give the same kind; where they do not, all of them are told. A program without Megatron never imports
it: nothing of it can be in a state while its module is not loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Union

import torch.distributed as dist

from outlast.checkpoint import dcp_plan
from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.share import Planned, Share, add_up

if TYPE_CHECKING:
    from outlast.checkpoint import megatron_plan

Prepared: TypeAlias = Union[dcp_plan.Prepared, "megatron_plan.Prepared"]

_MAPPING: Final = "megatron.core.dist_checkpointing.mapping"


def prepare_state(state: dict[str, Any], content_metadata: dict[str, Any] | None) -> Prepared:
    """Not collective. A Megatron state is changed as Megatron's save does."""
    if not _is_megatrons(state):
        return dcp_plan.prepare_state(state)
    from outlast.checkpoint import megatron_plan

    return megatron_plan.prepare_state(state, content_metadata)


def fill_plan(prepared: Prepared, planned: Planned, group: dist.ProcessGroup) -> Share:
    """This state in a plan that was made for its looks. Not collective."""
    if isinstance(prepared, dcp_plan.Prepared):
        return dcp_plan.fill_plan(prepared, planned)
    from outlast.checkpoint import megatron_plan

    return megatron_plan.fill_plan(prepared, planned, group)


def plan_anew(prepared: Prepared, directory: Path, group: dist.ProcessGroup) -> Share:
    """Collective; touches no file. Raises CheckpointError on all ranks where the state cannot be saved."""
    is_dcp = isinstance(prepared, dcp_plan.Prepared)
    (dcp_ranks,) = add_up(group, is_dcp)
    if dcp_ranks not in (0, dist.get_world_size(group)):
        raise CheckpointError(
            f"{dcp_ranks} of {dist.get_world_size(group)} ranks gave a state without any of Megatron's ShardedTensor, "
            "the others one with: give the same kind on all ranks"
        )
    if isinstance(prepared, dcp_plan.Prepared):
        return dcp_plan.plan_anew(prepared, group)
    from outlast.checkpoint import megatron_plan

    return megatron_plan.plan_anew(prepared, directory, group)


def _is_megatrons(state: Any) -> bool:
    mapping = sys.modules.get(_MAPPING)
    if mapping is None:
        return False
    kinds = (mapping.ShardedBase, mapping.ShardedTensorFactory, mapping.LocalNonpersistentObject)
    return any(isinstance(value, kinds) for value in _walk(state))


def _walk(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for one in value.values():
            yield from _walk(one)
    elif isinstance(value, list):
        for one in value:
            yield from _walk(one)
    else:
        yield value
