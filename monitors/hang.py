"""Whom a hang is due to, from all ranks' process states and stacks. Pure.

When nothing moves, nearly every rank waits for a peer; the one that waits for nobody is the cause. In this order:

    1. stopped (T, t)               somebody or something holds the process
    2. dead or gone (Z, X, '')      it will never come
    3. stuck in the kernel (D)      a device or a file system does not answer
    4. outside any collective       while all others wait
    5. behind                       the lowest train_step, when all wait

Two or more in the deciding place, or nothing that tells them apart, is ambiguous: then nobody is named, and the
reason is said. Not a judge: a named rank is a fact about a process, whose fault that is comes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outlast.reliability.model import Noun, Rank

STOPPED: Final = frozenset("Tt")
DEAD: Final = frozenset("ZXx")
NAMED_RANKS: Final = 8
"""So many ranks are written out in a reason."""


class StackFacts(Noun, frozen=True, kw_only=True):
    """One rank as its agent saw it."""

    rank: Rank
    process_state: str
    """R S D T Z as in /proc/PID/stat; '' where the process is gone."""
    waiting: bool | None = None
    """True: inside a collective or waiting for a peer; False: waits for nobody; None: cannot tell."""
    phase: str = ""
    train_step: int = -1
    still_s: float = 0.0
    stack: str = ""


def find(ranks: Sequence[StackFacts]) -> tuple[Rank | None, str]:
    """(the suspect, how it was told), or (None, why it cannot be told)."""
    if not ranks:
        return None, "no rank answered when asked for its stack"
    for group, what in (
        ([r for r in ranks if r.process_state in STOPPED and r.process_state], "is stopped (process state T)"),
        ([r for r in ranks if not r.process_state or r.process_state in DEAD], "is dead while the others wait for it"),
    ):
        if group:
            return _one(group, ranks, what)
    stuck = [r for r in ranks if r.process_state == "D" and r.waiting is not True]
    if stuck and len(stuck) < len(ranks):
        return _one(stuck, ranks, "is stuck in the kernel (process state D)")
    return _by_waiting(ranks)


def _by_waiting(ranks: Sequence[StackFacts]) -> tuple[Rank | None, str]:
    busy = [r for r in ranks if r.waiting is False]
    unknown = [r for r in ranks if r.waiting is None]
    if len(busy) == 1 and len(ranks) > 1:
        # ranks that cannot be told may hide a second one outside; say so, the one seen outside is still a fact
        hidden = f"; {_ranks(unknown)} could not be told" if unknown else ""
        return busy[0].rank, f"rank {busy[0].rank} waits for nobody while {_others(ranks)} wait{hidden}"
    if len(busy) > 1:
        return _behind(busy, f"{_ranks(busy)} wait for nobody", ranks)
    if len(ranks) == 1:
        return None, "the only rank that answered waits"
    what = (
        "all ranks wait for each other"
        if not unknown
        else f"no rank is seen outside a collective ({_ranks(unknown)} could not be told)"
    )
    return _behind(ranks, what, ranks)


def _behind(group: Sequence[StackFacts], what: str, ranks: Sequence[StackFacts]) -> tuple[Rank | None, str]:
    """Of a group that is otherwise alike, the one rank at the lowest train_step."""
    lowest = min(r.train_step for r in group)
    last = [r for r in group if r.train_step == lowest]
    if len(last) == 1 and len(group) > 1:
        ahead = min(r.train_step for r in group if r.train_step != lowest)
        return last[0].rank, f"{what}; rank {last[0].rank} is at train_step {lowest}, the others at {ahead} or later"
    if len(ranks) == len(group) and len(last) == len(group):
        return None, f"{what}, all at train_step {lowest}: no single rank stands out"
    return None, f"{what}, {len(last)} of them at train_step {lowest}: no single rank stands out"


def _one(group: Sequence[StackFacts], ranks: Sequence[StackFacts], what: str) -> tuple[Rank | None, str]:
    if len(group) == 1:
        return group[0].rank, f"rank {group[0].rank} {what}"
    if len(group) == len(ranks):
        return None, f"every rank {what}: not one rank's fault"
    return None, f"{_ranks(group)} alike: each {what}"


def _others(ranks: Sequence[StackFacts]) -> str:
    count = sum(1 for r in ranks if r.waiting)
    return f"{count} others" if count != 1 else "the other"


def _ranks(group: Sequence[StackFacts]) -> str:
    shown = ", ".join(str(r.rank) for r in group[:NAMED_RANKS])
    more = f" and {len(group) - NAMED_RANKS} more" if len(group) > NAMED_RANKS else ""
    return f"{'rank' if len(group) == 1 else 'ranks'} {shown}{more}"
