"""Saving: a state dict of all ranks becomes a committed checkpoint while training goes on.

    every rank   save() -- plan together, copy into staging memory -- train on -- poll() -- poll() -> train_step
    its writer process            write and hash what is copied, fsync own files ...|
    rank 0's writer process                                wait for all, then .metadata, manifest.json, COMMITTED

The train loop is held for one copy of the state into reused memory (staging.py), and with overlap=True for less. All
else is done by a writer process for each rank (engine.py) that was started before, holds no lock of the trainer's and
survives it: it writes while the copy goes on, and once all ranks have copied, the save becomes durable whoever of them
dies. Files are what Megatron's `torch_dist` or PyTorch's DCP writes, as the state is, and load without us.

Ranks agree about a save by small sums (gloo), so that all of them see it durable, failed or late in the same poll():
the one after that in which the last of them was ready, since an answer is taken where it is surely there.
A rank that dies takes its connections along, and the others' next agreement raises: that is the attempt's end, not
this module's to mend.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from outlast import __version__
from outlast.checkpoint.background import Stage
from outlast.checkpoint.commit import Reach
from outlast.checkpoint.copying import Copying
from outlast.checkpoint.drafting import Draft, Drafter
from outlast.checkpoint.errors import CheckpointError, SaveFailed, StoreError
from outlast.checkpoint.flight import Flight
from outlast.checkpoint.group import agree_on_session, make_group, require_all
from outlast.checkpoint.image import Image, write_now
from outlast.checkpoint.job import Room, SaveJob, Spread
from outlast.checkpoint.manifest import SCHEMA, DataFrontier, FileEntry, Identity, Manifest
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.points import read_kill_point
from outlast.checkpoint.share import Asked
from outlast.checkpoint.spreading import clear_place, store_of
from outlast.checkpoint.staged_prints import StagedPrints
from outlast.checkpoint.stager import Stager, WriterProcess
from outlast.checkpoint.staging import Budget, Counts
from outlast.reliability.model import Layout

log = logging.getLogger(__name__)

PAUSE_S: Final = 0.005
TOGETHER_S: Final = 1.0
"""Where one rank has waited too long, a rank whose own wait would soon be over has something to say of it too."""


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
        budget: Budget | None = None,
        reach: Reach | None = None,
        fingerprints: bool = True,
    ) -> None:
        """`directory` holds `iter_%07d` and is seen by all ranks.

        process_group: all ranks, gloo (or able to do object collectives); None makes a gloo group of its own.
        keep_last: rank 0 prunes older checkpoints after each commit; 0 leaves that to the supervisor. keep: train_steps
        never pruned (the one restored from).
        on_durable(train_step, hold_s, durable_s) is called on every rank, inside poll() or finish(). on_failure:
        'raise' SaveFailed on all ranks, or 'skip': log it, keep it in `last_failure`, train on. timeout_s: for writing
        the shards and committing.
        budget: what a save may take of memory, and what becomes of one that does not fit; None: what the machine has
        left, else synchronously. fingerprints: of DCP states, counted beside training (Megatron's: live_prints.py).
        reach: told each point that is passed (tests); None: the process ends at the one that OUTLAST_KILL_AT names.
        """
        if on_failure not in ("raise", "skip"):
            raise CheckpointError(f"on_failure: {on_failure!r}; expected 'raise' or 'skip'")
        self._root = Path(directory)
        self._keep_last, self._keep = keep_last, keep
        self._on_durable = on_durable
        self._raises = on_failure == "raise"
        self._budget = budget or Budget()
        self._timeout_s = timeout_s
        self._reach = reach or read_kill_point()
        self._group = require_all(process_group or make_group(timeout_s))
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size(self._group)
        self._stager = Stager(self._group, limit_bytes=self._budget.limit_bytes)
        self._writer = WriterProcess(self._stager.staging_fd, outlive_s=self._budget.outlive_s, reach=reach)
        self._session = agree_on_session(self._group)
        self._drafter = Drafter(self._group, self._stager)
        self._prints = StagedPrints(self._group, wanted=fingerprints)
        self._flight: Flight | None = None
        self._last_failure = ""
        self.counts = Counts()

    def save(
        self,
        state: dict[str, Any],
        *,
        train_step: int,
        samples: int,
        layout: Layout | None = None,
        identity: Identity | None = None,
        pins: Mapping[str, str] | None = None,
        parents: tuple[str, ...] = (),
        data_frontier: DataFrontier | None = None,
        content_metadata: dict[str, Any] | None = None,
        overlap: bool = False,
        spread: Spread | None = None,
    ) -> float:
        """Start a save of this state; returns the seconds that the train loop was held.

        A save still in flight is finished first. When it returns, the state may be changed freely; with overlap=True
        only after finish_copy(). data_frontier None means consumed=samples, nothing skipped.

        state: with Megatron's ShardedTensor or ShardedObject in it, one of Megatron's: all else goes to common.pt from
        rank 0, and the dict itself is changed as Megatron's own save changes it. Else what
        torch.distributed.checkpoint.save takes. The same kind on all ranks. layout None: all ranks data parallel.
        spread: a local checkpoint, this rank's shards on its own node (local_tier.py).
        """
        began_s = time.monotonic()
        if self._flight is not None and self._budget.when_busy == "skip":
            self._count_skip(f"train_step {self._flight.train_step} was still in flight")
            return time.monotonic() - began_s
        self.finish()
        self._reach("save.begin")
        flight = Flight(
            train_step=train_step,
            directory=store_of(self._root, spread).path(train_step),
            began_s=began_s,
            deadline_s=began_s + self._timeout_s,
            spread=spread,
        )
        flight.manifest = Manifest(
            schema=SCHEMA,
            train_step=train_step,
            samples=samples,
            layout=layout or Layout(dp=self._world_size),
            files={},
            identity=identity or Identity(),
            pins=dict(pins or {}),
            parents=parents,
            data_frontier=data_frontier or DataFrontier(consumed=samples),
            made_by=f"outlast {__version__}",
        )
        self.counts.begun += 1
        if self._begin(flight, state, content_metadata, overlap):
            self._flight = flight
        flight.hold_s = time.monotonic() - began_s
        return flight.hold_s

    def finish_copy(self) -> float:
        """With overlap=True: call it before the state changes. Returns the seconds that it held. Not collective."""
        began_s = time.monotonic()
        held_s = 0.0
        if self._flight is not None and self._flight.is_open:
            self._end_copy(self._flight)
            held_s = time.monotonic() - began_s
            self._flight.hold_s += held_s
        return held_s

    def prepare(self, state: dict[str, Any]) -> int:
        """Plan and make room for saves of such a state before training; returns the staging bytes of this rank.

        Without it the first save does so, and holds the loop meanwhile.
        """
        draft = self._drafter.agree(self._drafter.begin(state, None), self._root)
        if not draft.short:
            self._stager.make_room(draft.image.size_bytes)
            self._writer.make_room(Room(image_bytes=draft.image.size_bytes))
        return draft.image.size_bytes

    @property
    def overlaps(self) -> bool:
        """Whether the save in flight is copied beside the caller; a small one is not. The same on all ranks."""
        return self._flight is not None and self._flight.overlaps

    @property
    def in_flight(self) -> int | None:
        """Train_step of the save in flight; None where there is none. Not collective."""
        return self._flight.train_step if self._flight else None

    @property
    def last_failure(self) -> str:
        """Why the last save failed, with on_failure='skip'; '' where it did not. Not collective."""
        return self._last_failure

    @property
    def writer_pid(self) -> int:
        """This rank's writer process. Not collective."""
        return self._writer.pid

    def poll(self) -> int | None:
        """The train_step that became durable by the last poll, else None. Call it once a train_step on all ranks.

        Costs nothing while no save is in flight. While one is, each poll starts a small all-reduce which the next one
        takes the answer of: nobody waits for another rank, or for a writer.
        """
        return self._advance()

    def finish(self, timeout_s: float | None = None) -> int | None:
        """Wait for the save in flight: its train_step, or None where none was, or where it failed and was skipped.

        A save that is not durable within timeout_s (None: the Saver's own) has failed.
        """
        self.finish_copy()
        give_up_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._flight is not None:
            if (durable := self._advance(give_up_s)) is not None:
                return durable
            time.sleep(PAUSE_S)
        return None

    def close(self) -> None:
        """End this rank's writer at once; a save in flight stays uncommitted. Not collective. Safe to call twice."""
        if self._flight is not None and self._flight.copying is not None:
            self._flight.copying.drop()
        self._flight = None
        self._prints.drop()
        self._writer.end()
        self._stager.close()

    # ------------------------------------------------------------------ one save, step by step

    def _begin(
        self, flight: Flight, state: dict[str, Any], content_metadata: dict[str, Any] | None, overlap: bool
    ) -> bool:
        """Up to the copy, which goes on beside the caller with overlap. False where there is no save."""
        self._writer.start()  # it is there, unless the last one was ended
        refused = self._make_room(flight) if self._rank == 0 else ""
        guess = self._drafter.begin(state, content_metadata, refused)
        if guess.may_be_copied and not overlap:
            with suppress(OSError):  # no memory: found again, and told, where it is needed
                flight.copying = self._new_copying(guess.image)
                flight.copying.run_ahead()
        try:
            draft = self._drafter.agree(guess, flight.directory)
        except CheckpointError as e:
            self._fail(flight, str(e))
            return False
        self._reach("save.planned")
        if draft.short_ranks and self._budget.when_short == "skip":
            self._count_skip(draft.short or f"does not fit on {draft.short_ranks} other ranks")
            log.error("checkpoint %s: skipped: %s", flight.directory.name, self.counts.why)
            return False
        if draft.short:
            self.counts.synchronous += 1
            self.counts.why = draft.short
            log.warning("checkpoint %s: written at once: %s", flight.directory.name, draft.short)
        flight.overlaps, flight.is_open = overlap and draft.overlaps, overlap
        try:
            self._hand_over(flight, draft)
        except (OSError, RuntimeError) as e:
            flight.error = f"{type(e).__name__}: {e}"  # all ranks learn it in poll()
        return True

    def _make_room(self, flight: Flight) -> str:
        """Rank 0 makes an empty directory of that name; '' or why it could not."""
        try:
            flight.directory.parent.mkdir(parents=True, exist_ok=True)
            moved = store_of(self._root, flight.spread).set_aside(flight.train_step)
            flight.directory.mkdir()
        except (OSError, StoreError) as e:
            return f"cannot make {flight.directory}: {e}"
        if moved:
            log.warning("%s was there already; moved to %s", flight.directory, moved)
        return ""

    def _hand_over(self, flight: Flight, draft: Draft) -> None:
        """The writer process begins, and so does the copy that it follows."""
        image, index, written = draft.image, draft.index, dict[str, FileEntry]()
        if draft.short:
            place = clear_place(flight.directory, flight.spread, [region.name for region in image.regions])
            image, written = Image(), write_now(RealOps(), place, image)
            index = self._stager.add_index(image)
        shards = tuple(image.regions[: len(image.regions) - len(index)])
        job = SaveJob(
            save_id=f"{self._session}-{self.counts.begun}",
            rank=self._rank,
            world_size=self._world_size,
            root=str(self._root),
            directory=str(flight.directory),
            shards=shards,
            written=written,
            index=index,
            image_bytes=image.size_bytes,
            manifest=flight.manifest if self._rank == 0 else None,
            began_s=flight.began_s,
            timeout_s=self._timeout_s,
            keep_last=self._keep_last,
            keep=self._keep,
            spread=flight.spread,
        )
        memory = self._stager.make_room(image.size_bytes).memory
        self._prints.expect(draft.counting, draft.list_staged, None if draft.short else memory)
        if flight.copying is None or flight.copying.image is not image:  # or it was copied ahead of the agreement
            flight.copying = self._new_copying(image)
        self._writer.hand(job)
        if flight.overlaps:
            flight.copying.start()
        else:
            flight.copying.run()
        if not flight.is_open:
            self._end_copy(flight)

    def _new_copying(self, image: Image) -> Copying:
        return Copying(self._stager.make_room(image.size_bytes), image, self._writer.announce, self._reach)

    def _end_copy(self, flight: Flight) -> None:
        """The live state is not needed any more. What has failed, all ranks learn in poll()."""
        flight.is_open = False
        copying, flight.copying = flight.copying, None
        if copying is not None:
            copying.wait()
            flight.error = flight.error or copying.error
            self._prints.begin()
        flight.deadline_s = time.monotonic() + self._timeout_s

    def _advance(self, give_up_s: float = math.inf) -> int | None:
        flight = self._flight
        if flight is None or flight.is_open:
            return None  # a copy under way: on all ranks alike
        if flight.asked is not None:
            try:
                all_ready, failed = flight.asked.answer()
            except RuntimeError as e:
                raise CheckpointError(f"rank {self._rank}: the ranks could not agree about a save: {e}") from e
            if failed:
                give_up_s = min(give_up_s, flight.deadline_s) - TOGETHER_S
                self._give_up(flight, flight.asked_words or self._look(flight, give_up_s)[1])
                return None
            if all_ready == self._world_size:
                return self._end(flight)
        ready, flight.asked_words = self._look(flight, min(give_up_s, flight.deadline_s))
        flight.asked = Asked(self._group, ready, bool(flight.asked_words))
        return None

    def _look(self, flight: Flight, give_up_s: float) -> tuple[bool, str]:
        """Whether this rank's part of the save is done, and why it never will be ('' otherwise)."""
        if flight.error:
            return False, flight.error
        stage, words = self._writer.look()
        if stage is Stage.FAILED:
            return False, words
        if stage is Stage.DONE or (stage is Stage.HALFWAY and self._rank != 0):
            return self._prints.is_done(), ""
        if stage is Stage.HALFWAY and (ended := self._writer.how_it_ended()):
            return False, f"the writer process {ended}"
        if time.monotonic() > give_up_s:
            what = "waiting for the other ranks, or the commit," if stage is Stage.HALFWAY else "writing"
            waited_s = time.monotonic() - flight.began_s
            return False, f"{what} was not done {waited_s:.1f} s after the save began (writer process stuck?)"
        return False, ""

    def _end(self, flight: Flight) -> int:
        durable_s = time.monotonic() - flight.began_s
        if self._rank == 0:
            durable_s = float(self._writer.result())  # the writer's own clock: not when we happened to look
        self._prints.store(flight.directory, flight.train_step)
        self._flight = None
        self._last_failure = ""
        self.counts.durable += 1
        if self._on_durable:
            self._on_durable(flight.train_step, flight.hold_s, durable_s)
        return flight.train_step

    def _give_up(self, flight: Flight, words: str) -> None:
        said: list[str] = [""] * self._world_size
        self._writer.end()  # first: nothing is committed any more that was said to have failed
        dist.all_gather_object(said, words, group=self._group)
        self._prints.drop()
        self._flight = None
        self._writer.start()
        self._fail(flight, "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text))

    def _fail(self, flight: Flight, why: str) -> None:
        what = (
            f"checkpoint {flight.directory.name} was not saved: {why}. It stays uncommitted; older ones are untouched"
        )
        self._last_failure = what
        self.counts.failed += 1
        if self._raises and flight.spread is None:  # a local one is no promise that training must end for
            raise SaveFailed(what, path=str(flight.directory), train_step=flight.train_step)
        log.error("%s; training goes on", what)

    def _count_skip(self, why: str) -> None:
        self.counts.skipped += 1
        self.counts.why = why
