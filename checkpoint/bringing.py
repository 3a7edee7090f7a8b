"""A local checkpoint on its way back: the shards that a node's ranks need, from where they lie, into one directory.

    local/iter_N (index, manifest, marker) + own box + other nodes' shelves -> BOX/iter_N, an ordinary checkpoint

Each file that is brought is compared with the manifest, whoever had it, and named only then; what is here already is
hashed too. The index comes from the shared file system. No torch: which shards are needed is the caller's to know.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from outlast.checkpoint.commit import replace_file
from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.local_tier import LocalTier, index_files
from outlast.checkpoint.manifest import MANIFEST, MARKER, FileEntry, Manifest, hash_bytes
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.prints import FILE as PRINTS
from outlast.checkpoint.shelf_box import Box
from outlast.checkpoint.shelf_roster import Roster
from outlast.checkpoint.shelf_wire import Get, Here, ShelfError
from outlast.reliability.model import Node

AT_ONCE: Final = 4


def bring(
    local: LocalTier,
    train_step: int,
    box: Box,
    roster: Roster,
    *,
    names: Collection[str] | None = None,
    index: bool = True,
) -> Path:
    """The directory on this node with the index and these shards (None: all). Raises NotWhole where one is nowhere.

    Done twice at once on one node it does no harm.
    """
    manifest, parts = local.read(train_step)
    wanted = sorted(parts.nodes if names is None else {*names} & {*parts.nodes})
    here = box.look(train_step, wanted)
    missing = [name for name in wanted if here.get(name) != manifest.files[name]]
    copies = local.copies(train_step)
    known = list(roster.all())

    def fetch(name: str) -> str:
        first = (parts.nodes[name], copies.get(parts.nodes[name]))
        order = [node for node in dict.fromkeys((*first, *known)) if node is not None and node != roster.me]
        return _fetch(box, roster, train_step, name, manifest.files[name], order)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        problems = [why for why in pool.map(fetch, missing) if why]
    if problems:
        raise NotWhole(local.path(train_step).name, tuple(problems))
    if index:
        _bring_index(local.path(train_step), box.directory(train_step), manifest, index_files(manifest, parts))
    return box.directory(train_step)


def _fetch(box: Box, roster: Roster, train_step: int, name: str, entry: FileEntry, order: list[Node]) -> str:
    """'' once it is here; else why no node gave it."""
    known, said = roster.all(), []
    for node in order:
        if node not in known:
            said.append(f"node {node} has no shelf")
            continue
        try:
            with roster.call(known[node]) as channel:
                reply = channel.ask(Get(train_step=train_step, name=name))
                if not isinstance(reply, Here) or reply.size_bytes != entry.size_bytes:
                    raise ShelfError(f"node {node}: offers another size than the manifest's {entry.size_bytes:,} bytes")
                box.put(train_step, name, entry, channel.hear_data(reply.size_bytes))
            return ""
        except (OSError, CheckpointError) as e:
            said.append(str(e))
    return f"{name}: {'; '.join(said[:4]) or 'no other node is there'}"


def _bring_index(source: Path, target: Path, manifest: Manifest, index: tuple[str, ...]) -> None:
    ops = RealOps()
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in index:
        raw = (source / name).read_bytes()
        if FileEntry(size_bytes=len(raw), xxh3_128=hash_bytes(raw)) != manifest.files[name]:
            raise NotWhole(source.name, (f"{name}: not as its manifest says",))
        replace_file(ops, target, name, raw)
    for name in (PRINTS, MANIFEST, MARKER):
        try:
            replace_file(ops, target, name, (source / name).read_bytes())
        except FileNotFoundError:
            if name != PRINTS:
                raise
