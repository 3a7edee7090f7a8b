"""A storage reader for PyTorch's DCP, and so for Megatron: each byte once a node, hashed while it is read.

    DCP's own planner: items -> needs (each rank) -> plan_reads (the coordinator, over all ranks) -> Stream -> tensors
    all ranks: is every file that was read as its manifest says? -> only then is anything unpickled

The index comes as bytes that were compared with their hash, and is unpickled from these very bytes. What it says of
files is believed no further than the manifest goes. Without a manifest (a checkpoint that is not ours) nothing can be
compared; all else is the same.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.filling import Filling, Objected, Place, Record, Slice
from outlast.checkpoint.manifest import FileEntry
from outlast.checkpoint.node_memory import Shared
from outlast.checkpoint.read_plan import Needs, Reads, Runs, plan_reads, to_runs
from outlast.checkpoint.records import HEAD_LIMIT_BYTES
from outlast.checkpoint.slices import make_cut
from outlast.checkpoint.streaming import Outcome, Stream
from outlast.checkpoint.verify import Unreadable, open_below

Bring = Callable[[Collection[str]], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint, and what is known of it."""

    directory: Path
    index: bytes
    """The content of .metadata; it was compared with its hash."""
    files: Mapping[str, FileEntry]
    """All that may be read, with their sizes."""
    hashed: bool
    """The hashes are known, and are to be compared."""
    bring: Bring | None = None
    """Files may still lie elsewhere: called with those that this rank is about to read, which are here then."""


@dataclass(frozen=True, kw_only=True)
class _Need:
    """What a rank tells the coordinator, beside its plan."""

    rank: int
    neighbours: frozenset[int]
    files: Mapping[str, Runs]


class Sharing:
    """This rank's part in a group of ranks that load together. Collective to make; close() it when all are done."""

    def __init__(self, group: dist.ProcessGroup | None, *, alone: bool = False) -> None:
        self.group, self.alone = group, alone
        self.rank = 0 if alone else dist.get_rank(group)
        self.ranks = 1 if alone else dist.get_world_size(group)
        self.shared = Shared(self.rank)
        self.neighbours = self.shared.open_all(dict(enumerate(self.gather(self.shared.offer()))))

    def gather(self, mine: Any) -> list[Any]:
        """Everybody's, in rank order."""
        if self.alone:
            return [mine]
        said: list[Any] = [None] * self.ranks
        dist.all_gather_object(said, mine, group=self.group)
        return said

    def close(self) -> None:
        self.shared.close()


class StreamingReader(FileSystemReader):
    """DCP's StorageReader over one checkpoint, for one load."""

    def __init__(self, source: Source, sharing: Sharing, limit_s: float) -> None:
        super().__init__(source.directory)
        self._source, self._sharing, self._limit_s = source, sharing, limit_s
        self._filling = Filling(())
        self._items: list[Record] = []
        self._empty: list[ReadItem] = []
        self._kept: Metadata | None = None
        self._planner: LoadPlanner | None = None

    # ------------------------------------------------------------------ DCP asks, in this order

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._kept is None:
            self._kept = cast(Metadata, pickle.loads(self._source.index))
            if getattr(self._kept, "storage_meta", None) is None:
                self._kept.storage_meta = StorageMeta()
        return self._kept

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        chunks = _Chunks(self.read_metadata())
        self._items, self._empty = [], []
        for item in plan.items:
            if item.type == LoadItemType.TENSOR and 0 in item.lengths:
                self._empty.append(item)
            else:
                self._items.append(self._describe(item, chunks))
        self._filling = Filling(self._items)
        need = _Need(
            rank=self._sharing.rank,
            neighbours=self._sharing.neighbours,
            files={file: to_runs(ranges) for file, ranges in self._filling.needs().items()},
        )
        return replace(plan, storage_data=need)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        needs = [cast(_Need, plan.storage_data) for plan in plans]
        nodes = name_nodes([need.neighbours for need in needs])
        sizes = {name: entry.size_bytes for name, entry in self._source.files.items()}
        reads = plan_reads(
            [Needs(node=node, files=need.files) for node, need in zip(nodes, needs, strict=True)],
            sizes,
            hashes=self._source.hashed,
        )
        together: dict[str, frozenset[int]] = {
            node: need.neighbours if node.startswith("of ") else frozenset({need.rank})
            for node, need in zip(nodes, needs, strict=True)
        }
        return [
            replace(plan, storage_data=(read, together[node]))
            for plan, read, node in zip(plans, reads, nodes, strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._planner = planner
        outcome = self._stream(*cast("tuple[Reads, frozenset[int]]", plan.storage_data))
        self._agree(outcome)
        for item in self._empty:
            planner.commit_tensor(item, planner.resolve_tensor(item))
        for record in self._items:
            if isinstance(record, Objected):
                self._unpickle(record.tag, bytes(record.raw))
            elif record.odd:
                self._unpickle(record.tag, self._read_again(record.place))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # ------------------------------------------------------------------ what is wanted

    def _describe(self, item: ReadItem, chunks: _Chunks) -> Record:
        stored: _StorageInfo = self.storage_data[item.storage_index]
        place = self._place(stored)
        piece = chunks.find(item) if item.type == LoadItemType.TENSOR else None
        if piece is None or getattr(stored, "transform_descriptors", None):
            return Objected(place, item)
        dtype, shape = piece
        if not 0 <= place.size_bytes - dtype.itemsize * torch.Size(shape).numel() <= HEAD_LIMIT_BYTES:
            return Objected(place, item)
        lengths = tuple(item.lengths)
        return Slice(
            place=place,
            tag=item,
            dtype=dtype,
            shape=shape,
            cut=make_cut(shape, tuple(item.storage_offsets), lengths, dtype.itemsize),
            resolve=lambda: self._now.resolve_tensor(item),
            commit=lambda tensor: self._now.commit_tensor(item, tensor),
            lengths=lengths,
        )

    @property
    def _now(self) -> LoadPlanner:
        assert self._planner is not None, "tensors are asked for while data is read"
        return self._planner

    def _place(self, stored: _StorageInfo) -> Place:
        """Raises NotWhole where the index points out of the checkpoint."""
        name, at, size = str(stored.relative_path), stored.offset, stored.length
        entry = self._source.files.get(name)
        if entry is None:
            raise NotWhole(self._source.directory.name, (f".metadata: names {name[:200]!r}, which is no file of it",))
        if min(at, size) < 0 or at + size > entry.size_bytes:
            where = f"bytes {at:,} to {at + size:,} of {name}, which has {entry.size_bytes:,}"
            raise NotWhole(self._source.directory.name, (f".metadata: names {where}",))
        return Place(file=name, at_bytes=at, size_bytes=size)

    # ------------------------------------------------------------------ reading

    def _stream(self, reads: Reads, neighbours: frozenset[int]) -> Outcome:
        if self._source.bring is not None and (problems := self._bring(self._source.bring, reads)) is not None:
            return Outcome(problems=problems)
        needs = {file: to_runs(ranges) for file, ranges in self._filling.needs().items()}
        stream = Stream(
            self._source.directory, self._source.files, reads, needs, self._sharing.shared, neighbours, self._limit_s
        )
        try:
            return stream.run(self._filling.take)
        except Exception as e:  # noqa: BLE001 -- the others wait for what this rank has to say
            return Outcome(gave_up=f"rank {self._sharing.rank}: {type(e).__name__}: {e}")

    def _bring(self, bring: Bring, reads: Reads) -> tuple[str, ...] | None:
        """None where all ranks have what they are to read; else what this one lacks. Collective."""
        problems: tuple[str, ...] = ()
        try:
            bring([read.name for read in reads.files])
        except NotWhole as e:
            problems = e.problems
        except (OSError, CheckpointError) as e:
            problems = (f"rank {self._sharing.rank}: {type(e).__name__}: {e}",)
        return problems if any(self._sharing.gather(problems)) else None

    def _agree(self, mine: Outcome) -> None:
        """All ranks go on, or none. Collective."""
        said: list[Outcome] = self._sharing.gather(mine)
        name = self._source.directory.name
        if problems := dict.fromkeys(problem for one in said for problem in one.problems):
            raise NotWhole(name, tuple(problems))
        if errors := dict.fromkeys(error for one in said for error in one.errors):
            raise Unreadable(name, tuple(errors))
        if gave_up := [one.gave_up for one in said if one.gave_up]:
            raise CheckpointError(f"checkpoint {name}: {'; '.join(gave_up[:5])}", path=name)

    def _read_again(self, place: Place) -> bytes:
        """A record that torch must read itself. Its file was compared with its hash a moment ago."""
        fd = open_below(self._source.directory, place.file)
        with os.fdopen(fd, "rb") as file:
            file.seek(place.at_bytes)
            return file.read(place.size_bytes)

    def _unpickle(self, item: ReadItem, raw: bytes) -> None:
        """As torch's own reader does it, from bytes that are what was written."""
        stored: _StorageInfo = self.storage_data[item.storage_index]
        stream = self.transforms.transform_load_stream(
            item, getattr(stored, "transform_descriptors", None) or (), io.BytesIO(raw)
        )
        if item.type == LoadItemType.BYTE_IO:
            self._now.load_bytes(item, io.BytesIO(stream.read(-1)))
            return
        tensor = torch.load(io.BytesIO(stream.read(-1)), map_location="cpu", weights_only=True)
        for axis, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(axis, begin, length)
        target = self._now.resolve_tensor(item).detach()
        if target.size() != tensor.size():
            raise CheckpointError(f"{item.storage_index}: {list(tensor.size())} for a target of {list(target.size())}")
        target.copy_(tensor)
        self._now.commit_tensor(item, target)


class _Chunks:
    """dtype and shape of the pieces that a tensor is stored in, by where they begin."""

    def __init__(self, metadata: Metadata) -> None:
        self._entries = metadata.state_dict_metadata
        self._known: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}

    def find(self, item: ReadItem) -> tuple[torch.dtype, tuple[int, ...]] | None:
        index = item.storage_index
        entry = self._entries.get(index.fqn)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        if index.fqn not in self._known:
            self._known[index.fqn] = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        shape = self._known[index.fqn].get(tuple(index.offset or ()))
        return None if shape is None else (entry.properties.dtype, shape)


def name_nodes(neighbours: list[frozenset[int]]) -> list[str]:
    """A node's name for each rank: ranks that all have opened each other are one, others are alone."""
    return [
        f"of {min(seen)}" if all(neighbours[other] == seen for other in seen) else f"rank {rank}"
        for rank, seen in enumerate(neighbours)
    ]
