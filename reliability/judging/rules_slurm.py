"""Rules on Slurm: wills, ends of jobs, launches, drains, memory, refusals, and listings that hold no incident. Pure.

A person's drain is obeyed and left alone. A reason that comes to one node after the other is not those nodes'. Of two
sources on one job the live one counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outlast.reliability.judging.facts import Ended, GpuLooked, HostFault, Step
from outlast.reliability.judging.facts_run import (
    JobListed,
    LaunchFailed,
    MemoryShort,
    NamesListed,
    NodeListed,
    NothingQueued,
    Refused,
    Returned,
    Will,
)
from outlast.reliability.judging.scene import Scene, ids, nodes_of
from outlast.reliability.judging.words import PARSE_ONLY, Act, Finding, lost
from outlast.reliability.verdict import Kind

MODULE_SHARE: Final = 0.02
"""Memory short by more than this is a part that is gone; by less, what a kernel or firmware took."""


def wills(scene: Scene) -> Iterator[Finding]:
    """A person drained, resumed, rebooted or cancelled: obeyed, never repaired."""
    asked = [w for w in scene.seen(Will) if w.what in ("drain", "resume", "reboot", "maintenance")]
    rows = scene.seen(NodeListed)
    # in a listing of many nodes a planned reboot is one state among others
    alone = len({n.node for n in rows}) == 1
    planned = [n for n in rows if n.reason.startswith("Reboot ASAP") or (alone and "reboot_requested" in n.flags)]
    cancelled = [w for w in scene.seen(Will) if w.what == "cancel"]
    told = ids([*asked, *planned])
    # what a node shows after it was given back is new evidence
    news = [*(f.id for f in scene.faults), *(h.id for h in scene.seen(HostFault) if h.action != "ignore")]
    fresh = told and any(i > max(told) for i in news)
    if (asked or planned) and not fresh:
        yield Finding(
            verdict=Kind.OPERATOR_ACTION,
            action=Act.NONE,
            rule="a_persons_will",
            why="somebody drained, resumed or reboots a node on purpose: only new evidence may speak against it",
            evidence=ids([*asked, *planned]),
            rejected=(lost("a fault of the node", "a planned state is no failure, and the reason is not ours"),),
        )
    elif cancelled and not scene.faults:
        yield Finding(
            verdict=Kind.OPERATOR_ACTION,
            action=Act.NONE,
            rule="cancelled",
            why="the job was cancelled: a person's will, nothing is restarted",
            evidence=ids(cancelled),
        )


def kill_failed(scene: Scene) -> Iterator[Finding]:
    """`Kill task failed`: slow exits beat Slurm's patience. What is still there afterwards decides."""
    drained = [n for n in scene.seen(NodeListed) if n.reason.lower().startswith("kill task failed") and n.nodes]
    ends = [e for e in scene.seen(Ended) if e.how == "kill_failed"]
    if (not drained and not ends) or _listing(scene):
        return
    left = [g for g in scene.seen(GpuLooked) if g.what == "leftover"]
    clean = [r for r in scene.seen(Returned) if r.how == "clean"]
    yield Finding(
        verdict=Kind.SOFTWARE_FAULT if left else Kind.TRANSIENT,
        action=Act.REBOOT if left else Act.LOG,
        rule="left_behind" if left else "slow_exit",
        why="a process that cannot be killed is still there: the node needs a reboot"
        if left
        else "ranks took longer to end than Slurm waits"
        + ("; the nodes are clean" if clean else "; check, then resume"),
        culprit=(left[0].node or nodes_of(drained or ends)[0]) if left and (left[0].node or nodes_of(ends)) else None,
        evidence=ids([*ends, *drained, *left, *clean]),
        rejected=(lost("hardware of these nodes", "they were drained together, by one job's end"),),
    )


def launches(scene: Scene) -> Iterator[Finding]:
    """A launch that fails on one node is the node's; on one after the other it is what they were given."""
    failed = scene.seen(LaunchFailed)
    failed = [f for f in failed if f.why != "check" or f.nodes]
    if not failed:
        return
    held = any(f.held for f in failed)
    nodes = tuple(dict.fromkeys(n for f in failed for n in f.nodes)) or nodes_of(failed)
    versions = {f.version for f in failed if f.version}
    if len(nodes) > 1:
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.STOP,
            rule="one_reason_many_nodes",
            why=f"the same launch failure on {len(nodes)} nodes: stop feeding nodes to it",
            culprit="what the nodes were given: "
            + (next(iter(versions)) if versions else f"the {failed[0].why} or image"),
            evidence=ids(failed),
            rejected=(lost("each node", "one reason, one after the other"),),
            checks={"max_nodes_drained": 4 if versions else 2},
        )
        return
    yield Finding(
        verdict=Kind.SOFTWARE_FAULT,
        action=Act.REBOOT if nodes else Act.STOP,
        rule="launch_failed",
        why=f"launches fail on {nodes[0] if nodes else 'a node that is not named'}"
        + ("; the job is held and does not go on by itself: exclude the node, release once" if held else ""),
        culprit=nodes[0] if nodes else None,
        evidence=ids(failed),
        rejected=(lost("wait", "a held job waits for ever"),) if held else (),
    )


def memory(scene: Scene) -> Iterator[Finding]:
    """Less memory than declared: a margin, or a module that is gone."""
    short = scene.seen(MemoryShort)
    if not short:
        return
    gone = [m for m in short if m.want_mb and (m.want_mb - m.have_mb) / m.want_mb >= MODULE_SHARE]
    checks: dict[str, object] = {m.node or "": "hardware_suspect" if m in gone else "config" for m in short}
    names = ", ".join(dict.fromkeys(m.node or "a node" for m in gone))
    yield Finding(
        verdict=Kind.HARDWARE_SUSPECT if gone else Kind.SOFTWARE_FAULT,
        action=Act.PAGE,
        rule="memory_short",
        why=f"{names} lost as much memory as a module holds"
        if gone
        else "a few MB short of what is declared: under-declare",
        culprit=f"{names} (memory module)" if gone else "configuration margin",
        evidence=ids(gone or short),
        rejected=(lost("all nodes that are short", "a firmware or kernel takes a few MB"),) if gone else (),
        checks=checks,
    )


def ends(scene: Scene) -> Iterator[Finding]:
    """Jobs that the scheduler ended, and requeues that cannot work."""
    over = [
        e
        for e in scene.seen(Ended)
        if e.how in ("time_limit", "preempted", "cancelled", "node_fail", "oom", "time_boxed")
    ]
    missing = [r for r in scene.seen(Refused) if r.why == "missing"]
    if missing:
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.STOP,
            rule="requeue_impossible",
            why=f"{missing[0].tool} is not to be found where the job runs: nobody submits the follow-up",
            culprit="the requeue path",
            evidence=ids([*missing, *over]),
            rejected=(lost("requeued", "the command did not run"),),
        )
        return
    if not over:
        return
    hows = {e.how for e in over}
    if "oom" in hows:
        yield _end(over, "oom", Kind.APP_FAULT, Act.STOP, "the job used more memory than its limit", "the program")
    elif "preempted" in hows:
        yield _end(over, "preempted", Kind.SCHEDULER_EVENT, Act.RESTART, "preempted: free of blame, not counted", None)
    elif "node_fail" in hows:
        yield _node_failed(scene, over)
    elif "time_limit" in hows:
        yield _end(over, "time_limit", Kind.SCHEDULER_EVENT, Act.RESTART, "the time limit was reached", None)
    elif "time_boxed" in hows:
        yield _boxed(scene, over)
    elif not scene.faults:
        yield _end(over, "cancelled", Kind.OPERATOR_ACTION, Act.NONE, "the job was cancelled", None)


def _end(over: list[Ended], how: str, verdict: Kind, action: Act, why: str, culprit: str | None) -> Finding:
    own = [e for e in over if e.how == how]
    return Finding(
        verdict=verdict,
        action=action,
        rule=how,
        why=why,
        culprit=culprit,
        evidence=ids(own),
        rejected=(lost("the failure budget", "the scheduler ended it"),) if verdict is Kind.SCHEDULER_EVENT else (),
        checks={"reason": how},
    )


def _node_failed(scene: Scene, over: list[Ended]) -> Finding:
    again = [j for j in scene.seen(JobListed) if j.live and j.state in ("PENDING", "RUNNING", "CONFIGURING")]
    failed = [e for e in over if e.how == "node_fail"]
    node = next((e.node for e in failed if e.node), None)
    return Finding(
        verdict=Kind.SCHEDULER_EVENT if again else Kind.INFRA_EVENT,
        action=Act.NONE if again else Act.SPARE if not scene.everywhere else Act.WAIT,
        rule="node_failed",
        why="Slurm lost the node" + (" and has queued the job again itself" if again else ""),
        culprit=node,
        evidence=ids([*failed, *again]),
        rejected=(lost("submit another copy", "the same job comes back"),) if again else (),
        checks={"copies_running_max": 1} if again else {},
    )


def _boxed(scene: Scene, over: list[Ended]) -> Finding:
    steps = [s for s in scene.seen(Step) if s.total]
    done = bool(steps) and steps[-1].iteration >= steps[-1].total
    hole = scene.seen(NothingQueued)
    return Finding(
        verdict=Kind.NO_FAULT if done else Kind.SCHEDULER_EVENT,
        action=Act.NONE if done else Act.PAGE if hole or steps else Act.RESTART,
        rule="time_boxed_exit",
        why="the program ended by its own limit"
        + ("" if done else ", short of its target")
        + (", and nothing is queued after it" if hole else ""),
        evidence=ids([*over, *steps, *hole]),
        rejected=(lost("complete", "complete is the target reached, not a clean exit"),) if not done else (),
        checks={"complete": done},
    )


def refusals(scene: Scene) -> Iterator[Finding]:
    """The scheduler does not answer, or does not take what it was given."""
    refused = scene.seen(Refused)
    silent = [r for r in refused if r.why == "unreachable"]
    wrong = [r for r in refused if r.why == "impossible"]
    if silent:
        yield Finding(
            verdict=Kind.INFRA_EVENT,
            action=Act.WAIT,
            rule="scheduler_silent",
            why="the scheduler does not answer: that says nothing about jobs or nodes; ask again",
            culprit="the scheduler",
            evidence=ids(silent),
            rejected=(lost("the job is gone", "no answer is no state"),),
        )
    elif wrong:
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.STOP,
            rule="submission_refused",
            why="the scheduler refuses the request itself; the same request is refused again",
            culprit="the request",
            evidence=ids(wrong),
        )
    hole = scene.seen(NothingQueued)
    if hole and not refused:
        yield Finding(
            verdict=Kind.SCHEDULER_EVENT,
            action=Act.PAGE,
            rule="nothing_queued",
            why="the run has no job that runs or waits",
            evidence=ids(hole),
        )


def _listing(scene: Scene) -> bool:
    """The case is a listing of nodes with counts: nothing happened in it."""
    return any(n.count >= 1 and not n.nodes for n in scene.seen(NodeListed))


def names(scene: Scene) -> Iterator[Finding]:
    """Host lists. One that cannot be read is refused: the next step may be a drain."""
    listed = scene.seen(NamesListed)
    if not listed:
        return
    bad = [n for n in listed if n.error]
    expand = [name for n in listed for name in n.names]
    yield Finding(
        verdict=PARSE_ONLY,
        action=Act.REFUSE if bad else Act.NONE,
        rule="host_list",
        why=f"{len(bad)} of {len(listed)} lists cannot be read" if bad else f"{len(expand)} names, in the order given",
        evidence=ids(bad or listed),
        rejected=(lost("expand what can be guessed", "a cut list names other hosts"),) if bad else (),
        checks={"all_raise": len(bad) == len(listed)} if bad else {"expand": expand},
    )


def live_over_accounting(scene: Scene) -> Iterator[Finding]:
    """Two sources on one job that disagree: the live one counts."""
    jobs = scene.seen(JobListed)
    live = [j for j in jobs if j.live]
    if live and any(not j.live for j in jobs):
        running = live[-1].state
        yield Finding(
            verdict=Kind.NO_FAULT,
            action=Act.NONE,
            rule="live_source_counts",
            why=f"the queue says {running}; accounting lags, and numbers of jobs come round again",
            evidence=ids([*live, *jobs]),
            rejected=(lost("what accounting says", "it is of another time or another job"),),
            checks={"state": running},
        )


def listings(scene: Scene) -> Iterator[Finding]:
    """Jobs and nodes as listed, with nothing wrong between them."""
    jobs, nodes = scene.seen(JobListed), scene.seen(NodeListed)
    if jobs or nodes:
        yield Finding(
            verdict=PARSE_ONLY,
            action=Act.NONE,
            rule="listing",
            why=f"{len(jobs)} jobs and {len(nodes)} rows of nodes, as Slurm lists them",
            evidence=ids([*jobs, *nodes]),
            rejected=(lost("drains of ours", "a reason that is not ours is left alone"),) if nodes else (),
            checks=_checks(jobs, nodes),
        )


def _killed(code: str) -> bool:
    """Whether an ExitCode says POSIX signal; beyond 64 Slurm marks other ends there."""
    number = code.partition(":")[2]
    return number.isdigit() and 0 < int(number) <= 64


def _checks(jobs: list[JobListed], nodes: list[NodeListed]) -> dict[str, object]:
    checks: dict[str, object] = {}
    states = [j.state for j in jobs]
    if states:
        checks |= {"state": states[0]} if len(states) == 1 else {"states": states}
        signals = {j.job: f"signal {j.exit.partition(':')[2]}" for j in jobs if _killed(j.exit)}
        checks |= {"exit": signals} if signals and jobs[0].truncated else {}
        hosts = [n for j in jobs for n in j.nodes]
        checks |= {"host": hosts[0]} if len(hosts) == 1 else {}
    named = [n for n in nodes if n.node]
    if named:
        checks["drained_or_draining"] = [n.node for n in named if "drain" in n.flags]
        checks["not_drained"] = [n.node for n in named if "drain" not in n.flags]
        checks["not_responding"] = [n.node for n in named if "not_responding" in n.flags]
        # a spare is idle and nothing else: planned, reserved or in maintenance it is promised to somebody
        checks["free_spares"] = [
            n.node for n in named if n.state == "idle" and not set(n.flags) - {"dynamic_norm", "cloud"}
        ]
    reasons = {n.reason: n.owner.replace("person", "human") for n in nodes if n.reason and n.owner != "none"}
    if reasons and not named:
        checks["classes"] = reasons
    return checks
