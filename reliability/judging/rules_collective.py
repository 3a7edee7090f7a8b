"""Rules on collectives: who waited, who was missing, what did not fit together, which path failed. Pure.

Every rank prints a time-out, so printing it proves nothing; the rank that others wait for is behind or outside. Three
hangs with three culprits have one cause that they share, and that is the software.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outlast.reliability.judging.facts import Disagreed, Missing, NetError, RankSaid, Waited
from outlast.reliability.judging.facts_run import Reach
from outlast.reliability.judging.rules_host import port_stays_down
from outlast.reliability.judging.scene import Scene, ids, nodes_of
from outlast.reliability.judging.words import Act, Finding, lost
from outlast.reliability.verdict import Kind


def desynchronised(scene: Scene) -> Iterator[Finding]:
    """Collectives that do not fit together: the program's order of calls, on whichever ranks."""
    found = scene.seen(Disagreed)
    if found:
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.STOP,
            rule="collectives_disagree",
            why="ranks called collectives of different size or kind: the program, or a recorder that lost entries",
            culprit="the program's order of collectives",
            evidence=ids(found),
            rejected=(lost("the ranks that are named", "named is who disagrees with the first that was read"),),
        )


def missing_rank(scene: Scene) -> Iterator[Finding]:
    """One rank is behind or outside; again with another one, and it is no node."""
    named = scene.seen(Missing)
    waited = [w for w in scene.seen(Waited) if w.how == "timeout"]
    behind = _behind(waited)
    if not named and behind is None:
        return
    who = named or [m for m in (behind,) if m is not None]
    ranks = {(m.run, m.rank) for m in who}
    culprits = {m.rank for m in who}
    # one culprit in each of several runs, and not the same one
    if len({run for run, _ in ranks}) > 1 and len(culprits) > 1:
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.STOP,
            rule="culprits_differ",
            why=f"{len(ranks)} hangs name {len(culprits)} different ranks: what they share is the software",
            culprit="the library or program version, no node",
            evidence=ids(who),
            rejected=(lost("each rank that lagged", "after the second different culprit nobody is drained"),),
            checks={"drained_nodes": []},
        )
        return
    one = who[0]
    if len(culprits) > 1:
        yield _several(who, waited)
        return
    outside = one.how == "outside" or len({run for run, _ in ranks}) > 1
    place = f"rank {one.rank}" + (f" on {one.node}" if one.node else "")
    yield Finding(
        verdict=Kind.HARDWARE_SUSPECT if outside else Kind.AMBIGUOUS,
        action=Act.SPARE if outside else Act.RESTART,
        rule="rank_missing",
        why=f"{place} did not come to the collective that all others wait in: take its stack, then restart",
        culprit=place,
        evidence=ids([*who, *waited]),
        rejected=(lost("the ranks that timed out", "they waited"),),
        checks={"missing_ranks": sorted(r for r in culprits if r is not None)},
    )


def _several(who: Sequence[Missing], waited: Sequence[Waited]) -> Finding:
    return Finding(
        verdict=Kind.AMBIGUOUS,
        action=Act.RESTART,
        rule="several_missing",
        why=f"{len(who)} ranks are named as missing: what they share is not known; take stacks, restart once",
        evidence=ids([*who, *waited]),
        rejected=(lost("one of them", "nothing tells them apart"),),
        checks={"missing_ranks": sorted(m.rank for m in who if m.rank is not None)},
    )


def _behind(waited: Sequence[Waited]) -> Missing | None:
    """The one rank that had not enqueued what the others timed out in."""
    seqs = [w.seq for w in waited if w.seq is not None]
    if not seqs:
        return None
    late = [w for w in waited if w.enqueued is not None and w.enqueued < max(seqs) and w.rank is not None]
    lower = [w for w in waited if w.seq is not None and w.seq < max(seqs) and w.rank is not None]
    ranks = {w.rank for w in (late or lower)}
    if len(ranks) != 1 or len({w.rank for w in waited}) < 2:
        return None
    one = (late or lower)[0]
    return Missing(id=one.id, node=one.node, rank=one.rank)


def paths(scene: Scene) -> Iterator[Finding]:
    """Completion errors: the path between two ends; the same pair again excludes one of them."""
    errors = scene.of(NetError)
    primary = [e for e in errors if e.status != 5]
    if not primary or all(e.past for e in primary):
        return
    first = next(e for e in primary if not e.past)
    pair = frozenset({first.local, first.peer})
    again = {e.run for e in primary if frozenset({e.local, e.peer}) == pair}
    repeat = len(again) > 1 or any(e.past for e in primary if frozenset({e.local, e.peer}) == pair)
    ends = f"{first.local or 'the printer'}" + (f" GPU {first.gpu}'s NIC" if first.gpu else "")
    checks: dict[str, object] = {"primary_status": first.status}
    checks |= {k: v for k, v in (("local", first.local), ("peer", first.peer)) if v}
    yield Finding(
        verdict=Kind.HARDWARE_SUSPECT if repeat else Kind.AMBIGUOUS,
        action=Act.SPARE if repeat else Act.RESTART,
        rule="path_failed_again" if repeat else "path_failed",
        why=f"completion status {first.status}: either end or anything between"
        + ("; the same pair again, so one end leaves" if repeat else "; check both ports' counters"),
        culprit=f"link between {ends} and {first.peer or 'its peer'}",
        evidence=ids(primary),
        rejected=(
            lost("the node that printed it", "it only noticed"),
            lost("each further status 5", "requests flushed after the first error"),
        ),
        checks=checks,
    )


def waits(scene: Scene) -> Iterator[Finding]:
    """Time-outs alone: nobody is missing, so nobody is blamed. A port that is down explains them better."""
    if port_stays_down(scene):
        return
    waited = scene.seen(Waited)
    echoes = [s for s in scene.seen(RankSaid) if s.echo or s.class_ == "nccl_net_error"]
    if not waited:
        if echoes and any(r.rotates for r in scene.of(Reach)):
            yield _anywhere(echoes)
        elif echoes:
            yield _echoes(echoes)
        return
    nodes = nodes_of(w for w in waited if w.how == "timeout") or nodes_of(waited)
    told = next((w.first_reporter for w in waited if w.first_reporter is not None), None)
    seqs = {w.seq for w in waited if w.seq is not None}
    checks: dict[str, object] = {"missing_ranks": []}
    checks |= {"seq": next(iter(seqs))} if len(seqs) == 1 else {}
    checks |= {"first_reporter": told} if told is not None else {}
    yield Finding(
        verdict=Kind.AMBIGUOUS,
        action=Act.RESTART,
        rule="nobody_missing",
        why="all that speak entered the collective and none completed it: a path or a hung kernel; take stacks and "
        "recorder dumps, restart once",
        culprit=f"the path between {nodes[0]} and {nodes[1]}" if len(nodes) == 2 else None,
        evidence=ids(waited),
        rejected=(
            lost("the first to print", "first noticed is not first at fault"),
            lost("heartbeat messages", "they follow a stuck abort"),
        ),
        checks=checks,
    )


def _anywhere(echoes: Sequence[RankSaid]) -> Finding:
    return Finding(
        verdict=Kind.SOFTWARE_FAULT,
        action=Act.STOP,
        rule="whichever_nodes",
        why="connections fail whichever nodes are taken: a limit of scale or a configuration",
        culprit="configuration or scale",
        evidence=ids(echoes),
        rejected=(lost("the node that makes the difference", "any other makes it too"),),
    )


def _echoes(echoes: Sequence[RankSaid]) -> Finding:
    network = any(e.class_ == "nccl_net_error" for e in echoes)
    return Finding(
        verdict=Kind.AMBIGUOUS if network else Kind.TRANSIENT,
        action=Act.RESTART,
        rule="only_echoes",
        why="all that speak saw a peer go; which rank began it is not in these lines: restart, within a limit",
        evidence=ids(echoes),
        rejected=(lost("the ranks that print", "they followed"),),
    )
