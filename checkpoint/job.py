"""What a rank asks of its writer process, and what the writer processes tell each other. Pure.

A job names regions of the staging memory, which hold the files byte by byte as they are to lie on disk. So the
writer moves bytes: it knows of files, hashes and the commit, not of tensors.
"""

from __future__ import annotations

from typing import Final

import msgspec

from outlast.checkpoint.manifest import FileEntry, Manifest
from outlast.reliability.model import Node, Noun

REPORT: Final = ".written-"


class Region(Noun, frozen=True, kw_only=True):
    """One file's bytes in the staging memory. `at_bytes` is a multiple of the page size."""

    name: str
    at_bytes: int
    size_bytes: int


class Room(Noun, frozen=True, kw_only=True, tag="room"):
    """Map that much of the staging memory, before a save needs it."""

    image_bytes: int


class Spread(Noun, frozen=True, kw_only=True):
    """A local checkpoint: this rank's shards go to its own node, and only the rest to the shared directory."""

    node: Node
    shards: str
    """The directory on this node."""


class SaveJob(Noun, frozen=True, kw_only=True, tag="save"):
    """One rank's part of one save, and on rank 0 the commit. Times are CLOCK_MONOTONIC's, one clock a machine."""

    save_id: str
    """The same on all ranks, never used twice: what another save left in the directory is not taken for this one's."""
    rank: int
    world_size: int
    root: str
    directory: str
    image_bytes: int
    """Of the staging memory; they are copied from its beginning to its end, while this is being done."""
    shards: tuple[Region, ...]
    written: dict[str, FileEntry] = msgspec.field(default_factory=dict)
    """Files that the rank has written and synced itself: its state did not fit into the staging memory."""
    index: tuple[Region, ...] = ()
    """Files that are written after all shards of all ranks; rank 0 alone has them."""
    manifest: Manifest | None = None
    """Without its files; rank 0 alone has it."""
    began_s: float = 0.0
    timeout_s: float = 0.0
    """For the shards of all ranks, from now on."""
    keep_last: int = 0
    keep: tuple[int, ...] = ()
    spread: Spread | None = None


class Report(Noun, frozen=True, kw_only=True):
    """What a rank's writer leaves for rank 0's beside the files: `.written-RANK`, gone before the commit."""

    save_id: str
    files: dict[str, FileEntry]
    node: Node = Node("")
    """Where they lie, for a local checkpoint."""


def name_report(rank: int) -> str:
    return f"{REPORT}{rank}"
