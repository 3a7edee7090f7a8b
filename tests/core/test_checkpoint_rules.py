"""Which checkpoint a run goes back to, told as stories: refused, not as saved, followed by the same death, spoiled."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from outlast.reliability.actions import Advise, Hold, RollBack, Swap
from outlast.reliability.verdict import Kind

_spec = importlib.util.spec_from_file_location("core_story", Path(__file__).with_name("story.py"))
assert _spec and _spec.loader
_module = sys.modules.setdefault("core_story", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(_module)
Story = _module.Story

NOT_AS_SAVED = "NotAsSaved: checkpoint iter_0000020: after the restore 2 of 40 tensors are not as they were saved"


def refused(nodes: str, restore: int, exception: str, story=None):
    """An attempt whose rank 1 cannot use the checkpoint."""
    story = story or Story("abcd").train("ab", through=30).durable(10).durable(20).durable(30).end()
    story.plan(nodes, restore)
    story.move(_module.Event.GATE_ASKED).move(_module.Event.GATE_PASSED).move(_module.Event.LOAD_BEGUN)
    story.exit(1, exception=exception, phase="load")
    return story.later(3)


def test_values_that_are_not_as_saved_are_the_checkpoints_fault_and_no_nodes() -> None:
    story = refused("ab", 30, NOT_AS_SAVED)
    verdict = story.verdict()
    assert (verdict.kind, verdict.rule, verdict.node) == (Kind.CHECKPOINT_UNUSABLE, "not_as_saved", None)
    assert (verdict.quarantine, verdict.convicts, verdict.hold) == (30, False, False)
    (action,) = story.react()
    assert action == RollBack(quarantine=30, why=verdict.because)
    assert story.state.evidence.durable_step == 20, "what is set aside does not count any more"


def test_two_in_a_row_are_how_they_are_read_and_no_third_is_spent() -> None:
    story = refused("ab", 30, NOT_AS_SAVED)
    story.react()
    story.end()
    story = refused("cd", 20, NOT_AS_SAVED, story)
    verdict = story.verdict()
    assert (verdict.kind, verdict.rule, verdict.hold) == (Kind.SOFTWARE_FAULT, "not_as_saved_again", True)
    assert verdict.quarantine == -1 and "as that of 30 before it" in verdict.because
    assert [type(a) for a in story.react()] == [Hold]


@pytest.mark.parametrize(
    "exception",
    ["NotWhole: checkpoint iter_0000030: __1_0.distcp: 3 bytes", "outlast.checkpoint.errors.CheckpointError: x"],
)
def test_what_a_rank_refuses_to_load_is_set_aside(exception: str) -> None:
    verdict = refused("ab", 30, exception).verdict()
    assert (verdict.rule, verdict.quarantine, verdict.convicts) == ("load_refused", 30, False)


def test_the_same_words_outside_of_a_load_blame_the_program() -> None:
    story = Story().train(restore=0, through=30)
    story.exit(1, exception="CheckpointError: disk full", phase="train")
    assert story.later(3).verdict().kind is Kind.APP_FAULT


def died(story, nodes: str, posix_signal: int, rank: int = 1):
    story.train(nodes, restore=20, through=21)
    story.exit(rank, posix_signal=posix_signal)
    return story.later(3)


def test_the_same_death_after_the_same_load_on_other_nodes_sets_the_checkpoint_aside() -> None:
    story = Story("abcd").train("ab", through=20).durable(20).end()
    assert died(story, "ab", 11).verdict().kind is Kind.TRANSIENT
    story.react()
    verdict = died(story.end(), "cd", 11).verdict()
    assert (verdict.rule, verdict.quarantine) == ("same_failure_after_same_restore", 20)
    assert "POSIX signal 11" in verdict.because and verdict.node is None


@pytest.mark.parametrize(("nodes", "posix_signal"), [("ab", 11), ("cd", 9)])
def test_on_the_same_node_or_by_a_signal_of_anybodys_it_says_nothing_of_the_checkpoint(nodes, posix_signal) -> None:
    story = Story("abcd").train("ab", through=20).durable(20).end()
    died(story, "ab", posix_signal).react()
    assert died(story.end(), nodes, posix_signal).verdict().quarantine == -1


def test_errors_that_were_not_contained_spoil_what_was_saved_since_the_first_suspicion() -> None:
    story = Story().train("ab", through=15).durable(10)
    story.xid("a", 63)  # the first word: rows are being remapped
    story.later(60).react()
    story.steps(30).durable(20).later(60).durable(30)
    story.later(60).xid("a", 95)
    verdict = story.verdict()
    assert verdict.convicts and (verdict.quarantine, verdict.quarantine_too) == (30, (20,))
    assert "set aside: 20, 30" in verdict.because
    back = story.react()[-1]
    assert isinstance(back, RollBack) and (back.quarantine, back.too) == (30, (20,))
    assert story.state.quarantined == (30, 20) and story.state.evidence.durable_step == 10


def test_without_an_earlier_suspicion_what_was_saved_before_the_line_stays() -> None:
    story = Story().train("ab", through=30).durable(20).durable(30)
    story.xid("a", 95)
    assert story.verdict().quarantine == -1
    assert [type(a) for a in story.react()] == [Advise, Swap]


def test_a_checkpoint_of_other_nodes_is_not_doubted() -> None:
    story = Story("abc").train("ab", through=15).durable(10)
    story.xid("c", 63)
    story.later(60).react()
    story.steps(30).durable(20)
    story.xid("c", 95)
    assert story.verdict().quarantine == -1, "c had no hand in it"


def test_other_faults_of_hardware_spoil_nothing() -> None:
    story = Story().train("ab", through=15).durable(10)
    story.xid("a", 63)
    story.later(60).react()
    story.steps(30).durable(20)
    story.xid("a", 79)
    assert story.verdict().quarantine == -1


def test_wrong_numbers_that_are_confirmed_spoil_what_was_saved_since_the_first_suspicion() -> None:
    story = Story("abcd").train("ab", through=15).durable(10)
    story.xid("a", 63)
    story.later(60).react()
    story.steps(20).durable(20)
    story.exit(0, 16, error_class="sdc_suspect")
    story.later(3).react()
    story.end().train("cd", restore=20, through=20)
    story.exit(1, 17, error_class="sdc_confirmed")
    verdict = story.later(3).verdict()
    assert (verdict.rule, verdict.node, verdict.quarantine) == ("rerun_differs", "a", 20)
    story.react()
    assert story.state.evidence.durable_step == 10
