"""How far a save has come: on its nodes, copied to others, on the shared file system, in an object store.

    local    each node holds what its ranks wrote
    copied   every part also lies on a second node
    shared   the shared file system has all of it: what COMMITTED in the directory of checkpoints means
    remote   the object store has all of it, and it was read back

`tier.json` beside a checkpoint's files says so: for people, and for what is still to be done. It is a note, written
after the fact that it states: a restore verifies, and never believes it.
"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from outlast.checkpoint.commit import replace_file
from outlast.checkpoint.ops import Ops
from outlast.reliability.model import Noun

TIER_FILE: Final = "tier.json"
_LIMIT_BYTES: Final = 64 * 1024


class Tier(StrEnum):
    LOCAL = "local"
    COPIED = "copied"
    SHARED = "shared"
    REMOTE = "remote"


class TierRecord(Noun, frozen=True, kw_only=True):
    """The content of tier.json."""

    train_step: int
    tier: Tier
    at_s: float
    """Since when, by the clock of whoever wrote it."""
    where: str = ""
    """The object store's URL; the nodes that hold copies."""


def read_tier(directory: Path) -> TierRecord | None:
    """What is noted beside this checkpoint; None where nothing is, or nothing that can be read."""
    try:
        with open(directory / TIER_FILE, "rb") as file:
            return msgspec.json.decode(file.read(_LIMIT_BYTES), type=TierRecord)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def write_tier(ops: Ops, directory: Path, train_step: int, tier: Tier, where: str = "") -> None:
    record = TierRecord(train_step=train_step, tier=tier, at_s=time.time(), where=where)
    replace_file(ops, directory, TIER_FILE, msgspec.json.encode(record) + b"\n")
