"""What a replay tells: one row a verdict, its actions in an admin's words, and where two policies differ. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outlast.reliability.actions import (
    Action,
    Advise,
    Drain,
    EndRun,
    Hold,
    LeaveIt,
    RestartInPlace,
    RollBack,
    Shrink,
    Swap,
)
from outlast.reliability.model import Node, Noun
from outlast.reliability.planning import CHANGES
from outlast.reliability.verdict import Kind


class Told(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """One verdict and what would have been done about it."""

    at_s: float
    run: str
    kind: Kind
    rule: str
    node: Node | None
    gpu: str | None
    acts: tuple[str, ...]
    """drain advise restart page end, or () for: nothing."""
    detail: str
    """The actions in words."""
    because: str
    source: str
    """Where its first evidence was read."""
    evidence: int
    """How many signals it rests on."""


_ACTS: Final[tuple[tuple[type[Noun] | tuple[type[Noun], ...], str], ...]] = (
    (Drain, "drain"),
    (Advise, "advise"),
    ((*CHANGES, RollBack), "restart"),
    ((Hold, Advise), "page"),
    (EndRun, "end"),
)


def acts_of(actions: Sequence[Action]) -> tuple[str, ...]:
    """What these actions are to an admin: drain advise restart page end."""
    return tuple(word for kinds, word in _ACTS if any(isinstance(a, kinds) for a in actions))


def words_of(action: Action) -> str:
    match action:
        case Drain(node=node):
            return f"drain {node}"
        case Advise(node=node, why=why):
            return f"page: drain {node}? ({why})"
        case Swap(out=out, at_checkpoint=later):
            return f"restart without {' '.join(out)}" + (" at the next checkpoint" if later else "")
        case Shrink(out=out):
            return f"restart smaller without {' '.join(out)}"
        case RestartInPlace():
            return "restart on the same nodes"
        case RollBack(quarantine=step):
            return f"restart from before checkpoint {step}"
        case Hold(why=why):
            return f"hold and page: {why}"
        case LeaveIt(why=why):
            return why
        case EndRun(outcome=outcome):
            return f"end the run: {outcome}"
        case _:
            return type(action).__name__.lower()


class Difference(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """What two policies make of the same evidence; None: no verdict at all."""

    run: str
    source: str
    first: Told | None
    second: Told | None


def differences(first: Sequence[Told], second: Sequence[Told]) -> tuple[Difference, ...]:
    """Where acts, node or kind differ, by time. Verdicts are the same where run and first evidence are."""
    ours, theirs = _keyed(first), _keyed(second)
    found: list[Difference] = []
    for key in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(key), theirs.get(key)
        if a is None or b is None or (a.acts, a.node, a.kind, a.detail) != (b.acts, b.node, b.kind, b.detail):
            found.append(Difference(run=key[0], source=key[1], first=a, second=b))
    return tuple(sorted(found, key=lambda d: min(t.at_s for t in (d.first, d.second) if t is not None)))


def _keyed(told: Sequence[Told]) -> dict[tuple[str, str, int], Told]:
    keyed: dict[tuple[str, str, int], Told] = {}
    for one in told:
        times = 0
        while (one.run, one.source, times) in keyed:
            times += 1
        keyed[one.run, one.source, times] = one
    return keyed
