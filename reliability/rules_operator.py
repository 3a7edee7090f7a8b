"""Rules about a person's or the scheduler's will. It is obeyed and recorded, never repaired. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from outlast.reliability.evidence import JobFact
from outlast.reliability.model import OperatorAsked
from outlast.reliability.node_facts import NodeFacts
from outlast.reliability.policy import Case, Finding
from outlast.reliability.verdict import Confidence, Kind, Scope, Verdict
from outlast.reliability.verdict_shapes import by_will

OURS = "outlast:"
"""Reasons that we wrote on a node begin with this (slurm/drain.py)."""

_ENDS = {"stop": "stopped", "cancel": "cancelled"}


def asks(case: Case) -> Iterator[Finding]:
    """`outlast stop`, `outlast continue`, a cancel that was noticed, an admin's word about a node."""
    for fact in case.evidence.asks:
        yield _asked(fact.seq, fact.ask)


def _asked(seq: int, ask: OperatorAsked) -> Verdict:
    ends = _ENDS.get(ask.what, "")
    return by_will(
        f"ask:{seq}",
        seq,
        scope=Scope.NODE if ask.node else Scope.EVERYTHING,
        rule=f"operator_{ask.what}",
        because=f"{ask.who} asked to {ask.what}" + (f" ({ask.note})" if ask.note else "") + ": a person's will, obeyed",
        node=ask.node,
        convicts=ask.what == "drain" and ask.node is not None,
        stops=bool(ends),
        at_checkpoint=ask.what == "drain",
        ends=ends,
    )


def jobs(case: Case) -> Iterator[Finding]:
    """The scheduler ended an allocation. A cancelled primary job ends the run; the rest only takes nodes away."""
    for job, fact in case.evidence.jobs.items():
        if fact.state.state == "CANCELLED" and not fact.state.reason.startswith("feeder"):
            yield _cancelled(fact)
        elif fact.state.state in ("TIMEOUT", "PREEMPTED", "NODE_FAIL", "DEADLINE", "OUT_OF_MEMORY", "FAILED"):
            yield Verdict(
                key=f"job:{job}:{fact.seq}",
                kind=Kind.SCHEDULER_EVENT,
                scope=Scope.ALLOCATION,
                rule="job_ended",
                because=f"Slurm ended job {job}: {fact.state.state} {fact.state.reason}".rstrip(),
                confidence=Confidence.HIGH,
                evidence=(fact.seq,),
            )


def _cancelled(fact: JobFact) -> Verdict:
    return by_will(
        f"job:{fact.state.job}:{fact.seq}",
        fact.seq,
        scope=Scope.ALLOCATION,
        rule="job_cancelled",
        because=f"job {fact.state.job} was cancelled: a person's will, the run is not restarted",
        stops=True,
        ends="cancelled",
    )


def drains(case: Case) -> Iterator[Finding]:
    """An admin drained a node of ours: leave it at the next checkpoint, and leave the reason alone."""
    for facts in case.evidence.nodes.values():
        state = facts.state
        if state is None or "drain" not in state.flags or state.reason.startswith(OURS):
            continue
        if facts.present or _in_use(case, facts):
            yield by_will(
                f"drain:{facts.node}:{facts.state_seq}",
                facts.state_seq,
                scope=Scope.NODE,
                rule="admin_drain",
                because=f'an admin drained {facts.node} ("{state.reason or "no reason given"}"): obeyed at the next '
                "checkpoint, the reason is left as it is",
                node=facts.node,
                convicts=True,
                stops=_in_use(case, facts),
                at_checkpoint=True,
            )


def _in_use(case: Case, facts: NodeFacts) -> bool:
    now = case.evidence.current
    return now is not None and now.running and facts.node in now.plan.nodes
