"""A directory of checkpoints: which one to restore, setting bad ones aside, removing old ones.

`Store` is the real half of the CheckpointStore port. "Latest" is computed from what verifies, newest first; no
pointer is believed. It never deletes what it finds bad, and it does not save or load: see writer.py and reader.py.

What could not be read is not taken for bad: an older one is chosen where one verifies, but where none does, the
answer is StoreError(again=True) and not "there is no checkpoint", which would start a run from the beginning.
A directory that is not there at all is empty: a supervisor that has seen durable train_steps must not believe that.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from outlast.checkpoint.commit import replace_file, write_tracker
from outlast.checkpoint.errors import CheckpointError, NotCommitted, NotWhole, StoreError
from outlast.checkpoint.manifest import MARKER, Manifest
from outlast.checkpoint.names import ASIDE, LEASES, QUARANTINE, TRACKER, name_step, parse_step
from outlast.checkpoint.ops import Ops, RealOps
from outlast.checkpoint.retention import clear_trash, plan_removal, read_leases, remove_checkpoint, remove_tree
from outlast.checkpoint.verify import HashCache, Unreadable, verify
from outlast.reliability.model import Noun
from outlast.reliability.ports import BadCheckpoint, Choice, Restore

PROPER_PLACE = 1 << 62  # before any that was set aside
FINAL_ERRORS = frozenset({errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})


class Reason(Noun, frozen=True, kw_only=True):
    """Why a checkpoint lies in quarantine: `quarantine/iter_....reason`."""

    train_step: int
    why: str
    at_s: float


def _bad(step: int, path: Path, error: NotWhole) -> BadCheckpoint:
    why = "; ".join(error.problems)
    # said by what was found, not by looking again: a directory that cannot be read now may well be a committed one
    return BadCheckpoint(train_step=step, path=str(path), why=why, unfinished=isinstance(error, NotCommitted))


class Store:
    """The checkpoints below one directory. Safe to use from several processes at once."""

    def __init__(self, directory: Path | str, *, ops: Ops | None = None) -> None:
        self.directory = Path(directory)
        self._ops = ops if ops is not None else RealOps()
        self._hashes = HashCache()

    def path(self, train_step: int) -> Path:
        return self.directory / name_step(train_step)

    def choose(self, *, quarantined: Sequence[int]) -> Choice:
        """The newest that verifies and is not quarantined; what was passed over, newest first.

        Raises StoreError where the directory does not answer, or where all that could be the one cannot be read.
        """
        passed: list[BadCheckpoint] = []
        unreadable: list[str] = []
        for step, path in self._candidates():
            if step in quarantined:
                passed.append(BadCheckpoint(train_step=step, path=str(path), why="quarantined"))
                continue
            try:
                manifest = self._verify(path, step)
            except NotWhole as e:
                passed.append(_bad(step, path, e))
                if isinstance(e, Unreadable):
                    unreadable.append(path.name)
                continue
            restore = Restore(train_step=step, path=str(path), samples=manifest.samples)
            return Choice(restore=restore, passed_over=tuple(passed))
        if unreadable:
            raise StoreError(
                f"{self.directory}: no checkpoint verifies, but {len(unreadable)} could not be read (first: "
                f"{unreadable[0]}). Not taken for 'none': look at the file system, then try again",
                again=True,
                path=str(self.directory),
            )
        return Choice(restore=None, passed_over=tuple(passed))

    def quarantine(self, train_step: int, why: str) -> None:
        """Move all that choose() could take for this train_step to quarantine/, with a reason file each.

        Nothing is deleted. Doing it twice changes nothing.
        """
        reason = msgspec.json.encode(Reason(train_step=train_step, why=why, at_s=time.time())) + b"\n"
        bad = [path for step, path in self._candidates() if step == train_step]
        with self._answering("quarantine"):
            for path in bad:
                target = self._free_name(QUARANTINE, name_step(train_step))
                # the reason first: a reason without a checkpoint says too much, a checkpoint without one too little
                replace_file(self._ops, target.parent, f"{target.name}.reason", reason)
                self._move(path, target)
            if bad:
                self._point_tracker()

    def durable_steps(self) -> tuple[int, ...]:
        """Train_steps with a commit marker, ascending; cheap, nothing is verified."""
        return tuple(sorted({step for step, path in self._candidates() if _is_marked(path)}))

    def prune(self, keep_last: int, *, keep: Sequence[int], keep_every: int = 0) -> tuple[int, ...]:
        """Remove committed ones beyond the newest keep_last, and leftovers older than all that stay.

        Never the newest that verifies, nor any in `keep`, nor a leased (or named) one, nor the first at or after each
        multiple of keep_every; where none verifies nothing is removed. Reads the newest one through once to know that
        it verifies. Returns the train_steps that went.
        """
        with self._answering("prune"):
            if not self.directory.exists():
                return ()
            clear_trash(self._ops, self.directory)
            restore, plan = self._plan_prune(keep_last, keep, keep_every)
            if restore is None:
                return ()
            gone = tuple(step for step in plan if remove_checkpoint(self._ops, self.directory, step))
            staying = {restore.train_step, *self._committed(), *plan} - {*gone}
            self._clear_leftovers(oldest_kept=min(staying), needed={*keep, *read_leases(self.directory)})
            self._clear_aside(Path(restore.path))
            if gone:
                self._point_tracker()
            return gone

    def plan_prune(self, keep_last: int, *, keep: Sequence[int], keep_every: int = 0) -> tuple[int, ...]:
        """The train_steps that prune() would remove now. Changes nothing."""
        with self._answering("prune"):
            return self._plan_prune(keep_last, keep, keep_every)[1]

    def lease(self, train_step: int, who: str) -> Path:
        """Keep this checkpoint from being pruned until release(); `who` names the holder, one lease each.

        Raises NotWhole where it is not there (any more): look for another. A prune that was about to take it when the
        lease came may hide it for a moment, and brings it back.
        """
        if not who or not all(c.isalnum() or c in "-_" for c in who):
            raise CheckpointError(f"lease: holder {who!r}: use letters, digits, '-' and '_'")
        path = self.directory / LEASES / f"{name_step(train_step)}.{who}"
        with self._answering("lease"):
            self._ops.make_dir(path.parent)
            replace_file(self._ops, path.parent, path.name, b"")
            if not _is_marked(self.path(train_step)):
                self._ops.remove(path)
                raise NotWhole(name_step(train_step), ("gone, or not committed: no lease was taken",))
        return path

    def release(self, train_step: int, who: str) -> None:
        """Give a lease back. Doing it twice changes nothing."""
        with self._answering("release"), suppress(FileNotFoundError):
            self._ops.remove(self.directory / LEASES / f"{name_step(train_step)}.{who}")

    def set_aside(self, train_step: int) -> Path | None:
        """Move what has this train_step's name out of the way of a new save; None where nothing had it."""
        with self._answering("set aside"):
            if not os.path.lexists(self.path(train_step)):
                return None
            target = self._free_name(ASIDE, name_step(train_step))
            self._move(self.path(train_step), target)
            return target

    # ------------------------------------------------------------------ below: no decisions

    def _plan_prune(
        self, keep_last: int, keep: Sequence[int], keep_every: int
    ) -> tuple[Restore | None, tuple[int, ...]]:
        restore = self.choose(quarantined=()).restore
        if restore is None:
            return None, ()
        needed = {*keep, *read_leases(self.directory)}
        plan = plan_removal(
            self._committed(), keep_last=keep_last, keep=needed, verified=restore.train_step, keep_every=keep_every
        )
        return restore, plan

    def _committed(self) -> list[int]:
        """In their proper place."""
        return [step for step in self._steps(self.directory) if _is_marked(self.path(step))]

    def _verify(self, path: Path, step: int) -> Manifest:
        manifest = verify(path, cache=self._hashes)
        if manifest.train_step != step:
            raise NotWhole(path.name, (f"its manifest says train_step {manifest.train_step}",))
        return manifest

    def _candidates(self) -> list[tuple[int, Path]]:
        """Every directory that may be chosen, newest first: all with a checkpoint's name, and behind each the
        committed ones that made room for it, since a save that dies must not cost the one it was to replace.

        A symbolic link is listed, and then refused by verify.
        """
        with self._answering("list"):
            places = [(step, PROPER_PLACE, self.path(step)) for step in self._steps(self.directory)]
            places += [place for place in self._set_aside() if _is_marked(place[2])]
        return [(step, path) for step, _, path in sorted(places, reverse=True)]

    def _steps(self, folder: Path) -> list[int]:
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
        return [step for name in names if (step := parse_step(name)) is not None]

    def _set_aside(self) -> list[tuple[int, int, Path]]:
        """train_step, how manieth of its name, path."""
        folder = self.directory / ASIDE
        found = []
        for name in os.listdir(folder) if folder.is_dir() else ():
            first, _, number = name.partition(".")
            step = parse_step(first)
            if step is not None and (number or "1").isdecimal():
                found.append((step, int(number or 1), folder / name))
        return found

    def _free_name(self, folder: str, name: str) -> Path:
        self._ops.make_dir(self.directory / folder)
        self._ops.sync_dir(self.directory)
        taken = 1
        target = self.directory / folder / name
        while os.path.lexists(target):
            taken += 1
            target = self.directory / folder / f"{name}.{taken}"
        return target

    def _move(self, old: Path, new: Path) -> None:
        with suppress(FileNotFoundError):  # somebody else moved it first: that is what was wanted
            self._ops.rename(old, new)
        for folder in {new.parent, old.parent, self.directory}:
            self._ops.sync_dir(folder)

    def _point_tracker(self) -> None:
        durable = self.durable_steps()
        if durable:
            write_tracker(self._ops, self.directory, durable[-1])
        elif (self.directory / TRACKER).exists():
            self._ops.remove(self.directory / TRACKER)

    def _clear_leftovers(self, *, oldest_kept: int, needed: set[int]) -> None:
        """Saves that never finished. Only ones below all that stay: a newer one may be in flight right now."""
        for step in self._steps(self.directory):
            if step < oldest_kept and step not in needed and not _is_marked(self.path(step)):
                remove_checkpoint(self._ops, self.directory, step)

    def _clear_aside(self, verified: Path) -> None:
        """What had to make room goes once a checkpoint at least as far verifies in its proper place."""
        step = parse_step(verified.name)
        if step is None or verified.parent != self.directory:
            return  # the newest that verifies is itself one of these
        for old, _, path in self._set_aside():
            if old <= step:
                remove_tree(self._ops, path)

    @contextmanager
    def _answering(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise StoreError(
                f"{what}: {e.filename or self.directory}: {e.strerror}. Is the directory there and writable?",
                again=e.errno not in FINAL_ERRORS,
                path=str(self.directory),
            ) from e


def _is_marked(path: Path) -> bool:
    """It says that it is committed; whether that is so is verify's to find."""
    try:
        info = os.lstat(path / MARKER)
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and info.st_size > 0
