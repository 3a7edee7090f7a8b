"""What the core asks of the world. Each port has a real and a simulated half and one contract test for both.

Calls may block; the supervisor runs them in threads with a deadline. They raise PortError where the world did not
answer (try again) or refused (do not). Nothing here decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from outlast.reliability.model import JobId, JobState, Layout, Node, NodeState, Noun, Plan
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile
from outlast.reliability.wire import RankSpec


class PortError(Exception):
    """The world refused or did not answer. `again` tells whether trying again can help."""

    def __init__(self, what: str, *, again: bool) -> None:
        super().__init__(what)
        self.again = again


class Allocation(Noun, frozen=True, kw_only=True):
    """Nodes that the scheduler gave to the run."""

    job: JobId
    nodes: tuple[Node, ...]
    state: str
    """Slurm's job state, upper case."""
    feeder: bool = False
    restarts: int = 0
    batch_node: Node | None = None
    ends_at_s: float = 0.0
    """When the scheduler will end it (time limit, preemption under way), by this host's wall clock; 0: not known."""


class Clock(Protocol):
    def wall_s(self) -> float:
        """UTC seconds since the epoch: for people and the log."""

    def mono_s(self) -> float:
        """Monotonic seconds: for durations."""


class Cluster(Protocol):
    """The scheduler: Slurm, this machine (local), or a simulated one."""

    def allocations(self) -> tuple[Allocation, ...]:
        """All jobs of this run that the scheduler still knows, ended ones included, oldest first."""

    def launch_agents(self, allocation: Allocation, nodes: Sequence[Node]) -> None:
        """Start one agent on each of these nodes, named explicitly. Returns once they are asked for."""

    def node_states(self, nodes: Sequence[Node]) -> tuple[NodeState, ...]:
        """What the scheduler says now; nodes it does not know are left out."""

    def job_states(self, jobs: Sequence[JobId]) -> tuple[JobState, ...]: ...

    def may_drain(self) -> bool:
        """Whether this user has the right to drain nodes."""

    def drain(self, node: Node, reason: str) -> str:
        """Drain with our reason. Returns what was done; raises PortError(again=False) for another's reason."""

    def feed(self, nodes: int, exclude: Sequence[Node]) -> JobId:
        """Submit a feeder job whose agents will join the run."""

    def requeue(self, job: JobId, exclude: Sequence[Node]) -> None:
        """Give the allocation back and queue the job again without these nodes."""

    def release(self, node: Node, job: JobId) -> str:
        """Take this node out of a running job; its other nodes, and what runs there, stay. Returns what was done.

        Nothing where it is not in the job any more. PortError(again=False) for the job's batch node.
        """

    def cancel(self, job: JobId) -> None:
        """End an allocation of ours (a feeder no longer needed, or a job whose batch script is gone)."""


class Restore(Noun, frozen=True, kw_only=True):
    """A checkpoint that may be restored."""

    train_step: int
    path: str
    samples: int = -1
    """Samples consumed when it was taken; -1 where it does not say."""


class BadCheckpoint(Noun, frozen=True, kw_only=True):
    """A checkpoint that was passed over."""

    train_step: int
    path: str
    why: str
    unfinished: bool = False
    """It was never committed: a save that something interrupted, no fault of the checkpoint's."""


class Choice(Noun, frozen=True, kw_only=True):
    """The newest checkpoint that verifies, and what was passed over on the way."""

    restore: Restore | None
    passed_over: tuple[BadCheckpoint, ...] = ()


class CheckpointStore(Protocol):
    def choose(self, *, quarantined: Sequence[int]) -> Choice:
        """The newest that verifies and is not quarantined; restore None where there is none."""

    def quarantine(self, train_step: int, why: str) -> None:
        """Set it aside (never delete). Idempotent."""

    def durable_steps(self) -> tuple[int, ...]:
        """Train_steps with a commit marker, ascending; cheap, hashes not checked."""

    def prune(self, keep_last: int, *, keep: Sequence[int], keep_every: int = 0) -> tuple[int, ...]:
        """Remove old ones beyond keep_last; never the only verified one, nor any in keep, nor the first at or after
        each multiple of keep_every (0: none of these). Returns what went."""


class Launcher(Protocol):
    """How a kind of program is told its layout and where to restore from. Pure."""

    def argv(self, run: RunFile, plan: Plan) -> tuple[str, ...]: ...

    def env(self, run: RunFile, plan: Plan) -> dict[str, str]: ...

    def preload(self, run: RunFile) -> tuple[str, ...]: ...

    def legal(self, run: RunFile, layout: Layout) -> str:
        """'' where the program can run in this layout, else why not."""


class Starter(Protocol):
    """What the supervisor needs to start an attempt's ranks. Pure."""

    def ranks(
        self, run: RunFile, run_dir: RunDir, plan: Plan, *, addresses: Mapping[Node, str], master_port: int
    ) -> tuple[RankSpec, ...]:
        """All ranks of the plan, each with its command line and environment, in rank order."""

    def legal(self, run: RunFile, layout: Layout) -> str:
        """'' where the program can run in this layout, else why not."""


class Pager(Protocol):
    def page(self, title: str, text: str) -> None:
        """Tell a person. Never raises; a page that cannot be sent is written to stderr and counted."""
