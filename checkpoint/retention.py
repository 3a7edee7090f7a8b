"""Which checkpoints may go, and how one goes so that a crash at any line leaves none half believed.

The decision is pure (`plan_removal`). The deed: rename to `.leaving-*`, look at the leases once more, rename to
`.trash-*` (made durable), then delete below that name, COMMITTED first. A crash leaves one of the two, which the
next prune clears or brings back. Nothing here deletes a quarantined checkpoint: that is a person's to do.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from outlast.checkpoint.manifest import MARKER
from outlast.checkpoint.names import LEASES, LEAVING, TRASH, name_step, parse_step
from outlast.checkpoint.ops import Ops


def plan_removal(
    durable: Sequence[int], *, keep_last: int, keep: Collection[int], verified: int, keep_every: int = 0
) -> tuple[int, ...]:
    """The train_steps to remove, oldest first: committed, beyond the newest keep_last, and needed by nobody.

    `verified` is the newest that verifies. It stays, and so does everything newer: what is newer and does not verify
    is evidence, and no reason to count it among the ones to keep. keep_every: see pick_every; 0 for none.
    """
    sound = sorted(step for step in durable if step <= verified)
    old = sound[: max(0, len(sound) - max(keep_last, 1))]
    spaced = pick_every(durable, keep_every)
    return tuple(step for step in old if step not in keep and step not in spaced)


def pick_every(durable: Sequence[int], every: int) -> frozenset[int]:
    """The first checkpoint at or after each multiple of `every` train_steps.

    Not the exact multiples: saves that are due by time seldom meet one. What was picked once stays picked while it is
    there, whatever is removed or saved later.
    """
    if every <= 0:
        return frozenset()
    first: dict[int, int] = {}
    for step in sorted(durable):
        if step >= every:
            first.setdefault(step // every, step)
    return frozenset(first.values())


def read_leases(root: Path) -> frozenset[int]:
    """Train_steps that somebody holds a lease on: `leases/iter_0000030.<who>`."""
    return frozenset(list_leases(root))


def list_leases(root: Path) -> dict[int, tuple[str, ...]]:
    """train_step -> who holds a lease on it."""
    try:
        names = sorted(os.listdir(root / LEASES))
    except FileNotFoundError:
        return {}
    held: dict[int, tuple[str, ...]] = {}
    for name in names:
        first, _, who = name.partition(".")
        if (step := parse_step(first)) is not None:
            held[step] = (*held.get(step, ()), who)
    return held


def remove_checkpoint(ops: Ops, root: Path, train_step: int) -> bool:
    """Take one out of the way and delete it; False where a lease came in between, or it was gone already."""
    name = name_step(train_step)
    if train_step in read_leases(root):
        return False
    leaving, trash = root / f"{LEAVING}{name}", root / f"{TRASH}{name}.{os.getpid()}"
    try:
        ops.rename(root / name, leaving)
        # a lease taken after the plan was made: its holder sees the checkpoint again in a moment
        if train_step in read_leases(root):
            ops.rename(leaving, root / name)
            return False
        ops.rename(leaving, trash)
    except FileNotFoundError:
        return False  # another pruner has it, or brought it back
    # the rename must be on disk before anything below it goes, else a power loss could bring back a gutted one
    ops.sync_dir(root)
    remove_tree(ops, trash)
    return True


def remove_tree(ops: Ops, directory: Path) -> None:
    """Delete a directory and what is in it, the commit marker first; links are removed, not followed.

    Another process may be deleting the same one.
    """
    with suppress(FileNotFoundError):
        ops.remove(directory / MARKER)
        ops.sync_dir(directory)
    with suppress(FileNotFoundError):
        with os.scandir(directory) as entries:
            listed = sorted(entries, key=lambda e: e.name)
        for entry in listed:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(ops, Path(entry.path))
            else:
                with suppress(FileNotFoundError):
                    ops.remove(Path(entry.path))
        ops.remove_dir(directory)


def clear_trash(ops: Ops, root: Path) -> None:
    """Finish what a crash left half deleted; bring back what it left undecided."""
    for name in sorted(os.listdir(root)):
        if name.startswith(TRASH):
            remove_tree(ops, root / name)
        elif name.startswith(LEAVING):
            back = root / name.removeprefix(LEAVING)
            with suppress(FileNotFoundError):
                if os.path.lexists(back):  # saved anew since then
                    ops.rename(root / name, root / f"{TRASH}{back.name}.{os.getpid()}")
                else:
                    ops.rename(root / name, back)
