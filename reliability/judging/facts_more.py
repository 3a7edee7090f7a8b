"""Typed facts that no log line carries whole: comparisons, tests, changes, histories. Data only, Pure.

Other parts of the suite, or a person with a tool, make them; readers of text do not.
"""

from __future__ import annotations

from outlast.reliability.judging.facts import Fact
from outlast.reliability.runfile import LayoutAsked


class Compared(Fact, frozen=True, kw_only=True):
    """Compute time of ranks that do the same work (one pipeline stage, one train_step or the median of a window)."""

    names: tuple[str, ...]
    times_s: tuple[float, ...]
    work: tuple[float, ...] = ()
    """What each had to do, in any unit (tokens, sum of squared lengths); () where all had the same."""
    held: int = 1
    """Windows in a row that look like this."""


class PairTest(Fact, frozen=True, kw_only=True):
    """A collective of two nodes and how long it took: both show the time of the slower one."""

    pair: tuple[str, str]
    took_s: float


class Paused(Fact, frozen=True, kw_only=True):
    """One rank of one train_step stood still on its host, its GPU's own time unchanged."""

    rank: int
    pause_s: float


class CommunicationVaries(Fact, frozen=True, kw_only=True):
    """Step time goes up and down for all ranks alike, by what communication takes."""


class Changed(Fact, frozen=True, kw_only=True):
    """What differs since the trouble began: versions, flags, scale; the trouble follows it over places."""

    what: str
    trains: bool = True
    """Training goes on with it."""


class Excluded(Fact, frozen=True, kw_only=True):
    """How often a node was taken out, against the usual for its hours in use."""

    times: int
    usual: float = 1.0


class StuckSaving(Fact, frozen=True, kw_only=True):
    """Ranks that never finished the save that the others finished."""

    ranks: tuple[int, ...]


class PartitionDown(Fact, frozen=True, kw_only=True):
    """All nodes of the partition are down for one reason."""

    nodes: int
    reason: str = ""


class HostMemory(Fact, frozen=True, kw_only=True):
    """Host memory after each save, on all nodes alike."""

    used_bytes: tuple[int, ...]


class NodesLeft(Fact, frozen=True, kw_only=True):
    """What is left to train on."""

    nodes: int
    ranks_per_node: int
    asked: LayoutAsked
