"""What the scheduler and people say: polled in threads, put into the inbox. An edge; it decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from outlast.reliability import model as m
from outlast.reliability.acts import call
from outlast.reliability.model import Node
from outlast.reliability.parts import Parts
from outlast.reliability.planning import SiteView
from outlast.reliability.ports import Allocation, PortError
from outlast.reliability.rundir import RunDir

_LAUNCH_AGAIN_S = 30.0
_LAUNCH_TRIES = 3
_REQUEST_S = 0.5


@dataclass(frozen=True)
class SiteSeen:
    """One answer of the scheduler."""

    asked_mono_s: float
    allocations: tuple[Allocation, ...]
    nodes: tuple[m.NodeState, ...]


@dataclass(frozen=True)
class SiteSilent:
    """The scheduler did not answer, or answered nonsense."""

    why: str


@dataclass(frozen=True)
class Asked:
    """A request file of a person's; to be removed once it is in the log."""

    name: str
    ask: m.OperatorAsked


@dataclass
class Launches:
    """Agents asked for on nodes where none has joined."""

    tries: dict[Node, int] = field(default_factory=dict)
    last_mono_s: dict[Node, float] = field(default_factory=dict)

    def due(self, node: Node, mono_s: float) -> bool:
        tried = self.tries.get(node, 0)
        return tried < _LAUNCH_TRIES and mono_s >= self.last_mono_s.get(node, float("-inf")) + _LAUNCH_AGAIN_S

    def refused(self) -> tuple[Node, ...]:
        return tuple(n for n, tries in self.tries.items() if tries >= _LAUNCH_TRIES)


class SiteWatch:
    """Asks the scheduler every `poll_s` and at once when poked; keeps the last answer."""

    def __init__(self, parts: Parts, put: Callable[[object], None]) -> None:
        self.parts, self.put = parts, put
        self.site = SiteView(can_feed=parts.can_feed, can_requeue=parts.can_requeue, has_drains=parts.has_drains)
        self.closing = False
        """Set at the end: a cancellation alone can be lost inside wait_for (Python 3.11)."""
        self.asked = False
        """The scheduler was asked at least once, with or without an answer."""
        self.answered_mono_s = float("-inf")
        """When the newest answer was asked for."""
        self.nodes: tuple[Node, ...] = ()
        self.launches = Launches()
        self._poke = asyncio.Event()

    @property
    def answered(self) -> bool:
        """Before its first answer the scheduler may have all nodes or none: nothing is planned on that."""
        return self.answered_mono_s > float("-inf")

    def poke(self) -> None:
        self._poke.set()

    async def forever(self) -> None:
        await asyncio.gather(self._scheduler(), self._requests())

    async def _scheduler(self) -> None:
        while not self.closing:
            self._poke.clear()
            try:
                self.put(await self._ask())
            except PortError as error:
                self.put(SiteSilent(why=str(error)))
            self.asked = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.parts.poll_s):
                    await self._poke.wait()

    async def _ask(self) -> SiteSeen:
        asked = self.parts.clock.mono_s()
        cluster = self.parts.cluster
        if not self.site.may_drain:
            may = await call(cluster.may_drain)
            self.site = msgspec.structs.replace(self.site, may_drain=may)
        allocations = await call(cluster.allocations)
        names = {n: None for a in allocations if a.state in ("RUNNING", "COMPLETING") for n in a.nodes}
        names |= {n: None for n in self.nodes}
        nodes = await call(lambda: cluster.node_states(tuple(names))) if names else ()
        return SiteSeen(asked_mono_s=asked, allocations=allocations, nodes=nodes)

    def took(self, seen: SiteSeen, present: tuple[Node, ...], left_out: tuple[Node, ...]) -> list[Allocation]:
        """Keep the answer; returns what to launch agents on: allocations cut down to those nodes."""
        self.answered_mono_s = seen.asked_mono_s
        now = self.parts.clock.mono_s()
        todo: list[Allocation] = []
        for node in present:
            self.launches.tries.pop(node, None)
        for allocation in seen.allocations:
            if allocation.state != "RUNNING" or allocation.feeder:
                continue
            nodes = tuple(
                n for n in allocation.nodes if n not in present and n not in left_out and self.launches.due(n, now)
            )
            for node in nodes:
                self.launches.tries[node] = self.launches.tries.get(node, 0) + 1
                self.launches.last_mono_s[node] = now
            if nodes:
                todo.append(msgspec.structs.replace(allocation, nodes=nodes))
        self.site = msgspec.structs.replace(
            self.site, allocations=seen.allocations, launch_refused=self.launches.refused()
        )
        return todo

    async def _requests(self) -> None:
        """Request files, oldest first. A bad one is set aside with a note; it never stops the loop."""
        while not self.closing:
            for item in await asyncio.to_thread(read_requests, self.parts.run_dir):
                self.put(item)
            await asyncio.sleep(_REQUEST_S)


def read_requests(run_dir: RunDir) -> list[object]:
    """Asked for each readable request, a line of text for each that is not (renamed to *.bad)."""
    found: list[object] = []
    try:
        paths = sorted(run_dir.requests.glob("*.json"))
    except OSError:
        return found
    for path in paths:
        try:
            ask = msgspec.json.decode(path.read_bytes(), type=m.OperatorAsked)
            found.append(Asked(name=path.name, ask=ask))
        except (OSError, msgspec.MsgspecError) as error:
            found.append(f"{path.name}: not a request ({error}); set aside")
            try:
                path.rename(path.with_suffix(".bad"))
            except OSError:
                continue
    return found


def changed_node(before: m.NodeState | None, after: m.NodeState) -> bool:
    """Whether Slurm says something new of a node that matters: down, draining, not answering, another reason."""
    return _matter(before) != _matter(after) if before is not None else _matter(after) != (False, False, False, "")


def _matter(state: m.NodeState | None) -> tuple[bool, bool, bool, str]:
    if state is None:
        return (False, False, False, "")
    down = state.state in ("down", "error", "unknown", "fail", "future")
    return (down, "drain" in state.flags, "not_responding" in state.flags, state.reason)
