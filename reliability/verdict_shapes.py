"""The two shapes that most verdicts have: what an exit ended, and what somebody wanted. Pure."""

from __future__ import annotations

from typing import Final, TypedDict, Unpack

from outlast.reliability.evidence import AttemptFacts, ExitFact
from outlast.reliability.model import Node, Rank
from outlast.reliability.verdict import Confidence, Kind, Rejected, Scope, Verdict

NO_HARDWARE: Final = Rejected(alternative="hardware", why="no kernel line blames a node of this attempt")


class Blame(TypedDict, total=False):
    """What else a verdict on an exit may say; fields as in Verdict."""

    confidence: Confidence
    node: Node
    rank: Rank
    convicts: bool
    drains: bool
    hold: bool
    quarantine: int
    quarantine_too: tuple[int, ...]
    rejected: tuple[Rejected, ...]


def on_exit(
    now: AttemptFacts, first: ExitFact, *, kind: Kind, scope: Scope, rule: str, because: str, **more: Unpack[Blame]
) -> Verdict:
    """An exit that ended the attempt. One incident an attempt; all its exits are evidence, what began it first."""
    return Verdict(
        key=f"exit:{now.plan.attempt}",
        kind=kind,
        scope=scope,
        rule=rule,
        because=because,
        stops=True,
        evidence=(first.seq, *(f.seq for f in now.exits if f.seq != first.seq)),
        **more,
    )


class Wish(TypedDict, total=False):
    """What a will does besides being obeyed; fields as in Verdict."""

    node: Node | None
    convicts: bool
    stops: bool
    at_checkpoint: bool
    ends: str


def by_will(key: str, seq: int, *, scope: Scope, rule: str, because: str, **more: Unpack[Wish]) -> Verdict:
    """A person's will: beyond doubt, and nobody's fault. `seq`: the line that tells of it."""
    return Verdict(
        key=key,
        kind=Kind.OPERATOR_ACTION,
        scope=scope,
        rule=rule,
        because=because,
        confidence=Confidence.HIGH,
        evidence=(seq,),
        **more,
    )
