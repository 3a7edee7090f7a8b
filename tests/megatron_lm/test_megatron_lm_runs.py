"""Megatron-LM's own pretrain_gpt.py, unmodified, through what may befall it: the result is the undisturbed run's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.prints import read_prints
from outlast.reliability.verdict import Kind


def ends_like(found: Any, reference: Any, steps: int = 16) -> None:
    """Same losses, to the last bit, and the same weights, optimizer and generators in the last checkpoint."""
    assert found.exit_code == 0, found.said()
    assert found.losses == {step: reference.losses[step] for step in range(1, steps + 1)}, found.said()
    assert found.weights(steps) == reference.weights(steps)


def rules(found: Any) -> list[str]:
    return [incident.verdict.rule for incident in found.view.incidents]


def test_an_undisturbed_run_is_recorded_step_by_step_and_its_saves_are_committed(reference: Any) -> None:
    assert reference.exit_code == 0, reference.said()
    assert sorted(reference.losses) == list(range(1, 17)) and len(set(reference.losses.values())) == 16
    assert [(s.samples_from, s.samples_to) for s in reference.view.steps] == [(8 * i, 8 * i + 8) for i in range(16)]
    assert all(s.grad_norm for s in reference.view.steps)
    assert [s.train_step for s in reference.view.steps if s.save_s > 0] == [4, 8, 12, 16]
    assert set(reference.weights(4)) == set(reference.weights(16)) and reference.weights(4) != reference.weights(16)
    assert rules(reference) == []


@pytest.mark.parametrize("train_step", [4, 16])
def test_every_save_has_fingerprints_of_weights_and_moments(reference: Any, train_step: int) -> None:
    prints = read_prints(Path(reference.checkpoint_dir) / f"iter_{train_step:07d}")
    assert prints is not None and prints.train_step == train_step and prints.left_out == {}
    weights = {label for label in prints.tensors if ":" not in label}
    moments = {f"{label}:{key}" for label in weights for key in ("exp_avg", "exp_avg_sq", "step")}
    assert len(weights) >= 5 and prints.tensors.keys() == weights | moments


STEP = [
    "on_checkpointing_start",
    "maybe_finalize_async_save",
    "on_checkpointing_end",
    "on_training_step_start",
    "train_step",
    "on_training_step_end",
    "training_log",
    "post_training_step_callbacks",
    "checkpoint_and_decide_exit",
]
SAVE = ["save_checkpoint_and_time", "save_checkpoint", "on_checkpointing_start", "on_checkpointing_end"]


def test_functions_are_called_in_the_order_that_the_hooks_count_on(reference: Any) -> None:
    first, last = reference.calls(1, 0), reference.calls(1, 1)
    block = ["train", *STEP * 4, *SAVE]
    assert first[: len(block)] == block
    assert last[: len(block) + 1] == [*block[:-1], "on_save_checkpoint_success", block[-1]]


STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\]"
PRINTED_BY_RANK_0 = (
    rf"^{STAMP} saving checkpoint at iteration {{7}}4 to \S+ in torch_dist format$",
    rf"^  {STAMP} successfully saved checkpoint from iteration {{7}}4 to \S+ \[ t 1/1, p 1/1 \]$",
    r"^\[after training is done\] datetime: ",
)
PRINTED_BY_THE_LAST = (
    rf"^ {STAMP} iteration {{7}}12/ {{6}}16 \| consumed samples: {{11}}96 \|"
    r" elapsed time per iteration \(ms\): [\d.]+ \|.* learning rate: \d\.\d{6}E-\d\d \|"
    r" global batch size: {5}8 \| lm loss: \d\.\d{6}E\+00 \|"
    r" loss scale: 1\.0 \| grad norm: \d+\.\d{3} \|"
    r" number of skipped iterations:   0 \| number of nan iterations:   0 \|$",
)
PRINTED_ON_RESTORE = (
    r"^ loading distributed checkpoint from \S+ at iteration 4$",
    r"^  successfully loaded checkpoint from \S+ \[ t 1/1, p 1/1 \] at iteration 4$",
)


def test_lines_are_those_that_people_and_tools_read(reference: Any) -> None:
    for rank, lines in enumerate((PRINTED_BY_RANK_0, PRINTED_BY_THE_LAST)):
        for line in lines:
            assert re.search(line, reference.log(1, rank), re.M), line
            assert not re.search(line, reference.log(1, 1 - rank), re.M), line


def test_a_killed_rank_costs_a_restart_in_place(runs: Any, reference: Any) -> None:
    found = runs("killed", fault="kill:rank=1:step=7")
    ends_like(found, reference)
    for line in PRINTED_ON_RESTORE:
        assert re.search(line, found.log(2, 0), re.M), line
    assert found.calls(2, 0)[:3] == ["load_checkpoint", "on_checkpoint_loaded", "train"]
    assert re.search(r"^outlast: restored iter_0000004: \d+ tensors as saved$", found.log(2, 0), re.M)
    assert rules(found) == ["unexplained_death"] and found.restored == [0, 4]
    assert found.nodes == [("a", "b"), ("a", "b")]


def test_a_restore_that_gives_one_wrong_bit_is_not_trained_on(runs: Any, reference: Any) -> None:
    found = runs("flipped", fault="flip:rank=1:step=7")
    for rank in (0, 1):
        assert re.search(
            r"NotAsSaved: checkpoint iter_0000004: after the restore 1 of \d+ tensors", found.log(2, rank)
        ), found.said()
    assert {e.exit_code for e in found.exits if e.attempt == 2} != {0}
    ends_like(found, reference)


def test_a_node_is_swapped_after_an_xid_and_nothing_is_saved_on_its_way_out(runs: Any, reference: Any) -> None:
    found = runs("xid", fault="xid:rank=0:step=7", spares=1)
    ends_like(found, reference)
    assert [v.verdict.node for v in found.view.incidents] == ["a"]
    assert "a" not in found.nodes[1] and len(found.nodes) == 2
    assert all(e.exit_code != 0 for e in found.exits if e.attempt == 1), "SIGTERM alone would have brought a save"
    assert found.restored[1] % 4 == 0, "a convicted node's memory was saved"


def test_stop_saves_at_the_step_that_was_asked_in_and_another_run_goes_on(
    runs: Any, reference: Any, tmp_path: Any
) -> None:
    place = str(tmp_path / "checkpoints")
    stopped = runs("stopped", fault="hold:rank=1:step=7", checkpoint_dir=place, stop_after=6)
    assert stopped.exit_code == 0 and stopped.view.state == "stopped", stopped.said()
    assert max(stopped.losses) == 7 and {e.exit_code for e in stopped.exits} == {0}, stopped.said()
    after = runs("goes-on", checkpoint_dir=place)
    assert after.restored == [7], after.said()
    assert after.exit_code == 0
    assert stopped.losses | after.losses == reference.losses
    assert after.weights() == reference.weights()


def test_sigterm_before_a_deadline_saves_and_the_run_goes_on_from_there(runs: Any, reference: Any) -> None:
    found = runs("term", fault="term:rank=1:step=7")
    ends_like(found, reference)
    assert found.restored == [0, 7] and rules(found) == [], found.said()


def test_a_suspicious_result_is_repeated_on_another_node_and_the_first_one_is_blamed(runs: Any, reference: Any) -> None:
    found = runs("rerun", fault="persistent:rank=0:step=7", spares=1)
    ends_like(found, reference)
    assert rules(found) == ["rerun_elsewhere", "rerun_differs"], found.said()
    assert [i.verdict.node for i in found.view.incidents] == ["a", "a"]
    assert found.restored == [0, 6, 6] and all("a" not in nodes for nodes in found.nodes[1:])
    by_attempt = [{e.exit_code for e in found.exits if e.attempt == attempt} for attempt in (1, 2, 3)]
    assert by_attempt == [{16}, {17}, {0}]
    told = {(e.attempt, e.error_class) for e in found.exits if e.error_class}
    assert told == {(1, "sdc_suspect"), (2, "sdc_confirmed")}


def test_a_result_that_two_nodes_agree_on_holds_the_run(runs: Any) -> None:
    found = runs("agreed", fault="correct:rank=0:step=7", spares=1)
    assert rules(found)[:2] == ["rerun_elsewhere", "rerun_same_everywhere"], found.said()
    assert found.view.incidents[1].verdict.kind is Kind.DATA_OR_OPTIMIZER
    assert found.exit_code != 0 and found.view.incidents[1].verdict.node is None


@pytest.mark.megatron_lm
def test_an_asynchronous_save_is_committed_when_it_is_final_and_restored_exactly(
    real_tree: Any, tmp_path_factory: Any, make_runs: Any
) -> None:
    runs = make_runs(real_tree, tmp_path_factory.mktemp("async"))
    asked = {"async_save": True, "use_persistent_ckpt_worker": True}
    found, undisturbed = runs("async", fault="kill:rank=1:step=11", params=asked), runs("sync")
    ends_like(found, undisturbed)
    assert "scheduled an async checkpoint save at iteration" in found.log(1, 0)
    assert found.restored[1] in (4, 8)


@pytest.mark.megatron_lm
def test_a_version_that_lacks_a_name_is_refused_by_name(real_tree: Any, tmp_path: Any, make_runs: Any) -> None:
    """A copy of the tree with one function renamed, as a later version might have it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for path in real_tree.iterdir():
        if path.name != "megatron":
            (tree / path.name).symlink_to(path)
    shutil.copytree(real_tree / "megatron", tree / "megatron")
    module = tree / "megatron" / "training" / "training.py"
    module.write_text(module.read_text().replace("checkpoint_and_decide_exit(", "save_and_decide_exit("))
    found = make_runs(tree, tmp_path)("refused")
    assert found.exit_code == 1 and {e.exit_code for e in found.exits} == {2}, found.said()
    assert "names that outlast hooks are gone: checkpoint_and_decide_exit (found save_and_decide_exit" in found.log(
        1, 0
    )
    assert rules(found)[-1] == "same_failure_again", found.said()
