"""Rules on what Slurm says of one node or one job: lost nodes, missing GPUs, health checkers, why a job waits. Pure.

A checker that timed out has not failed. A job that waits for its turn is no fault; one that is held, or can never
start, needs a person.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from outlast.reliability.judging.facts_run import CheckFailed, GpusShort, JobListed, NodeGone, Refused
from outlast.reliability.judging.scene import MANY_NODES, Scene, ids, nodes_of
from outlast.reliability.judging.words import Act, Finding, lost
from outlast.reliability.verdict import Kind

_MOUNT: Final = ("check_fs", "mount")
_HARDWARE: Final = ("check_hw", "gpu", "nvidia", "nv_", "ib", "mcelog", "dcgm", "ecc", "nvlink", "pcie")
_OF_A_PERSON: Final = frozenset({"JobHeldUser", "JobHeldAdmin"})
_NEVER: Final = frozenset(
    {
        "DependencyNeverSatisfied",
        "BadConstraints",
        "InvalidAccount",
        "InvalidQOS",
        "AccountNotAllowed",
        "PartitionNodeLimit",
    }
)

_STATES: Final[Mapping[str, tuple[Kind, Act, str]]] = {
    "TIMEOUT": (Kind.SCHEDULER_EVENT, Act.RESTART, "the time limit was reached"),
    "DEADLINE": (Kind.SCHEDULER_EVENT, Act.RESTART, "the deadline was reached"),
    "PREEMPTED": (Kind.SCHEDULER_EVENT, Act.RESTART, "preempted: free of blame, not counted"),
    "NODE_FAIL": (Kind.INFRA_EVENT, Act.SPARE, "Slurm lost a node of the job"),
    "BOOT_FAIL": (Kind.INFRA_EVENT, Act.SPARE, "a node of the job did not boot"),
    "OUT_OF_MEMORY": (Kind.APP_FAULT, Act.STOP, "the job used more memory than its limit"),
    "CANCELLED": (Kind.OPERATOR_ACTION, Act.NONE, "the job was cancelled: a person's will"),
    "COMPLETING": (Kind.TRANSIENT, Act.WAIT, "the job is ending"),
    "FAILED": (Kind.APP_FAULT, Act.RESTART, "the job ended with an error of its own"),
}


def missing_gpus(scene: Scene) -> Iterator[Finding]:
    """A node that registers fewer GPUs than it is declared to have."""
    short = scene.seen(GpusShort)
    reached = nodes_of(short)
    if len(reached) >= MANY_NODES:
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.STOP,
            rule="gpus_missing_everywhere",
            why=f"{len(reached)} nodes register too few GPUs at once: a driver or configuration, no node",
            culprit="driver or configuration",
            evidence=ids(short),
            rejected=(lost("each node", "nodes do not lose GPUs together"),),
        )
    elif short:
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.SPARE,
            rule="gpu_missing",
            why=f"{short[0].node or 'the node'} registers {short[0].have} of {short[0].want} GPUs",
            culprit=f"{short[0].node or 'the node'}, a GPU that does not register",
            evidence=ids(short),
        )


def lost_nodes(scene: Scene) -> Iterator[Finding]:
    """Nodes that the controller does not hear, or that rebooted by themselves."""
    gone = scene.seen(NodeGone)
    if not gone:
        return
    rebooted = [g for g in gone if g.how == "rebooted"]
    many = len(nodes_of(gone)) >= MANY_NODES or scene.everywhere
    yield Finding(
        verdict=Kind.INFRA_EVENT,
        action=Act.WAIT if many or not rebooted else Act.SPARE,
        rule="node_lost",
        why="many nodes are not heard at once: the network or the controller, wait"
        if many
        else "the node rebooted by itself: its job is gone, a spare takes its place"
        if rebooted
        else "the controller does not hear the node: ask again before anything is done",
        culprit=None if many else gone[0].node,
        evidence=ids(gone),
        rejected=(lost("broken nodes", "not being heard is not being broken"),),
    )


def checkers(scene: Scene) -> Iterator[Finding]:
    """A site's health checker speaks: a time-out is the checker's, a mount is shared until one node alone lacks it."""
    failed = scene.seen(CheckFailed)
    if not failed:
        return
    many = len(nodes_of(failed)) >= MANY_NODES or scene.everywhere or scene.reach >= MANY_NODES
    words = failed[0].check.lower()
    node = failed[0].node
    if failed[0].timed_out:
        verdict, action, why = Kind.MONITORING_FAULT, Act.PAGE, "the checker timed out: that is no failed check"
    elif any(w in words for w in _MOUNT):
        verdict, action = Kind.INFRA_EVENT, Act.WAIT if many else Act.REBOOT
        why = "a file system is not mounted" + (" on many nodes: wait for it" if many else " on this node alone")
    elif many:
        verdict, action, why = Kind.SOFTWARE_FAULT, Act.STOP, "the same check fails on many nodes: what they share"
    elif any(w in words for w in _HARDWARE):
        verdict, action, why = Kind.HARDWARE_SUSPECT, Act.REFUSE, "a hardware check fails on this node"
    else:
        verdict, action, why = Kind.AMBIGUOUS, Act.REFUSE, "a check fails on this node: it does not pass its gate"
    yield Finding(
        verdict=verdict,
        action=action,
        rule="health_checker",
        why=why,
        culprit=None if many or failed[0].timed_out else node,
        evidence=ids(failed),
        rejected=(lost("drain by this alone", "another's checker is one witness"),),
    )


def job_state(scene: Scene) -> Iterator[Finding]:
    """One job and its state. A queue with several jobs is a listing."""
    jobs = [j for j in scene.seen(JobListed) if not j.truncated]
    if len({j.job.split(".")[0] for j in jobs}) != 1 or (any(j.live for j in jobs) and any(not j.live for j in jobs)):
        return
    # of a job's own row and those of its steps, its own tells why it ended
    job = next((j for j in reversed(jobs) if "." not in j.job), jobs[-1])
    if job.state == "PENDING" and job.reason:
        yield _waiting(job)
    elif job.state in _STATES:
        verdict, action, why = _failed(jobs) if job.state == "FAILED" else _STATES[job.state]
        yield Finding(
            verdict=verdict,
            action=action,
            rule=f"job_{job.state.lower()}",
            why=why,
            culprit=job.nodes[0] if verdict is Kind.INFRA_EVENT and len(job.nodes) == 1 else None,
            evidence=ids(jobs),
            checks={"state": job.state},
        )


def _failed(jobs: Sequence[JobListed]) -> tuple[Kind, Act, str]:
    """A job that failed, by the exit of its steps: `code:signal` as accounting writes it."""
    ends = [j.exit.partition(":") for j in jobs if j.exit and j.state == "FAILED"]
    if any(code == "16" for code, _, _ in ends):
        return Kind.AMBIGUOUS, Act.SPARE, "exit 16: the program asks for the same train_step on another GPU"
    if any(code == "0" and signal != "0" for code, _, signal in ends):
        return Kind.AMBIGUOUS, Act.RESTART, "it was killed, and accounting does not say by whom"
    return _STATES["FAILED"]


def unknown_jobs(scene: Scene) -> Iterator[Finding]:
    """A job that the queue does not know: too new, or long gone."""
    answers = scene.seen(Refused)
    unknown = [r for r in answers if r.why == "unknown_job"]
    if unknown and not scene.seen(JobListed):
        fresh = any(r.why == "submitted" for r in answers)
        yield Finding(
            verdict=Kind.NO_FAULT if fresh else Kind.AMBIGUOUS,
            action=Act.WAIT,
            rule="job_not_known",
            why="a job that was just submitted is not listed yet: ask again"
            if fresh
            else "the queue does not know the job: ask accounting, within its lag, before anything is started",
            evidence=ids(answers),
            rejected=(lost("the job ended", "one source that does not know it is no end"),),
        )


def _waiting(job: JobListed) -> Finding:
    reason = job.reason.split(",")[0].strip()
    if reason in _OF_A_PERSON:
        verdict, action, why = Kind.OPERATOR_ACTION, Act.NONE, "held by a person"
    elif reason in _NEVER or (reason.startswith(("QOSMax", "AssocMax")) and "Limit" not in reason):
        verdict, action, why = Kind.SOFTWARE_FAULT, Act.STOP, "it can never start as it was asked for"
    else:
        verdict, action, why = Kind.SCHEDULER_EVENT, Act.WAIT, "it waits for its turn or for nodes"
    return Finding(
        verdict=verdict,
        action=action,
        rule="job_waits",
        why=f"the job is pending ({reason}): {why}",
        evidence=ids([job]),
        checks={"state": job.state},
    )
