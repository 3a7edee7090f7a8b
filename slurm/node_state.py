"""What Slurm says of a node, in one form. Pure.

Slurm writes the same state in three ways: `MIXED+DRAIN+NOT_RESPONDING` (scontrol), `draining*` (sinfo), and lists in
JSON. A state that we do not know becomes 'unknown': such a node is not ours to touch.
"""

from __future__ import annotations

from outlast.reliability.model import Node, Noun

UNKNOWN = "unknown"
BASES = frozenset({"allocated", "mixed", "idle", "down", "error", "future", UNKNOWN})

_SUFFIXES = {
    "*": "not_responding",
    "~": "powered_down",
    "#": "powering_up",
    "!": "power_down",
    "%": "powering_down",
    "$": "maintenance",
    "@": "reboot_requested",
    "^": "reboot_issued",
    "-": "planned",
}
"""The sign after sinfo's state (man sinfo, NODE STATE CODES)."""

_WORDS: dict[str, tuple[str, str]] = {
    # sinfo's word: base state and flag. A draining node is busy; whether wholly or partly sinfo does not say.
    "draining": ("allocated", "drain"),
    "drng": ("allocated", "drain"),
    "drained": ("idle", "drain"),
    "drain": ("idle", "drain"),
    "failing": ("allocated", "fail"),
    "failg": ("allocated", "fail"),
    "fail": ("idle", "fail"),
    "completing": ("allocated", "completing"),
    "comp": ("allocated", "completing"),
    "maint": ("idle", "maintenance"),
    "reserved": ("idle", "reserved"),
    "resv": ("idle", "reserved"),
    "planned": ("idle", "planned"),
    "plnd": ("idle", "planned"),
    "blocked": ("idle", "blocked"),
    "inval": ("idle", "invalid_reg"),
    "no_respond": ("down", "not_responding"),
    "powering_up": ("idle", "powering_up"),
    "pow_up": ("idle", "powering_up"),
    "powered_down": ("idle", "powered_down"),
    "pow_dn": ("idle", "powered_down"),
    "powering_down": ("idle", "powering_down"),
    "power_down": ("idle", "power_down"),
    "reboot_requested": ("idle", "reboot_requested"),
    "reboot_issued": ("idle", "reboot_issued"),
    "reboot": ("idle", "reboot_requested"),
    "boot": ("idle", "reboot_issued"),
    "perfctrs": ("allocated", "perfctrs"),
    "alloc": ("allocated", ""),
    "mix": ("mixed", ""),
    "unk": (UNKNOWN, ""),
    "futr": ("future", ""),
    "err": ("error", ""),
}

_FLAGS = {"maint": "maintenance", "drained": "drain", "draining": "drain"}
"""Other spellings of a flag -> ours."""


class NodeRow(Noun, frozen=True, kw_only=True):
    """One node as Slurm sees it."""

    node: Node
    state: str
    """One of BASES."""
    flags: tuple[str, ...] = ()
    """Lower case, sorted: drain not_responding fail maintenance completing planned reserved ..."""
    reason: str = ""
    """'' where nobody gave one."""
    reason_user: str = ""
    address: str = ""
    """NodeAddr: where other nodes reach it; '' where it is not said."""

    @property
    def is_draining(self) -> bool:
        return "drain" in self.flags


def parse_state(text: str) -> tuple[str, tuple[str, ...]]:
    """(base, flags) of any of Slurm's spellings; ('unknown', what was found) for one that we do not know."""
    first, *rest = text.strip().lower().split("+")
    word, flags = _unsuffixed(first)
    base, flag = (word, "") if word in BASES else _WORDS.get(word, (UNKNOWN, word))
    flags.add(flag)
    for other in rest:
        # 20.11 wrote DOWN*+DRAIN
        word, more = _unsuffixed(other)
        flags |= {_FLAGS.get(word, word), *more}
    return base, tuple(sorted(flags - {""}))


def _unsuffixed(word: str) -> tuple[str, set[str]]:
    flags: set[str] = set()
    while word and word[-1] in _SUFFIXES:
        flags.add(_SUFFIXES[word[-1]])
        word = word[:-1]
    return word, flags
