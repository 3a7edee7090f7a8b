"""Which shelves there are: one small file a node in the run directory, and what is asked of all of them together.

    RUN_DIR/shelves/NODE.json    where its shelf listens, its failure domain

A file may outlive its shelf: a call finds out. So nothing here is a proof that a node lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from outlast.checkpoint.commit import replace_file
from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.local_tier import LocalTier
from outlast.checkpoint.manifest import FileEntry
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.shelf_link import Channel, call
from outlast.checkpoint.shelf_wire import Files, Look
from outlast.reliability.model import Node, Noun

AT_ONCE: Final = 16
_MAX_BYTES: Final = 4096


class Registration(Noun, frozen=True, kw_only=True):
    """The content of NODE.json."""

    node: Node
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    domain: str = ""


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The shelves of a run, as `me` sees and calls them."""

    folder: Path
    secret: bytes
    me: Node

    def register(self, registration: Registration) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(RealOps(), self.folder, f"{registration.node}.json", msgspec.json.encode(registration) + b"\n")

    def leave(self) -> None:
        with suppress(OSError):
            (self.folder / f"{self.me}.json").unlink()

    def all(self) -> dict[Node, Registration]:
        found = {}
        for path in sorted(self.folder.glob("*.json")):
            with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError), open(path, "rb") as file:
                one = msgspec.json.decode(file.read(_MAX_BYTES), type=Registration)
                if path.name == f"{one.node}.json":
                    found[one.node] = one
        return found

    def call(self, whom: Registration) -> Channel:
        return call((whom.host, whom.port), self.secret, self.me, whom.node)

    def look(self, train_step: int, wanted: Mapping[Node, Iterable[str]]) -> dict[Node, dict[str, FileEntry]]:
        """What each of these nodes has of its names, read through and hashed there. A silent one has nothing."""
        known = self.all()

        def ask(node: Node) -> dict[str, FileEntry]:
            try:
                with self.call(known[node]) as channel:
                    reply = channel.ask(Look(train_step=train_step, names=tuple(wanted[node])))
            except (KeyError, OSError, CheckpointError):
                return {}
            return reply.files if isinstance(reply, Files) else {}

        nodes = list(wanted)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(nodes, pool.map(ask, nodes), strict=True))


def find_holders(local: LocalTier, roster: Roster, train_step: int) -> tuple[dict[str, tuple[Node, ...]], list[str]]:
    """shard -> the nodes that have it, whole, now; and what is wrong: shards that nobody has. Raises NotWhole."""
    manifest, parts = local.read(train_step)
    copies = local.copies(train_step)
    wanted: dict[Node, list[str]] = {}
    for name, node in parts.nodes.items():
        for holder in dict.fromkeys((node, copies.get(node, node))):
            wanted.setdefault(holder, []).append(name)
    found = roster.look(train_step, wanted)
    holders: dict[str, tuple[Node, ...]] = {}
    missing = []
    for name, node in sorted(parts.nodes.items()):
        asked = dict.fromkeys((node, copies.get(node, node)))
        holders[name] = tuple(one for one in asked if found[one].get(name) == manifest.files[name])
        if not holders[name]:
            missing.append(f"{name}: not on {' nor on '.join(asked)}, whole")
    return holders, missing
