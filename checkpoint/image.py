"""The bytes of a rank's files as they are to lie on disk, laid out before anything is copied.

    __R_0.distcp   |zip head|tensor bytes|zip tail| pad |zip head|tensor bytes|zip tail| ...
    common.pt      rank 0 alone
    .metadata      rank 0 alone, when the layout of all ranks is known

Each item is what `torch.save` makes of it, so that DCP and Megatron read it without us: torch writes its head and
tail round a hole (torch.serialization.skip_data), and the tensor is copied straight into the hole. That is one copy
of the state and no other. The checksums in the zip are those of the hole, which torch does not look at; what is
checked is the manifest's hash of the file.
"""

from __future__ import annotations

import ctypes
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import skip_data

from outlast.checkpoint.blocks import round_up
from outlast.checkpoint.commit import write_file
from outlast.checkpoint.job import Region
from outlast.checkpoint.manifest import FileEntry
from outlast.checkpoint.ops import HashedFile, Ops
from outlast.checkpoint.share import Share

ALIGN_BYTES: Final = 64
COMMON: Final = "common.pt"


@dataclass(frozen=True)
class Frame:
    """What torch.save writes before and after a tensor's bytes."""

    head: bytes
    hole_bytes: int
    tail: bytes


@dataclass(frozen=True)
class Piece:
    """Bytes, or a tensor's, at a place in the image."""

    at_bytes: int
    data: bytes | memoryview | torch.Tensor


@dataclass
class Image:
    """Regions of whole pages, and what is to be in them."""

    regions: list[Region] = field(default_factory=list)
    pieces: list[list[Piece]] = field(default_factory=list)
    """For each region, ascending."""
    results: list[WriteResult] = field(default_factory=list)
    """Where each item lies in its file."""
    size_bytes: int = 0

    def add(self, name: str, size_bytes: int, pieces: list[Piece]) -> Region:
        region = Region(name=name, at_bytes=self.size_bytes, size_bytes=size_bytes)
        self.regions.append(region)
        self.pieces.append([Piece(region.at_bytes + piece.at_bytes, piece.data) for piece in pieces])
        self.size_bytes += round_up(size_bytes)
        return region


class Framer:
    """Heads and tails by dtype and shape, each asked of torch once."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.dtype, torch.Size], Frame] = {}

    def frame(self, tensor: torch.Tensor) -> Frame:
        key = (tensor.dtype, tensor.shape)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = _ask_torch(*key)
        return known


class _Holed:
    """A stream that notes what is written and what is skipped. torch uses no more of it."""

    def __init__(self) -> None:
        self.parts: list[bytes | int] = []
        self._at = 0

    def write(self, data: bytes) -> int:
        self.parts.append(bytes(data))
        self._at += len(data)
        return len(data)

    def seek(self, count: int, whence: int = 0) -> int:
        assert whence == io.SEEK_CUR, "torch skips relatively"
        self.parts.append(count)
        self._at += count
        return self._at

    def flush(self) -> None:
        """Nothing is buffered."""

    def tell(self) -> int:
        return self._at


def _ask_torch(dtype: torch.dtype, shape: torch.Size) -> Frame:
    stream = _Holed()
    with skip_data():
        torch.save(torch.empty(shape, dtype=dtype), stream)  # type: ignore[arg-type]
    holes = [n for n, part in enumerate(stream.parts) if isinstance(part, int)]
    split = holes[0] if holes else len(stream.parts)
    head, tail = stream.parts[:split], stream.parts[split + 1 :]
    hole_bytes = sum(part for part in stream.parts if isinstance(part, int))
    if len(holes) > 1 or hole_bytes != dtype.itemsize * shape.numel():
        raise AssertionError(f"torch.save of {dtype} {tuple(shape)}: {len(holes)} holes of {hole_bytes} bytes")
    return Frame(b"".join(_solid(head)), hole_bytes, b"".join(_solid(tail)))


def _solid(parts: list[bytes | int]) -> Iterator[bytes]:
    return (part for part in parts if isinstance(part, bytes))


def lay_out(share: Share, framer: Framer) -> Image:
    """Where everything of this rank's lies. Touches no data."""
    image, pieces, at = Image(), list[Piece](), 0
    name = share.planned.file_name
    for item, data in zip(share.planned.items, share.data, strict=True):
        at = round_up(at, ALIGN_BYTES)
        begin = at
        if isinstance(data, torch.Tensor):
            frame = framer.frame(data)
            pieces += [Piece(at, frame.head), Piece(at + len(frame.head), data.detach())]
            pieces.append(Piece(at + len(frame.head) + frame.hole_bytes, frame.tail))
            at += len(frame.head) + frame.hole_bytes + len(frame.tail)
        else:
            pieces.append(Piece(at, data.getbuffer()))
            at += data.getbuffer().nbytes
        where = _StorageInfo(name, begin, at - begin)
        image.results.append(WriteResult(index=item.index, size_in_bytes=at - begin, storage_data=where))
    if pieces:
        image.add(name, at, pieces)
    if share.common is not None:
        image.add(COMMON, len(share.common), [Piece(0, share.common)])
    return image


def write_now(ops: Ops, directory: Path, image: Image) -> dict[str, FileEntry]:
    """The files of an image that found no room in staging memory, straight from the live state. Blocks; durable."""
    written = {}
    ops.make_dir(directory)
    for region, pieces in zip(image.regions, image.pieces, strict=True):

        def fill(stream: HashedFile, region: Region = region, pieces: list[Piece] = pieces) -> None:
            for piece in pieces:
                stream.write(bytes(piece.at_bytes - region.at_bytes - stream.tell()))
                _stream(stream, piece.data)

        written[region.name] = write_file(ops, directory / region.name, fill)
    ops.sync_dir(directory)
    return written


def _stream(stream: HashedFile, data: bytes | memoryview | torch.Tensor) -> None:
    if not isinstance(data, torch.Tensor):
        stream.write(data)
    elif data.numel():
        flat = data.cpu().contiguous()
        stream.write(memoryview((ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())))
