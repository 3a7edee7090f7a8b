"""Rules on comparisons, histories and changes that other parts of the suite report as facts. Pure.

Who is slow is told within a class of ranks that do the same work, after dividing by the work. What falls on another
place each time is no place's fault. A verdict on a change needs the same condition run again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Final

from outlast.reliability.elastic import nodes_needed, plan_layout
from outlast.reliability.judging.facts import HostFault
from outlast.reliability.judging.facts_more import (
    Changed,
    CommunicationVaries,
    Compared,
    Excluded,
    HostMemory,
    NodesLeft,
    PairTest,
    PartitionDown,
    Paused,
    StuckSaving,
)
from outlast.reliability.judging.scene import Scene, ids
from outlast.reliability.judging.words import Act, Finding, lost
from outlast.reliability.verdict import Kind

SLOW_SHARE: Final = 0.10
"""So much over the median of its class, held, is a slow rank (GREYHOUND's limit)."""
HELD: Final = 3
PLACES: Final = 3
"""The same pause on so many different ranks is everybody's."""
OFTEN: Final = 3.0
"""So many times the usual for its hours in use: a repeat offender."""


def slow_in_class(scene: Scene) -> Iterator[Finding]:
    """The rank that is slow for its work, among those of its class."""
    seen = scene.seen(Compared)
    if not seen:
        return
    slow = [(c, name) for c in seen for name in _slow(c)]
    held = [(c, name) for c, name in slow if c.held >= HELD]
    if held:
        compared, name = held[0]
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.JOB_END,
            rule="slow_in_class",
            why=f"{name} takes over {SLOW_SHARE:.0%} longer than others with its work, {compared.held} windows long",
            culprit=name,
            evidence=ids([compared]),
            rejected=(lost("a class that is always slower", "it is compared within its class"),),
        )
    else:
        yield Finding(
            verdict=Kind.NO_FAULT,
            action=Act.NONE,
            rule="slow_for_its_work",
            why="who is slow changes with the work, and divided by the work nobody is",
            culprit="data imbalance" if any(c.work for c in seen) else None,
            evidence=ids(seen),
            rejected=(lost("the slowest of each step", "it had the most to do"),),
        )


def _slow(compared: Compared) -> list[str]:
    work = compared.work or (1.0,) * len(compared.times_s)
    rates = [t / w for t, w in zip(compared.times_s, work, strict=True) if w > 0]
    usual = statistics.median(rates) if rates else 0.0
    return [n for n, r in zip(compared.names, rates, strict=False) if usual and r > (1 + SLOW_SHARE) * usual]


def pair_tests(scene: Scene) -> Iterator[Finding]:
    """Slow pairs of several rounds have the slow node in common."""
    tests = scene.seen(PairTest)
    if not tests:
        return
    usual = statistics.median_low([t.took_s for t in tests])
    slow = [t for t in tests if t.took_s > (1 + SLOW_SHARE) * usual]
    common = set.intersection(*(set(t.pair) for t in slow)) if slow else set()
    if len(common) == 1 and len(slow) > 1:
        name = next(iter(common))
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.SPARE,
            rule="slow_pairs_meet",
            why=f"{name} is in each of the {len(slow)} slow pairs, and its partners are quick with others",
            culprit=name,
            evidence=ids(slow),
            rejected=(lost("both of a pair", "a pair shows the slower one's time"),),
            checks={"culprit": name},
        )
    elif slow:
        yield Finding(
            verdict=Kind.AMBIGUOUS,
            action=Act.NONE,
            rule="slow_pair",
            why="a slow pair does not say which of the two: pair them anew",
            evidence=ids(slow),
        )


def pauses(scene: Scene) -> Iterator[Finding]:
    """Pauses that fall on another rank each time are the program's host side."""
    seen = scene.seen(Paused)
    if len({p.rank for p in seen}) >= PLACES:
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.PAGE,
            rule="pauses_rotate",
            why="pauses of one size on another rank each time, GPU time unchanged: the host side of the program, "
            "such as garbage collection; run it on all ranks at the same step",
            culprit="the program's host side",
            evidence=ids(seen),
            rejected=(lost("each rank that paused", "none pauses more often than the others"),),
        )


def communication(scene: Scene) -> Iterator[Finding]:
    seen = scene.seen(CommunicationVaries)
    if seen:
        yield Finding(
            verdict=Kind.NO_FAULT,
            action=Act.NONE,
            rule="shared_network",
            why="communication takes longer for all ranks alike: the network is shared",
            culprit="shared network",
            evidence=ids(seen),
            rejected=(lost("a node", "all ranks alike"),),
        )


def changes(scene: Scene) -> Iterator[Finding]:
    """The trouble came with a change and follows it: the change, whatever else was found on the way."""
    seen = scene.seen(Changed)
    if seen:
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.PAGE if all(c.trains for c in seen) else Act.STOP,
            rule="follows_a_change",
            why=f"it came with {seen[0].what} and follows it over nodes",
            culprit=seen[0].what,
            evidence=ids(seen),
            rejected=(lost("nodes that joined then", "run the same condition again before one is blamed"),),
        )


def offenders(scene: Scene) -> Iterator[Finding]:
    """Nodes taken out again and again: kept out until a person signs."""
    often = [e for e in scene.seen(Excluded) if e.times >= 3 and e.times >= OFTEN * e.usual]
    if often:
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.PAGE,
            rule="repeat_offender",
            why="taken out far more often than others with the same hours in use: a clean diagnostic clears no history",
            culprit=", ".join(e.node or "a node" for e in often),
            evidence=ids(often),
            rejected=(lost("clean by its last diagnostic", "the history says more than one test"),),
        )


def stuck_saves(scene: Scene) -> Iterator[Finding]:
    seen = scene.seen(StuckSaving)
    if seen:
        ranks = ", ".join(map(str, seen[0].ranks))
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.RESTART,
            rule="stuck_in_save",
            why=f"ranks {ranks} never finished the save that the others finished: end them, restore the one before",
            culprit=f"ranks {ranks}, stuck in a save",
            evidence=ids(seen),
            rejected=(lost("the save is complete", "two ranks' parts are not there"),),
        )


def partition_down(scene: Scene) -> Iterator[Finding]:
    seen = scene.seen(PartitionDown)
    if seen:
        yield Finding(
            verdict=Kind.INFRA_EVENT,
            action=Act.WAIT,
            rule="partition_down",
            why=f"all {seen[0].nodes} nodes are down for one reason ({seen[0].reason}): wait, go on when they are back",
            evidence=ids(seen),
            rejected=(lost("a strike on each node", "one cause"),),
        )


def leaks(scene: Scene) -> Iterator[Finding]:
    """Host memory that grows with each save on all nodes; whom the kernel kills is chance."""
    seen = [h for h in scene.seen(HostMemory) if len(h.used_bytes) > 2]
    grows = [h for h in seen if all(a < b for a, b in zip(h.used_bytes, h.used_bytes[1:], strict=False))]
    if grows:
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.STOP,
            rule="memory_grows",
            why="host memory grows with each save on all nodes: the save path keeps what it copied",
            culprit="the save path",
            evidence=ids([*grows, *scene.seen(HostFault)]),
            rejected=(lost("the node where a rank was killed", "all climb alike, the victim is chance"),),
        )


def shrinks(scene: Scene) -> Iterator[Finding]:
    """Fewer nodes: the largest layout that keeps the global batch."""
    for left in scene.seen(NodesLeft):
        layout = plan_layout(left.asked, ranks=left.nodes * left.ranks_per_node, ranks_per_node=left.ranks_per_node)
        if layout is None:
            yield Finding(
                verdict=Kind.NO_FAULT,
                action=Act.WAIT,
                rule="no_layout",
                why=f"{left.nodes} nodes carry no legal layout: wait for more",
                evidence=ids([left]),
            )
            continue
        nodes = nodes_needed(layout, left.ranks_per_node)
        yield Finding(
            verdict=Kind.NO_FAULT,
            action=Act.SHRINK,
            rule="shrink",
            why=f"{layout} on {nodes} of {left.nodes} nodes keeps the global batch of {left.asked.global_batch}",
            evidence=ids([left]),
            rejected=(lost("all nodes that are left", "their replicas do not divide the global batch"),),
            checks={"nodes": nodes, "dp": layout.dp},
        )
