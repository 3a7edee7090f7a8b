"""Whose fault it is, told as stories. Each test is one thing that happens on clusters and the verdict it deserves."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from outlast.reliability import model as m
from outlast.reliability.actions import Advise, EndRun, Hold, LeaveIt, RestartInPlace, RollBack, Swap
from outlast.reliability.model import Node
from outlast.reliability.verdict import Kind, Scope

_spec = importlib.util.spec_from_file_location("core_story", Path(__file__).with_name("story.py"))
assert _spec and _spec.loader
_module = sys.modules.setdefault("core_story", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(_module)
Story, run_file = _module.Story, _module.run_file


def test_a_gpu_off_the_bus_convicts_its_node_at_once():
    story = Story().train(through=12)
    seq = story.xid("a", 79)
    verdict = story.verdict()
    assert (verdict.kind, verdict.node, verdict.convicts, verdict.drains) == (Kind.HARDWARE_FAULT, "a", True, True)
    assert verdict.stops
    assert verdict.evidence[0] == seq
    assert "XID 79" in verdict.because and verdict.rejected


def test_a_burst_on_one_node_is_one_incident():
    story = Story().train(through=12)
    story.xid("a", 79)
    story.react()
    for gpu in ("0000:4a:00", "0000:5b:00"):
        story.xid("a", 79, gpu=gpu)
    assert story.verdicts() == ()


def test_the_same_line_twice_changes_nothing():
    story = Story().train(through=12)
    story.xid("a", 79)
    before = story.state.evidence
    story.xid("a", 79)
    assert story.state.evidence == before


def test_the_same_fault_on_many_nodes_blames_none_of_them():
    story = Story("abcdef").train(through=12)
    for node in "abc":
        story.xid(node, 79)
    verdicts = story.verdicts()
    assert [v.scope for v in verdicts] == [Scope.EVERYTHING]
    assert not any(v.convicts or v.drains for v in verdicts)


def test_an_application_xid_alone_blames_nobody_and_stops_nothing():
    story = Story().train(through=12)
    story.xid("a", 31)
    assert story.verdicts() == () and story.judge().again_at_s == story.now_s + 2.0
    story.later(2.5)
    verdict = story.verdict()
    assert (verdict.kind, verdict.node, verdict.stops, verdict.convicts) == (Kind.APP_FAULT, None, False, False)


def test_an_exception_waits_for_the_kernel_and_then_blames_the_program():
    story = Story().train(through=12)
    story.exit(1, exception="ValueError: boom")
    assert story.verdicts() == ()
    verdict = story.later(2.1).verdict()
    assert (verdict.kind, verdict.rank, verdict.convicts) == (Kind.APP_FAULT, 1, False)
    assert "ValueError: boom" in verdict.because


def test_the_kernels_word_within_the_settle_time_wins_over_the_exception():
    story = Story().train(through=12)
    story.exit(1, exception="RuntimeError: CUDA error")
    story.later(1.0).xid("a", 95)
    actions = story.react()
    assert [type(a) for a in actions] == [Advise, Swap]
    assert story.later(5).verdicts() == ()


def test_a_kernel_line_after_the_stop_still_convicts():
    story = Story().train(through=12)
    story.exit(1, exception="RuntimeError: CUDA error")
    story.later(2.1).react()
    story.end()
    story.xid("a", 79)
    verdict = story.verdict()
    assert verdict.convicts and not verdict.stops


def test_ranks_that_only_saw_a_peer_go_do_not_lead():
    story = Story().train(through=12)
    story.exit(0, exception="RuntimeError: Connection closed by peer", error_class="peer_died")
    story.later(0.1).exit(3, exception="KeyError: doc_881", error_class="app_exception")
    assert story.later(3).verdict().rank == 3


def test_only_echoes_is_ambiguous():
    story = Story().train(through=12)
    story.exit(0, error_class="peer_died")
    assert story.later(3).verdicts() == ()  # a node may be lost, its agent is not missed yet
    assert story.later(4).verdict().kind is Kind.AMBIGUOUS


def test_the_same_exception_at_the_same_step_three_times_is_held():
    story = Story()
    for _ in range(2):
        story.train(restore=0, through=20)
        story.exit(1, exception="KeyError: doc_881", error_class="app_exception")
        assert not story.later(3).verdict().hold
        story.react()
        story.end().later(10)
    story.train(through=20)
    story.exit(1, exception="KeyError: doc_881", error_class="app_exception")
    (action,) = story.later(3).react()
    assert isinstance(action, Hold) and "KeyError" in action.why


def test_the_same_failure_after_the_same_restore_on_other_nodes_sets_the_checkpoint_aside():
    story = Story("abcd")
    story.train("ab", through=20).durable(20).end()
    story.train("ab", restore=20, through=21)
    story.exit(1, exception="RuntimeError: nan")
    story.later(3).react()
    story.end().train("cd", restore=20, through=21)
    story.exit(1, exception="RuntimeError: nan")
    verdict = story.later(3).verdict()
    assert (verdict.kind, verdict.quarantine) == (Kind.CHECKPOINT_UNUSABLE, 20)


def test_sigkill_once_is_chance_and_twice_on_one_node_is_that_node():
    story = Story().train(through=12)
    story.exit(1, posix_signal=9)
    assert story.later(3).verdict().kind is Kind.TRANSIENT
    story.react()
    story.end().train(restore=10, through=15)
    story.exit(0, posix_signal=9)
    verdict = story.later(3).verdict()
    assert (verdict.kind, verdict.node, verdict.convicts, verdict.drains) == (Kind.HARDWARE_SUSPECT, "a", True, False)


@pytest.mark.parametrize("key", ["oom_job", "oom_node"])
@pytest.mark.parametrize("how", [{"posix_signal": 9}, {"code": 137}])
def test_kills_for_memory_never_add_up_to_the_nodes_death(key, how):
    """137: a shell whose child was killed."""
    story = Story()
    for reached in (12, 15, 18):
        story.train(restore=reached - 2, through=reached)
        story.exit(0, **how)
        story.later(1).see(m.KernelSeen(node=Node("a"), at_s=story.now_s, key=key))
        verdict = story.later(3).verdict()
        assert (verdict.rule, verdict.kind, verdict.convicts) == ("killed_for_memory", Kind.APP_FAULT, False)
        story.react()
        story.end()
    # one more, and the kernel says nothing of memory: the first unexplained one, not the fourth on this node
    story.train(restore=18, through=20)
    story.exit(0, posix_signal=9)
    assert story.later(3).verdict().kind is Kind.TRANSIENT
    story.react()
    story.end().train(restore=20, through=22)
    story.exit(0, posix_signal=9)
    assert story.later(3).verdict().rule == "same_node_again"


def test_the_kernels_word_on_memory_that_comes_after_the_verdict_still_counts():
    story = Story().train(through=12)
    story.exit(0, posix_signal=9)
    assert [type(a) for a in story.later(3).react()] == [RestartInPlace]
    story.see(m.KernelSeen(node=Node("a"), at_s=story.now_s, key="oom_job"))
    assert story.verdicts() == ()
    story.end().train(restore=10, through=15)
    story.exit(0, posix_signal=9)
    verdict = story.later(3).verdict()
    assert (verdict.rule, verdict.convicts) == ("unexplained_death", False)


def test_memory_of_another_node_explains_nothing():
    story = Story().train(through=12)
    story.see(m.KernelSeen(node=Node("b"), at_s=story.now_s, key="oom_job"))
    story.exit(0, posix_signal=9)
    assert story.later(3).verdict().rule == "unexplained_death"


def test_a_lost_agent_excludes_its_node_and_drains_nothing():
    story = Story().train(through=12)
    story.see(m.AgentLost(node=Node("b"), at_s=story.now_s, silent_s=4.0, why="connection closed"))
    verdict = story.verdict()
    assert (verdict.kind, verdict.node, verdict.stops, verdict.drains) == (Kind.INFRA_EVENT, "b", True, False)
    assert [type(a) for a in story.react()] == [Swap]


def test_a_lost_spare_stops_nothing():
    story = Story().train(through=12)
    story.see(m.AgentLost(node=Node("c"), at_s=story.now_s, silent_s=4.0, why="connection closed"))
    verdict = story.verdict()
    assert verdict.convicts and not verdict.stops
    assert [type(a) for a in story.react()] == [LeaveIt]


def test_most_agents_lost_at_once_blames_nobody():
    story = Story().train(through=12)
    for node in "ab":
        story.see(m.AgentLost(node=Node(node), at_s=story.now_s, silent_s=4.0, why="connection closed"))
    verdict = story.verdict()
    assert verdict.kind is Kind.AMBIGUOUS and not verdict.convicts


def test_an_admins_drain_is_obeyed_at_the_next_checkpoint_and_never_repaired():
    story = Story().train(through=12).durable(10)
    story.see(m.NodeState(node=Node("a"), at_s=0, state="mixed", flags=("drain",), reason="DIMM swap, ticket 5512"))
    verdict = story.verdict()
    assert (verdict.kind, verdict.at_checkpoint, verdict.drains) == (Kind.OPERATOR_ACTION, True, False)
    (action,) = story.react()
    assert isinstance(action, Swap) and action.at_checkpoint
    assert story.state.at_checkpoint_from == 10 and story.state.must_stop == 0


def test_our_own_drain_is_no_admins_will():
    story = Story().train(through=12)
    story.see(m.NodeState(node=Node("a"), at_s=0, state="mixed", flags=("drain",), reason="outlast: xid 79"))
    assert story.verdicts() == ()


def test_an_admin_who_gives_a_node_back_lifts_only_his_own_drain():
    story = Story().train(through=12)
    story.see(m.NodeState(node=Node("c"), at_s=0, state="idle", flags=("drain",), reason="mine"))
    story.react()
    story.xid("b", 79)
    story.react()
    assert set(story.state.excluded) == {"b", "c"}
    for node in "bc":
        story.see(m.NodeState(node=Node(node), at_s=0, state="idle"))
    assert set(story.state.excluded) == {"b"}


@pytest.mark.parametrize(("what", "outcome"), [("stop", "stopped"), ("cancel", "cancelled")])
def test_a_persons_will_ends_the_run(what, outcome):
    story = Story().train(through=12)
    story.see(m.OperatorAsked(at_s=0, what=what, who="ada"))
    (action,) = story.react()
    assert isinstance(action, EndRun) and action.outcome == outcome


def test_a_cancelled_job_ends_the_run_and_ranks_killed_by_it_are_no_fault():
    story = Story().train(through=12)
    story.exit(0, posix_signal=15)
    story.see(m.JobState(job=m.JobId("1"), at_s=0, state="CANCELLED"))
    story.later(5)
    assert [v.rule for v in story.verdicts()] == ["job_cancelled"]


def test_a_rank_in_the_wrong_place_is_our_fault():
    story = Story().train(through=12)
    story.see(m.RankPlaced(node=Node("c"), at_s=0, attempt=1, rank=m.Rank(0), pid=1))
    verdict = story.verdict()
    assert verdict.kind is Kind.SOFTWARE_FAULT and verdict.stops and not verdict.convicts


def test_a_rank_on_a_node_convicted_before_is_our_fault_and_one_convicted_meanwhile_is_not():
    story = Story().train(through=12).durable(10)
    story.see(m.RankPlaced(node=Node("a"), at_s=0, attempt=1, rank=m.Rank(0), pid=1))
    story.see(m.NodeState(node=Node("a"), at_s=0, state="mixed", flags=("drain",), reason="ticket 5512"))
    story.react()
    assert story.verdicts() == (), "it may stay until the checkpoint"
    story.end().later(1).train("ab", restore=10)
    story.see(m.RankPlaced(node=Node("a"), at_s=0, attempt=2, rank=m.Rank(0), pid=1))
    assert [v.rule for v in story.verdicts()] == ["misplaced_rank"]


def test_a_hang_names_the_rank_that_waits_for_nobody():
    story = Story().train(through=12)
    story.see(
        m.NoProgress(
            at_s=0, attempt=1, stalled_s=9, limit_s=5, suspect=m.Rank(2), node=Node("b"), how="stopped (T)", stack="f"
        )
    )
    verdict = story.verdict()
    assert (verdict.rank, verdict.convicts, verdict.stops) == (2, False, True)


def hang(story, node="b", rank=2):
    attempt = story.state.evidence.current.plan.attempt
    how = {"suspect": m.Rank(rank), "node": Node(node), "how": "stopped (T)", "stack": "f"}
    story.see(m.NoProgress(at_s=0, attempt=attempt, stalled_s=9, limit_s=5, **how))
    verdict = story.verdict()
    story.react()
    return verdict


def test_hangs_in_a_row_on_one_node_are_that_nodes():
    story = Story().train(through=12)
    assert not hang(story).convicts
    story.end().train(restore=10, through=25)
    again = hang(story)
    assert (again.rule, again.node, again.convicts, again.drains) == ("same_node_again", "b", True, False)
    assert "the 2. hang or unexplained death in a row there" in again.because


def test_hangs_at_the_same_train_step_or_on_different_nodes_convict_nobody():
    story = Story().train(through=12)
    hang(story)
    story.end().train(restore=10, through=12)
    assert not hang(story).convicts, "what repeats at the same train_step is not hardware"
    story.end().train(restore=10, through=25)
    assert not hang(story, node="a", rank=0).convicts


def test_a_node_that_fails_its_gate_is_swapped():
    story = Story().plan("ab")
    story.see(
        m.GateSeen(node=Node("a"), at_s=0, attempt=1, outcome=m.GateOutcome.FAULT, findings=("/dev/shm is read-only",))
    )
    verdict = story.verdict()
    assert verdict.convicts and not verdict.drains and "/dev/shm" in verdict.because


def test_a_gate_that_most_nodes_fail_blames_none():
    story = Story().plan("ab")
    from outlast.reliability.attempt import Event

    story.move(Event.GATE_ASKED)
    fault = {"at_s": 0, "attempt": 1, "outcome": m.GateOutcome.FAULT, "findings": ("/dev/shm is too small",)}
    story.see(m.GateSeen(node=Node("a"), **fault))
    assert story.verdicts() == (), "the other gate has not answered yet"
    story.see(m.GateSeen(node=Node("b"), **fault))
    verdict = story.verdict()
    assert verdict.kind is Kind.AMBIGUOUS and not verdict.convicts and verdict.stops


def test_what_was_everybodys_trouble_stays_that_however_old_it_is():
    story = Story("abcdef").train(through=12)
    for node in "abcd":
        story.xid(node, 79)
    assert [type(a) for a in story.react()] == [LeaveIt]
    story.later(500).xid("f", 31)
    assert not any(v.convicts for v in story.later(5).verdicts())
    story.xid("a", 95)
    assert [v.node for v in story.verdicts() if v.convicts] == ["a"], "what is its own still counts"


def test_exit_0_before_the_target_is_not_finished():
    story = Story().train(through=12)
    for rank in range(4):
        story.exit(rank, code=0)
    from outlast.reliability.attempt import Event

    story.move(Event.RANKS_FINISHED).move(Event.NODES_CLEAR)
    assert story.verdict().rule == "ended_early"


def test_a_bad_checkpoint_is_set_aside_and_nobody_is_blamed():
    story = Story()
    story.see(
        m.CheckpointSeen(at_s=0, train_step=30, verified=False, path="iter_0000030", why="__3_1.distcp: truncated")
    )
    (action,) = story.react()
    assert isinstance(action, RollBack) and action.quarantine == 30 and story.state.quarantined == (30,)


def test_megatrons_16_then_17_convicts_the_first_node():
    story = Story().train(through=12)
    story.exit(1, code=16, error_class="sdc_suspect")
    verdict = story.later(3).verdict()
    assert verdict.node == "a" and verdict.convicts and not verdict.drains
    story.react()
    story.end().train("cb", restore=12, through=12)
    story.exit(1, code=17, error_class="sdc_confirmed")
    verdict = story.later(3).verdict()
    assert verdict.node == "a" and verdict.drains


def test_megatrons_17_with_a_correct_result_is_the_programs_and_is_held():
    story = Story().train(through=12)
    story.exit(1, code=17, error_class="instability")
    verdict = story.later(3).verdict()
    assert verdict.hold and not verdict.convicts
