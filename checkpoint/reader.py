"""Loading: a committed checkpoint into the state dict of any layout, and never one that is not whole.

    load(...)      a Megatron sharded state dict      load_dcp(...)   DTensor, FSDP2, plain tensors
    all ranks: COMMITTED, manifest, sizes, .metadata's and common.pt's hashes  -> read once a node, hashed on the way

`.metadata` and `common.pt` are pickles, so nothing is unpickled before the hashes of the manifest hold: of these two
at once, and of the shards' objects when all ranks have said that every file that was read is as it was written. Tensors
are filled as the bytes come: where a load raises, what they hold is undefined. Resharding is Megatron's and DCP's;
which checkpoint to load is store.py's.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict

from outlast.checkpoint.dcp_reader import Bring, Sharing, Source, StreamingReader
from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.manifest import FileEntry, Found, Manifest, hash_bytes
from outlast.checkpoint.verify import (
    HashCache,
    Unreadable,
    find_files,
    list_plain,
    read_content,
    read_manifest,
    require,
)
from outlast.checkpoint.verify import verify as verify_directory

INDEX: Final = ".metadata"
COMMON: Final = "common.pt"
FORMAT: Final = "metadata.json"
LIMIT_S: Final = 300.0
T = TypeVar("T")


class _Format(msgspec.Struct):
    """What Megatron writes into metadata.json."""

    sharded_backend: str = ""
    common_backend: str = ""


def load(
    sharded_state_dict: dict[str, Any],
    path: Path | str,
    *,
    verify: str = "hashes",
    process_group: dist.ProcessGroup | None = None,
    strict: str = "assume_ok_unexpected",
    limit_s: float = LIMIT_S,
    bring: Bring | None = None,
) -> tuple[dict[str, Any], Manifest]:
    """The state dict filled from `path`, and the checkpoint's manifest. Collective over all ranks.

    Raises NotWhole on every rank, before anything is unpickled, where COMMITTED is missing or a file is not what the
    manifest says; Unreadable where a read does not come back within limit_s. verify='hashes' compares every file that
    is read, over all ranks each once; 'sizes' trusts a check made just before. process_group: all ranks, able to do
    object collectives; None: the default one. `strict` is dist_checkpointing's. bring: shards may be missing
    here; it is called on each rank with those that the rank is to read, for all ranks of its node.
    """
    _refuse_unknown(verify)
    directory = Path(path)
    sharing = Sharing(process_group)
    try:
        manifest = _open_together(directory, sharing, partial=bring is not None)
        source, common = _read_small(directory, sharing, manifest.files, verify, (INDEX, COMMON, FORMAT))
        source = replace(source, bring=bring)
        return _load_megatron(sharded_state_dict, source, sharing, common, strict, limit_s), manifest
    finally:
        sharing.close()


def load_dcp(
    state_dict: dict[str, Any],
    path: Path | str,
    *,
    verify: str = "hashes",
    process_group: dist.ProcessGroup | None = None,
    planner: LoadPlanner | None = None,
    limit_s: float = LIMIT_S,
) -> Manifest:
    """Fill a DCP state dict (DTensor, FSDP2, plain tensors, objects) in place. Collective where there are ranks.

    Raises as load() does. The planner is DCP's own where none is given.
    """
    _refuse_unknown(verify)
    directory = Path(path)
    sharing = Sharing(process_group, alone=not dist.is_initialized())
    try:
        manifest = _open_together(directory, sharing)
        source, _ = _read_small(directory, sharing, manifest.files, verify, (INDEX,))
        _load_dcp(state_dict, source, sharing, planner, limit_s)
        return manifest
    finally:
        sharing.close()


def load_foreign(
    state_dict: dict[str, Any],
    path: Path | str,
    *,
    megatron: bool,
    process_group: dist.ProcessGroup | None = None,
    strict: str = "assume_ok_unexpected",
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
    """Fill from a checkpoint that plain Megatron-core or DCP wrote: no manifest, so nothing can be compared.

    Only for one whose origin is known: its pickles are carried out as they lie there.
    """
    directory = Path(path)
    sharing = Sharing(process_group, alone=not dist.is_initialized())
    try:
        files = _together(sharing, directory, lambda: list_plain(directory))
        names = (INDEX, COMMON, FORMAT) if megatron else (INDEX,)
        source, common = _read_small(directory, sharing, files, "sizes", names)
        if megatron:
            return _load_megatron(state_dict, source, sharing, common, strict, limit_s)
        _load_dcp(state_dict, source, sharing, None, limit_s)
        return state_dict
    finally:
        sharing.close()


def load_common(path: Path | str, *, verify: str = "hashes", partial: bool = False) -> tuple[dict[str, Any], Manifest]:
    """The unsharded part alone (common.pt), on this rank alone, and the manifest. Raises NotWhole.

    All sizes are checked (partial: none, shards may be missing here), and the hash of the one file that is read: the
    very bytes that are unpickled then.
    """
    _refuse_unknown(verify)
    directory = Path(path)
    manifest = read_manifest(directory) if partial else verify_directory(directory, hashes=False)
    raw = _read_one(directory, COMMON, manifest.files, verify)
    # weights_only: tensors and plain containers, and what the program has allowed by torch.serialization
    return cast(dict[str, Any], torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)), manifest


# ---------------------------------------------------------------------- before the shards


def _open_together(directory: Path, sharing: Sharing, *, partial: bool = False) -> Manifest:
    """The manifest; sizes of all files, each looked at by one rank."""

    def look() -> Manifest:
        manifest = read_manifest(directory)
        if not partial:
            _require_share(directory, manifest.files, sharing, hashes=False)
        return manifest

    return _together(sharing, directory, look)


def _read_small(
    directory: Path, sharing: Sharing, files: Mapping[str, FileEntry], how: str, names: Iterable[str]
) -> tuple[Source, dict[str, bytes]]:
    """Files that are unpickled, as bytes that are what the manifest says."""
    raw = _together(sharing, directory, lambda: {name: _read_one(directory, name, files, how) for name in names})
    return Source(directory=directory, index=raw[INDEX], files=files, hashed=how == "hashes"), raw


def _read_one(directory: Path, name: str, files: Mapping[str, FileEntry], how: str) -> bytes:
    if name not in files:
        raise NotWhole(directory.name, (f"its manifest lists no {name}",))
    raw = read_content(directory, name, files[name].size_bytes)
    if how == "hashes":
        require(directory, {name: files[name]}, {name: Found(size_bytes=len(raw), xxh3_128=hash_bytes(raw))})
    return raw


def _together(sharing: Sharing, directory: Path, look: Callable[[], T]) -> T:
    """What `look` finds, if no rank found a fault; else NotWhole on every rank, each fault once."""
    found: list[T] = []
    mine: tuple[str, ...] = ()
    unreadable = False
    try:
        found.append(look())
    except NotWhole as e:
        mine, unreadable = e.problems, isinstance(e, Unreadable)
    said = sharing.gather((mine, unreadable))
    problems = tuple(dict.fromkeys(problem for one, _ in said for problem in one))  # in rank order
    if problems or not found:
        only_unreadable = all(unread for one, unread in said if one)
        raise (Unreadable if only_unreadable else NotWhole)(directory.name, problems)
    return found[0]


# ---------------------------------------------------------------------- the shards


def _load_megatron(
    state: dict[str, Any], source: Source, sharing: Sharing, small: Mapping[str, bytes], strict: str, limit_s: float
) -> dict[str, Any]:
    from megatron.core import dist_checkpointing  # type: ignore[import-untyped]

    from outlast.checkpoint.megatron_load import load_megatron

    if not _is_ours_to_read(small[FORMAT]):  # another backend: Megatron reads it, when all of it is known to be whole
        if source.bring is not None:
            source.bring(tuple(source.files))
        if source.hashed:
            _together(
                sharing,
                source.directory,
                lambda: _require_share(source.directory, source.files, sharing, hashes=True),
            )
        return cast(dict[str, Any], dist_checkpointing.load(state, str(source.directory), strict=strict))
    reader = StreamingReader(source, sharing, limit_s)
    return cast(
        dict[str, Any],
        _unwrapped(lambda: load_megatron(state, source.directory, reader, sharing, small[COMMON], strict)),
    )


def _is_ours_to_read(format_raw: bytes) -> bool:
    try:
        found = msgspec.json.decode(format_raw, type=_Format)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return (found.sharded_backend, found.common_backend) == ("torch_dist", "torch")


def _require_share(directory: Path, files: Mapping[str, FileEntry], sharing: Sharing, *, hashes: bool) -> None:
    """Every rank its share of the files."""
    share = sorted(files)[sharing.rank :: sharing.ranks]
    hash_fd = HashCache().hash_file if hashes else None
    require(directory, {name: files[name] for name in share}, find_files(directory, share, hash_fd=hash_fd))


def _load_dcp(
    state: dict[str, Any], source: Source, sharing: Sharing, planner: LoadPlanner | None, limit_s: float
) -> None:
    reader = StreamingReader(source, sharing, limit_s)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        _unwrapped(
            lambda: load_state_dict(
                state,
                storage_reader=reader,
                planner=planner,
                process_group=sharing.group,
                no_dist=sharing.alone,
            )
        )


def _unwrapped(work: Callable[[], T]) -> T:
    """What DCP wraps of ours comes out as it was raised."""
    try:
        return work()
    except CheckpointException as e:
        for error, _ in e.failures.values():
            if isinstance(error, CheckpointError):
                raise error from None
        raise


def _refuse_unknown(how: str) -> None:
    if how not in ("hashes", "sizes"):
        raise CheckpointError(f"verify: {how!r}; expected 'hashes' or 'sizes'")
