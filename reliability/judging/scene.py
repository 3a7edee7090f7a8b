"""The facts of a case as rules ask for them: by kind, in bursts, with their reach. Pure.

    fault fault fault .. quiet .. fault        one burst: the same node, no longer pause than the quiet time;
    \\____ one incident ____/                  the same code on the same GPU is one incident over a longer pause

A return to service (a reset, a reboot) ends a burst: what comes back after it is a new incident, and tells more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

from outlast.reliability.catalogue import XidRow
from outlast.reliability.judging.case import Case
from outlast.reliability.judging.facts import Fact, GpuFault
from outlast.reliability.judging.facts_run import Reach, Returned

Kind = TypeVar("Kind", bound=Fact)

QUIET_S: Final = 60.0
"""A pause longer than this ends a burst."""
SAME_CAUSE_S: Final = 600.0
"""The same code on the same GPU within this is the same trouble still going on."""
OPEN_BURSTS: Final = 8
"""So many of a node's latest bursts may still go on."""
MANY_NODES: Final = 3
"""A cause seen on this many nodes at once is not a node's fault (policy.py's many_nodes)."""


class Burst(tuple[GpuFault, ...]):
    """Faults that are one incident, in order."""

    @property
    def first(self) -> GpuFault:
        return self[0]


@dataclass(frozen=True)
class Scene:
    """What is known of a case."""

    case: Case
    facts: tuple[Fact, ...]
    meaning: Callable[[int], XidRow]
    """The catalogue's row of an XID that was told by its number alone."""

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The facts of one kind, in order, history included."""
        return [f for f in self.facts if type(f) is kind]

    def seen(self, kind: type[Kind]) -> list[Kind]:
        return [f for f in self.of(kind) if not f.past]

    @cached_property
    def faults(self) -> tuple[GpuFault, ...]:
        """XIDs and SXids of the case itself, further lines of the same event left out, in order of time."""
        own = [f for f in self.of(GpuFault) if not f.companion or not self._told_elsewhere(f)]
        return tuple(sorted(own, key=_when))

    def _told_elsewhere(self, companion: GpuFault) -> bool:
        return any(f.code == companion.code and not f.companion for f in self.of(GpuFault))

    @cached_property
    def bursts(self) -> tuple[Burst, ...]:
        return bursts(self.faults, self.of(Returned))

    @property
    def reach(self) -> int:
        """The largest number of nodes that anybody speaks of; 0 where nobody does."""
        return max((r.nodes for r in self.of(Reach)), default=0)

    @property
    def everywhere(self) -> bool:
        return any(r.everywhere for r in self.of(Reach))

    @property
    def others_fine(self) -> bool:
        return any(r.others_fine for r in self.of(Reach))


def _when(fact: Fact) -> tuple[float, int]:
    return (fact.at_s if fact.at_s is not None else -1.0, fact.id)


def bursts(faults: Sequence[GpuFault], returns: Sequence[Returned] = ()) -> tuple[Burst, ...]:
    """Faults in bursts. Where no times are known, all of one node is one burst."""
    found: list[_Open] = []
    nodes: dict[tuple[str | None, bool], list[_Open]] = {}
    for fault in faults:
        here = nodes.setdefault((fault.node, fault.past), [])
        home = next((b for b in reversed(here[-OPEN_BURSTS:]) if b.takes(fault, returns)), None)
        if home is None:
            home = _Open()
            here.append(home)
            found.append(home)
        home.add(fault)
    return tuple(Burst(b.faults) for b in found)


class _Open:
    """A burst that may still go on."""

    __slots__ = ("faults", "last")

    def __init__(self) -> None:
        self.faults: list[GpuFault] = []
        self.last: dict[tuple[int, str | None], GpuFault] = {}

    def add(self, fault: GpuFault) -> None:
        self.faults.append(fault)
        self.last[(fault.code, fault.gpu)] = fault

    def takes(self, fault: GpuFault, returns: Sequence[Returned]) -> bool:
        newest = self.faults[-1]
        if newest.run != fault.run:
            return False  # another job is another incident
        if any(_between(r, newest, fault) for r in returns):
            return False
        if pause(newest, fault) <= QUIET_S:
            return True
        same = self.last.get((fault.code, fault.gpu))
        return same is not None and pause(same, fault) <= SAME_CAUSE_S


def _between(returned: Returned, first: Fact, then: Fact) -> bool:
    if returned.how not in ("reset", "reboot") or returned.node not in (None, first.node):
        return False
    return first.id < returned.id < then.id or (
        None not in (first.at_s, returned.at_s, then.at_s) and _when(first)[0] < _when(returned)[0] < _when(then)[0]
    )


def pause(first: Fact, then: Fact) -> float:
    """Seconds between two facts; 0 where a time is unknown."""
    if first.at_s is None or then.at_s is None:
        return 0.0
    return abs(then.at_s - first.at_s)


def returns_between(scene: Scene, first: Fact, then: Fact) -> int:
    """How often the node came back from a reset or reboot between two facts."""
    return sum(1 for r in scene.of(Returned) if _between(r, first, then))


def nodes_of(facts: Iterable[Fact]) -> tuple[str, ...]:
    """The nodes of these facts, each once, in order."""
    return tuple(dict.fromkeys(f.node for f in facts if f.node))


def near(facts: Sequence[Kind], window_s: float = QUIET_S) -> list[Kind]:
    """The facts of most nodes that lie within a window; all of them where a time is unknown."""
    if any(f.at_s is None for f in facts):
        return list(facts)
    ordered = sorted(facts, key=_when)
    best: tuple[int, int, int] = (0, 0, 0)
    inside: Counter[str | None] = Counter()
    first = 0
    for last, fact in enumerate(ordered):
        inside[fact.node] += 1
        while pause(ordered[first], fact) > window_s:
            inside[ordered[first].node] -= 1
            inside += Counter()  # drops what fell to nothing
            first += 1
        best = max(best, (len(inside), first, last + 1), key=lambda b: b[0])
    return ordered[best[1] : best[2]]


def place(fact: Fact, gpu: str | None = None, default: str = "") -> str:
    """Where a fact was seen, in words."""
    on = f"GPU {gpu}" if gpu else default
    return " ".join(w for w in (fact.node, on) if w) or "the node"


def ids(facts: Iterable[Fact]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(f.id for f in facts if f.id))
