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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from outlast.checkpoint.errors import CheckpointError, NotWhole, StoreError
from outlast.checkpoint.local_tier import LocalTier, Parts
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.names import name_step
from outlast.checkpoint.ops import Ops
from outlast.checkpoint.remote import Remote
from outlast.checkpoint.shelf_roster import Roster, find_holders
from outlast.checkpoint.store import Store
from outlast.reliability.model import Node
from outlast.reliability.ports import BadCheckpoint, Choice, Restore

CLOCKS_S: Final = 60.0
"""How far clocks of two nodes may be apart."""


def nobody() -> dict[Node, float]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Near:
    """The nodes' tier."""

    local: LocalTier
    roster: Roster
    suspects: Callable[[], Mapping[Node, float]] = nobody
    """Nodes whose numbers may be wrong, and since when: what they had a hand in since then is not taken."""


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
            newest = _step(choice)
            self._set_aside_near(self._near, newest, f"newer than train_step {newest}, from which the run goes on")
        return choice

    def quarantine(self, train_step: int, why: str) -> None:
        """In every tier on this file system; what lies in an object store is left out by the caller's own list.

        Local ones go with it back to the shared one before: whatever is wrong with it may have been so in them.
        """
        before = max((step for step in self.durable_steps() if step < train_step), default=-1)
        super().quarantine(train_step, why)
        if self._near is not None:
            self._set_aside_near(self._near, before, why)

    # ------------------------------------------------------------------ nearer

    def _look_near(self, near: Near, choice: Choice, quarantined: Sequence[int]) -> Choice:
        passed: list[BadCheckpoint] = []
        steps = [step for step in near.local.steps() if step >= _step(choice) and step not in quarantined]
        suspects = near.suspects() if steps else {}
        for step in reversed(steps):
            path = str(near.local.path(step))
            try:
                manifest, parts = near.local.read(step)
                problems = _distrust(suspects, manifest, parts) or find_holders(near.local, near.roster, step)[1]
            except NotWhole as e:
                problems = list(e.problems)
            if not problems:
                restore = Restore(train_step=step, path=path, samples=manifest.samples)
                return _with(msgspec.structs.replace(choice, restore=restore), passed)
            why = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
            # no incident: its nodes are lost, silent or suspect, which is told by others
            passed.append(BadCheckpoint(train_step=step, path=path, why=why, unfinished=True))
        return _with(choice, passed)

    def _set_aside_near(self, near: Near, newest: int, why: str) -> None:
        for step in near.local.steps():
            if step > newest:
                Store(near.local.root).quarantine(step, why)

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


def _distrust(suspects: Mapping[Node, float], manifest: Manifest, parts: Parts) -> list[str]:
    """A node computes on what all nodes computed, so one suspect that took part is enough."""
    holders = sorted({*parts.nodes.values()} & {*suspects})
    return [
        f"node {node} had a hand in it, and may have computed wrong numbers since before it was saved"
        for node in holders
        if manifest.made_at_s + CLOCKS_S > suspects[node]
    ]


def _step(choice: Choice) -> int:
    return choice.restore.train_step if choice.restore else -1


def _not_taken(far: Remote, train_step: int, why: str) -> BadCheckpoint:
    # told, but no incident: what lies there was whole when it was sent, and nothing here depends on it
    path = f"{far.url}/{name_step(max(train_step, 0))}"
    return BadCheckpoint(train_step=train_step, path=path, why=why, unfinished=True)


def _with(choice: Choice, passed: list[BadCheckpoint]) -> Choice:
    return msgspec.structs.replace(choice, passed_over=(*passed, *choice.passed_over))
