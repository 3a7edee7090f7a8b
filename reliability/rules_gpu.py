"""Rules about states of GPUs as the driver's library and the exporter's page tell them. Pure.

    proof of a broken part (lost, a remap that failed, the driver's own request)    convicts and drains
    memory errors that were counted                                                suspect; again: leaves the run
    slower than it should be, waiting for a reset                                  suspect, and no more
    a library that does not come back                                              unknown, until the gate says it too

States are read every few seconds: the same cause is told by each node at its own time, so a conviction waits longer
for the others than one by a kernel line, and what is well again by then convicts nobody.
"""

from __future__ import annotations

from collections.abc import Iterator

from outlast.reliability.gpu_facts import key_of, standing
from outlast.reliability.model import GateOutcome, Node
from outlast.reliability.node_facts import GpuFact, NodeFacts, XidFact
from outlast.reliability.policy import Case, Finding, LineMeaning, Pending
from outlast.reliability.rules_node import (
    EXPORTER,
    convicting_change,
    everywhere,
    in_use,
    many,
    meaning,
    own_once,
    wide,
)
from outlast.reliability.verdict import Confidence, Kind, Rejected, Scope, Verdict

_MEMORY = "gpu_memory_ue"
_WEDGED = "UNRECOGNIZED_CLIENT"
_GATE_HANGS = "gpu: unknown: NVML: no answer"
"""How the gate's finding begins where its own child did not come back from the library either (monitors/gate.py)."""
_PROGRAM = Rejected(alternative="program", why="the driver's own word on its hardware, not a rank's output")
_ONE_NODE = Rejected(alternative="fabric or driver roll-out", why="one node only")


def broken_gpus(case: Case) -> Iterator[Finding]:
    """A state that proves a broken part, and that holds still."""
    for facts in case.evidence.nodes.values():
        if facts.node in case.excluded:
            continue
        yield from own_once(
            wide(case, fact, row.class_, row.meaning, quiet_s=_patience_s(case, fact))
            or _broken(case, facts, fact, row)
            for fact in _fresh(facts)
            if (row := convicting_change(case, fact)) is not None
        )


def _broken(case: Case, facts: NodeFacts, fact: GpuFact, row: LineMeaning) -> Verdict:
    return Verdict(
        key=f"hardware:{facts.node}:{facts.joined_seq}",
        kind=Kind.HARDWARE_FAULT,
        scope=Scope.GPU,
        rule=row.class_,
        because=f"{row.meaning} ({_told(fact)}) on {facts.node}; it holds still and no other node shows it; "
        f"the catalogue blames the {row.blames} and needs no second witness",
        confidence=Confidence.HIGH,
        node=facts.node,
        gpu=fact.change.gpu,
        convicts=True,
        drains=True,
        stops=in_use(case, facts.node),
        evidence=(fact.seq, *(f.seq for f in facts.gpus if f.seq > fact.seq)),
        rejected=(_PROGRAM, _ONE_NODE),
    )


def memory_again(case: Case) -> Iterator[Finding]:
    """Uncorrectable errors of one GPU's memory, counted again after the burst of the first: the part is weak."""
    for facts in case.evidence.nodes.values():
        if facts.node in case.excluded:
            continue
        for fact in _fresh(facts):
            row = _row(case, fact)
            first = _earlier(case, facts, fact)
            if row is None or row.class_ != _MEMORY or first is None:
                continue
            reach = wide(case, fact, row.class_, row.meaning, quiet_s=_patience_s(case, fact))
            yield reach or Verdict(
                key=f"hardware:{facts.node}:{facts.joined_seq}",
                kind=Kind.HARDWARE_SUSPECT,
                scope=Scope.GPU,
                rule="memory_errors_again",
                because=f"GPU {fact.change.gpu} of {facts.node} counted uncorrectable memory errors again "
                f"({_told(fact)}) {fact.seen_s - first.seen_s:.0f} s after the first: the node leaves this run at the "
                "next checkpoint; whether it is taken out for everybody is left to the kernel's word",
                node=facts.node,
                gpu=fact.change.gpu,
                convicts=True,
                stops=in_use(case, facts.node),
                at_checkpoint=True,
                evidence=(fact.seq, first.seq),
                rejected=(_PROGRAM, Rejected(alternative="chance", why="the same GPU twice")),
            )


def contained_again(case: Case) -> Iterator[Finding]:
    """A contained memory error stops a program and no more; a second one on the same GPU, later, is the part."""
    for facts in case.evidence.nodes.values():
        if facts.node in case.excluded:
            continue
        kept = [f for f in facts.xids if f.seq > facts.joined_seq and f.xid.gpu and f.xid.source != EXPORTER]
        contained = [f for f in kept if (row := meaning(case, f)).class_ == _MEMORY and not row.convicts]
        for fact in contained:
            first = next((f for f in contained if _same_gpu_later(case, f, fact)), None)
            if first is None:
                continue
            reach = wide(case, fact, "contained_again", f"XID {fact.xid.code} again")
            yield reach or Verdict(
                key=f"hardware:{facts.node}:{facts.joined_seq}",
                kind=Kind.HARDWARE_FAULT,
                scope=Scope.GPU,
                rule="contained_error_again",
                because=f"XID {fact.xid.code} on GPU {fact.xid.gpu} of {facts.node} again, "
                f"{fact.seen_s - first.seen_s:.0f} s after the first: one contained error is chance, two are the part",
                confidence=Confidence.HIGH,
                node=facts.node,
                gpu=fact.xid.gpu,
                convicts=True,
                drains=True,
                stops=in_use(case, facts.node),
                evidence=(fact.seq, first.seq),
                rejected=(_PROGRAM, Rejected(alternative="chance", why="the same GPU twice")),
            )
            break


def _same_gpu_later(case: Case, first: XidFact, fact: XidFact) -> bool:
    # by the node's own clock as well: what an agent could only deliver late is no repetition
    apart_s = min(fact.seen_s - first.seen_s, fact.xid.at_s - first.xid.at_s)
    return first.xid.gpu == fact.xid.gpu and apart_s > case.policy.burst_s


def wedged_nodes(case: Case) -> Iterator[Finding]:
    """A fault of a client that the driver cannot name: what the program wrote wedged the node until it is reset.

    The node leaves this run and is not drained by it. A second node is not a second wedge but the program, which would
    take one after the other: a person is needed.
    """
    told = [(facts, f) for facts in case.evidence.nodes.values() for f in facts.xids if _WEDGED in f.xid.text]
    nodes = {facts.node for facts, _ in told}
    for facts, fact in told:
        if facts.node in case.excluded or fact.seq < facts.joined_seq:
            continue
        again = len(nodes) > 1
        yield Verdict(
            key=f"wedged:{facts.node}:{facts.joined_seq}",
            kind=Kind.SOFTWARE_FAULT,
            scope=Scope.NODE,
            rule="wedged_by_program",
            because=f"XID {fact.xid.code} on {facts.node} of a client that the driver cannot name: the program wedged "
            + (
                f"{len(nodes)} nodes, it would take the next"
                if again
                else "the node, which needs a reboot and no repair"
            ),
            node=facts.node,
            gpu=fact.xid.gpu,
            convicts=True,
            stops=in_use(case, facts.node),
            hold=again,
            evidence=(fact.seq,),
            rejected=(Rejected(alternative=f"hardware of {facts.node}", why="a class that programs cause"),),
        )


def _earlier(case: Case, facts: NodeFacts, fact: GpuFact) -> GpuFact | None:
    """An older growth of the same counter, beyond the burst: by the log's time and by the node's."""
    now = fact.change
    for other in facts.gpus:
        was = other.change
        same = (was.source, was.gpu, was.field) == (now.source, now.gpu, now.field) and other.seq > facts.joined_seq
        apart_s = min(fact.seen_s - other.seen_s, now.at_s - was.at_s)
        if same and key_of(was) == "state_ecc" and apart_s > case.policy.burst_s:
            return other
    return None


def suspect_gpus(case: Case) -> Iterator[Finding]:
    """What is worse than before and proves nothing: said once a node and class, and nobody leaves for it."""
    for facts in case.evidence.nodes.values():
        if facts.node in case.excluded:
            continue
        for fact in _fresh(facts):
            row = _row(case, fact)
            if row is None or convicting_change(case, fact) is not None:
                continue
            due = fact.seen_s + _patience_s(case, fact)
            if case.now_s < due:
                yield Pending(again_at_s=due, why=f"whether {row.meaning} on {facts.node} lasts, and where else")
                continue
            reached = _reach(case, row.class_, fact.seen_s)
            if len(reached) >= many(case, row.class_):
                yield everywhere(case, row.class_, row.meaning, reached)
            else:
                yield _suspect(facts, fact, row)


def _suspect(facts: NodeFacts, fact: GpuFact, row: LineMeaning) -> Verdict:
    return Verdict(
        key=f"suspect:{facts.node}:{facts.joined_seq}:{row.class_}",
        kind=Kind.HARDWARE_SUSPECT,
        scope=Scope.GPU,
        rule=row.class_,
        because=f"{row.meaning} ({_told(fact)}) on {facts.node}: worth a look, and alone no proof; the node stays",
        confidence=Confidence.LOW,
        gpu=fact.change.gpu,
        evidence=(fact.seq,),
        rejected=(Rejected(alternative=f"drain of {facts.node}", why="one state without a second witness"),),
    )


def hung_libraries(case: Case) -> Iterator[Finding]:
    """The GPUs' library does not come back: unknown, until the gate's own look hangs as well."""
    hung = [f for f in case.evidence.nodes.values() if f.hung_seq > f.joined_seq and f.node not in case.excluded]
    for facts in hung:
        gate = facts.gate if facts.gate_seq > facts.hung_seq else None
        near = {f.node: f.hung_seq for f in hung if abs(f.hung_s - facts.hung_s) <= case.policy.burst_s}
        if gate is not None and gate.outcome is not GateOutcome.UNKNOWN:
            continue  # it answered there, or the gate's own fault is the gate's verdict
        if len(near) >= many(case):
            yield everywhere(case, "gpu_library_hung", "the GPUs' library does not answer", near)
        elif gate is not None and any(text.startswith(_GATE_HANGS) for text in gate.findings):
            yield _stuck(case, facts)
        elif case.now_s < facts.hung_s + case.policy.polled_s:
            due = facts.hung_s + case.policy.polled_s
            yield Pending(again_at_s=due, why=f"whether the library hangs on more nodes than {facts.node}")
        else:
            yield _silent(facts)


def _stuck(case: Case, facts: NodeFacts) -> Verdict:
    return Verdict(
        key=f"hardware:{facts.node}:{facts.joined_seq}",
        kind=Kind.HARDWARE_SUSPECT,
        scope=Scope.NODE,
        rule="gpu_library_hung",
        because=f"the GPUs' library hung on {facts.node}, and the gate's own look at them did not come back either: "
        "ranks would hang there too; the node leaves this run and is not drained",
        node=facts.node,
        convicts=True,
        stops=in_use(case, facts.node),
        evidence=(facts.hung_seq, facts.gate_seq),
        rejected=(_PROGRAM, _ONE_NODE),
    )


def _silent(facts: NodeFacts) -> Verdict:
    return Verdict(
        key=f"hung:{facts.node}:{facts.hung_seq}",
        kind=Kind.AMBIGUOUS,
        scope=Scope.NODE,
        rule="gpu_library_hung",
        because=f"the GPUs' library does not answer on {facts.node}: unknown, neither health nor a fault; the next "
        "gate looks for itself",
        confidence=Confidence.LOW,
        evidence=(facts.hung_seq,),
        rejected=(Rejected(alternative=f"hardware of {facts.node}", why="no answer is not a fault"),),
    )


def _patience_s(case: Case, fact: GpuFact) -> float:
    """How long the other nodes may take to tell the same."""
    return case.policy.exported_s if fact.change.source == EXPORTER else case.policy.polled_s


def _fresh(facts: NodeFacts) -> Iterator[GpuFact]:
    return (f for f in standing(facts.gpus) if f.seq > facts.joined_seq)


def _row(case: Case, fact: GpuFact) -> LineMeaning | None:
    key = key_of(fact.change)
    return case.policy.kernel(key) if key else None


def _reach(case: Case, class_: str, about_s: float) -> dict[Node, int]:
    """Nodes on which a state of this class began about then."""
    reached: dict[Node, int] = {}
    for facts in case.evidence.nodes.values():
        for fact in facts.gpus:
            row = _row(case, fact)
            if row is not None and row.class_ == class_ and abs(fact.seen_s - about_s) <= case.policy.burst_s:
                reached.setdefault(facts.node, fact.seq)
    return reached


def _told(fact: GpuFact) -> str:
    change = fact.change
    was = "found so" if change.before is None else f"was {change.before}"
    return f"{change.source}: GPU {change.gpu}, {change.field} {change.now}, {was}"
