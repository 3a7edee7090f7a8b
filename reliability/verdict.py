"""Verdicts: whose fault, how sure, because. Data only; rules make them, decide.py acts on them."""

from __future__ import annotations

from enum import StrEnum

from outlast.reliability.model import Node, Noun, Rank


class Kind(StrEnum):
    """What a verdict says happened. The words are shared with `outlast judge`."""

    HARDWARE_FAULT = "hardware_fault"
    HARDWARE_SUSPECT = "hardware_suspect"
    APP_FAULT = "app_fault"
    SOFTWARE_FAULT = "software_fault"
    DATA_OR_OPTIMIZER = "data_or_optimizer"
    INFRA_EVENT = "infra_event"
    TRANSIENT = "transient"
    NO_FAULT = "no_fault"
    MONITORING_FAULT = "monitoring_fault"
    AMBIGUOUS = "ambiguous"
    CHECKPOINT_UNUSABLE = "checkpoint_unusable"
    SCHEDULER_EVENT = "scheduler_event"
    OPERATOR_ACTION = "operator_action"


class Scope(StrEnum):
    """How far the same thing reaches, narrow to wide."""

    GPU = "gpu"
    RANK = "rank"
    NODE = "node"
    DOMAIN = "domain"
    CHECKPOINT = "checkpoint"
    TRAIN_STEP = "train_step"
    ALLOCATION = "allocation"
    EVERYTHING = "everything"


class Confidence(StrEnum):
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Rejected(Noun, frozen=True, kw_only=True):
    """An alternative that lost, and why."""

    alternative: str
    why: str


class Verdict(Noun, frozen=True, kw_only=True):
    """Whose fault, how sure, and why. `key` is its identity: the same key again is the same incident."""

    key: str
    kind: Kind
    scope: Scope
    rule: str
    because: str
    """One sentence for a person."""
    confidence: Confidence = Confidence.MEDIUM
    node: Node | None = None
    """The culprit node; None where no node is blamed."""
    rank: Rank | None = None
    gpu: str | None = None
    convicts: bool = False
    """True: this node is not to be used by this run any more (until a person says so or it is re-tested)."""
    drains: bool = False
    """True: the evidence is strong enough to take the node out for everybody. Implies `convicts`."""
    stops: bool = False
    """True: the present attempt cannot or must not go on."""
    at_checkpoint: bool = False
    """True: no hurry; act when the next checkpoint is durable."""
    ends: str = ""
    """'' or the outcome with which the run is to end: stopped, cancelled."""
    quarantine: int = -1
    """The train_step of a checkpoint that must not be restored again; -1 none."""
    quarantine_too: tuple[int, ...] = ()
    """More of them."""
    hold: bool = False
    """True: restarting cannot help; a person is needed."""
    evidence: tuple[int, ...] = ()
    """Event log sequence numbers, primary evidence first."""
    rejected: tuple[Rejected, ...] = ()
    role: str = "train"
