"""Loading: a committed checkpoint into the state dict of any layout, and never one that is not whole.

`.metadata` and `common.pt` are pickles, so nothing is unpickled before the hashes of the manifest hold. Each rank
hashes its share of the files, so that a checkpoint is read through once, not once a rank; all ranks learn the same
answer. Resharding is Megatron's; which checkpoint to load is store.py's.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME  # type: ignore[import-untyped]

from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.manifest import Found, Manifest, hash_bytes
from outlast.checkpoint.verify import HashCache, find_files, read_manifest, require
from outlast.checkpoint.verify import verify as verify_directory


def load(
    sharded_state_dict: dict[str, Any],
    path: Path | str,
    *,
    verify: str = "hashes",
    process_group: dist.ProcessGroup | None = None,
    strict: str = "assume_ok_unexpected",
) -> tuple[dict[str, Any], Manifest]:
    """The state dict filled from `path`, and the checkpoint's manifest. Collective over all ranks.

    Raises NotWhole on every rank, before anything is unpickled, where COMMITTED is missing or a file is not what the
    manifest says. verify='hashes' reads each file once over all ranks; 'sizes' trusts a check made just before.
    process_group: all ranks, able to do object collectives; None: the default one. `strict` is dist_checkpointing's.
    """
    directory = Path(path)
    manifest = verify_together(directory, how=verify, process_group=process_group)
    loaded = dist_checkpointing.load(sharded_state_dict, str(directory), strict=strict)
    return cast(dict[str, Any], loaded), manifest


def verify_together(directory: Path, *, how: str = "hashes", process_group: dist.ProcessGroup | None) -> Manifest:
    """The manifest of a whole checkpoint, the work shared between ranks. Collective; raises NotWhole on every rank."""
    _refuse_unknown(how)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    manifest: Manifest | None = None
    mine: tuple[str, ...] = ()
    try:
        manifest = read_manifest(directory)
        share = sorted(manifest.files)[rank::world_size]
        hash_fd = HashCache().hash_file if how == "hashes" else None
        part = {name: manifest.files[name] for name in share}
        require(directory, part, find_files(directory, share, hash_fd=hash_fd))
    except NotWhole as e:
        mine = e.problems
    said: list[tuple[str, ...]] = [()] * world_size
    dist.all_gather_object(said, mine, group=process_group)
    problems = dict.fromkeys(problem for one in said for problem in one)  # each once, in rank order
    if problems or manifest is None:
        raise NotWhole(directory.name, tuple(problems))
    return manifest


def load_common(path: Path | str, *, verify: str = "hashes") -> tuple[dict[str, Any], Manifest]:
    """The unsharded part alone (common.pt), on this rank alone, and the manifest. Raises NotWhole.

    All sizes are checked, and the hash of the one file that is read: the very bytes that are unpickled then.
    """
    _refuse_unknown(verify)
    directory = Path(path)
    manifest = verify_directory(directory, hashes=False)
    if COMMON_STATE_FNAME not in manifest.files:
        raise NotWhole(directory.name, (f"its manifest lists no {COMMON_STATE_FNAME}",))
    raw = (directory / COMMON_STATE_FNAME).read_bytes()
    if verify == "hashes":
        found = Found(size_bytes=len(raw), xxh3_128=hash_bytes(raw))
        require(directory, {COMMON_STATE_FNAME: manifest.files[COMMON_STATE_FNAME]}, {COMMON_STATE_FNAME: found})
    # weights_only: tensors and plain containers, and what the program has allowed by torch.serialization
    return cast(dict[str, Any], torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)), manifest


def _refuse_unknown(how: str) -> None:
    if how not in ("hashes", "sizes"):
        raise CheckpointError(f"verify: {how!r}; expected 'hashes' or 'sizes'")
