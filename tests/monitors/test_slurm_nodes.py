"""Changes between two looks at Slurm."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.monitors.slurm_nodes import SlurmMemory
from outlast.reliability.model import JobId, JobState, Node, NodeState


def node(name: str, state: str = "idle", *flags: str, at_s: float = 1.0, reason: str = "") -> NodeState:
    return NodeState(node=Node(name), at_s=at_s, state=state, flags=flags, reason=reason)


def test_only_what_differs_is_a_signal() -> None:
    memory = SlurmMemory()
    first = memory.take([node("a"), node("b", "allocated", "drain", "not_responding")])
    assert len(first) == 2
    assert memory.take([node("a", at_s=9.0), node("b", "allocated", "not_responding", "drain", at_s=9.0)]) == ()
    (changed,) = memory.take([node("a", "down", reason="dead"), node("b", "allocated", "drain", "not_responding")])
    assert isinstance(changed, NodeState) and (changed.node, changed.reason) == ("a", "dead")


def test_absence_says_nothing_and_the_later_answer_counts() -> None:
    memory = SlurmMemory()
    memory.take([node("a")])
    assert memory.take([]) == ()
    assert memory.take([node("a", "down"), node("a")]) == ()


def test_jobs_change_by_state_reason_and_nodes() -> None:
    memory = SlurmMemory()
    job = JobState(job=JobId("7"), at_s=1.0, state="RUNNING", nodes=(Node("a"), Node("b")))
    assert memory.take(jobs=[job]) == (job,)
    assert memory.take(jobs=[JobState(job=JobId("7"), at_s=2.0, state="RUNNING", nodes=(Node("a"), Node("b")))]) == ()
    assert len(memory.take(jobs=[JobState(job=JobId("7"), at_s=3.0, state="RUNNING", nodes=(Node("a"),))])) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["idle", "down", "mixed"])), max_size=12))
def test_a_repeated_look_is_silent(looks: list[tuple[str, str]]) -> None:
    memory = SlurmMemory()
    states = [node(n, s) for n, s in looks]
    memory.take(states)
    assert memory.take(states) == ()
