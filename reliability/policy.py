"""Judging: evidence in, verdicts out, each with its `because`. Pure -- no clock, no Slurm, no logging.

Scope comes first: before a node is blamed, the rules ask how far the same thing reaches. Hardware is convicted by the
kernel's word alone or by the node gate; what a rank prints blames a program. "Ambiguous" is a legal verdict, and what
follows from it is cheap and reversible.

The rules stand in rules_operator.py (a person's or the scheduler's will), rules_node.py (hardware, lost agents, gates)
and rules_attempt.py (ranks that died, hang, or never began); this module asks them in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Protocol

from outlast.reliability.evidence import Evidence
from outlast.reliability.model import Node, Noun
from outlast.reliability.verdict import Verdict


class XidMeaning(Protocol):
    """What judging needs to know of an XID (reliability/catalogue.py: XidRow)."""

    @property
    def name(self) -> str: ...
    @property
    def blames(self) -> str: ...
    @property
    def class_(self) -> str: ...
    @property
    def alone(self) -> bool: ...
    @property
    def convicts(self) -> bool: ...
    @property
    def drains(self) -> bool: ...
    @property
    def stops_training(self) -> bool: ...


class LineMeaning(Protocol):
    """What judging needs to know of another kernel line (reliability/catalogue.py: LineRow)."""

    @property
    def meaning(self) -> str: ...
    @property
    def blames(self) -> str: ...
    @property
    def class_(self) -> str: ...
    @property
    def action(self) -> str: ...
    @property
    def alone(self) -> bool: ...


def no_line(_key: str) -> LineMeaning | None:
    """A policy that knows no kernel lines beside XIDs."""
    return None


class Policy(Noun, frozen=True, kw_only=True):
    """The numbers and tables that judging goes by."""

    xid: Callable[[int, str], XidMeaning]
    """The catalogue: what a code means on a line of this text, whose own words outrank the table."""
    kernel: Callable[[str], LineMeaning | None] = no_line
    """The catalogue: what another kernel line means, by its form."""
    quiet_s: float = 0.0
    """After a line that would convict, wait this long for the same on other nodes: what reaches many convicts none."""
    polled_s: float = 15.0
    """The same for what is only looked at every few seconds: each node tells it at its own time."""
    exported_s: float = 60.0
    """The same for an exporter's page: it collects every 30 s by itself, and is fetched every 15 s."""
    settle_s: float = 0.5
    """After a rank's death, wait this long for the kernel's word before blaming the program. Its lines arrive within
    milliseconds, and one that comes later still convicts: it then costs a second restart."""
    consequence_s: float = 2.0
    """After a line that blames a program, wait this long for a rank to die of it."""
    echo_s: float = 6.0
    """The same where every rank that died only saw a peer go: a lost node is noticed within this."""
    burst_s: float = 60.0
    """Hardware events of one class within this time count as one cause when their reach is measured."""
    many_nodes: int = 3
    """A cause seen on this many nodes at once (or on all of a smaller run) is not a node's fault."""
    same_failure_limit: int = 3
    """The same failure at the same train_step this often: restarting cannot help."""
    suspect_after: int = 2
    """Unexplained deaths on the same node in a row before it is taken for the cause."""
    near_restore_steps: int = 2
    """A failure within so many train_steps of a restore may be the checkpoint's."""


class Case(Noun, frozen=True, kw_only=True):
    """What a rule looks at."""

    evidence: Evidence
    now_s: float
    """The supervisor's steady clock, as in the log's at_s."""
    policy: Policy
    excluded: frozenset[Node]
    """Nodes that are already convicted."""
    barred: frozenset[Node] = frozenset()
    """Nodes that were convicted before the present attempt was planned: no rank of it may be there."""
    target_steps: int = 0
    """The run's train_steps; 0 where exit 0 alone says that it is finished."""


class Pending(Noun, frozen=True, kw_only=True):
    """Too early to say: ask again at this time, or when something new is known."""

    again_at_s: float
    why: str


Finding = Verdict | Pending
Rule = Callable[[Case], Iterable[Finding]]


class Judgement(Noun, frozen=True, kw_only=True):
    verdicts: tuple[Verdict, ...] = ()
    """New ones only, in the order to act on them."""
    again_at_s: float | None = None


def judge(
    evidence: Evidence,
    *,
    now_s: float,
    policy: Policy,
    known: Set[str],
    excluded: Set[Node],
    rules: Iterable[Rule],
    target_steps: int = 0,
    stopped: bool = False,
    barred: Set[Node] = frozenset(),
) -> Judgement:
    """The verdicts that this evidence supports and that are not known yet.

    A rule that comes earlier wins: once a verdict stops the attempt, or the run ends, later rules do not add a second
    explanation of the same death (a hardware verdict about another node still counts). `stopped`: an earlier verdict
    has stopped the present attempt already.
    """
    case = Case(
        evidence=evidence,
        now_s=now_s,
        policy=policy,
        excluded=frozenset(excluded),
        barred=frozenset(barred),
        target_steps=target_steps,
    )
    verdicts: list[Verdict] = []
    again: list[float] = []
    for rule in rules:
        for finding in rule(case):
            if isinstance(finding, Pending):
                again.append(finding.again_at_s)
                continue
            fresh = finding.key not in known and all(finding.key != v.key for v in verdicts)
            if fresh and not (stopped and finding.stops and not finding.convicts and not finding.ends):
                verdicts.append(finding)
            now = finding.stops and not finding.at_checkpoint and finding.key not in known
            stopped = stopped or now or bool(finding.ends)
    return Judgement(verdicts=tuple(verdicts), again_at_s=min(again) if again else None)
