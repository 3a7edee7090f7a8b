"""Local checkpoints as the shared file system knows them: index, manifest, who holds which part, who has a copy.

    checkpoints/local/iter_0000120/   .metadata common.pt metadata.json   the index, small
                                      parts.json       which node wrote which shard
                                      manifest.json    size and hash of every file, shards and parts.json too
                                      COMMITTED        last, when every shard was on its node
                                      copied-NODE.json that node's shards also lie on another one
                                      tier.json        local | copied

The shards lie on nodes (shelf_box.py). So one marker vouches for all parts, and what a dead node held can be known
without asking it. A copy's record counts only for the manifest that it names: a train_step may be saved again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from outlast.checkpoint.commit import Reach, commit, pass_by, replace_file, write_bytes
from outlast.checkpoint.errors import NotWhole
from outlast.checkpoint.manifest import MANIFEST, MARKER, Manifest, hash_bytes
from outlast.checkpoint.names import ASIDE, LOCAL, name_step, parse_step
from outlast.checkpoint.ops import Ops, RealOps
from outlast.checkpoint.retention import clear_trash, plan_removal, remove_checkpoint, remove_tree
from outlast.checkpoint.shelf_wire import Name, unsafe_name
from outlast.checkpoint.tiers import Tier, read_tier, write_tier
from outlast.checkpoint.verify import read_manifest
from outlast.reliability.model import Node, Noun

PARTS: Final = "parts.json"
COPIED: Final = "copied-"
PARTS_MAX_BYTES: Final = 64 << 20
_RECORD_MAX_BYTES: Final = 4096


class Parts(Noun, frozen=True, kw_only=True):
    """The content of parts.json."""

    nodes: dict[Name, Node]
    """Shard -> the node that wrote it."""

    def of(self, node: Node) -> tuple[str, ...]:
        return tuple(sorted(name for name, holder in self.nodes.items() if holder == node))


class CopyRecord(Noun, frozen=True, kw_only=True):
    """The content of copied-NODE.json."""

    of: Node
    on: Node
    manifest_xxh3_128: str
    at_s: float


class LocalTier:
    """Below one directory of checkpoints."""

    def __init__(self, checkpoints: Path, *, ops: Ops | None = None) -> None:
        self.root = checkpoints / LOCAL
        self._ops = ops or RealOps()

    def path(self, train_step: int) -> Path:
        return self.root / name_step(train_step)

    def steps(self) -> tuple[int, ...]:
        """Committed ones, ascending."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return ()
        found = (parse_step(name) for name in names)
        return tuple(sorted(step for step in found if step is not None and (self.path(step) / MARKER).is_file()))

    def commit(self, manifest: Manifest, parts: Mapping[str, Node], reach: Reach = pass_by) -> None:
        """Make one true whose index lies in its directory and whose shards are durable on their nodes.

        `manifest` has the files of all; those in `parts` lie on the nodes. parts.json is added.
        """
        directory = self.path(manifest.train_step)
        noted = msgspec.json.encode(Parts(nodes=dict(parts)), order="deterministic")
        entry = write_bytes(self._ops, directory / PARTS, noted)
        whole = msgspec.structs.replace(manifest, files={**manifest.files, PARTS: entry})
        commit(self._ops, directory, whole, reach, elsewhere=frozenset(parts))
        with suppress(OSError):
            write_tier(self._ops, directory, manifest.train_step, Tier.LOCAL)

    def read(self, train_step: int) -> tuple[Manifest, Parts]:
        """Of a committed one. Raises NotWhole."""
        directory = self.path(train_step)
        manifest = read_manifest(directory)
        try:
            raw = (directory / PARTS).read_bytes()
            entry = manifest.files[PARTS]
            if (len(raw), hash_bytes(raw)) != (entry.size_bytes, entry.xxh3_128):
                raise NotWhole(directory.name, (f"{PARTS}: not as its manifest says",))
            parts = msgspec.json.decode(raw, type=Parts)
        except (OSError, KeyError, msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise NotWhole(directory.name, (f"{PARTS}: {type(e).__name__}: {e}",)) from e
        for name in parts.nodes:
            if (why := unsafe_name(name)) or name not in manifest.files:
                raise NotWhole(directory.name, (f"{PARTS}: {name!r} {why or 'is not in the manifest'}; refused",))
        return manifest, parts

    def copies(self, train_step: int) -> dict[Node, Node]:
        """node -> the node that has a copy of its shards."""
        found, current = {}, self._manifest_hash(train_step)
        for path in sorted(self.path(train_step).glob(f"{COPIED}*.json")):
            with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError), open(path, "rb") as file:
                record = msgspec.json.decode(file.read(_RECORD_MAX_BYTES), type=CopyRecord)
                if record.manifest_xxh3_128 == current and path.name == _record_name(record.of):
                    found[record.of] = record.on
        return found

    def note_copy(self, train_step: int, of: Node, on: Node, manifest: Manifest, parts: Parts) -> None:
        """A copy of this node's shards lies on that one, compared with `manifest`. Then all may have one: `copied`."""
        directory = self.path(train_step)
        if read_manifest(directory) != manifest:
            return  # saved anew meanwhile
        current = self._manifest_hash(train_step)
        record = CopyRecord(of=of, on=on, manifest_xxh3_128=current, at_s=time.time())
        replace_file(self._ops, directory, _record_name(of), msgspec.json.encode(record) + b"\n")
        copies = self.copies(train_step)
        if set(parts.nodes.values()) <= set(copies):
            where = ", ".join(f"{one} on {other}" for one, other in sorted(copies.items())[:64])
            write_tier(self._ops, directory, train_step, Tier.COPIED, where)

    def tier(self, train_step: int) -> Tier:
        record = read_tier(self.path(train_step))
        return record.tier if record else Tier.LOCAL

    def prune(self, keep_last: int) -> tuple[int, ...]:
        """Remove all but the newest, and what saves that never finished have left; shelves then drop the parts."""
        steps = self.steps()
        if not steps:
            return ()
        clear_trash(self._ops, self.root)
        plan = plan_removal(steps, keep_last=keep_last, keep=(), verified=steps[-1])
        gone = tuple(step for step in plan if remove_checkpoint(self._ops, self.root, step))
        for name in os.listdir(self.root):
            step = parse_step(name)
            if step is not None and step < steps[-1] and step not in steps:
                remove_checkpoint(self._ops, self.root, step)
        remove_tree(self._ops, self.root / ASIDE)  # its parts have made room on the nodes too
        return gone

    def clear(self) -> None:
        """The run is over and its nodes are given back: no part is left anywhere."""
        for step in self.steps():
            remove_checkpoint(self._ops, self.root, step)

    def _manifest_hash(self, train_step: int) -> str:
        try:
            return hash_bytes((self.path(train_step) / MANIFEST).read_bytes())
        except OSError:
            return ""


def _record_name(node: Node) -> str:
    return f"{COPIED}{node}.json"


def index_files(manifest: Manifest, parts: Parts) -> tuple[str, ...]:
    """What lies on the shared file system."""
    return tuple(sorted(name for name in manifest.files if name not in parts.nodes))


def is_local(directory: Path) -> bool:
    """Whether this is a local checkpoint's directory on the shared file system."""
    return directory.parent.name == LOCAL and (directory / PARTS).is_file() and (directory / MARKER).is_file()
