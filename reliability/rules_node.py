"""Rules that may convict a node: the kernel's word, a lost agent, the gate, leftovers that cannot be killed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outlast.reliability.attempt import State
from outlast.reliability.evidence import memory_kills, primary_exit
from outlast.reliability.gpu_facts import key_of, standing
from outlast.reliability.model import GateOutcome, Node
from outlast.reliability.node_facts import GpuFact, KernelFact, NodeFacts, XidFact
from outlast.reliability.policy import Case, Finding, LineMeaning, Pending, XidMeaning
from outlast.reliability.rules_checkpoint import SPOILS, doubtful, tell_doubtful
from outlast.reliability.verdict import Confidence, Kind, Rejected, Scope, Verdict

SHARED = ("nvlink_fatal", "nvswitch_fatal")
EXPORTER = "dcgm"
"""An exporter's gauge holds a code and no event: its change asks for a look and convicts nobody."""


def in_use(case: Case, node: Node) -> bool:
    """An attempt that is under way has its ranks, or a place for them, on this node."""
    now = case.evidence.current
    return now is not None and now.active and node in now.plan.nodes


def convicting(case: Case, fact: XidFact) -> XidMeaning | None:
    """The catalogue's row if this line alone convicts, else None. An XID caused by an earlier one follows that one."""
    row = meaning(case, fact)
    return row if row.convicts and row.alone and fact.xid.source != EXPORTER else None


GATES_S = 5.0
"""How long the first gate's fault waits for the other nodes' answers."""


def meaning(case: Case, fact: XidFact) -> XidMeaning:
    """The catalogue's row of this line. One without text says less than its code: a recovery that is not named, say."""
    if fact.xid.caused_by is not None:
        return case.policy.xid(fact.xid.caused_by, "")
    return case.policy.xid(fact.xid.code, fact.xid.text or " ")


def convicting_line(case: Case, fact: KernelFact) -> LineMeaning | None:
    """The catalogue's row if this line, no XID, alone takes a node out, else None."""
    return _alone(case.policy.kernel(fact.line.key))


def convicting_change(case: Case, fact: GpuFact) -> LineMeaning | None:
    """The catalogue's row if this change of a GPU's state alone takes a node out, else None."""
    key = key_of(fact.change)
    return _alone(case.policy.kernel(key)) if key else None


def _alone(row: LineMeaning | None) -> LineMeaning | None:
    return row if row is not None and row.alone and row.action.startswith("drain") else None


def _classes(case: Case, facts: NodeFacts) -> Iterator[tuple[int, float, str]]:
    """(log number, when, class) of each line of a node that alone takes it out."""
    for fact in facts.xids:
        row = convicting(case, fact)
        if row is not None:
            yield fact.seq, fact.seen_s, row.class_
    for line in facts.kernel:
        other = convicting_line(case, line)
        if other is not None:
            yield line.seq, line.seen_s, other.class_
    for change in standing(facts.gpus):
        state = convicting_change(case, change)
        if state is not None:
            yield change.seq, change.seen_s, state.class_


def _reach(case: Case, class_: str, about_s: float) -> dict[Node, int]:
    """Nodes on which the same class was seen within the burst time of `about_s`, each with its evidence.

    Measured about the line itself, not about now: what was everybody's trouble stays that, however old it is.
    """
    reached: dict[Node, int] = {}
    for facts in case.evidence.nodes.values():
        for seq, seen_s, other in _classes(case, facts):
            if other == class_ and abs(seen_s - about_s) <= case.policy.burst_s:
                reached.setdefault(facts.node, seq)
    return reached


def hardware_xids(case: Case) -> Iterator[Finding]:
    """A kernel line that blames this node's hardware, unless the same thing reaches many nodes at once."""
    for facts in case.evidence.nodes.values():
        if facts.node in case.excluded:
            continue  # the rest of the burst, or its aftermath: one incident
        yield from own_once(
            wide(case, fact, row.class_, f"XID {fact.xid.code} ({row.name})") or _hardware(case, facts, fact, row)
            for fact in facts.xids
            if fact.seq >= facts.joined_seq and (row := convicting(case, fact)) is not None
        )


def kernel_lines(case: Case) -> Iterator[Finding]:
    """A kernel line other than an XID that is enough by itself: a switch, a machine check, a dead device."""
    for facts in case.evidence.nodes.values():
        if facts.node in case.excluded:
            continue
        yield from own_once(
            wide(case, fact, row.class_, row.meaning) or _broken(case, facts, fact, row)
            for fact in facts.kernel
            if fact.seq >= facts.joined_seq and (row := convicting_line(case, fact)) is not None
        )


def own_once(findings: Iterable[Finding]) -> Iterator[Finding]:
    """One node's findings: the first that is its own, and all that are everybody's.

    What is everybody's does not clear the node of what is its own, nor the other way round, whichever came first.
    """
    own = False
    for finding in findings:
        everybodys = isinstance(finding, Verdict) and finding.node is None
        if everybodys or not own:
            yield finding
        own = own or not everybodys


def killed_for_memory(case: Case) -> Iterator[Finding]:
    """SIGKILL, and the kernel of that node says that it killed for memory: the program's need, not a node's fault."""
    now = case.evidence.current
    first = primary_exit(now.exits) if now is not None and now.running else None
    if now is None or first is None:
        return
    told = memory_kills(case.evidence, now.plan.attempt, first)
    if told:
        yield Verdict(
            key=f"exit:{now.plan.attempt}",
            kind=Kind.APP_FAULT,
            scope=Scope.RANK,
            rule="killed_for_memory",
            because=f"rank {first.exit.rank} on {first.exit.node} was killed by the kernel for memory "
            f"after train_step {now.reached}; which process is killed is the kernel's choice",
            confidence=Confidence.HIGH,
            rank=first.exit.rank,
            stops=True,
            evidence=(told[0].seq, first.seq),
            rejected=(Rejected(alternative=f"hardware of {first.exit.node}", why="the kernel says why it killed"),),
        )


def wide(
    case: Case, fact: XidFact | KernelFact | GpuFact, class_: str, what: str, *, quiet_s: float = -1.0
) -> Finding | None:
    """Everybody's trouble, or too early to say that it is not; None where it is this node's alone."""
    reached = _reach(case, class_, fact.seen_s)
    if len(reached) >= many(case, class_):
        return everywhere(case, class_, what, reached)
    due = fact.seen_s + (case.policy.quiet_s if quiet_s < 0 else quiet_s)
    if case.now_s < due:
        return Pending(again_at_s=due, why=f"whether other nodes show {what} too")
    return None


def many(case: Case, class_: str = "") -> int:
    """How many nodes make it everybody's trouble: the policy's number, or all of a smaller run (but two at least).

    NVLinks and their switches may be shared by the nodes of a domain: there the second node is a common cause.
    """
    if class_ in SHARED:
        return 2
    return max(2, min(case.policy.many_nodes, len(case.evidence.present)))


def _hardware(case: Case, facts: NodeFacts, fact: XidFact, row: XidMeaning) -> Verdict:
    gpu = fact.xid.gpu
    spoiled = doubtful(case.evidence, facts.node, fact.seq) if fact.xid.code in SPOILS else ()
    return Verdict(
        key=f"hardware:{facts.node}:{facts.joined_seq}",
        kind=Kind.HARDWARE_FAULT,
        scope=Scope.GPU if gpu else Scope.NODE,
        rule=row.class_ or "hardware_xid",
        because=f"XID {fact.xid.code} ({row.name}) on {'GPU ' + gpu if gpu else 'one GPU'} of {facts.node}; no other "
        f"node shows it; the catalogue blames the {row.blames} and needs no second witness" + tell_doubtful(spoiled),
        quarantine=spoiled[0] if spoiled else -1,
        quarantine_too=spoiled[1:],
        confidence=Confidence.HIGH,
        node=facts.node,
        gpu=gpu,
        convicts=True,
        drains=row.drains,
        stops=in_use(case, facts.node),
        evidence=(fact.seq, *(f.seq for f in facts.xids if f.seq > fact.seq)),
        rejected=(
            Rejected(alternative="program", why="the kernel's own word, not a rank's output"),
            Rejected(alternative="fabric or driver roll-out", why="one node only"),
        ),
    )


def _broken(case: Case, facts: NodeFacts, fact: KernelFact, row: LineMeaning) -> Verdict:
    device = f" ({fact.line.device})" if fact.line.device else ""
    return Verdict(
        key=f"hardware:{facts.node}:{facts.joined_seq}",
        kind=Kind.HARDWARE_FAULT,
        scope=Scope.NODE,
        rule=row.class_,
        because=f"{row.meaning}{device} on {facts.node}; no other node shows it; the catalogue blames the {row.blames} "
        "and needs no second witness",
        confidence=Confidence.HIGH,
        node=facts.node,
        convicts=True,
        drains=True,
        stops=in_use(case, facts.node),
        evidence=(fact.seq, *(f.seq for f in facts.kernel if f.seq > fact.seq)),
        rejected=(
            Rejected(alternative="program", why="the kernel's own word, not a rank's output"),
            Rejected(alternative="fabric or driver roll-out", why="one node only"),
        ),
    )


def everywhere(case: Case, class_: str, what: str, reached: dict[Node, int]) -> Verdict:
    names = ", ".join(sorted(reached))
    causes = "an NVLink domain, a fabric manager" if class_ in SHARED else "driver, firmware, power, fabric"
    return Verdict(
        key=f"everywhere:{class_}:{min(reached.values())}",
        kind=Kind.AMBIGUOUS,
        scope=Scope.DOMAIN if class_ in SHARED else Scope.EVERYTHING,
        rule="many_nodes_at_once",
        because=f"{what} on {len(reached)} nodes in {case.policy.burst_s:.0f} s ({names}): "
        f"a common cause ({causes}), no node is blamed for it",
        evidence=tuple(sorted(reached.values())),
        rejected=(Rejected(alternative="each node's hardware", why="nodes do not break in the same way together"),),
    )


def other_xids(case: Case) -> Iterator[Finding]:
    """Lines that blame a program, or that hardware alone cannot be convicted by: kept, nobody is blamed."""
    now = case.evidence.current
    for facts in case.evidence.nodes.values():
        for fact in facts.xids:
            row = meaning(case, fact)
            if convicting(case, fact) is not None or facts.node in case.excluded:
                continue
            died = now is not None and fact.attempt == now.plan.attempt and bool(now.exits)
            if died:
                continue  # the death has its own verdict, which weighs this line
            due = fact.seen_s + case.policy.consequence_s
            if case.now_s < due:
                yield _pending(due, facts.node)
                continue
            yield _other(facts.node, fact, row)


def _other(node: Node, fact: XidFact, row: XidMeaning) -> Verdict:
    said = "an exporter's gauge holds a code and no event" if fact.xid.source == EXPORTER else "no rank died of it"
    hardware = row.blames in ("gpu", "link", "node")
    kind = Kind.APP_FAULT if row.blames == "program" else Kind.HARDWARE_SUSPECT if hardware else Kind.NO_FAULT
    why = "one line without a second witness" if hardware else "application-class evidence alone"
    return Verdict(
        key=f"xid:{node}:{fact.xid.gpu}:{fact.xid.code}:{fact.attempt}",
        kind=kind,
        scope=Scope.GPU,
        rule=row.class_ or "xid_without_consequence",
        because=f"XID {fact.xid.code} ({row.name}) on {node}: the catalogue blames the {row.blames}, "
        f"{said}, and alone it convicts no hardware",
        gpu=fact.xid.gpu,
        evidence=(fact.seq,),
        rejected=(Rejected(alternative=f"hardware of {node}", why=why),),
    )


def _pending(due_s: float, node: Node) -> Finding:
    return Pending(again_at_s=due_s, why=f"whether a rank on {node} dies of it")


def lost_agents(case: Case) -> Iterator[Finding]:
    """An agent fell silent: its node is lost to the run -- unless most of them did, then the trouble is elsewhere."""
    lost = [f for f in case.evidence.nodes.values() if f.lost is not None and f.node not in case.excluded]
    silent = [f for f in lost if not case.evidence.let_go(f.node)]
    known = len(case.evidence.present) + len(silent)
    if len(silent) >= 2 and 2 * len(silent) > known:
        yield Verdict(
            key="lost:many:" + ",".join(f"{f.node}:{f.lost_seq}" for f in silent),
            kind=Kind.AMBIGUOUS,
            scope=Scope.ALLOCATION,
            rule="most_agents_lost",
            because=f"{len(silent)} of {known} agents fell silent together: the network, the scheduler or this node, "
            "not so many nodes; nobody is blamed",
            stops=any(in_use(case, f.node) for f in silent),
            evidence=tuple(f.lost_seq for f in silent),
            rejected=(Rejected(alternative="each node", why="nodes do not die together"),),
        )
        return
    for facts in lost:
        yield _let_go(case, facts) if case.evidence.let_go(facts.node) else _lost(case, facts)


def _let_go(case: Case, facts: NodeFacts) -> Verdict:
    return Verdict(
        key=f"lost:{facts.node}:{facts.lost_seq}",
        kind=Kind.SCHEDULER_EVENT,
        scope=Scope.NODE,
        rule="allocation_gone",
        because=f"{facts.node} is not in job {facts.job} any more: its agent's end says nothing about the node",
        confidence=Confidence.HIGH,
        stops=in_use(case, facts.node),
        evidence=(facts.lost_seq,),
    )


def _lost(case: Case, facts: NodeFacts) -> Verdict:
    assert facts.lost is not None  # chosen by the caller
    slurm = f"; Slurm says {facts.state.state}" if facts.state else ""
    return Verdict(
        key=f"lost:{facts.node}:{facts.lost_seq}",
        kind=Kind.INFRA_EVENT,
        scope=Scope.NODE,
        rule="agent_lost",
        because=f"{facts.node}: {facts.lost.why} ({facts.lost.silent_s:.1f} s){slurm}; the other agents answer",
        confidence=Confidence.HIGH,
        node=facts.node,
        convicts=True,
        stops=in_use(case, facts.node),
        evidence=(facts.lost_seq,) + ((facts.state_seq,) if facts.state_seq else ()),
        rejected=(
            Rejected(alternative="network", why="all other agents of the run are heard"),
            Rejected(alternative="drain", why="a node that is gone is not proven bad: it is left to Slurm"),
        ),
    )


def gates(case: Case) -> Iterator[Finding]:
    """The node gate found a proven fault, unless most nodes of the attempt show one: then it is none of theirs."""
    now = case.evidence.current
    if now is None:
        return
    answers = [f for n in now.plan.nodes if (f := case.evidence.node(n)).gate_seq > now.planned_seq and f.gate]
    bad = [f for f in answers if f.gate is not None and f.gate.outcome is GateOutcome.FAULT]
    if not bad:
        return
    due = now.state_s + GATES_S
    if len(answers) < len(now.plan.nodes) and now.state is State.GATING and case.now_s < due:
        yield Pending(again_at_s=due, why="what the gates of the other nodes say")
    elif len(bad) >= 2 and 2 * len(bad) > len(answers):
        yield Verdict(
            key=f"gates:{now.plan.attempt}",
            kind=Kind.AMBIGUOUS,
            scope=Scope.EVERYTHING,
            rule="most_gates",
            because=f"{len(bad)} of {len(answers)} nodes did not pass their gate: a common cause, or the gate itself: "
            + "; ".join(dict.fromkeys(text for f in bad if f.gate for text in f.gate.findings)),
            stops=True,
            evidence=tuple(f.gate_seq for f in bad),
            rejected=(Rejected(alternative="each node", why="nodes do not break in the same way together"),),
        )
    else:
        yield from (_gate(f) for f in bad)


def _gate(facts: NodeFacts) -> Verdict:
    assert facts.gate is not None  # chosen by the caller
    return Verdict(
        key=f"gate:{facts.node}:{facts.gate_seq}",
        kind=Kind.HARDWARE_SUSPECT,
        scope=Scope.NODE,
        rule="gate",
        because=f"{facts.node} did not pass its gate: " + "; ".join(facts.gate.findings),
        confidence=Confidence.HIGH,
        node=facts.node,
        convicts=True,
        stops=True,
        evidence=(facts.gate_seq,),
    )


def leftovers(case: Case) -> Iterator[Finding]:
    """Something of an older attempt could not be removed from a node: it is not used again."""
    for facts in case.evidence.nodes.values():
        unclear = facts.unclear
        if unclear is not None and facts.unclear_seq > facts.joined_seq:
            yield Verdict(
                key=f"unclear:{facts.node}:{facts.unclear_seq}",
                kind=Kind.HARDWARE_SUSPECT,
                scope=Scope.NODE,
                rule="not_clear",
                because=f"{facts.node} still holds something of attempt {unclear.attempt} after KILL: {unclear.why}",
                node=facts.node,
                convicts=True,
                evidence=(facts.unclear_seq,),
            )
