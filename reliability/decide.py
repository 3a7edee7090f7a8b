"""The decision: verdicts in, actions out. Pure -- no clock, no Slurm, no logging.

`decide` is deliberately timid: it takes the cheapest rung of the restart ladder that is sound, never drains past the
budget, never restarts without progress for ever, and holds and calls a person where it does not know better.

    leave it -> restart in place -> swap -> shrink and feed -> requeue -> roll back -> hold
"""

from __future__ import annotations

from collections.abc import Callable

from outlast.reliability.actions import (
    Action,
    Advise,
    Drain,
    EndRun,
    Feed,
    Grow,
    Hold,
    LeaveIt,
    Requeue,
    RestartInPlace,
    RollBack,
    Shrink,
    Swap,
    Wait,
)
from outlast.reliability.elastic import plan_layout, wanted
from outlast.reliability.model import Layout, Node, Noun, Plan
from outlast.reliability.runfile import LayoutAsked, Limits
from outlast.reliability.verdict import Verdict

GATHER_S = 10.0
"""At the beginning, this long for all agents: the first in the allocation train, not the first to be ready."""

Legal = Callable[[Layout], str]
"""'' where the program can run in a layout, else why not."""


class Situation(Noun, frozen=True, kw_only=True):
    """What a decision depends on besides the verdict."""

    now_s: float
    limits: Limits
    asked: LayoutAsked
    ranks_per_node: int
    nodes_wanted: int
    nodes_min: int
    plan: Plan | None
    """The present or last attempt's."""
    usable: tuple[Node, ...]
    """Nodes with an agent that are not excluded, in the order of joining."""
    excluded: tuple[Node, ...] = ()
    expected: int = 0
    """Agents that were asked for and have not joined yet."""
    feeding: int = 0
    """Nodes in feeder jobs that have not started yet."""
    has_allocation: bool = True
    """Some allocation of the run is running."""
    can_feed: bool = False
    can_requeue: bool = False
    may_drain: bool = False
    has_drains: bool = True
    drains_last_hour: int = 0
    failures_without_progress: int = 0
    waiting_since_s: float | None = None
    requeued_for: frozenset[Node] = frozenset()

    @property
    def layout_wanted(self) -> Layout:
        return wanted(self.asked, nodes=self.nodes_wanted, ranks_per_node=self.ranks_per_node)


def decide(verdict: Verdict, now: Situation, *, legal: Legal) -> tuple[Action, ...]:
    """The actions for one new verdict, in the order to carry them out: drains first, one change of the run last."""
    if verdict.ends:
        return (EndRun(outcome=verdict.ends, why=verdict.because),)
    drains = _drains(verdict, now)
    if verdict.hold:
        return (*drains, Hold(why=verdict.because))
    in_plan = now.plan is not None and verdict.node in now.plan.nodes
    back = RollBack(quarantine=verdict.quarantine, too=verdict.quarantine_too, why=verdict.because)
    if not verdict.stops and verdict.quarantine >= 0:
        return (*drains, back)
    if not verdict.stops:
        why = "the attempt goes on" + (f"; {verdict.node} is not used any more" if verdict.convicts else "")
        return (*drains, LeaveIt(why=why))
    if now.failures_without_progress + 1 >= now.limits.attempts_without_progress and not verdict.at_checkpoint:
        times = now.failures_without_progress + 1
        return (*drains, Hold(why=f"{times} attempts in a row without progress; the last: {verdict.because}"))
    if verdict.quarantine >= 0:
        return (*drains, back)
    return (*drains, *ladder(now, legal=legal, why=verdict.rule, at_checkpoint=verdict.at_checkpoint and in_plan))


def _drains(verdict: Verdict, now: Situation) -> tuple[Action, ...]:
    if not verdict.drains or verdict.node is None or not now.has_drains:
        return ()
    reason = f"outlast: {verdict.rule}: {verdict.because}"[:200]
    command = f'scontrol update nodename={verdict.node} state=drain reason="{verdict.rule}"'
    if not now.may_drain:
        return (Advise(node=verdict.node, command=command, why="this user may not drain nodes"),)
    if now.drains_last_hour >= now.limits.drains_per_hour:
        spent = f"{now.drains_last_hour} drains in the last hour, the budget is {now.limits.drains_per_hour}"
        return (Advise(node=verdict.node, command=command, why=spent),)
    return (Drain(node=verdict.node, reason=reason),)


def ladder(now: Situation, *, legal: Legal, why: str, at_checkpoint: bool = False) -> tuple[Action, ...]:
    """The cheapest sound way to go on with the nodes that there are."""
    plan, usable = now.plan, now.usable
    if plan is None and now.expected and now.waiting_since_s is not None:
        gather = now.waiting_since_s + GATHER_S
        if now.now_s < gather and len(usable) >= now.nodes_wanted:
            return (Wait(until_s=gather, why=f"{now.expected} more agents are starting"),)
    out = tuple(n for n in plan.nodes if n not in usable) if plan else ()
    if plan and not out and (plan.layout == now.layout_wanted or len(usable) < now.nodes_wanted):
        return (RestartInPlace(why=why),)
    if len(usable) >= now.nodes_wanted:
        if plan is None:
            return (RestartInPlace(why="all nodes are there"),)
        if plan.layout != now.layout_wanted:
            return (Grow(layout=now.layout_wanted, why=why),)
        into = tuple(n for n in usable if n not in plan.nodes)[: len(out)]
        return (Swap(out=out, into=into, why=why, at_checkpoint=at_checkpoint),)
    return _too_few(now, out, legal, why)


def _too_few(now: Situation, out: tuple[Node, ...], legal: Legal, why: str) -> tuple[Action, ...]:
    """Fewer nodes than wanted: wait for some, train on with what there is, or give the allocation back."""
    if not now.has_allocation:
        # the job ended or waits in the queue: whoever starts in the next one decides, with its nodes in view
        return (Wait(until_s=now.now_s + now.limits.start_timeout_s, why="no allocation of the run is running"),)
    missing = now.nodes_wanted - len(now.usable)
    feed: tuple[Action, ...] = ()
    if now.can_feed and now.feeding < missing and now.expected < missing:
        feed = (Feed(nodes=missing - now.feeding, exclude=now.excluded, why=f"{missing} nodes too few"),)
    coming = now.feeding + now.expected + (missing if feed else 0)
    since = now.now_s if now.waiting_since_s is None else now.waiting_since_s
    patience = now.limits.start_timeout_s if now.expected else now.limits.wait_for_spare_s
    if coming and now.now_s < since + patience:
        return (*feed, Wait(until_s=since + patience, why=f"{missing} nodes too few; {coming} may come"))
    fit = plan_layout(
        now.asked, ranks=len(now.usable) * now.ranks_per_node, ranks_per_node=now.ranks_per_node, legal=legal
    )
    if fit is not None and nodes_for(fit, now.ranks_per_node) >= now.nodes_min:
        return (*feed, Shrink(out=out, layout=fit, feed=missing if now.can_feed else 0, why=why))
    if now.can_requeue and not set(now.excluded) <= now.requeued_for:
        return (Requeue(exclude=now.excluded, why=f"{len(now.usable)} usable nodes cannot carry the run"),)
    return (
        *feed,
        Hold(
            why=f"{len(now.usable)} usable nodes, {now.nodes_min} are the fewest acceptable"
            + (f" (excluded: {', '.join(now.excluded)})" if now.excluded else "")
        ),
    )


def nodes_for(layout: Layout, ranks_per_node: int) -> int:
    return -(-layout.world_size // ranks_per_node)


def grow(now: Situation) -> Grow | None:
    """Whether enough nodes are there again for the wanted layout, while a smaller one trains."""
    if now.plan is None or now.plan.layout == now.layout_wanted or len(now.usable) < now.nodes_wanted:
        return None
    return Grow(layout=now.layout_wanted, why=f"{len(now.usable)} nodes are usable again")


def next_layout(now: Situation, *, legal: Legal) -> Layout | None:
    """The layout to start now: the wanted one if the nodes are there, else the largest legal one; None: not yet."""
    if len(now.usable) >= now.nodes_wanted:
        return now.layout_wanted
    return plan_layout(
        now.asked, ranks=len(now.usable) * now.ranks_per_node, ranks_per_node=now.ranks_per_node, legal=legal
    )


def choose_nodes(layout: Layout, now: Situation) -> tuple[Node, ...]:
    """Nodes for this layout: those of the last plan first, in their order, spares where one is missing.

    A node keeps its place in the rank order where it can, so that a swap moves only the ranks of the node that left.
    """
    need = nodes_for(layout, now.ranks_per_node)
    before = list(now.plan.nodes[:need]) if now.plan else []
    free = [n for n in now.usable if n not in before]
    free = [n for n in (now.plan.nodes if now.plan else ()) if n in free] + [
        n for n in free if now.plan is None or n not in now.plan.nodes
    ]
    chosen: list[Node] = []
    for place in range(need):
        if place < len(before) and before[place] in now.usable:
            chosen.append(before[place])
        else:
            chosen.append(free.pop(0))
    return tuple(chosen)
