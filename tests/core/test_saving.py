"""When a run saves: how often by what its log has shown, and last calls before an end or a change of nodes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import msgspec
import pytest

from outlast.reliability import model as m
from outlast.reliability.interval import optimal_interval_s
from outlast.reliability.model import JobId, Node
from outlast.reliability.ports import Allocation
from outlast.reliability.saves_seen import SAVE_FIRST
from outlast.reliability.saving import GUESS_DURABLE_S, HINT_WAIT_S, NODE_FAILURE_EACH_S, last_call, next_interval
from outlast.reliability.saving import too_late_s as too_late

_spec = importlib.util.spec_from_file_location("core_story", Path(__file__).with_name("story.py"))
assert _spec and _spec.loader
_module = sys.modules.setdefault("core_story", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(_module)
Story, run_file = _module.Story, _module.run_file


def auto(kind: str = "reference", **checkpoint: float):
    checkpoint = {"every_max_s": 1e6, **checkpoint}
    run = run_file()
    task = msgspec.structs.replace(run.task, kind=kind)
    saving = msgspec.structs.replace(run.checkpoint, **{"auto": True, "every_steps": 50, **checkpoint})
    return msgspec.structs.replace(run, task=task, checkpoint=saving)


def saved(story, train_step: int, hold_s: float, durable_s: float = 2.0) -> None:
    story.see(
        m.CheckpointSeen(
            at_s=story.now_s,
            train_step=train_step,
            verified=True,
            path=f"iter_{train_step}",
            hold_s=hold_s,
            durable_s=durable_s,
        )
    )


def failed(story) -> None:
    story.exit(1, posix_signal=9)
    story.later(3).react()
    story.end()


def test_without_auto_or_before_anything_was_seen_the_run_files_number_stands() -> None:
    story = Story(run=auto())
    assert next_interval(story.state.evidence, story.run) == (0, "")
    story.train(through=20)
    assert next_interval(story.state.evidence, run_file()) == (0, "")
    assert next_interval(story.state.evidence, auto(kind="plain")) == (0, "")


def test_the_interval_is_the_optimum_of_what_was_seen() -> None:
    story = Story(run=auto())
    story.train(through=20)
    for step in (5, 10, 15):
        saved(story, step, hold_s=2.0)
    steps, because = next_interval(story.state.evidence, story.run)
    between_s = NODE_FAILURE_EACH_S / 2  # two nodes, and nothing has failed yet
    assert steps == pytest.approx(optimal_interval_s(2.0, between_s) / 0.3, rel=0.01)
    assert "a save costs 2.00 s" in because and "a train_step takes 0.3 s" in because


def test_failures_make_it_shorter_and_dear_saves_longer() -> None:
    calm, rough, dear = Story(run=auto()), Story(run=auto()), Story(run=auto())
    for story, hold_s in ((calm, 1.0), (rough, 1.0), (dear, 20.0)):
        story.train(through=20)
        saved(story, 10, hold_s)
    for _ in range(5):
        failed(rough)
        rough.train(restore=10, through=20)
    assert rough.state.evidence.saving.failures == 5
    often, usual, seldom = (next_interval(s.state.evidence, s.run)[0] for s in (rough, calm, dear))
    assert often < usual < seldom


def test_the_attempt_that_has_just_failed_counts_already() -> None:
    story = Story(run=auto())
    story.train(through=20)
    saved(story, 10, 1.0)
    before = next_interval(story.state.evidence, story.run)[0]
    failed(story)
    after = next_interval(story.state.evidence, story.run)[0]
    assert after < before
    story.plan(restore=10)
    assert story.state.evidence.saving.failures == 1


def test_a_change_at_a_checkpoint_and_a_finish_are_no_failures() -> None:
    story = Story(run=auto())
    story.train(through=20).end("checkpoint 20 is durable: nodes change now")
    story.train(restore=20, through=30).end(f"{SAVE_FIRST}: the allocation ends")
    story.train(restore=30, through=60)
    for rank in range(4):
        story.exit(rank, 0)
    story.end().plan()
    assert story.state.evidence.saving.failures == 0


def test_the_users_bounds_hold() -> None:
    story = Story(run=auto(every_max_s=30.0))
    story.train(through=20)
    steps, because = next_interval(story.state.evidence, story.run)
    assert steps == 100 and "bounded from above" in because
    steps, because = next_interval(story.state.evidence, auto(every_min_s=30_000.0))
    assert steps == 100_000 and "bounded from below" in because


def ending(story, in_s: float) -> tuple[Allocation, ...]:
    nodes = tuple(Node(n) for n in "abc")
    return (Allocation(job=JobId("1"), nodes=nodes, state="RUNNING", ends_at_s=story.now_s + in_s),)


def call(story, in_s: float | None = None) -> str:
    allocations = story.site.allocations if in_s is None else ending(story, in_s)
    return last_call(story.state, story.run, allocations, story.now_s)


def test_the_last_save_before_an_allocation_ends() -> None:
    story = Story(run=auto(end_margin_s=60.0))
    story.train(through=20)
    saved(story, 10, 1.0, durable_s=30.0)
    assert call(story) == "" and call(story, 3600) == "" and call(story, 91) == ""
    why = call(story, 89)
    assert why.startswith(f"{SAVE_FIRST}: the allocation ends: 89 s to the deadline; a save takes 30.0 s")
    # what is saved already needs no other one
    saved(story, 20, 1.0)
    assert call(story, 89) == ""


def test_a_save_whose_time_is_not_known_yet_is_begun_early_and_0_asks_for_none() -> None:
    story = Story(run=auto())
    story.train(through=20)
    margin_s = story.run.checkpoint.end_margin_s
    assert call(story, GUESS_DURABLE_S + margin_s - 1) and not call(story, GUESS_DURABLE_S + margin_s + 1)
    story.run = auto(end_margin_s=0.0)
    assert not call(story, 1.0)


@pytest.mark.parametrize("kind", ["plain", "reference"])
def test_only_programs_that_save_on_request_are_asked(kind: str) -> None:
    story = Story(run=auto(kind=kind))
    story.train(through=20)
    assert bool(call(story, 5)) == (kind == "reference")


def test_a_node_that_will_be_taken_out_is_not_waited_for_for_long() -> None:
    story = Story(run=auto())
    story.train(through=20).durable(10)
    assert call(story) == ""
    story.see(m.NodeState(node=Node("a"), at_s=0, state="mixed", flags=("drain",), reason="DIMM swap"))
    story.react()
    assert story.later(HINT_WAIT_S - 1).state.at_checkpoint_from == 10 and call(story) == ""
    assert call(story.later(1)) == f"{SAVE_FIRST}: a will be taken out, and no checkpoint came within 30 s"
    assert call(story.durable(20)) == "", "that one is taken"


def test_no_attempt_is_begun_that_could_not_save() -> None:
    story = Story(run=auto())
    assert too_late(story.state, story.run, ending(story, 10), story.now_s) is None, "the first one is always tried"
    story.train(through=20)
    saved(story, 20, 1.0, durable_s=10.0)
    story.end(f"{SAVE_FIRST}: the allocation ends")
    assert too_late(story.state, story.run, ending(story, 60), story.now_s) == 60
    assert too_late(story.state, story.run, ending(story, 600), story.now_s) is None
    assert too_late(story.state, story.run, story.site.allocations, story.now_s) is None
