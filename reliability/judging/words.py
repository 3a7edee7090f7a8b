"""The vocabulary of judging a case: verdicts, actions, and a finding with its reasons. Data only, Pure.

The verdicts are `model.Kind`, plus `parse_only` for input that holds no incident. The actions are coarser than the
ladder's (decide.py): they name what an operator would be asked to agree to.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from outlast.reliability.model import Noun
from outlast.reliability.verdict import Kind, Rejected

PARSE_ONLY: Final = "parse_only"


class Act(StrEnum):
    """What is to be done about a case."""

    NONE = "none"
    LOG = "log"
    RESTART = "restart_in_place"
    SPARE = "drain_restart_spare"
    JOB_END = "drain_at_job_end"
    REBOOT = "drain_reboot"
    SHRINK = "shrink"
    ROLLBACK = "rollback"
    STOP = "stop_page"
    PAGE = "page_only"
    WAIT = "wait"
    REFUSE = "refuse"
    FENCE = "fence"


DRAINING: Final = frozenset({Act.SPARE, Act.JOB_END, Act.REBOOT})
"""Actions that take a node out."""


class Finding(Noun, frozen=True, kw_only=True):
    """What one rule says of a case."""

    verdict: str
    action: Act
    rule: str
    why: str
    """One sentence for a person."""
    culprit: str | None = None
    """Node, GPU, rank or scope in words; None where nobody is blamed."""
    evidence: tuple[int, ...] = ()
    """Numbers of the lines that bear it, primary evidence first."""
    rejected: tuple[Rejected, ...] = ()
    checks: Mapping[str, object] = msgspec.field(default_factory=dict)
    """Facts that a program can compare: counts, expansions, the checkpoint chosen."""


def lost(alternative: str, why: str) -> Rejected:
    return Rejected(alternative=alternative, why=why)


class Because(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """The reasons of an answer."""

    rule: str
    text: str
    evidence: tuple[str, ...]
    """`e3` is the third line of the input, counted over all its items."""
    rejected: tuple[Rejected, ...]


class Answer(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """One line of `outlast judge`."""

    id: str
    verdict: str
    culprit: str | None
    action: Act
    because: Because
    checks: Mapping[str, object]


VERDICTS: Final = frozenset({*Kind, PARSE_ONLY})
