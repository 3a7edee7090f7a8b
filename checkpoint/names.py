"""What things are called in a directory of checkpoints. Pure; the one place that knows the names.

checkpoints/iter_0000030/       a checkpoint, believed once COMMITTED fits its manifest and files
            quarantine/iter_... found bad: kept for a person, with `iter_....reason` beside it
            aside/iter_...      made room for a new save of the same train_step; counts until that one is true
            leases/iter_....WHO somebody needs that checkpoint: it is not pruned
            .leaving-iter_...   about to be deleted, may still come back (a lease)
            .trash-iter_...     being deleted
            .fetching-iter_...  on its way here from an object store; not whole yet
            local/iter_...      index and manifest of a checkpoint whose shards lie on the nodes
            latest_checkpointed_iteration.txt   for readers that know the framework alone; never believed here
"""

from __future__ import annotations

import re
from typing import Final

TRACKER: Final = "latest_checkpointed_iteration.txt"
QUARANTINE: Final = "quarantine"
ASIDE: Final = "aside"
LEASES: Final = "leases"
LOCAL: Final = "local"
LEAVING: Final = ".leaving-"
TRASH: Final = ".trash-"
FETCHING: Final = ".fetching-"
_NAME: Final = re.compile(r"iter_([0-9]{7,10})")


def name_step(train_step: int) -> str:
    """As Megatron names it; at least seven digits."""
    return f"iter_{train_step:07d}"


def parse_step(name: str) -> int | None:
    """The train_step of a checkpoint's directory name; None for any other name, 'iter_00000030' (not canonical) too."""
    found = _NAME.fullmatch(name)
    if found is None or name_step(int(found[1])) != name:
        return None
    return int(found[1])
