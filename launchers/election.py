"""Takeover: when the supervisor's lease has lapsed, which agent starts its successor.

    lease lapsed -> show myself in orphans/<epoch>/<node> -> who else shows itself? -> my turn? -> start the successor
                        a counter, rewritten each 0.5 s        fresh: it changed within 3 s of MY clock

The rule (`should_start`) is pure: the lowest-index agent of the roster among those who see a majority of it. Exactly
half is enough where the event log has stood still for much longer: a supervisor that lived on the other side would
have written that it lost us. It needs
no clock that two nodes share and no message between agents: the run directory is the one thing that all of them, and
the successor, need anyway. It does not have to be perfect: agents with different views may start two successors, and
the fence lets one of them hold the epoch. If whoever's turn it is brings nothing up, the turn passes on.

Reading is kept small in a large run: an agent that sees a lower one alive looks no further; a candidate reads all.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from outlast.launchers.aside import Aside
from outlast.reliability.fence import FenceError, highest_number
from outlast.reliability.model import Node
from outlast.reliability.rundir import RunDir

_FILES_S: Final = 5.0
_MAX_TURN_FACTOR: Final = 8
_QUIET_LEASES: Final = 3.0
_FEW: Final = 64
"""In a run of so many agents each looks at all others; in a larger one first at so many of those before it."""


def enough(alive: Collection[Node], roster: Collection[Node], *, quiet: bool) -> bool:
    """A majority, or exactly half while the event log is quiet: a run of two nodes must outlive the first."""
    return 2 * len(alive) > len(roster) or (quiet and 2 * len(alive) == len(roster))


def should_start(
    me: Node,
    roster: Sequence[Node],
    fresh_orphans: Collection[Node],
    epoch: int,
    *,
    passed: Collection[Node] = (),
    quiet: bool = False,
) -> bool:
    """Whether I am the one: lowest in index order of those alive, `passed` left out, and enough of them are alive.

    `epoch` is the one whose lease has lapsed; below 1 nobody has supervised yet, and who launched us will.
    """
    if epoch < 1 or me not in roster:
        return False
    alive = {me, *fresh_orphans}.intersection(roster)
    if not enough(alive, roster, quiet=quiet):
        return False
    return next((n for n in roster if n in alive and n not in passed), None) == me


class Freshness:
    """Who has moved lately. Pure: times are the caller's, of one monotonic clock."""

    def __init__(self) -> None:
        self._counters: dict[Node, int] = {}
        self._moved_s: dict[Node, float] = {}

    def saw(self, counters: Mapping[Node, int], now_s: float) -> None:
        """A first sight is not yet life: the file may be a dead agent's."""
        for node, counter in counters.items():
            if self._counters.get(node, counter) != counter:
                self._moved_s[node] = now_s
            self._counters[node] = counter

    def fresh(self, now_s: float, within_s: float) -> frozenset[Node]:
        return frozenset(n for n, moved_s in self._moved_s.items() if now_s - moved_s <= within_s)


class Turns:
    """Whose turn it is, and when it passes on. Pure.

    Each may start once in its turn; a turn that brings no higher epoch ends after `turn_s`, twice that in the next
    round, and so on up to eight times: an agent that cannot start a process does not try for ever at full speed.
    """

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._round = 0
        self._passed: set[Node] = set()
        self._holder: Node | None = None
        self._since_s = 0.0
        self._started = False

    def step(
        self,
        now_s: float,
        me: Node,
        roster: Sequence[Node],
        fresh: Collection[Node],
        epoch: int,
        *,
        complete: bool = True,
        quiet: bool = False,
    ) -> bool:
        """True: start the successor now. `complete`: all of the roster was looked at, not only those before me."""
        alive = [n for n in roster if n == me or n in fresh]
        if complete and not enough(alive, roster, quiet=quiet):
            # nobody's turn, else two sides that meet again would disagree on whose it is
            self._passed.clear()
            self._holder = None
            return False
        holder = self._next(alive)
        if holder != self._holder:
            self._holder, self._since_s, self._started = holder, now_s, False
        elif holder is not None and now_s - self._since_s > self._length_s():
            self._passed.add(holder)
            self._holder, self._since_s, self._started = self._next(alive), now_s, False
        if self._holder != me or self._started:
            return False
        if not should_start(me, roster, fresh, epoch, passed=self._passed, quiet=quiet):
            self._since_s = now_s  # all that may be alive have yet to be looked at: my turn has not begun
            return False
        self._started = True
        return True

    def goes_before(self, me: Node, roster: Sequence[Node]) -> list[Node]:
        """Agents whose turn would come before mine, in order."""
        if me not in roster:
            return []
        return [n for n in roster[: roster.index(me)] if n not in self._passed]

    def _next(self, alive: Sequence[Node]) -> Node | None:
        if alive and all(n in self._passed for n in alive):
            self._passed.clear()
            self._round += 1
        return next((n for n in alive if n not in self._passed), None)

    def _length_s(self) -> float:
        return self._turn_s * min(1 << min(self._round, 16), _MAX_TURN_FACTOR)


class Lease(Protocol):
    """What election.py needs of link.AgentLink."""

    @property
    def lease_age_s(self) -> float: ...

    @property
    def epoch(self) -> int: ...

    @property
    def roster(self) -> tuple[Node, ...]: ...


class Election:
    """The edge: shows this agent, reads the others, and asks for a successor when it is this agent's turn."""

    def __init__(
        self,
        *,
        run_dir: RunDir,
        me: Node,
        lease: Lease,
        lease_s: float,
        start_successor: Callable[[int], Awaitable[None]],
        note: Callable[[str], None],
        show_s: float = 0.5,
        fresh_s: float = 3.0,
        turn_s: float = 10.0,
        mono_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start_successor(epoch)` starts a supervisor that tries to take exactly this epoch, and returns."""
        self._run_dir, self._me, self._lease, self._lease_s = run_dir, me, lease, lease_s
        self._start_successor, self._note = start_successor, note
        self._show_s, self._fresh_s, self._turn_s, self._mono_s = show_s, fresh_s, turn_s, mono_s
        self._aside = Aside()
        self._counter = 0
        self._shown_epoch = 0
        self._orphaned_s: float | None = None
        self._freshness, self._turns = Freshness(), Turns(turn_s)
        self._starting: asyncio.Task[None] | None = None
        self._log_bytes: int | None = None
        self._log_moved_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                # many agents share one file system: thousands of them show themselves more slowly
                await asyncio.sleep(self._show_s * self._slowness())
                try:
                    await self._tick()
                except (OSError, FenceError, TimeoutError) as error:
                    self._note(f"takeover: {self._run_dir.orphans}: {error}; looking again")
        finally:
            if self._starting is not None:
                self._starting.cancel()
                await asyncio.gather(self._starting, return_exceptions=True)

    async def _tick(self) -> None:
        epoch = self._lease.epoch
        if epoch < 1:
            return
        if epoch != self._shown_epoch:
            # made while all is well: a name that was asked for in vain may be remembered as missing for a minute
            await self._aside.call(lambda: _show(self._folder(epoch), self._me, self._counter), timeout_s=_FILES_S)
            self._shown_epoch = epoch
            self._orphaned_s = None
        if self._lease.lease_age_s <= self._lease_s:
            self._orphaned_s = None
            return
        now_s = self._mono_s()
        if self._orphaned_s is None:
            self._orphaned_s = now_s
            self._freshness, self._turns = Freshness(), Turns(self._turn_s)
            self._note(f"takeover: no supervisor for {self._lease.lease_age_s:.1f} s (epoch {epoch})")
        await self._look(epoch)
        await self._decide(epoch)

    async def _look(self, epoch: int) -> None:
        self._counter += 1
        counter, folder, names = self._counter, self._folder(epoch), self._worth_reading()

        def exchange() -> tuple[dict[Node, int], int | None]:
            _show(folder, self._me, counter)
            return _look_at(folder, names), _size_bytes(self._run_dir.events)

        counters, log_bytes = await self._aside.call(exchange, timeout_s=_FILES_S)
        self._freshness.saw(counters, self._mono_s())
        if log_bytes is None or log_bytes != self._log_bytes:
            self._log_bytes, self._log_moved_s = log_bytes, self._mono_s()

    def _quiet(self) -> bool:
        """Nobody has written a line for so long that no supervisor can be at work, not even out of our reach."""
        return self._mono_s() - self._log_moved_s > _QUIET_LEASES * self._lease_s

    async def _decide(self, epoch: int) -> None:
        now_s = self._mono_s()
        if self._orphaned_s is None or now_s - self._orphaned_s < self._fresh_s * self._slowness():
            return  # not long enough to tell who is not there
        fresh, roster = self._fresh(), self._lease.roster
        complete = len(roster) <= _FEW
        if epoch != self._lease.epoch:
            return
        if not self._turns.step(now_s, self._me, roster, fresh, epoch, complete=complete, quiet=self._quiet()):
            return
        found = await self._aside.call(lambda: highest_number(self._run_dir), timeout_s=_FILES_S)
        if found > epoch or (self._starting is not None and not self._starting.done()):
            return
        alive = [n for n in roster if n == self._me or n in fresh]
        self._note(f"takeover: {len(alive)} of {len(roster)} agents are here, I start epoch {epoch + 1}")
        self._starting = asyncio.create_task(self._start(epoch + 1))

    async def _start(self, epoch: int) -> None:
        try:
            await self._start_successor(epoch)
        except Exception as error:  # noqa: BLE001  the turn passes to the next agent, which may be able to
            self._note(f"takeover: epoch {epoch} could not be started: {type(error).__name__}: {error}")

    def _worth_reading(self) -> tuple[Node, ...]:
        fresh, roster = self._fresh(), self._lease.roster
        others = tuple(n for n in roster if n != self._me)
        if len(roster) <= _FEW:
            return others
        before = self._turns.goes_before(self._me, roster)
        for i, node in enumerate(before):
            if node in fresh:
                return tuple(before[: i + 1])
        watched_s = self._mono_s() - (self._orphaned_s or 0.0)
        return tuple(before[:_FEW]) if watched_s < self._fresh_s * self._slowness() else others

    def _fresh(self) -> frozenset[Node]:
        return self._freshness.fresh(self._mono_s(), self._fresh_s * self._slowness())

    def _slowness(self) -> float:
        return max(1.0, len(self._lease.roster) / 512)

    def _folder(self, epoch: int) -> Path:
        return self._run_dir.orphans / str(epoch)


def _show(folder: Path, me: Node, counter: int) -> None:
    """In place, one small write: a reader that opens the file sees the old number or the new one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder / _name(me), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, b"%020d\n" % counter, 0)
    finally:
        os.close(fd)


def _look_at(folder: Path, nodes: Sequence[Node]) -> dict[Node, int]:
    """Counters of those that can be read; who cannot be read is not there."""
    counters: dict[Node, int] = {}
    for node in nodes:
        with suppress(OSError, ValueError):
            fd = os.open(folder / _name(node), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                counters[node] = int(os.read(fd, 32))
            finally:
                os.close(fd)
    return counters


def _size_bytes(path: Path) -> int | None:
    """None where it cannot be told."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # opened anew: a remembered size would be an old one
    except OSError:
        return None
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _name(node: Node) -> str:
    if "/" in node or node.startswith(".") or not node:
        raise ValueError(f"found {node!r}, expected a node name")
    return node
