"""The tensors of a committed checkpoint, one at a time, in one process without ranks or a GPU.

    Tensors(iter_0000030) -- .metadata's hash --> names, dtypes, shapes;  read(name) -> the whole tensor from its shards

Memory holds one tensor at a time. `.metadata` is a pickle, so its hash is checked before it is opened; the shards' own
hashes are the caller's to check (catalogue.check_whole). Also here: the names as Megatron's modules have them, where a
file keeps all layers, and all experts of a layer, as one stacked tensor.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from outlast.checkpoint.catalogue import check_file
from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.verify import read_manifest

INDEX: Final = ".metadata"
_STACKED_LAYERS: Final = re.compile(r"(^|\.)layers\.(?![0-9]+\.)")
_STACKED_EXPERTS: Final = ".experts.experts."
_OPTIMIZER: Final = re.compile(r"^(?:chained_\d+\.)?optimizer\.|(?:^|\.)optim(?:izer)?\.(?:state|param_groups)\.")
"""As Megatron names it, and as PyTorch's get_state_dict does below whatever name a program gives it."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in the checkpoint's own terms."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored_elements: int
    """Over all its shards: equal to the shape's where each element is there once."""


class _Reader(FileSystemReader):
    """Reads the index once, not once a tensor."""

    _kept: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._kept is None:
            self._kept = super().read_metadata(*args, **kwargs)
        return self._kept


class Tensors:
    """A committed checkpoint's tensors by name, in the order of names."""

    def __init__(self, directory: Path) -> None:
        """Raises NotWhole where it has no fitting marker, or its index is not the one that was written."""
        self.directory = directory
        self.manifest: Manifest = read_manifest(directory)
        if INDEX not in self.manifest.files:
            raise NotWhole(directory.name, (f"its manifest lists no {INDEX}: not in torch_dist or DCP format",))
        check_file(directory, INDEX, self.manifest.files[INDEX])
        self._reader = _Reader(directory)
        entries = self._reader.read_metadata().state_dict_metadata
        tensors = (_describe(name, one) for name, one in entries.items() if isinstance(one, TensorStorageMetadata))
        self.tensors = {one.name: one for one in sorted(tensors, key=lambda one: one.name)}
        self.objects = tuple(sorted(name for name, one in entries.items() if isinstance(one, BytesStorageMetadata)))

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU. Raises CheckpointError where its shards do not cover it."""
        stored = self.tensors[name]
        wanted = torch.Size(stored.shape).numel()
        if stored.stored_elements != wanted:
            raise CheckpointError(
                f"{self.directory.name}: {name}: its shards hold {stored.stored_elements:,} elements of {wanted:,}",
                path=str(self.directory),
            )
        state = {name: torch.empty(stored.shape, dtype=stored.dtype)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
            load(state, storage_reader=self._reader, no_dist=True)
        return state[name]


def _describe(name: str, one: TensorStorageMetadata) -> Stored:
    return Stored(
        name=name,
        dtype=one.properties.dtype,
        shape=tuple(one.size),
        stored_elements=sum(chunk.sizes.numel() for chunk in one.chunks),
    )


def is_optimizer(name: str) -> bool:
    return _OPTIMIZER.match(name) is not None


def unstack(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same as single tensors under the names of Megatron's modules; views, nothing is copied.

    decoder.layers.mlp.linear_fc1.weight [24, 512, 128]  ->  decoder.layers.0.mlp.linear_fc1.weight [512, 128] ...
    """
    if found := _STACKED_LAYERS.search(name):
        for layer, part in enumerate(tensor.unbind(0)):
            yield from unstack(f"{name[: found.end()]}{layer}.{name[found.end() :]}", part)
    elif _STACKED_EXPERTS in name:
        for expert, part in enumerate(tensor.unbind(0)):
            yield name.replace(_STACKED_EXPERTS, f".experts.local_experts.{expert}."), part
    else:
        yield name, tensor
