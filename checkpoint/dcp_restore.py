"""A restore of a DCP state dict: read by our reader, then compared with the fingerprints that were stored at its save.

    restore(state, path) -- load_dcp: hashes, resharding, in place -- Stateful told -- every rank counts all that it
    holds: n copies must give n times the saved number, so one wrong copy anywhere is seen, in any layout

Where a part lies in its tensor is told by dcp_places.py, not by what placed it there. Names are those of the state as
DCP flattens it; what the state lacks of the checkpoint is not compared, so a part of one (the model alone) is restored
as well. `compare` alone is for programs that load by torch.distributed.checkpoint.load.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from outlast.checkpoint.dcp_places import Place
from outlast.checkpoint.dcp_plan import ask_stateful, place_of
from outlast.checkpoint.errors import NotWhole
from outlast.checkpoint.fingerprint import SCHEME, Block, Part
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.prints import NotAsSaved, Prints, TensorPrint, read_prints
from outlast.checkpoint.raw_bits import raw_bits
from outlast.checkpoint.reader import load_dcp
from outlast.checkpoint.staged_prints import Kind, count_blocks

log = logging.getLogger(__name__)

_MODULUS: Final = 1 << 64
_TOTAL, _ELEMENTS, _SKIPPED, _MISSHAPEN = range(4)


def restore(
    state: dict[str, Any], path: Path | str, *, process_group: dist.ProcessGroup | None = None, verify: str = "hashes"
) -> Manifest:
    """Fill the state in place, and make sure that it is what was saved. Collective where there are ranks.

    Raises NotWhole on every rank where a file is not what its manifest says, NotAsSaved where a tensor is not what was
    saved. process_group: all ranks, able to do object collectives; None: the default one.
    """
    manifest = load_dcp(state, path, process_group=process_group, verify=verify)
    compare(state, path, process_group=process_group)
    return manifest


def compare(state: dict[str, Any], path: Path | str, *, process_group: dist.ProcessGroup | None = None) -> int:
    """How many tensors are as they were saved; 0 where nothing was stored to compare with. Collective.

    Raises NotAsSaved on every rank where one is not, NotWhole where the fingerprints cannot be used.
    """
    directory = Path(path)
    saved = _read_together(directory, process_group)
    if saved is None:
        log.warning("%s has no fingerprints: what was restored is checked by its files alone", directory)
        return 0
    if saved.scheme != SCHEME:
        log.warning("%s: fingerprints of scheme %s, this version has %s", directory, saved.scheme, SCHEME)
        return 0
    rows = {name: row for row, name in enumerate(saved.tensors)}
    sums = np.zeros((len(rows), 4), np.uint64)
    with torch.no_grad():
        for name, value in _flatten(state).items():
            if name in rows and isinstance(value, torch.Tensor | ShardedTensor):
                sums[rows[name]] += _count(value, saved.tensors[name])
    return _judge(saved, _add_up(sums, process_group), directory)


def _read_together(directory: Path, group: dist.ProcessGroup | None) -> Prints | None:
    """As the first rank finds them."""
    said: list[Prints | tuple[str, ...] | None] = [None]
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        try:
            said = [read_prints(directory)]
        except NotWhole as e:
            said = [e.problems]
    if dist.is_initialized():
        dist.broadcast_object_list(said, group_src=0, group=group)
    if isinstance(said[0], tuple):
        raise NotWhole(directory.name, said[0])
    return said[0]


def _flatten(state: dict[str, Any]) -> dict[str, Any]:
    planner = DefaultSavePlanner()
    planner.set_up_planner(ask_stateful(state))
    flat: dict[str, Any] = planner.state_dict
    return flat


def _count(value: torch.Tensor | ShardedTensor, saved: TensorPrint) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """What this rank holds of one tensor: total, elements, whether it was passed over, whether its shape is another."""
    kind = Kind(dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.size()))
    if kind.dtype != saved.dtype:  # converted on purpose: its bits say nothing
        return np.array([0, 0, 1, 0], np.uint64)
    if kind.shape != saved.shape:
        return np.array([0, 0, 0, 1], np.uint64)
    done = Part()
    for local, place in _held(value):
        if place.why_not:
            return np.array([0, 0, 1, 0], np.uint64)
        done = sum(count_blocks(raw_bits(local.detach().reshape(-1)), place), done)
    return np.array([done.total, done.elements, 0, 0], np.uint64)


def _held(value: torch.Tensor | ShardedTensor) -> Iterator[tuple[torch.Tensor, Place]]:
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            offset, extent = tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)
            yield shard.tensor, Place(blocks=(Block(shape=tuple(value.size()), offset=offset, extent=extent),))
    else:
        yield value.to_local() if isinstance(value, DTensor) else value, place_of(value)


def _add_up(
    sums: np.ndarray[Any, np.dtype[np.uint64]], group: dist.ProcessGroup | None
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    if not dist.is_initialized():
        return sums
    # as signed numbers: sums wrap around the same way
    total = torch.from_numpy(sums.view(np.int64))
    if dist.get_backend(group) == "nccl":
        total = total.to(torch.device("cuda", torch.cuda.current_device()))
    dist.all_reduce(total, group=group)
    found: np.ndarray[Any, np.dtype[np.uint64]] = total.cpu().numpy().view(np.uint64)
    return found


def _judge(saved: Prints, sums: np.ndarray[Any, np.dtype[np.uint64]], directory: Path) -> int:
    problems: list[str] = []
    compared = 0
    for (name, one), row in zip(saved.tensors.items(), sums.tolist(), strict=True):
        if row[_MISSHAPEN]:
            problems.append(f"{name}: not {list(one.shape)}, as it was saved, on {row[_MISSHAPEN]} ranks")
        elif not row[_SKIPPED] and row[_ELEMENTS]:
            compared += 1
            problems += _find_fault(name, one, row)
    if problems:
        raise NotAsSaved(directory.name, tuple(problems), of=compared)
    return compared


def _find_fault(name: str, saved: TensorPrint, row: list[int]) -> Iterator[str]:
    elements = Kind(dtype=saved.dtype, shape=saved.shape).elements
    copies, rest = divmod(row[_ELEMENTS], elements)
    if rest:
        yield f"{name}: all ranks hold {row[_ELEMENTS]:,} elements of {elements:,}"
    elif row[_TOTAL] != copies * int(saved.fingerprint, 16) % _MODULUS:
        yield f"{name}: {copies} copies add up to {row[_TOTAL]:016x}, each was saved with {saved.fingerprint}"
