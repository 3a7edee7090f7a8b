"""The nouns that all rooms share: what was seen (Signal), and where ranks run (Plan).

What the core makes of them is in verdict.py and actions.py.

Data only. Everything here is frozen, checks itself when it is read from a file or a socket, and names its units:
`_s` seconds, `_bytes` bytes. `at_s` is wall time (UTC, seconds since the epoch) and is for people and for order
between nodes to within clock skew; durations are measured with a monotonic clock where they are taken.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import msgspec

Node = NewType("Node", str)
"""Slurm's NodeName."""
JobId = NewType("JobId", str)
"""One allocation of the scheduler."""
Rank = NewType("Rank", int)
"""Global rank, 0 .. world_size-1."""


class Noun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all data that crosses a function, file or socket boundary."""


# ---------------------------------------------------------------- signals: what was seen, where, when


class XidSeen(Noun, frozen=True, kw_only=True, tag="xid_seen"):
    """A kernel line that reports an NVIDIA XID (or a GPU that fell off the bus without one: code 79)."""

    node: Node
    at_s: float
    code: int
    gpu: str | None = None
    """PCI address as dddd:bb:dd, lower case; None where the line does not say."""
    source: str = "kmsg"
    """Where it was read: kmsg, or kernel_log (a file). Never a rank's output."""
    text: str = ""
    caused_by: int | None = None
    """The earlier XID that the driver itself names as the cause."""


class KernelSeen(Noun, frozen=True, kw_only=True, tag="kernel_seen"):
    """A kernel line that tells of trouble other than an XID: a switch, a machine check, a disk, a lost mount."""

    node: Node
    at_s: float
    key: str
    """The form of the line: a row of reliability/catalog/kernel.yaml."""
    device: str = ""
    """PCI address or name of the device, where the line has one."""
    source: str = "kmsg"
    text: str = ""


class GpuChanged(Noun, frozen=True, kw_only=True, tag="gpu_changed"):
    """One field of one GPU's state changed for the worse or for the better."""

    node: Node
    at_s: float
    source: str
    """nvml | dcgm"""
    gpu: str
    field: str
    """A field of GpuState (monitors/gpu_state.py)."""
    before: int | None
    """None: this was the first look, and it is no healthy value."""
    now: int


class SourceBlind(Noun, frozen=True, kw_only=True, tag="source_blind"):
    """A monitor could not see for a while. Not health, not a fault."""

    node: Node
    at_s: float
    source: str
    why: str
    lost: int = 0
    """Records known to be lost; 0 where it cannot be counted."""
    hung: bool = False
    """True: what it asks does not come back from a call."""


class RankExited(Noun, frozen=True, kw_only=True, tag="rank_exited"):
    """A rank's process ended: by exit code or by POSIX signal, never both."""

    node: Node
    at_s: float
    attempt: int
    rank: Rank
    exit_code: int | None = None
    posix_signal: int | None = None
    error_class: str = ""
    """Class of the first primary error in its output (see monitors/rank_log.py); '' where none was found."""
    exception: str = ""
    """`Type: message` of the program's own exception, without addresses and paths; '' where none."""
    last_words: str = ""
    """The last lines of its output, control characters made visible; at most 4,000 characters."""
    phase: str = ""
    train_step: int = -1
    """The last train_step it had finished; -1 before the first."""
    asked: bool = False
    """True where we had asked this rank to end (stop, restart): an exit that was asked for is no fault."""


class RankPlaced(Noun, frozen=True, kw_only=True, tag="rank_placed"):
    """Where a rank says that it really runs (read inside the rank, not from the plan)."""

    node: Node
    at_s: float
    attempt: int
    rank: Rank
    pid: int


class AgentJoined(Noun, frozen=True, kw_only=True, tag="agent_joined"):
    node: Node
    at_s: float
    job: JobId
    incarnation: str
    """New for each start of an agent process."""
    address: str = "127.0.0.1"
    """Where other nodes of the run reach this node."""


class AgentLost(Noun, frozen=True, kw_only=True, tag="agent_lost"):
    node: Node
    at_s: float
    silent_s: float
    why: str


class NoProgress(Noun, frozen=True, kw_only=True, tag="no_progress"):
    """No rank has finished a train_step for longer than the limit; stacks were asked for before this was sent."""

    at_s: float
    attempt: int
    stalled_s: float
    limit_s: float
    suspect: Rank | None = None
    """The rank that waits for nobody (stopped, dead, or outside any collective); None where it cannot be told."""
    node: Node | None = None
    how: str = ""
    """How the suspect was told from the ranks that only wait."""
    stack: str = ""
    """The suspect's stack, innermost last, at most 4,000 characters."""


class NodeState(Noun, frozen=True, kw_only=True, tag="node_state"):
    """What Slurm says of a node, sent when it changes."""

    node: Node
    at_s: float
    state: str
    """Slurm's base state, lower case: idle mixed allocated down unknown ..."""
    flags: tuple[str, ...] = ()
    """Lower case: drain not_responding fail maintenance ..."""
    reason: str = ""
    reason_user: str = ""


class JobState(Noun, frozen=True, kw_only=True, tag="job_state"):
    """What Slurm says of one allocation of the run, sent when it changes."""

    job: JobId
    at_s: float
    state: str
    """Slurm's base state, upper case: RUNNING PENDING COMPLETING CANCELLED TIMEOUT NODE_FAIL ..."""
    reason: str = ""
    nodes: tuple[Node, ...] = ()


class GateOutcome(StrEnum):
    WELL = "well"
    FAULT = "fault"
    UNKNOWN = "unknown"


class GateSeen(Noun, frozen=True, kw_only=True, tag="gate_seen"):
    """The node gate's answer before an attempt."""

    node: Node
    at_s: float
    attempt: int
    outcome: GateOutcome
    findings: tuple[str, ...] = ()
    free_port: int = 0
    """A port free on that node just now, for the ranks' rendezvous; 0 where none was looked for."""


class NodeNotClear(Noun, frozen=True, kw_only=True, tag="node_not_clear"):
    """After TERM and KILL something of an attempt is still there: processes, or GPU memory in use."""

    node: Node
    at_s: float
    attempt: int
    pids: tuple[int, ...] = ()
    why: str = ""


class CheckpointSeen(Noun, frozen=True, kw_only=True, tag="checkpoint_seen"):
    """A checkpoint became durable (COMMITTED is on disk), or one was found that does not verify."""

    at_s: float
    train_step: int
    verified: bool
    path: str
    why: str = ""
    """What did not verify; '' for a good one."""
    hold_s: float = 0.0
    """How long the train loop stood still for it."""
    durable_s: float = 0.0
    """From the call to the commit marker on disk."""


class OperatorAsked(Noun, frozen=True, kw_only=True, tag="operator_asked"):
    """A person's will: stop, cancel, continue a held run, or an admin's drain. Obeyed, never repaired."""

    at_s: float
    what: str
    """stop | cancel | continue | drain"""
    who: str
    node: Node | None = None
    note: str = ""


Signal = (
    XidSeen
    | KernelSeen
    | GpuChanged
    | SourceBlind
    | RankExited
    | RankPlaced
    | AgentJoined
    | AgentLost
    | NoProgress
    | NodeState
    | JobState
    | GateSeen
    | NodeNotClear
    | CheckpointSeen
    | OperatorAsked
)


class StepSeen(Noun, frozen=True, kw_only=True):
    """One finished train_step, as the reporting rank recorded it."""

    train_step: int
    """1-based: the step that was just finished."""
    age_s: float = 0.0
    """How long before this was sent it finished, by the node's monotonic clock: no node's wall clock is trusted."""
    step_s: float
    """Wall time of this step, saves not included."""
    loss: float | None = None
    grad_norm: float | None = None
    samples_from: int = -1
    samples_to: int = -1
    """The step consumed samples [samples_from, samples_to); -1 where the program does not say."""
    save_s: float = 0.0
    """How long the train loop stood still for a save right after this step."""


# ---------------------------------------------------------------- layouts and plans


class Layout(Noun, frozen=True, kw_only=True):
    """Parallel sizes. world_size = tp * pp * cp * dp (ep divides dp * cp)."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        extra = "".join(f" {n} {v}" for n, v in (("cp", self.cp), ("ep", self.ep)) if v > 1)
        return f"tp {self.tp} pp {self.pp} dp {self.dp}{extra}"


class Placement(Noun, frozen=True, kw_only=True):
    """One rank's place: node and local rank (the GPU's index on that node)."""

    rank: Rank
    node: Node
    local_rank: int


class Plan(Noun, frozen=True, kw_only=True):
    """One attempt: which ranks run where, from which checkpoint, up to which step."""

    attempt: int
    layout: Layout
    nodes: tuple[Node, ...]
    """In rank order: node i holds ranks [i * ranks_per_node, (i+1) * ranks_per_node)."""
    ranks: tuple[Placement, ...]
    restore_step: int = 0
    """0: from the beginning."""
    restore_path: str = ""
    micro_batch: int = 1
    why: str = ""
    save_every: int = 0
    """Train_steps between checkpoints in this attempt; 0: as the run file says."""
    save_because: str = ""
    """How that number came about."""
