"""A torchsnapshot snapshot becomes a checkpoint of ours, once: read without torchsnapshot, written as DCP's files.

    SNAPSHOT/.snapshot_metadata   JSON: path -> container | value | tensor (file, bytes, dtype, shape) | pieces of one
            0/... batched/...     the bytes         -> nested state -> DCP files, manifest.json, COMMITTED

A snapshot has no hash: every length is compared with the metadata before a tensor is believed, and what a bit did to
it nobody can tell. From then on it has hashes. Values of rank 0 are taken; of sharded tensors every rank's shards.
Quantized tensors and objects that are more than plain data are refused by name. See docs/decisions/0015.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
import struct
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from outlast import __version__
from outlast.checkpoint.commit import commit
from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.manifest import SCHEMA, FileEntry, Manifest, unsafe_path
from outlast.checkpoint.names import name_step
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.verify import hash_open_file
from outlast.reliability.model import Layout

METADATA: Final = ".snapshot_metadata"
_PLAIN: Final = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex128,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
DTYPES: Final = {str(dtype): dtype for dtype in _PLAIN}


class Snapshot:
    """One snapshot, as its metadata tells."""

    def __init__(self, place: Path) -> None:
        self.place = place
        try:
            told = json.loads((place / METADATA).read_bytes())
            self.ranks, self.entries = int(told["world_size"]), dict(told["manifest"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise CheckpointError(f"{place / METADATA}: {e}; expected a snapshot's metadata", path=str(place)) from e

    def state(self) -> dict[str, Any]:
        """Everything of rank 0, nested as it was."""
        tops = dict.fromkeys(path.split("/")[1] for path in self.entries if path.startswith("0/"))
        return {_decode(top): self._build(f"0/{top}") for top in tops}

    def _build(self, path: str) -> Any:
        entry = self.entries.get(path)
        if entry is None:
            raise self._refuse(path, "not in the metadata; a value of another rank's")
        match entry["type"]:
            case "dict" | "OrderedDict":
                return {key: self._build(f"{path}/{_encode(str(key))}") for key in entry["keys"]}
            case "list":
                parts: list[Any] = []
                while f"{path}/{len(parts)}" in self.entries:
                    parts.append(self._build(f"{path}/{len(parts)}"))
                return parts
            case "Tensor":
                return self._tensor(path, entry)
            case "ChunkedTensor":
                return self._pieces(path, entry["chunks"])
            case "ShardedTensor":
                same = (self.entries.get(f"{rank}/{path.partition('/')[2]}") for rank in range(self.ranks))
                return self._pieces(path, [shard for one in same if one for shard in one["shards"]])
            case "object":
                return self._object(path, entry)
            case kind:
                return _value(kind, entry.get("serialized_value", ""))

    def _pieces(self, path: str, pieces: list[dict[str, Any]]) -> torch.Tensor:
        dims = range(len(pieces[0]["sizes"]))
        shape = [max(piece["offsets"][d] + piece["sizes"][d] for piece in pieces) for d in dims]
        dtype = self._dtype(path, pieces[0]["tensor"])
        whole, seen = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for piece in pieces:
            where = tuple(slice(o, o + s) for o, s in zip(piece["offsets"], piece["sizes"], strict=True))
            whole[where] = self._tensor(path, piece["tensor"])
            seen[where] = True
        if not bool(seen.all()):
            raise self._refuse(path, "its shards leave a part of it out")
        return whole

    def _dtype(self, path: str, entry: dict[str, Any]) -> torch.dtype:
        if entry["dtype"] not in DTYPES:
            raise self._refuse(path, f"dtype {entry['dtype']}")
        return DTYPES[entry["dtype"]]

    def _tensor(self, path: str, entry: dict[str, Any]) -> torch.Tensor:
        if entry["serializer"] != "buffer_protocol":
            found = self._load(path, self._read(path, entry))
            return found if torch.is_tensor(found) else self._fail(path, f"found {type(found).__name__}")
        dtype, raw = self._dtype(path, entry), self._read(path, entry)
        wanted = math.prod(entry["shape"]) * dtype.itemsize
        if len(raw) != wanted:
            raise self._refuse(path, f"{entry['location']} has {len(raw):,} of its {wanted:,} bytes")
        flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(entry["shape"])

    def _object(self, path: str, entry: dict[str, Any]) -> Any:
        return self._load(path, self._read(path, entry))

    def _load(self, path: str, raw: bytes) -> Any:
        try:
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as e:
            raise self._refuse(path, f"no plain data ({str(e).splitlines()[0][:120]})") from e

    def _read(self, path: str, entry: dict[str, Any]) -> bytes:
        name, span = entry["location"], entry.get("byte_range")
        if why := unsafe_path(name):
            raise self._refuse(path, f"{name!r} {why}")
        try:
            with (self.place / name).open("rb") as file:
                file.seek(span[0] if span else 0)
                content: bytes = file.read(span[1] - span[0] if span else -1)
                return content
        except OSError as e:
            raise self._refuse(path, f"{name}: {e.strerror}") from e

    def _refuse(self, path: str, why: str) -> CheckpointError:
        return CheckpointError(f"snapshot {self.place}: {path}: {why}; nothing was imported", path=str(self.place))

    def _fail(self, path: str, why: str) -> torch.Tensor:
        raise self._refuse(path, why)


def import_snapshot(place: Path, root: Path, *, train_step: int, samples: int) -> Path:
    """The new, committed checkpoint below `root`. Raises CheckpointError; a directory that is there is not touched."""
    snapshot = Snapshot(place)
    state, ops, directory = snapshot.state(), RealOps(), root / name_step(train_step)
    root.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir()
    except FileExistsError:
        raise CheckpointError(f"{directory} is there already; choose another train_step", path=str(directory)) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process: as it should be
        save(state, checkpoint_id=directory, no_dist=True)
    files = {path.name: _sync_and_hash(path) for path in sorted(directory.iterdir())}
    manifest = Manifest(
        schema=SCHEMA,
        train_step=train_step,
        samples=samples,
        layout=Layout(dp=snapshot.ranks),
        files=files,
        pins={"imported": f"torchsnapshot {place.name}"},
        made_by=f"outlast {__version__}",
    )
    commit(ops, directory, manifest)
    return directory


def _sync_and_hash(path: Path) -> FileEntry:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        return FileEntry(size_bytes=os.fstat(fd).st_size, xxh3_128=hash_open_file(fd))
    finally:
        os.close(fd)


def _value(kind: str, text: str) -> Any:
    match kind:
        case "int":
            return int(text)
        case "float":
            return struct.unpack("<d", base64.b64decode(text))[0]
        case "bool":
            return text == "True"
        case "bytes":
            return base64.b64decode(text)
        case "str":
            return text
    raise CheckpointError(f"a value of kind {kind!r} is not known; nothing was imported")


def _encode(key: str) -> str:
    return key.replace("%", "%25").replace("/", "%2F")


def _decode(key: str) -> str:
    return key.replace("%2F", "/").replace("%25", "%")
