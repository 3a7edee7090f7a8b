"""What is known of one node, each fact with its number and time in the log: what may convict it. Pure data."""

from __future__ import annotations

from outlast.reliability import model as m
from outlast.reliability.model import JobId, Node, Noun


class XidFact(Noun, frozen=True, kw_only=True):
    seq: int
    seen_s: float
    """When it entered the log, by the supervisor's steady clock."""
    attempt: int
    xid: m.XidSeen


class KernelFact(Noun, frozen=True, kw_only=True):
    seq: int
    seen_s: float
    attempt: int
    line: m.KernelSeen


class GpuFact(Noun, frozen=True, kw_only=True):
    seq: int
    seen_s: float
    change: m.GpuChanged


class NodeFacts(Noun, frozen=True, kw_only=True):
    """What is known of one node."""

    node: Node
    joined_seq: int = 0
    """Log number of the newest AgentJoined; 0 where no agent ever joined."""
    lost_seq: int = 0
    """Log number of an AgentLost newer than the newest join; 0 while the agent is there."""
    lost: m.AgentLost | None = None
    incarnation: str = ""
    job: JobId = JobId("")
    address: str = "127.0.0.1"
    xids: tuple[XidFact, ...] = ()
    kernel: tuple[KernelFact, ...] = ()
    """Kernel lines other than XIDs."""
    gpus: tuple[GpuFact, ...] = ()
    hung_seq: int = 0
    """Log number of the newest word that the GPUs' library hangs; 0 where it never did."""
    hung_s: float = 0.0
    state_seq: int = 0
    state: m.NodeState | None = None
    gate_seq: int = 0
    gate: m.GateSeen | None = None
    unclear_seq: int = 0
    unclear: m.NodeNotClear | None = None

    @property
    def present(self) -> bool:
        """An agent of the run is on it."""
        return bool(self.joined_seq) and not self.lost_seq
