"""Drain and undrain, as commands or as a reason not to. Pure.

A reason that somebody else wrote on a node outranks ours and is never overwritten, the controller's own "Not
responding" included; only our own drains are undone. A node in a state that we do not know is not ours to touch.
"""

from __future__ import annotations

import re

from outlast.slurm.node_state import UNKNOWN, NodeRow

OWNER = "outlast:"
"""Begins every reason of ours; who undrains looks for it."""
REASON_MAX = 200


def drain_argv(row: NodeRow, reason: str) -> list[str] | None:
    """The scontrol command that drains this node, or None where there is nothing for us to do."""
    if refusal(row) or is_ours(row):
        return None
    return ["scontrol", "update", f"NodeName={row.node}", "State=DRAIN", f"Reason={owned(reason)}"]


def refusal(row: NodeRow) -> str:
    """Why we must not drain this node; '' where we may, or where our own drain already stands."""
    if row.state in (UNKNOWN, "future"):
        return f"its state is {'+'.join((row.state, *row.flags))}, which is not ours to touch"
    if row.reason and not row.reason.startswith(OWNER):
        by = f" by {row.reason_user}" if row.reason_user else ""
        return f"it carries another's reason{by}: {row.reason!r}"
    if row.is_draining and not row.reason:
        return "it is drained without a reason, and not by us"
    return ""


def is_ours(row: NodeRow) -> bool:
    """Whether the node is drained by us."""
    return row.is_draining and row.reason.startswith(OWNER)


def undrain_argv(row: NodeRow) -> list[str] | None:
    """The command that takes our own drain back, or None where it is not ours (any more)."""
    if row.state == UNKNOWN or not is_ours(row):
        return None
    return ["scontrol", "update", f"NodeName={row.node}", "State=UNDRAIN"]


def owned(reason: str) -> str:
    """One line of plain text with our prefix: it is shown in every sinfo -R of the site."""
    text = re.sub(r"[^\x20-\x7e]+|[\[\]\"'`\\]", " ", reason)
    text = " ".join(text.split())
    if text.startswith(OWNER):
        text = text[len(OWNER) :].lstrip()
    return f"{OWNER} {text}"[:REASON_MAX].rstrip()
