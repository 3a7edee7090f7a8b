"""Saving: a state dict of all ranks becomes a committed checkpoint while training goes on.

    every rank   save() -- plan together, fork a writer -- train on -- poll() -- train on -- poll() -> train_step
    its writer           write, hash, fsync own shard ......|
    rank 0's writer                                         wait for all, then .metadata, manifest.json, COMMITTED

The writer is a forked child: it sees the state as it was at the fork (copy on write), needs no lock of the trainer's
and dies with its rank (background.py). Right comes before fast here; a save costs the fork and the page copies that
follow. Files are what Megatron's `torch_dist` writes, and load without us.

Ranks agree about a save by small sums (gloo), so that all of them see it durable, failed or late in the same poll().
A rank that dies takes its connections along, and the others' next agreement raises: that is the attempt's end, not
this module's to mend.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from outlast import __version__
from outlast.checkpoint.background import Background, Link, Stage
from outlast.checkpoint.commit import POINTS, Reach, commit, pass_by, write_tracker
from outlast.checkpoint.errors import CheckpointError, SaveFailed, StoreError
from outlast.checkpoint.manifest import SCHEMA, DataFrontier, FileEntry, Identity, Manifest
from outlast.checkpoint.megatron_async import Share, Written, plan_save, write_index, write_share
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.store import Store
from outlast.reliability.model import Layout

log = logging.getLogger(__name__)

KILL_AT: Final = "OUTLAST_KILL_AT"
RANK_POINTS: Final = ("save.begin", "save.planned", "save.forked", "save.handed_over")
ANSWER_S: Final = 86400.0  # a pause of training must not fail a save; the writer dies with its rank in any case
PAUSE_S: Final = 0.005


@dataclass
class _Flight:
    """The save in flight, as this rank sees it. The only thing here that changes."""

    train_step: int
    directory: Path
    began_s: float
    """Monotonic, as all times here."""
    deadline_s: float
    hold_s: float = 0.0
    child: Background | None = None
    error: str = ""
    committing: bool = False
    """All shards are written; rank 0's writer commits."""


class Saver:
    """Saves of one training process group, one in flight at a time. All methods are collective unless they say so."""

    def __init__(
        self,
        directory: Path | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        keep_last: int = 0,
        keep: tuple[int, ...] = (),
        on_durable: Callable[[int, float, float], None] | None = None,
        on_failure: str = "raise",
        timeout_s: float = 600.0,
        reach: Reach | None = None,
    ) -> None:
        """`directory` holds `iter_%07d` and is seen by all ranks.

        process_group: all ranks, gloo (or able to do object collectives); None makes a gloo group of its own.
        keep_last: rank 0 prunes older checkpoints after each commit; 0 leaves that to the supervisor. keep: train_steps
        never pruned (the one restored from).
        on_durable(train_step, hold_s, durable_s) is called on every rank, inside poll() or finish().
        on_failure: 'raise' SaveFailed on all ranks, or 'skip': log it, keep it in `last_failure`, train on.
        timeout_s: for the shards, and again for the commit. reach: told each point that is passed (tests);
        None: the process ends at the point that OUTLAST_KILL_AT names, if it is set.
        """
        if on_failure not in ("raise", "skip"):
            raise CheckpointError(f"on_failure: {on_failure!r}; expected 'raise' or 'skip'")
        self._root = Path(directory)
        self._store = Store(self._root)
        self._keep_last, self._keep = keep_last, keep
        self._on_durable = on_durable
        self._raises = on_failure == "raise"
        self._timeout_s = timeout_s
        self._reach = reach or _read_kill_point()
        self._group = process_group or _make_group(timeout_s)
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size(self._group)
        if self._world_size != dist.get_world_size():
            raise CheckpointError(
                f"process_group has {self._world_size} ranks of {dist.get_world_size()}: give one of all ranks"
            )
        self._flight: _Flight | None = None
        self._tail: Background | None = None
        self._last_failure = ""

    def save(
        self,
        sharded_state_dict: dict[str, Any],
        *,
        train_step: int,
        samples: int,
        layout: Layout,
        identity: Identity | None = None,
        pins: Mapping[str, str] | None = None,
        parents: tuple[str, ...] = (),
        data_frontier: DataFrontier | None = None,
        content_metadata: dict[str, Any] | None = None,
    ) -> float:
        """Start a save of this state; returns the seconds that the train loop was held.

        A save still in flight is finished first. Everything that is not a ShardedTensor/ShardedObject goes to
        common.pt from rank 0. When it returns, the state may be changed freely. data_frontier None means
        consumed=samples, nothing skipped. The dict itself is changed as Megatron's own save changes it.
        """
        began_s = time.monotonic()
        self.finish()
        self._reach("save.begin")
        manifest = Manifest(
            schema=SCHEMA,
            train_step=train_step,
            samples=samples,
            layout=layout,
            files={},
            identity=identity or Identity(),
            pins=dict(pins or {}),
            parents=parents,
            data_frontier=data_frontier or DataFrontier(consumed=samples),
            made_by=f"outlast {__version__}",
        )
        flight = _Flight(
            train_step=train_step,
            directory=self._store.path(train_step),
            began_s=began_s,
            deadline_s=time.monotonic() + self._timeout_s,
        )
        if refused := self._make_room(flight):
            self._fail(flight, f"rank 0: {refused}")
            return time.monotonic() - began_s
        share = plan_save(sharded_state_dict, flight.directory, self._group, content_metadata)
        self._reach("save.planned")
        self._fork(flight, share, manifest)
        self._reach("save.forked")
        self._flight = flight
        flight.hold_s = time.monotonic() - began_s
        return flight.hold_s

    @property
    def in_flight(self) -> int | None:
        """Train_step of the save in flight; None where there is none. Not collective."""
        return self._flight.train_step if self._flight else None

    @property
    def last_failure(self) -> str:
        """Why the last save failed, with on_failure='skip'; '' where it did not. Not collective."""
        return self._last_failure

    def poll(self) -> int | None:
        """The train_step that has just become durable, else None. Call it once a train_step on all ranks.

        Costs nothing while no save is in flight, one small all-reduce while one is. Never blocks on a writer.
        """
        return self._advance(give_up=False)

    def finish(self, timeout_s: float | None = None) -> int | None:
        """Wait for the save in flight: its train_step, or None where none was, or where it failed and was skipped.

        A save that is not durable within timeout_s (None: the Saver's own, shards and commit each) has failed.
        """
        give_up_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while self._flight is not None:
            if (durable := self._advance(give_up=time.monotonic() > give_up_s)) is not None:
                return durable
            time.sleep(PAUSE_S)
        return None

    def close(self) -> None:
        """End this rank's writer at once; a save in flight stays uncommitted. Not collective. Safe to call twice."""
        if self._flight is not None and self._flight.child is not None:
            self._flight.child.end()
        self._flight = None
        self._end_tail()

    # ------------------------------------------------------------------ one save, step by step

    def _make_room(self, flight: _Flight) -> str:
        """Rank 0 makes an empty directory of that name; all ranks learn '' or why it could not."""
        said = [""]
        if self._rank == 0:
            self._end_tail()
            try:
                flight.directory.parent.mkdir(parents=True, exist_ok=True)
                moved = self._store.set_aside(flight.train_step)
                flight.directory.mkdir()
                RealOps().sync_dir(flight.directory.parent)
                if moved:
                    log.warning("%s was there already; moved to %s", flight.directory, moved)
            except (OSError, StoreError) as e:
                said = [f"cannot make {flight.directory}: {e}"]
        dist.broadcast_object_list(said, src=0, group=self._group)
        return said[0]

    def _fork(self, flight: _Flight, share: Share, manifest: Manifest) -> None:
        job = _Job(
            root=self._root,
            directory=flight.directory,
            share=share,
            manifest=manifest,
            began_s=flight.began_s,
            first=self._rank == 0,
            keep_last=self._keep_last,
            keep=self._keep,
            reach=self._reach,
        )
        try:
            flight.child = Background(job.run, name=f"ckpt-{flight.train_step}")
        except OSError as e:
            flight.error = f"cannot fork a writer: {e.strerror}"  # the others have theirs: all learn it in poll()

    def _advance(self, *, give_up: bool) -> int | None:
        flight = self._flight
        if flight is None:
            return None
        ready, words = self._look(flight, give_up=give_up)
        all_ready, all_failed = self._add_up(ready, bool(words))
        if all_failed:
            self._give_up(flight, words)
            return None
        if flight.committing:
            return self._end(flight) if all_ready else None
        if all_ready == self._world_size:
            self._hand_over(flight)
        return None

    def _look(self, flight: _Flight, *, give_up: bool) -> tuple[bool, str]:
        """Whether this rank's part of the present stage is done, and why it never will be ('' otherwise)."""
        if flight.error:
            return False, flight.error
        if flight.child is None:
            return False, ""  # this rank's part is over; rank 0 commits
        stage = flight.child.stage()
        if stage is Stage.FAILED:
            return False, flight.child.result().decode("utf-8", "replace")
        if stage is (Stage.DONE if flight.committing else Stage.HALFWAY):
            return True, ""
        if give_up or time.monotonic() > flight.deadline_s:
            what = "the commit" if flight.committing else "writing"
            waited_s = time.monotonic() - flight.began_s
            return False, f"{what} was not done {waited_s:.1f} s after the save began (writer process stuck?)"
        return False, ""

    def _add_up(self, ready: bool, failed: bool) -> tuple[int, int]:
        counts = torch.tensor([int(ready), int(failed)], dtype=torch.int64)
        try:
            dist.all_reduce(counts, group=self._group)
        except RuntimeError as e:
            raise CheckpointError(f"rank {self._rank}: the ranks could not agree about a save: {e}") from e
        return int(counts[0]), int(counts[1])

    def _hand_over(self, flight: _Flight) -> None:
        """What each writer wrote goes to rank 0's writer, which commits."""
        assert flight.child is not None, "every rank is ready"
        gathered: list[bytes | None] | None = [None] * self._world_size if self._rank == 0 else None
        dist.gather_object(flight.child.result(), gathered, dst=0, group=self._group)
        flight.committing = True
        flight.deadline_s = time.monotonic() + self._timeout_s
        if self._rank == 0:
            flight.child.answer(pickle.dumps(gathered))
        else:
            flight.child.end()
            flight.child = None
        self._reach("save.handed_over")

    def _end(self, flight: _Flight) -> int:
        durable_s = time.monotonic() - flight.began_s
        if flight.child is not None:
            durable_s = float(flight.child.result())  # the writer's own clock: not when we happened to look
            self._tail = flight.child  # it may still be pruning
        self._flight = None
        self._last_failure = ""
        if self._on_durable:
            self._on_durable(flight.train_step, flight.hold_s, durable_s)
        return flight.train_step

    def _give_up(self, flight: _Flight, words: str) -> None:
        said: list[str] = [""] * self._world_size
        dist.all_gather_object(said, words, group=self._group)
        if flight.child is not None:
            flight.child.end()
        self._flight = None
        self._fail(flight, "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text))

    def _fail(self, flight: _Flight, why: str) -> None:
        what = (
            f"checkpoint {flight.directory.name} was not saved: {why}. It stays uncommitted; older ones are untouched"
        )
        self._last_failure = what
        if self._raises:
            raise SaveFailed(what, path=str(flight.directory), train_step=flight.train_step)
        log.error("%s; training goes on", what)

    def _end_tail(self) -> None:
        if self._tail is not None:
            self._tail.end()  # a prune that is cut short goes on with the next one
            self._tail = None


@dataclass(frozen=True)
class _Job:
    """What a writer process does. Everything in it is as it was at the fork."""

    root: Path
    directory: Path
    share: Share
    manifest: Manifest
    began_s: float
    first: bool
    keep_last: int
    keep: tuple[int, ...]
    reach: Reach

    def run(self, link: Link) -> None:
        written = write_share(RealOps(), self.directory, self.share, self.reach)
        link.report(Stage.HALFWAY, pickle.dumps(written))
        if self.first:
            self._commit([pickle.loads(part) for part in pickle.loads(link.wait(ANSWER_S))])
            durable_s = time.monotonic() - self.began_s
            # after the commit nothing may fail the save: what is left undone, the next save or the supervisor does
            with suppress(OSError, CheckpointError):
                write_tracker(RealOps(), self.root, self.manifest.train_step)
                self.reach("commit.tracker")
            link.report(Stage.DONE, str(durable_s).encode())
            if self.keep_last:
                with suppress(OSError, CheckpointError):
                    Store(self.root).prune(self.keep_last, keep=self.keep)

    def _commit(self, written: list[Written]) -> None:
        ops = RealOps()
        self.reach("commit.begin")
        files: dict[str, FileEntry] = {}
        for one in written:
            files.update(one.files)
        files.update(write_index(ops, self.directory, self.share, written))
        self.reach("commit.index")
        manifest = msgspec.structs.replace(self.manifest, files=files, made_at_s=time.time())
        commit(ops, self.directory, manifest, self.reach)


def _make_group(timeout_s: float) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise CheckpointError("no process group: call torch.distributed.init_process_group first (one rank too)")
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    if not isinstance(group, dist.ProcessGroup):
        raise CheckpointError(f"torch.distributed.new_group gave {group!r} for a group of all ranks")
    return group


def _read_kill_point() -> Reach:
    """For drills: the process that reaches the point named by OUTLAST_KILL_AT ends there, by SIGKILL."""
    point = os.environ.get(KILL_AT, "")
    if not point:
        return pass_by
    if point not in POINTS + RANK_POINTS:
        raise CheckpointError(f"{KILL_AT}: no point {point!r}; there are {', '.join(RANK_POINTS + POINTS)}")

    def reach(passed: str) -> None:
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return reach
