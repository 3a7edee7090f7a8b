"""A directory of checkpoints with nearer and farther tiers: what a restore takes may have to be brought first.

The newest train_step that verifies over all tiers is chosen, and of one train_step the nearest.

- Nearer: parts on the nodes. Each shelf hashes what it has, so nothing moves before the choice is made; a checkpoint of
  which any shard is nowhere whole is passed over. What is newer than the choice is set aside then: it belongs to a past
  that this run leaves, and must not come back when a node does.
- Farther: the object store is asked only for what is newer than all that verifies here; it is brought here, and then it
  is an ordinary checkpoint. A store that does not answer costs nothing where a checkpoint verifies here. Where none
  does, it is no proof that there is none: the answer is "try again", not a start from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outlast.checkpoint.errors import CheckpointError, NotWhole, StoreError
from outlast.checkpoint.local_tier import LocalTier
from outlast.checkpoint.names import name_step
from outlast.checkpoint.ops import Ops
from outlast.checkpoint.remote import Remote
from outlast.checkpoint.shelf_roster import Roster, find_holders
from outlast.checkpoint.store import Store
from outlast.reliability.ports import BadCheckpoint, Choice, Restore


@dataclass(frozen=True, kw_only=True)
class Near:
    """The nodes' tier."""

    local: LocalTier
    roster: Roster


class TieredStore(Store):
    """Safe to use from several processes at once, as Store is."""

    def __init__(
        self, directory: Path | str, *, near: Near | None = None, far: Remote | None = None, ops: Ops | None = None
    ) -> None:
        super().__init__(directory, ops=ops)
        self._near, self._far = near, far

    def choose(self, *, quarantined: Sequence[int]) -> Choice:
        choice = super().choose(quarantined=quarantined)
        if self._near is not None:
            choice = self._look_near(self._near, choice, quarantined)
        if self._far is not None:
            choice = self._look_far(self._far, choice, quarantined)
        if self._near is not None:
            self._leave_newer(self._near, _step(choice))
        return choice

    def quarantine(self, train_step: int, why: str) -> None:
        """In every tier on this file system; what lies in an object store is left out by the caller's own list."""
        super().quarantine(train_step, why)
        if self._near is not None:
            Store(self._near.local.root).quarantine(train_step, why)

    # ------------------------------------------------------------------ nearer

    def _look_near(self, near: Near, choice: Choice, quarantined: Sequence[int]) -> Choice:
        passed: list[BadCheckpoint] = []
        for step in reversed(near.local.steps()):
            if step < _step(choice):
                break
            if step in quarantined:
                continue
            path = str(near.local.path(step))
            try:
                _, missing = find_holders(near.local, near.roster, step)
                manifest, _ = near.local.read(step)
            except NotWhole as e:
                missing = list(e.problems)
            if not missing:
                restore = Restore(train_step=step, path=path, samples=manifest.samples)
                return _with(msgspec.structs.replace(choice, restore=restore), passed)
            why = "; ".join(missing[:3]) + (f"; and {len(missing) - 3} more" if len(missing) > 3 else "")
            # no incident: its nodes are lost or silent, which is told by others
            passed.append(BadCheckpoint(train_step=step, path=path, why=why, unfinished=True))
        return _with(choice, passed)

    def _leave_newer(self, near: Near, chosen: int) -> None:
        for step in near.local.steps():
            if step > chosen:
                Store(near.local.root).quarantine(step, f"newer than train_step {chosen}, from which the run goes on")

    # ------------------------------------------------------------------ farther

    def _look_far(self, far: Remote, here: Choice, quarantined: Sequence[int]) -> Choice:
        passed: list[BadCheckpoint] = []
        try:
            farther = [step for step in far.steps() if step > _step(here) and step not in quarantined]
        except StoreError as e:
            if here.restore is None:
                raise
            return _with(here, [_not_taken(far, _step(here), str(e))])
        silent: StoreError | None = None
        for step in reversed(farther):
            try:
                far.fetch(step, self.directory)
            except StoreError as e:
                silent = e
                passed.append(_not_taken(far, step, str(e)))
            except CheckpointError as e:
                passed.append(_not_taken(far, step, str(e)))
            else:
                return _with(super().choose(quarantined=quarantined), passed)
        if here.restore is None and silent is not None:
            raise silent
        return _with(here, passed)


def _step(choice: Choice) -> int:
    return choice.restore.train_step if choice.restore else -1


def _not_taken(far: Remote, train_step: int, why: str) -> BadCheckpoint:
    # told, but no incident: what lies there was whole when it was sent, and nothing here depends on it
    path = f"{far.url}/{name_step(max(train_step, 0))}"
    return BadCheckpoint(train_step=train_step, path=path, why=why, unfinished=True)


def _with(choice: Choice, passed: list[BadCheckpoint]) -> Choice:
    return msgspec.structs.replace(choice, passed_over=(*passed, *choice.passed_over))
