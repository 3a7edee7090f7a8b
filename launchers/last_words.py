"""How a rank ended, as a signal: its status, and what the end of its output says. Pure.

What a program prints is its word and no more: `NVRM: Xid 79` in a rank's output becomes text here, never an XidSeen.
"""

from __future__ import annotations

from outlast.launchers.held import HeldRank
from outlast.launchers.logs import visible
from outlast.monitors.rank_log import read_last_words
from outlast.reliability.model import Node, RankExited

CHARS = 4000


def compose(held: HeldRank, node: Node, *, at_s: float, note: str = "") -> RankExited:
    """The signal for a rank that has ended (held.status is known)."""
    status = held.status or 0
    tail = held.log.last_bytes()
    said = read_last_words(tail.decode("utf-8", errors="backslashreplace"))
    shown = visible(tail).rstrip()
    return RankExited(
        node=node,
        at_s=at_s,
        attempt=held.attempt,
        rank=held.rank,
        exit_code=status if status >= 0 else None,
        posix_signal=-status if status < 0 else None,
        error_class=said.error_class if status else "",
        exception=said.exception if status else "",
        last_words=last_chars(f"{shown}\n[outlast: {visible(note.encode())}]" if note else shown),
        phase=held.phase,
        train_step=held.train_step,
        asked=held.asked,
    )


def last_chars(text: str) -> str:
    """The last 4,000 characters, from the start of a line where one begins early enough."""
    if len(text) <= CHARS:
        return text
    cut = text[-CHARS:]
    newline = cut.find("\n")
    return cut[newline + 1 :] if 0 <= newline < CHARS // 2 else cut
