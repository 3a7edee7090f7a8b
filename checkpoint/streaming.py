"""One rank's part in a restore: read its share, take what it needs out of everybody's, until nobody owes anybody.

    fill own slots -> messages -> READ, HASHED, TAKEN: next block | FILLED: take, say TAKEN | LEFT, FAILED

A loop that never waits for one thing alone, so ranks cannot wait for each other in a circle. Every wait ends: a read
that does not come back is found by its own rank, a rank that says nothing by its neighbours. No torch here: what is
done with the bytes is the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outlast.checkpoint.block_reader import BlockReader
from outlast.checkpoint.manifest import FileEntry
from outlast.checkpoint.node_memory import Kind, Message, Shared
from outlast.checkpoint.read_plan import BLOCK_BYTES, Reads, Runs, count

TICK_S: Final = 2.0

Take = Callable[[str, int, memoryview], None]
"""(file, where its bytes begin there, bytes); blocks of a file come in ascending order."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What this rank has to say of the files. Both empty: all is as the manifest says, as far as it looked."""

    problems: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    """What could not be told: unreadable, or stuck."""
    gave_up: str = ""
    """Why it stopped before its end, where that is the fault of somebody else."""


class Stream:
    """Reads and takes; `neighbours` are the ranks of this node."""

    def __init__(
        self,
        directory: Path,
        entries: Mapping[str, FileEntry],
        reads: Reads,
        needs: Mapping[str, Runs],
        shared: Shared,
        neighbours: frozenset[int],
        limit_s: float,
    ) -> None:
        self._names = sorted(entries)
        self._shared, self._limit_s = shared, limit_s
        self._left = {rank: time.monotonic() for rank in neighbours if rank != shared.rank}
        """Who is at it, and when it was last heard of."""
        self._to_take = sum(map(count, needs.values()))
        self._reader = BlockReader(directory, reads, entries, shared, self._names)

    def run(self, take: Take) -> Outcome:
        """Returns when this rank has all that it needs and owes nothing, or when somebody gave up."""
        gave_up = ""
        try:
            gave_up = self._loop(take)
        except BaseException:
            self._tell_all(Kind.FAILED)
            raise
        finally:
            self._reader.close()
        self._tell_all(Kind.LEFT if self._complete and not gave_up else Kind.FAILED)
        return Outcome(problems=tuple(self._reader.problems), errors=tuple(self._reader.errors), gave_up=gave_up)

    @property
    def _complete(self) -> bool:
        return not self._to_take and self._reader.done

    def _loop(self, take: Take) -> str:
        """'' when all is done, else why it is not."""
        self._reader.fill()
        ticked_s = time.monotonic()
        while not self._complete:
            for message in self._shared.box.wait(TICK_S):
                if error := self._handle(message, take):
                    return error
            now_s = time.monotonic()
            if now_s - ticked_s >= TICK_S:
                ticked_s = now_s
                self._tell_all(Kind.TICK)
                if error := self._find_stuck(now_s):
                    return error
        return ""

    def _handle(self, message: Message, take: Take) -> str:
        if message.sender in self._left:
            self._left[message.sender] = time.monotonic()
        match message.kind:
            case Kind.FILLED:
                view = self._shared.slot_of(message.sender, message.slot)[: message.size_bytes]
                take(self._names[message.file], message.block * BLOCK_BYTES, view)
                self._to_take -= 1
                self._shared.tell(message.sender, Message(kind=Kind.TAKEN, sender=self._shared.rank, slot=message.slot))
            case Kind.READ:
                self._reader.on_read(message)
            case Kind.HASHED | Kind.TAKEN:
                self._reader.on_released(message)
            case Kind.LEFT:
                self._left.pop(message.sender, None)
            case Kind.FAILED:
                return f"rank {message.sender} gave up reading"
        return ""

    def _find_stuck(self, now_s: float) -> str:
        if stuck := self._reader.find_stuck(self._limit_s):
            self._reader.errors.append(stuck)
            return stuck
        silent = [rank for rank, heard_s in self._left.items() if now_s - heard_s > self._limit_s + 2 * TICK_S]
        if silent:
            return f"rank {silent[0]} of this node said nothing for {self._limit_s:g} s"
        return ""

    def _tell_all(self, kind: Kind) -> None:
        for rank in self._left:
            try:
                self._shared.tell(rank, Message(kind=kind, sender=self._shared.rank))
            except BlockingIOError:
                continue  # it has not read thousands: it will find out by our silence
