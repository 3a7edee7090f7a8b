"""The laws of judging and deciding, over generated histories: order, doubling, delay and loss of signals.

application-class evidence alone never drains            a burst is one incident
a cause that reaches many nodes drains none of them      a doubled, late or replayed signal changes nothing
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.reliability import model as m
from outlast.reliability.actions import Action, Advise, Drain
from outlast.reliability.catalogue import load_catalogue
from outlast.reliability.model import Node
from outlast.reliability.policy import Policy, judge
from outlast.reliability.rules import RULES
from outlast.reliability.verdict import Kind, Scope

_spec = importlib.util.spec_from_file_location("core_story", Path(__file__).with_name("story.py"))
assert _spec and _spec.loader
_fresh = "core_story" not in sys.modules
_module = sys.modules.setdefault("core_story", importlib.util.module_from_spec(_spec))
if _fresh:
    _spec.loader.exec_module(_module)
Story, run_file = _module.Story, _module.run_file

CATALOGUE = load_catalogue()
QUIET_S = 0.3
POLICY = Policy(xid=CATALOGUE.xid, kernel=CATALOGUE.kernel, settle_s=0.5, quiet_s=QUIET_S)
NODES = "abcdef"

PROGRAM = (13, 31, 32, 43, 45, 68, 69, 137)
HARDWARE = (46, 48, 64, 79, 95, 119, 120, 140, 143, 171)
QUIET_TEXTS = (
    (149, "NVRM: Xid (PCI:0000:5e:00): 149, NETIR_LINK_EVT Fatal XC0 i1 Link 08 (0x0 0x0)"),
    (145, "NVRM: Xid (PCI:0000:5e:00): 145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 03 (0x0 0x0)"),
    (154, "NVRM: Xid (PCI:0000:5e:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"),
    (154, "NVRM: Xid (PCI:0000:5e:00): 154 ("),
    (74, "NVRM: Xid (PCI:0000:5e:00): 74, NVLink: fatal error detected on link 5(0x800000, 0x0, 0x0)"),
)
gpus = st.sampled_from([f"0000:{n:02x}:00" for n in (0x19, 0x3B, 0x5E, 0x9B)])


class Told(Story):  # type: ignore[misc, valid-type]
    """A story that is judged by the real catalogue, and by its quiet time."""

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

    def settle(self) -> list[Action]:
        """React until nothing is pending; at most a minute passes."""
        actions = self.react()
        for _ in range(20):
            due = self.judge().again_at_s
            if due is None or due > self.now_s + 60:
                break
            self.now_s = max(self.now_s, due)
            actions += self.react()
        return actions


def told(nodes: str = NODES, in_plan: str = "abcd") -> Told:
    story = Told(nodes, run_file(nodes=len(in_plan), spares=len(nodes) - len(in_plan)))
    story.site = story.site  # no drain rights: a drain shows as advice
    return story.train(in_plan, through=12)


def drained(actions: list[Action]) -> set[str]:
    return {a.node for a in actions if isinstance(a, Drain | Advise)}


def convicted(story: Told) -> set[str]:
    return set(story.state.excluded)


# ---------------------------------------------------------------- what programs cause

program_lines = st.tuples(st.sampled_from(NODES), st.sampled_from(PROGRAM), gpus)
quiet_lines = st.tuples(st.sampled_from(NODES), st.sampled_from(QUIET_TEXTS))
exits = st.tuples(
    st.integers(0, 7), st.sampled_from(["app_exception", "peer_died", "nccl_timeout_victim", "gpu_app_fault", ""])
)


@given(
    lines=st.lists(program_lines, max_size=12),
    quiet=st.lists(quiet_lines, max_size=4),
    deaths=st.lists(exits, max_size=3, unique_by=lambda e: e[0]),
    pauses=st.lists(st.floats(0, 3), max_size=20),
)
def test_application_class_evidence_alone_never_drains_or_convicts(lines, quiet, deaths, pauses):
    story, actions = told(), []
    steps = iter(pauses)
    for node, code, gpu in lines:
        story.later(next(steps, 0.0)).xid(node, code, gpu=gpu, text=f"NVRM: Xid (PCI:{gpu}): {code}, pid=7, name=p, x")
        actions += story.react()
    for node, (code, text) in quiet:
        story.later(next(steps, 0.0)).xid(node, code, text=text)
        actions += story.react()
    for rank, error in deaths:
        story.exit(rank, exception="RuntimeError: CUDA error" if error else "", error_class=error)
        actions += story.react()
    actions += story.settle()
    assert not drained(actions) and not convicted(story)


# ---------------------------------------------------------------- bursts and reach


@given(codes=st.lists(st.tuples(st.sampled_from(HARDWARE), gpus), min_size=1, max_size=10), pause=st.floats(0, 5))
def test_a_burst_on_one_node_is_one_incident(codes, pause):
    story, actions = told(), []
    for code, gpu in codes:
        story.xid("a", code, gpu=gpu, text=f"NVRM: Xid (PCI:{gpu}): {code}, pid=7")
        actions += story.react()
        story.later(pause)
    actions += story.settle()
    assert len(story.state.incidents) == 1
    assert convicted(story) == drained(actions) == {"a"}


@given(
    code=st.sampled_from(HARDWARE),
    order=st.permutations(NODES),
    many=st.integers(3, 6),
    within=st.floats(0, QUIET_S * 0.99),
)
def test_nothing_is_drained_when_a_cause_reaches_many_nodes(code, order, many, within):
    """All lines are written within the quiet time, and heard one by one."""
    story, actions = told(), []
    for node in order[:many]:
        story.xid(node, code, text=f"NVRM: Xid (PCI:0000:5e:00): {code}, pid=7")
        actions += story.react()
        story.later(within / many)
    actions += story.settle()
    assert not drained(actions) and not convicted(story)
    assert [i.verdict.scope for i in story.state.incidents] == [Scope.EVERYTHING]


@given(
    keys=st.sets(st.sampled_from(["mce", "edac_ue", "nic_health", "sxid_fatal"]), min_size=1),
    node=st.sampled_from(NODES),
)
def test_a_kernel_line_that_is_enough_convicts_its_node_once(keys, node):
    story, actions = told(), []
    for key in sorted(keys):
        story.see(m.KernelSeen(node=Node(node), at_s=story.now_s, key=key))
        actions += story.react()
    actions += story.settle()
    assert len(story.state.incidents) == 1 and convicted(story) == drained(actions) == {node}


@pytest.mark.parametrize("key", ["soft_lockup", "nfs_lost", "oom_node", "aer_corrected", "no such form"])
def test_a_kernel_line_that_is_not_enough_convicts_nobody(key):
    story = told()
    story.see(m.KernelSeen(node=Node("a"), at_s=story.now_s, key=key))
    assert story.settle() == [] and not convicted(story)


def test_sigkill_with_the_kernels_word_on_memory_blames_the_program_each_time():
    story = told()
    story.see(m.KernelSeen(node=Node("a"), at_s=story.now_s, key="oom_job"))
    story.exit(0, posix_signal=9)
    verdict = story.verdict()
    assert (verdict.kind, verdict.rule, verdict.convicts) == (Kind.APP_FAULT, "killed_for_memory", False)


def test_a_verdict_waits_for_the_quiet_time_and_no_longer():
    story = told()
    story.xid("a", 79)
    assert story.verdicts() == () and story.judge().again_at_s == pytest.approx(story.now_s + QUIET_S)
    assert story.later(QUIET_S).verdict().node == "a"


# ---------------------------------------------------------------- order, doubling, delay, loss

any_line = st.tuples(st.sampled_from(NODES), st.sampled_from((*PROGRAM, *HARDWARE)), gpus)


def outcome(story: Told) -> tuple[set[str], set[Kind]]:
    return convicted(story), {i.verdict.kind for i in story.state.incidents}


def hear(lines, *, times: int = 1, late_s: float = 0.0) -> tuple[Told, list[Action]]:
    """All of these at one moment, judged when the last is heard."""
    story = told()
    at_s = story.now_s
    story.later(late_s)
    for node, code, gpu in lines:
        text = f"NVRM: Xid (PCI:{gpu}): {code}, pid=7"
        for _ in range(times):
            story.see(m.XidSeen(node=Node(node), at_s=at_s, code=code, gpu=gpu, text=text))
    return story, story.settle()


@given(lines=st.lists(any_line, max_size=8, unique=True), shuffled=st.randoms(use_true_random=False))
def test_the_order_of_what_comes_together_changes_no_conviction(lines, shuffled):
    other = list(lines)
    shuffled.shuffle(other)
    (one, first), (two, second) = hear(lines), hear(other)
    assert outcome(one) == outcome(two) and drained(first) == drained(second)


@pytest.mark.parametrize("own", [{"a": 46}, {"a": 64, "c": 46}, {"a": 46, "b": 64, "c": 79}])
def test_a_nodes_own_fault_hides_nothing_that_is_everybodys(own):
    """XID 140 on three nodes, some of which also show a fault of their own, before it or after it."""
    shared = [(node, 140, "0000:19:00") for node in "abc"]
    alone = [(node, code, "0000:3b:00") for node, code in own.items()]
    for lines in ([*alone, *shared], [*shared, *alone]):
        story, _ = hear(lines)
        assert outcome(story) == (set(own), {Kind.AMBIGUOUS, Kind.HARDWARE_FAULT})


@given(lines=st.lists(any_line, max_size=8, unique=True), times=st.integers(2, 4))
def test_doubled_signals_change_nothing(lines, times):
    (one, first), (two, second) = hear(lines), hear(lines, times=times)
    assert outcome(one) == outcome(two) and first == second


@given(lines=st.lists(any_line, max_size=8, unique=True), late_s=st.floats(0, 30))
def test_a_delay_changes_no_conviction(lines, late_s):
    (one, first), (two, second) = hear(lines), hear(lines, late_s=late_s)
    assert outcome(one) == outcome(two) and drained(first) == drained(second)


@given(lines=st.lists(any_line, min_size=1, max_size=8, unique=True), gone=st.integers(0, 7))
def test_a_lost_signal_convicts_nobody_who_was_clear(lines, gone):
    """Loss may hide a fault, or how far it reaches; a node of which nothing bad was said stays clear."""
    (_, _), (two, _) = hear(lines), hear([line for i, line in enumerate(lines) if i != gone])
    bad = {node for node, code, _ in lines if code in HARDWARE}
    assert convicted(two) <= bad


@given(lines=st.lists(any_line, max_size=6, unique=True))
def test_a_log_replayed_is_the_same_state(lines):
    from outlast.reliability.runstate import replay

    story, _ = hear(lines)
    assert replay(story.events) == story.state
