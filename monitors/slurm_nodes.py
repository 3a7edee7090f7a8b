"""What changed between two looks at Slurm: node and job states as signals. Pure.

Slurm is asked every few seconds and says the same thing nearly always; only what differs is a signal. A node or job
that one answer leaves out is not gone: Slurm answers late or in part when it is busy, so absence says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outlast.reliability.model import JobId, JobState, Node, NodeState


def node_changed(before: NodeState | None, now: NodeState) -> bool:
    """Anything but the time of looking differs. Flags count as a set: Slurm prints them in any order."""
    return before is None or (
        (before.state, frozenset(before.flags), before.reason, before.reason_user)
        != (now.state, frozenset(now.flags), now.reason, now.reason_user)
    )


def job_changed(before: JobState | None, now: JobState) -> bool:
    return before is None or (before.state, before.reason, before.nodes) != (now.state, now.reason, now.nodes)


def node_changes(before: Mapping[Node, NodeState], now: Iterable[NodeState]) -> tuple[NodeState, ...]:
    """The states that are new or different, in the order given; of two answers on one node the later counts."""
    latest = {s.node: s for s in now}
    return tuple(s for s in latest.values() if node_changed(before.get(s.node), s))


def job_changes(before: Mapping[JobId, JobState], now: Iterable[JobState]) -> tuple[JobState, ...]:
    latest = {s.job: s for s in now}
    return tuple(s for s in latest.values() if job_changed(before.get(s.job), s))


@dataclass
class SlurmMemory:
    """What Slurm last said. `take` gives what is new and remembers it; the first look at a node is always new."""

    nodes: dict[Node, NodeState] = field(default_factory=dict)
    jobs: dict[JobId, JobState] = field(default_factory=dict)

    def take(self, nodes: Iterable[NodeState] = (), jobs: Iterable[JobState] = ()) -> tuple[NodeState | JobState, ...]:
        changed_nodes, changed_jobs = node_changes(self.nodes, nodes), job_changes(self.jobs, jobs)
        self.nodes.update((s.node, s) for s in changed_nodes)
        self.jobs.update((s.job, s) for s in changed_jobs)
        return (*changed_nodes, *changed_jobs)
