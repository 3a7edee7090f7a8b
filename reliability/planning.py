"""From the state and the scheduler's word to the situation that decisions are made in, and the next plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outlast.reliability.actions import Feed, Grow, Release, Requeue, RestartInPlace, RollBack, Shrink, Swap
from outlast.reliability.attempt import State
from outlast.reliability.decide import Legal, Situation, choose_nodes, next_layout
from outlast.reliability.elastic import places
from outlast.reliability.model import Node, Noun, Plan
from outlast.reliability.ports import Allocation, Restore
from outlast.reliability.runfile import RunFile
from outlast.reliability.runstate import RunState

CHANGES = (RestartInPlace, Swap, Shrink, Grow, Requeue)
"""Actions that end with another attempt; their outcome is that attempt's first train_step."""


class SiteView(Noun, frozen=True, kw_only=True):
    """What the scheduler allows and last said."""

    allocations: tuple[Allocation, ...] = ()
    may_drain: bool = False
    has_drains: bool = True
    """False where there is no scheduler that could take a node out for everybody."""
    can_feed: bool = False
    can_requeue: bool = False
    launch_refused: tuple[Node, ...] = ()
    """Nodes on which no agent came up in the allowed tries."""


def running(allocations: Sequence[Allocation]) -> tuple[Allocation, ...]:
    return tuple(a for a in allocations if a.state == "RUNNING")


def usable(state: RunState, site: SiteView) -> tuple[Node, ...]:
    """Nodes of running allocations that have an agent and are not excluded, in the order of the allocations."""
    present = set(state.evidence.present) - set(state.excluded)
    return tuple(dict.fromkeys(n for a in running(site.allocations) for n in a.nodes if n in present))


def expected(state: RunState, site: SiteView) -> int:
    """Nodes of running allocations whose agent has not joined yet and may still come."""
    nodes = {n for a in running(site.allocations) for n in a.nodes}
    return sum(
        1
        for n in nodes
        if not state.evidence.node(n).present and n not in state.excluded and n not in site.launch_refused
    )


_UNSEEN_S = 60.0
"""A job that was just submitted may not be in the scheduler's answer yet."""


def feeding(state: RunState, site: SiteView, now_s: float) -> int:
    """Nodes of feeder jobs that are asked for and have not started."""
    listed = {a.job: a.state for a in site.allocations}
    count = sum(a.action.nodes for a in state.open(Feed) if isinstance(a.action, Feed))
    for feeder in state.feeders:
        waits = listed.get(feeder.job) in ("PENDING", "CONFIGURING")
        unseen = feeder.job not in listed and now_s < feeder.at_s + _UNSEEN_S
        count += feeder.nodes if waits or unseen else 0
    return count


def situation(state: RunState, site: SiteView, run: RunFile, *, now_s: float) -> Situation:
    plan = state.evidence.current.plan if state.evidence.current else None
    return Situation(
        now_s=now_s,
        limits=run.limits,
        asked=run.layout,
        ranks_per_node=run.ranks_per_node,
        nodes_wanted=run.cluster.nodes,
        nodes_min=run.nodes_min,
        plan=plan,
        usable=usable(state, site),
        excluded=tuple(state.excluded),
        expected=expected(state, site),
        feeding=feeding(state, site, now_s),
        can_feed=site.can_feed and run.cluster.feed,
        has_allocation=bool(running(site.allocations)),
        can_requeue=site.can_requeue,
        may_drain=site.may_drain,
        has_drains=site.has_drains,
        drains_last_hour=sum(1 for t in state.drains_s if t > now_s - 3600),
        failures_without_progress=state.failures_without_progress,
        waiting_since_s=state.waiting_since_s,
        requeued_for=state.requeued_for,
    )


def releasable(state: RunState, site: SiteView, own: Node) -> Release | None:
    """A node that is being drained and that nothing of the run uses any more: kept, it would be draining for the
    whole job, and nobody could repair it. None where there is none.

    The batch node of a job cannot leave it, unless it is all that a feeder job has. `own`: where this supervisor runs;
    its node stays until the job's end. Nodes that are excluded but not drained stay too: the next job would get them.
    """
    now = state.evidence.current
    for allocation in running(site.allocations):
        for node in allocation.nodes:
            slurm = state.evidence.node(node).state
            fixed = node == allocation.batch_node and not (allocation.feeder and allocation.nodes == (node,))
            idle = now is not None and (now.state is State.ENDED or node not in now.plan.nodes)
            draining = node in state.excluded and slurm is not None and "drain" in slurm.flags
            if draining and idle and not fixed and node != own and (node, allocation.job) not in state.released:
                why = f"{state.excluded[node].rule}: Slurm drains it, and no rank of the run is on it"
                return Release(node=node, job=allocation.job, why=why)
    return None


def next_plan(
    now: Situation, attempt: int, restore: Restore | None, *, legal: Legal, why: str, saves: tuple[int, str] = (0, "")
) -> Plan | None:
    """The next attempt's plan, or None where the nodes do not carry a legal layout."""
    layout = next_layout(now, legal=legal)
    if layout is None:
        return None
    nodes = choose_nodes(layout, now)
    return Plan(
        attempt=attempt,
        layout=layout,
        nodes=nodes,
        ranks=places(layout, nodes, now.ranks_per_node),
        restore_step=restore.train_step if restore else 0,
        restore_path=restore.path if restore else "",
        micro_batch=now.asked.micro_batch,
        why=why,
        save_every=saves[0],
        save_because=saves[1],
    )


def between_attempts(state: RunState) -> bool:
    """No attempt is under way."""
    now = state.evidence.current
    return now is None or now.state is State.ENDED


def may_plan(state: RunState) -> bool:
    """Whether the next attempt may be planned now."""
    return (
        between_attempts(state)
        and not state.held
        and state.ending is None
        and state.ended is None
        and not state.unsettled
        and not state.open(Requeue)
        and not state.open(RollBack)
    )


def reached_target(state: RunState, run: RunFile) -> bool:
    """The last attempt did all that was asked for."""
    now = state.evidence.current
    if now is None or now.state is not State.ENDED:
        return False
    if 0 < run.train_steps <= state.evidence.durable_step:
        return True  # whatever ended the attempt, the last checkpoint is there
    done = bool(now.exits) and all(f.exit.exit_code == 0 and not f.exit.asked for f in now.exits)
    return done and (not run.train_steps or now.reached >= run.train_steps) and not state.stopped
