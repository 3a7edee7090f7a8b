"""Whether a checkpoint loads into another layout as it lies there, and a verified copy of one.

Megatron's `torch_dist` and PyTorch's DCP name tensors by their global position, so there is nothing to cut anew: every
rank reads its ranges of any file. What does not follow is an optimizer that was saved in the coordinates of its
buffers (`dp_reshardable` and older). So resharding offline is a check, and where it fails a refusal by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from outlast.checkpoint.commit import commit, write_file
from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.names import name_step
from outlast.checkpoint.ops import HashedFile, Ops
from outlast.checkpoint.prints import read_prints, write_prints
from outlast.checkpoint.tensors import Tensors, is_optimizer
from outlast.checkpoint.verify import CHUNK_BYTES, read_manifest
from outlast.reliability.model import Noun

_BOUND: Final = re.compile(r"dp_group_idx_|gbuf_idx_|bucket_idx_|optimizer\.distributed\.")
"""Names of optimizer tensors in the coordinates of Megatron's gradient buffers."""
_STATE: Final = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(?P<kind>\w+?)\.(?P<weight>.+)$")
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
MEGATRONS: Final = "metadata.json"
"""Megatron's format alone has it. Of others it is not known which moments a weight should have, and by which name."""


class Reshardable(Noun, frozen=True, kw_only=True):
    """What a look at the index says. `problems` empty: it loads into any layout."""

    weights: int
    optimizer_tensors: int
    problems: tuple[str, ...]

    @property
    def verdict(self) -> str:
        if self.problems:
            return "bound to the layout that it was saved in"
        what = "weights and optimizer" if self.optimizer_tensors else "weights (it holds no optimizer)"
        return f"loads into any layout as it is: {what} are named by global position. There is nothing to reshard"


def judge_reshardable(tensors: Tensors) -> Reshardable:
    """From names, shapes and shards alone; values are not read."""
    problems = [
        f"{one.name}: its shards hold {one.stored_elements:,} elements, its shape {list(one.shape)} others"
        for one in tensors.tensors.values()
        if one.stored_elements != _elements(one.shape)
    ]
    names = (*tensors.tensors, *tensors.objects)
    bound = [name for name in names if _BOUND.search(name)]
    if bound:
        problems.append(
            f"{len(bound)} optimizer entries lie in the coordinates of gradient buffers ({bound[0]} ...): load it with "
            "Megatron in its own layout and save it as fully_reshardable"
        )
    states = {name for name in tensors.tensors if is_optimizer(name)}
    weights = [name for name in tensors.tensors if name not in states]
    if states and not bound and MEGATRONS in tensors.manifest.files:
        problems += _missing_moments(tensors, weights)
    return Reshardable(weights=len(weights), optimizer_tensors=len(states), problems=tuple(problems))


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _missing_moments(tensors: Tensors, weights: list[str]) -> list[str]:
    """A weight without moments, or with moments of another shape, would train on from zero in any other layout."""
    held = {(m["kind"], m["weight"]): name for name in tensors.tensors if (m := _STATE.match(name))}
    said = []
    for weight in weights:
        shape = tensors.tensors[weight].shape
        for kind in _MOMENTS:
            name = held.get((kind, weight))
            if name is None:
                said.append(f"{weight}: no {kind} in the optimizer's part")
            elif tensors.tensors[name].shape != shape:
                said.append(f"{name}: shape {list(tensors.tensors[name].shape)}, its weight has {list(shape)}")
    return said


def copy_checkpoint(source: Path, root: Path, ops: Ops, *, on_bytes: Callable[[int], None]) -> Path:
    """The same checkpoint below another directory, hashed on the way and committed there as a new save is."""
    manifest = read_manifest(source)
    target = root / name_step(manifest.train_step)
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: is there already; nothing is overwritten", path=str(target))
    root.mkdir(parents=True, exist_ok=True)
    ops.make_dir(target)
    for name, entry in manifest.files.items():
        for parent in reversed((target / name).relative_to(target).parents[:-1]):
            ops.make_dir(target / parent)
        copied = write_file(ops, target / name, lambda out, name=name: _fill(source / name, out, on_bytes))  # type: ignore[misc]
        if copied != entry:
            raise NotWhole(source.name, (f"{name}: read as xxh3_128 {copied.xxh3_128}, not as its manifest says",))
    if (prints := read_prints(source)) is not None:
        write_prints(ops, target, prints)
    commit(ops, target, manifest)
    return target


def _fill(path: Path, out: HashedFile, on_bytes: Callable[[int], None]) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb", buffering=0) as file:
        while block := file.read(CHUNK_BYTES):
            out.write(block)
            on_bytes(len(block))
