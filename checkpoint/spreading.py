"""Where the files of one save go: all into one directory, or, for a local checkpoint, shards onto their ranks' nodes.

Small helpers of the save side; what a local checkpoint is stands in local_tier.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outlast.checkpoint.job import Spread
from outlast.checkpoint.names import LOCAL
from outlast.checkpoint.store import Store


def store_of(root: Path, spread: Spread | None) -> Store:
    """What holds the directories of such saves."""
    return Store(root / LOCAL if spread else root)


def clear_place(directory: Path, spread: Spread | None, names: Iterable[str]) -> Path:
    """The directory of this rank's shards; on a node, without what an earlier save of this train_step left there."""
    if spread is None:
        return directory
    place = Path(spread.shards)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in names:
        (place / name).unlink(missing_ok=True)
    return place
