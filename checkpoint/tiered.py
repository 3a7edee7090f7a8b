"""A directory of checkpoints with farther tiers behind it: what a restore takes may have to be brought first.

The newest train_step that verifies over all tiers is chosen, and of one train_step the nearest. So the object store is
asked only for what is newer than all that verifies here; it is brought here, and then it is an ordinary checkpoint.
A store that does not answer costs nothing where a checkpoint verifies here. Where none does, it is no proof that there
is none: the answer is "try again", not a start from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from outlast.checkpoint.errors import CheckpointError, StoreError
from outlast.checkpoint.names import name_step
from outlast.checkpoint.ops import Ops
from outlast.checkpoint.remote import Remote
from outlast.checkpoint.store import Store
from outlast.reliability.ports import BadCheckpoint, Choice


class TieredStore(Store):
    """Safe to use from several processes at once, as Store is."""

    def __init__(self, directory: Path | str, remote: Remote, *, ops: Ops | None = None) -> None:
        super().__init__(directory, ops=ops)
        self._remote = remote

    def choose(self, *, quarantined: Sequence[int]) -> Choice:
        here = super().choose(quarantined=quarantined)
        newest = here.restore.train_step if here.restore else -1
        passed: list[BadCheckpoint] = []
        try:
            farther = [step for step in self._remote.steps() if step > newest and step not in quarantined]
        except StoreError as e:
            if here.restore is None:
                raise
            return _with(here, [self._not_taken(newest, str(e))])
        silent: StoreError | None = None
        for step in reversed(farther):
            try:
                self._remote.fetch(step, self.directory)
            except StoreError as e:
                silent = e
                passed.append(self._not_taken(step, str(e)))
            except CheckpointError as e:
                passed.append(self._not_taken(step, str(e)))
            else:
                return _with(super().choose(quarantined=quarantined), passed)
        if here.restore is None and silent is not None:
            raise silent
        return _with(here, passed)

    def _not_taken(self, train_step: int, why: str) -> BadCheckpoint:
        # told, but no incident: what lies there was whole when it was sent, and nothing here depends on it
        path = f"{self._remote.url}/{name_step(max(train_step, 0))}"
        return BadCheckpoint(train_step=train_step, path=path, why=why, unfinished=True)


def _with(choice: Choice, passed: list[BadCheckpoint]) -> Choice:
    return msgspec.structs.replace(choice, passed_over=(*passed, *choice.passed_over))
