"""States of GPUs, judged by the real catalogue: what convicts, what is only a suspect, what is unknown."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.monitors.gpu_state import COUNTERS, FACTS
from outlast.monitors.gpu_tell import EACH, SELDOM
from outlast.reliability import model as m
from outlast.reliability.actions import Advise, Drain, Hold, Swap
from outlast.reliability.catalogue import load_catalogue
from outlast.reliability.gpu_facts import key_of
from outlast.reliability.model import GateOutcome, Node
from outlast.reliability.policy import Policy, judge
from outlast.reliability.rules import RULES
from outlast.reliability.runstate import replay
from outlast.reliability.verdict import Kind, Scope

_spec = importlib.util.spec_from_file_location("core_story", Path(__file__).with_name("story.py"))
assert _spec and _spec.loader
_fresh = "core_story" not in sys.modules
_module = sys.modules.setdefault("core_story", importlib.util.module_from_spec(_spec))
if _fresh:
    _spec.loader.exec_module(_module)
Story, run_file = _module.Story, _module.run_file

CATALOGUE = load_catalogue()
POLLED_S = 15.0
POLICY = Policy(xid=CATALOGUE.xid, kernel=CATALOGUE.kernel, settle_s=0.5, quiet_s=0.3, polled_s=POLLED_S)
NODES = "abcdef"
GPU = "0000:5e:00"
PROOF = [("lost", 1), ("remap_failed", 1), ("recovery_action", 1), ("recovery_action", 2), ("recovery_action", 4)]
WEAK = [
    *(("hw_slowdown", 72), ("pcie_width", 8), ("nvlinks_down", 1), ("remap_pending", 1), ("retired_pending", 1)),
    *(("ecc_uncorrected", 1), ("ecc_uncorrected_ever", 3), ("remapped_uncorrected", 1), ("retired_dbe", 2)),
    ("recovery_action", 9),
]


class Told(Story):  # type: ignore[misc, valid-type]
    """A story that is judged by the real catalogue."""

    def judge(self):
        return judge(
            self.state.evidence,
            now_s=self.now_s,
            policy=POLICY,
            known=self.state.keys,
            excluded=set(self.state.excluded),
            rules=RULES,
            stopped=self.state.stopped,
            target_steps=self.run.train_steps,
        )

    def gpu(self, node, field, now, before=0, gpu=GPU, source="nvml"):
        before = 16 if field == "pcie_width" and before == 0 else before
        return self.see(
            m.GpuChanged(node=Node(node), at_s=self.now_s, source=source, gpu=gpu, field=field, before=before, now=now)
        )

    def gate(self, node, outcome, *findings):
        now = self.state.evidence.current
        attempt = now.plan.attempt if now else 1
        self.see(m.GateSeen(node=Node(node), at_s=self.now_s, attempt=attempt, outcome=outcome, findings=findings))

    def hang(self, node):
        why = "NVML hangs: no states within 15 s"
        self.see(m.SourceBlind(node=Node(node), at_s=self.now_s, source="nvml", why=why, hung=True))

    def settle(self):
        actions = self.react()
        for _ in range(20):
            due = self.judge().again_at_s
            if due is None or due > self.now_s + 61:
                break
            self.now_s = max(self.now_s, due)
            actions += self.react()
        return actions


def told(nodes: str = NODES, in_plan: str = "abcd") -> Told:
    return Told(nodes, run_file(nodes=len(in_plan), spares=len(nodes) - len(in_plan))).train(in_plan, through=12)


def drained(actions):
    return {a.node for a in actions if isinstance(a, Drain | Advise)}


def kinds(story):
    return [i.verdict.kind for i in story.state.incidents]


# ---------------------------------------------------------------- what it is called


def test_each_state_that_is_told_has_a_row_and_the_rates_have_none():
    assert {*EACH, *SELDOM} <= {*FACTS, *COUNTERS}
    for field in (*EACH, *SELDOM):
        worse = m.GpuChanged(node=Node("a"), at_s=0, source="nvml", gpu=GPU, field=field, before=None, now=1)
        row = CATALOGUE.kernel(key_of(worse))
        assert row is not None, field
    better = m.GpuChanged(node=Node("a"), at_s=0, source="nvml", gpu=GPU, field="pcie_width", before=8, now=16)
    assert key_of(better) == ""


# ---------------------------------------------------------------- proof


@pytest.mark.parametrize(("field", "now"), PROOF)
@pytest.mark.parametrize("source", ["nvml", "dcgm"])
def test_proof_of_a_broken_part_convicts_and_drains_once_the_others_had_time_to_tell(field, now, source):
    story = told()
    story.gpu("b", field, now, source=source)
    patience_s = POLLED_S if source == "nvml" else POLICY.exported_s
    assert story.verdicts() == () and story.judge().again_at_s == pytest.approx(story.now_s + patience_s)
    actions = story.settle()
    (incident,) = story.state.incidents
    assert (incident.verdict.kind, incident.verdict.node, incident.verdict.gpu) == (Kind.HARDWARE_FAULT, "b", GPU)
    assert drained(actions) == {"b"} and incident.verdict.stops


@pytest.mark.parametrize(("field", "now"), PROOF)
def test_what_is_true_at_the_first_look_is_proof_too(field, now):
    story = told()
    story.gpu("e", field, now, before=None)
    assert drained(story.settle()) == {"e"}  # a spare
    assert not story.state.incidents[0].verdict.stops


def test_what_is_well_again_before_anybody_acts_convicts_nobody():
    story = told()
    story.gpu("b", "recovery_action", 1)
    story.later(5).gpu("b", "recovery_action", 0, before=1)
    assert story.settle() == [] and kinds(story) == []


def test_the_kernels_line_needs_no_second_incident_for_the_state_it_causes():
    story = told()
    story.xid("b", 79, text=f"NVRM: Xid (PCI:{GPU}): 79, GPU has fallen off the bus.")
    story.later(4).gpu("b", "lost", 1)
    story.settle()
    assert kinds(story) == [Kind.HARDWARE_FAULT]


def test_one_state_on_many_nodes_over_the_time_of_a_look_blames_none():
    story = told()
    actions = []
    for node in "abc":
        story.gpu(node, "recovery_action", 1)
        actions += story.react()
        story.later(POLLED_S / 3)
    actions += story.settle()
    assert not drained(actions) and not story.state.excluded
    assert [i.verdict.scope for i in story.state.incidents] == [Scope.EVERYTHING]


def test_the_kernels_word_and_a_state_of_one_class_count_together():
    story = told()
    story.gpu("a", "lost", 1)
    story.gpu("b", "lost", 1)
    story.xid("c", 79, text=f"NVRM: Xid (PCI:{GPU}): 79, GPU has fallen off the bus.")
    assert not drained(story.settle()) and not story.state.excluded


# ---------------------------------------------------------------- suspects


@pytest.mark.parametrize(("field", "now"), WEAK)
def test_what_proves_nothing_is_a_suspect_and_nobody_leaves(field, now):
    story = told()
    story.gpu("b", field, now)
    actions = story.settle()
    (incident,) = story.state.incidents
    assert incident.verdict.kind is Kind.HARDWARE_SUSPECT and not incident.verdict.convicts
    assert not drained(actions) and not story.state.excluded and not story.state.stopped


def test_a_row_of_racks_that_is_too_warm_is_one_incident_of_nobody():
    story = told()
    for node in "abcd":
        story.gpu(node, "hw_slowdown", 64)
        story.later(2)
    story.settle()
    assert kinds(story) == [Kind.AMBIGUOUS] and not story.state.excluded


def test_memory_errors_again_on_one_gpu_leave_the_run_and_are_not_drained():
    story = told()
    story.gpu("b", "ecc_uncorrected", 1)
    story.settle()
    story.later(700).gpu("b", "ecc_uncorrected", 3, before=1)
    actions = story.settle()
    assert [i.verdict.rule for i in story.state.incidents] == ["gpu_memory_ue", "memory_errors_again"]
    assert set(story.state.excluded) == {"b"} and not drained(actions)
    assert any(isinstance(a, Swap) and a.at_checkpoint for a in actions)


def test_memory_errors_of_two_gpus_are_no_repetition():
    story = told()
    story.gpu("b", "ecc_uncorrected", 1)
    story.later(700).gpu("b", "ecc_uncorrected", 1, gpu="0000:9b:00")
    story.settle()
    assert not story.state.excluded


def test_a_gauge_of_the_exporter_asks_for_a_look_and_drains_nobody():
    story = told()
    story.see(m.XidSeen(node=Node("b"), at_s=story.now_s, code=79, gpu=GPU, source="dcgm", text="exporter: XID 79"))
    assert not drained(story.settle()) and not story.state.excluded
    (incident,) = story.state.incidents
    assert incident.verdict.kind is Kind.HARDWARE_SUSPECT
    story.xid("b", 79, text=f"NVRM: Xid (PCI:{GPU}): 79, GPU has fallen off the bus.")
    assert drained(story.settle()) == {"b"}


# ---------------------------------------------------------------- what the kernel says twice, and of whom


def test_a_second_contained_error_on_one_gpu_is_the_part():
    story = told()
    story.xid("b", 94, gpu=GPU, text=f"NVRM: Xid (PCI:{GPU}): 94, pid=7, name=p, Contained ECC error")
    assert not drained(story.settle()) and not story.state.excluded
    story.later(30).xid("b", 94, gpu=GPU, text=f"NVRM: Xid (PCI:{GPU}): 94, pid=7, name=p, the same burst")
    assert not drained(story.settle()) and not story.state.excluded
    story.later(600).xid("b", 94, gpu=GPU, text=f"NVRM: Xid (PCI:{GPU}): 94, pid=9, name=p, Contained ECC error")
    assert drained(story.settle()) == {"b"}


def test_what_an_agent_could_only_deliver_late_is_no_repetition():
    story = told()
    text = f"NVRM: Xid (PCI:{GPU}): 94, pid=7"
    began_s = story.now_s
    story.xid("b", 94, gpu=GPU, text=text)
    story.gpu("b", "ecc_uncorrected", 1)
    story.later(600)
    late = m.XidSeen(node=Node("b"), at_s=began_s + 0.2, code=94, gpu=GPU, source="nvml", text="NVML event: XID 94")
    story.see(late)
    field = "ecc_uncorrected"
    story.see(m.GpuChanged(node=Node("b"), at_s=began_s + 9, source="nvml", gpu=GPU, field=field, before=1, now=2))
    assert not drained(story.settle()) and not story.state.excluded


def test_contained_errors_of_two_gpus_are_no_repetition():
    story = told()
    story.xid("b", 94, gpu=GPU, text=f"NVRM: Xid (PCI:{GPU}): 94, pid=7")
    story.later(600).xid("b", 94, gpu="0000:9b:00", text="NVRM: Xid (PCI:0000:9b:00): 94, pid=9")
    assert not drained(story.settle()) and not story.state.excluded


WEDGED = f"NVRM: Xid (PCI:{GPU}): 31, pid=7, name=p, channel 0x2. MMU Fault: ENGINE GRAPHICS GPC0 UNRECOGNIZED_CLIENT"


def test_a_program_that_wedges_a_node_costs_it_and_no_drain_and_a_second_node_is_held():
    story = told()
    story.xid("b", 31, gpu=GPU, text=WEDGED)
    actions = story.settle()
    assert set(story.state.excluded) == {"b"} and not drained(actions)
    assert story.state.incidents[0].verdict.kind is Kind.SOFTWARE_FAULT
    story.end().train("acde", through=14)
    story.later(300).xid("c", 31, gpu=GPU, text=WEDGED)
    assert any(isinstance(a, Hold) for a in story.settle())


@pytest.mark.parametrize("code", [149, 145])
def test_nvlinks_of_two_nodes_are_their_domains(code):
    story = told()
    for node in "ab":
        text = f"NVRM: Xid (PCI:{GPU}): {code}, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x1 0x0)"
        story.xid(node, code, gpu=GPU, text=text)
    assert not drained(story.settle()) and not story.state.excluded
    assert [i.verdict.scope for i in story.state.incidents] == [Scope.DOMAIN]


def test_a_switch_of_one_node_is_that_nodes():
    story = told()
    story.see(m.KernelSeen(node=Node("b"), at_s=story.now_s, key="sxid_fatal", device="0000:c7:00"))
    assert drained(story.settle()) == {"b"}


# ---------------------------------------------------------------- a library that hangs


def test_a_library_that_hangs_is_unknown():
    story = told()
    story.hang("b")
    story.settle()
    (incident,) = story.state.incidents
    assert (incident.verdict.kind, incident.verdict.node, incident.verdict.stops) == (Kind.AMBIGUOUS, None, False)


def test_the_gates_own_look_that_hangs_too_convicts_without_a_drain():
    story = told()
    story.hang("b")
    story.settle()
    story.gate("b", GateOutcome.UNKNOWN, "gpu: unknown: NVML: no answer in time")
    actions = story.settle()
    assert set(story.state.excluded) == {"b"} and not drained(actions)


@pytest.mark.parametrize(
    ("outcome", "findings"),
    [(GateOutcome.WELL, ()), (GateOutcome.UNKNOWN, ("writable /scratch: unknown: no answer in time",))],
)
def test_a_gate_that_saw_the_gpus_clears_them(outcome, findings):
    story = told()
    story.hang("b")
    story.gate("b", outcome, *findings)
    story.settle()
    assert not story.state.excluded and not story.state.stopped


def test_a_library_that_hangs_on_many_nodes_blames_none():
    story = told()
    for node in "abcd":
        story.hang(node)
        story.gate(node, GateOutcome.UNKNOWN, "gpu: unknown: NVML: no answer in time")
    story.settle()
    assert kinds(story) == [Kind.AMBIGUOUS] and not story.state.excluded


def test_other_blindness_is_no_evidence():
    story = told()
    before = story.state.evidence
    story.see(m.SourceBlind(node=Node("b"), at_s=story.now_s, source="dcgm", why="unreachable"))
    assert story.state.evidence == before and story.settle() == []


# ---------------------------------------------------------------- laws, over generated histories

weak = st.tuples(st.sampled_from(NODES), st.sampled_from(WEAK))
proofs = st.tuples(st.sampled_from(NODES), st.sampled_from(PROOF))
anything = weak | proofs


def hear(states, *, times=1, late_s=0.0):
    story = told()
    at_s = story.now_s
    story.later(late_s)
    for node, (field, now) in states:
        for _ in range(times):
            before = 16 if field == "pcie_width" else 0
            story.see(
                m.GpuChanged(node=Node(node), at_s=at_s, source="nvml", gpu=GPU, field=field, before=before, now=now)
            )
    return story, story.settle()


def outcome(story):
    return set(story.state.excluded), {(i.verdict.kind, i.verdict.rule) for i in story.state.incidents}


@given(states=st.lists(weak, max_size=12, unique=True), pauses=st.lists(st.floats(0, 8), max_size=12))
def test_weak_states_alone_never_drain_or_convict(states, pauses):
    story, actions, steps = told(), [], iter(pauses)
    for node, (field, now) in states:
        story.later(next(steps, 0.0)).gpu(node, field, now)
        actions += story.react()
    actions += story.settle()
    # the last of the pauses is far below the time after which memory errors count as a repetition
    repeated = story.now_s > 1000 + POLICY.burst_s
    assert not drained(actions) and (repeated or not story.state.excluded)


@given(state=st.sampled_from(PROOF), order=st.permutations(NODES), many=st.integers(3, 6), within=st.floats(0, 14.9))
def test_nothing_is_drained_when_a_state_reaches_many_nodes(state, order, many, within):
    story, actions = told(), []
    for node in order[:many]:
        story.gpu(node, *state)
        actions += story.react()
        story.later(within / many)
    actions += story.settle()
    assert not drained(actions) and not story.state.excluded


def of_one_word(states):
    """A state has one value at one moment."""
    return list({(node, field): (node, (field, now)) for node, (field, now) in states}.values())


@given(states=st.lists(anything, max_size=8, unique=True), shuffled=st.randoms(use_true_random=False))
def test_the_order_of_states_changes_no_conviction(states, shuffled):
    states = of_one_word(states)
    other = list(states)
    shuffled.shuffle(other)
    (one, first), (two, second) = hear(states), hear(other)
    assert set(one.state.excluded) == set(two.state.excluded) and drained(first) == drained(second)


@given(states=st.lists(anything, max_size=8, unique=True), times=st.integers(2, 4))
def test_doubled_states_change_nothing(states, times):
    (one, first), (two, second) = hear(states), hear(states, times=times)
    assert outcome(one) == outcome(two) and first == second


@given(states=st.lists(anything, max_size=8, unique=True), late_s=st.floats(0, 30))
def test_a_late_state_convicts_the_same(states, late_s):
    (one, first), (two, second) = hear(states), hear(states, late_s=late_s)
    assert outcome(one) == outcome(two) and drained(first) == drained(second)


@given(states=st.lists(anything, min_size=1, max_size=8, unique=True), gone=st.integers(0, 7))
def test_a_lost_state_convicts_nobody_who_was_clear(states, gone):
    story, _ = hear([s for i, s in enumerate(states) if i != gone])
    assert set(story.state.excluded) <= {node for node, state in states if state in PROOF}


@given(states=st.lists(anything, max_size=6, unique=True))
def test_a_log_of_states_replayed_is_the_same_state(states):
    story, _ = hear(states)
    assert replay(story.events) == story.state
