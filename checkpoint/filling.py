"""From the blocks of files into tensors: every wanted byte straight to its place, whatever arrives when.

    Record   a stored tensor, or an object, somewhere in a file      take(file, at, bytes) -> head, then bytes -> target

A target is the caller's own tensor where that lies in row-major order on the CPU in the dtype that is stored; else a
tensor of our own that is copied when it is complete. Bytes are only ever copied here. What has to be unpickled is kept
aside as bytes until somebody who knows the hashes asks for it; so is what does not look as torch writes a tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outlast.checkpoint.records import TensorAt, find_tensor
from outlast.checkpoint.slices import Box, Cut, boxes_between

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a record lies."""

    file: str
    at_bytes: int
    size_bytes: int


class Objected:
    """A record that is wanted as bytes, all of it."""

    def __init__(self, place: Place, tag: Any) -> None:
        self.place, self.tag = place, tag
        self.raw = bytearray(place.size_bytes)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(self.place.at_bytes, self.place.at_bytes + self.place.size_bytes)]

    def feed(self, begin: int, view: Bytes) -> None:
        """Bytes of the record from `begin` on."""
        self.raw[begin : begin + view.nbytes] = view.data


@dataclass
class Slice:
    """A slice of a stored tensor, on its way into a target."""

    place: Place
    tag: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the stored piece."""
    cut: Cut
    resolve: Callable[[], torch.Tensor]
    commit: Callable[[torch.Tensor], None]
    lengths: tuple[int, ...]
    odd: bool = False
    """Not as torch writes a plain tensor: nothing of it was taken."""
    _head: bytearray = field(default_factory=bytearray)
    _at: int = -1
    """Where the tensor's bytes begin in the record; -1 while it is not known."""
    _target: torch.Tensor | None = None
    _bytes: Bytes | None = None
    _missing: int = 0

    def __post_init__(self) -> None:
        self._missing = self.cut.taken_bytes

    @property
    def _head_bytes(self) -> int:
        """The tensor begins at most this far into its record."""
        stored = self.dtype.itemsize * torch.Size(self.shape).numel()
        return self.place.size_bytes - stored

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """What has to be read for it: the head, and its bytes wherever they may begin."""
        begin, head = self.place.at_bytes, self._head_bytes
        return [(begin, begin + head), (begin + self.cut.first, begin + head + self.cut.end)]

    @property
    def complete(self) -> bool:
        return not self._missing

    def feed(self, begin: int, view: Bytes) -> None:
        """Bytes of the record from `begin` on; windows come in ascending order."""
        wanted = self._head_bytes - len(self._head)
        if begin <= len(self._head) and wanted > 0:
            self._head += view[len(self._head) - begin :][:wanted].tobytes()
            if len(self._head) == self._head_bytes:
                self._open(find_known(bytes(self._head)))
        if self._at >= 0 and begin + view.nbytes > self._head_bytes:
            skipped = max(0, self._head_bytes - begin)
            self._copy(begin + skipped - self._at, view[skipped:])

    def _open(self, found: TensorAt | None) -> None:
        stored_bytes = self.place.size_bytes - self._head_bytes
        if (
            found is None
            or (found.dtype, found.shape) != (str(self.dtype).removeprefix("torch."), self.shape)
            or found.at_bytes + stored_bytes > self.place.size_bytes
        ):
            self.odd = True
            return
        self._at = found.at_bytes
        self._copy(0, np.frombuffer(self._head, np.uint8)[self._at :])

    def _copy(self, begin: int, view: Bytes) -> None:
        """`view` holds the tensor's bytes from `begin` on."""
        for box in boxes_between(self.cut, begin, begin + view.nbytes):
            if self._bytes is None:
                self._bytes = self._open_target()
            _copy_box(box, view, begin, self._bytes)
            self._missing -= prod(box.shape)
        if not self._missing and self._bytes is not None:
            self._finish()

    def _open_target(self) -> Bytes:
        target = self.resolve().detach()
        if tuple(target.shape) != self.lengths:
            raise ValueError(f"{self.tag}: a target of shape {list(target.shape)} for a slice of {list(self.lengths)}")
        if type(target) is torch.Tensor and target.dtype == self.dtype and _is_plain(target):
            self._target = target
            return _as_bytes(target)
        return _as_bytes(self._make_own())

    def _make_own(self) -> torch.Tensor:
        self._own = torch.empty(self.lengths, dtype=self.dtype)
        return self._own

    def _finish(self) -> None:
        target = self._target
        if target is None:
            target = self.resolve().detach()
            target.copy_(self._own)
            del self._own
        self.commit(target)
        self._target = self._bytes = None


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()


def _as_bytes(tensor: torch.Tensor) -> Bytes:
    flat: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def _copy_box(box: Box, view: Bytes, begin: int, target: Bytes) -> None:
    source = box.source - begin
    if len(box.shape) == 1:
        target[box.target : box.target + box.shape[0]] = view[source : source + box.shape[0]]
        return
    into: Bytes = np.ndarray(box.shape, np.uint8, target, box.target, box.target_steps)
    into[...] = np.ndarray(box.shape, np.uint8, view, source, box.source_steps)


_KNOWN: dict[bytes, TensorAt | None] = {}
_KNOWN_MOST = 4096


def find_known(head: bytes) -> TensorAt | None:
    """find_tensor, asked once for tensors that look alike."""
    if head not in _KNOWN:
        if len(_KNOWN) >= _KNOWN_MOST:
            _KNOWN.clear()
        _KNOWN[head] = find_tensor(head)
    return _KNOWN[head]


Record = Slice | Objected


class Filling:
    """All records that one rank wants."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self.records[record.place.file].append(record)
        self._begins: dict[str, list[int]] = {}
        self._longest: dict[str, int] = {}
        for file, found in self.records.items():
            found.sort(key=lambda record: record.place.at_bytes)
            self._begins[file] = [record.place.at_bytes for record in found]
            self._longest[file] = max(record.place.size_bytes for record in found)

    def needs(self) -> dict[str, list[tuple[int, int]]]:
        """File -> the ranges of bytes that are wanted of it."""
        return {file: [one for record in found for one in record.ranges] for file, found in self.records.items()}

    def take(self, file: str, at_bytes: int, window: memoryview) -> None:
        """Bytes of a file, from at_bytes on."""
        view: Bytes = np.frombuffer(window, np.uint8)
        end = at_bytes + view.nbytes
        records: Sequence[Record] = self.records[file]
        # records that begin before the window may reach into it, as far back as the longest is long
        first = bisect_right(self._begins[file], at_bytes - self._longest[file])
        for record in records[first : bisect_right(self._begins[file], end - 1)]:
            place = record.place
            lo, hi = max(at_bytes, place.at_bytes), min(end, place.at_bytes + place.size_bytes)
            if lo < hi:
                record.feed(lo - place.at_bytes, view[lo - at_bytes : hi - at_bytes])
