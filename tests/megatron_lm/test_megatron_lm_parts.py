"""The parts that are put around Megatron-LM, one by one."""

from __future__ import annotations

import os
import signal
import time
import types
from pathlib import Path

import pytest

from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.store import Store
from outlast.launchers import (
    after_import,
    megatron_lm,
    megatron_lm_commit,
    megatron_lm_end,
    megatron_lm_rerun,
    megatron_lm_saves,
    megatron_lm_steps,
    recorder,
)
from outlast.launchers.megatron_lm_names import FAULT_TOLERANCE, MegatronLmRefused, check
from outlast.reliability.model import Layout


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A checkpoint as Megatron-LM leaves it."""
    directory = tmp_path / "iter_0000004"
    directory.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json"):
        (directory / name).write_bytes(name.encode() * 1000)
    (directory / ".metadata").write_bytes(b"\x80\x04 __0_0.distcp \x94 __1_0.distcp \x94")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    return directory


def save(directory: Path) -> megatron_lm_commit.Save:
    manifest = Manifest(schema=1, train_step=4, samples=32, layout=Layout(dp=2), files={})
    return megatron_lm_commit.Save(directory=directory, manifest=manifest)


def test_a_committed_save_is_one_that_the_store_believes(written: Path) -> None:
    store = Store(written.parent)
    assert store.choose(quarantined=()).restore is None
    megatron_lm_commit.commit_files(save(written))
    found = store.choose(quarantined=()).restore
    assert found is not None and (found.train_step, found.samples) == (4, 32)
    (written / "__1_0.distcp").write_bytes(b"__1_0.dIstcp" * 1000)
    assert Store(written.parent).choose(quarantined=()).restore is None


@pytest.mark.parametrize("name", ["__1_0.distcp", "common.pt", ".metadata"])
def test_a_save_that_lacks_a_file_is_not_committed(written: Path, name: str) -> None:
    (written / name).unlink()
    with pytest.raises(CheckpointError, match="not there after"):
        megatron_lm_commit.commit_files(save(written), shown_s=0.1)
    assert Store(written.parent).durable_steps() == ()


@pytest.mark.parametrize(("before", "after"), [(None, "4"), ("3", "4"), ("8", "8")])
def test_the_tracker_is_waited_for_and_then_written(written: Path, before: str | None, after: str) -> None:
    tracker = written.parent / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    if before:
        tracker.write_text(before)
    megatron_lm_commit.commit_files(save(written), tracker_s=0.05)
    assert tracker.read_text().strip() == after


def test_a_failed_commit_says_so_and_training_hears_of_nothing(
    written: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (written / "COMMITTED" / "in_the_way").mkdir(parents=True)
    durable: list[int] = []
    megatron_lm_commit.start(save(written), durable.append).join(10)
    assert durable == [] and "is not committed and will not be restored" in capfd.readouterr().err


def test_a_module_that_lacks_a_name_is_refused_with_what_it_has() -> None:
    module = types.ModuleType(FAULT_TOLERANCE)
    module.__dict__.update(on_training_step_begin=print, on_training_step_end=print)
    with pytest.raises(MegatronLmRefused, match=r"on_training_step_start \(found .*on_training_step_begin"):
        check(module)


def test_a_refusal_ends_the_rank_with_exit_code_2_and_tells_its_exception(capfd: pytest.CaptureFixture[str]) -> None:
    def hook(_module: types.ModuleType) -> None:
        raise MegatronLmRefused("nothing fits", module="megatron.training.training")

    with pytest.raises(SystemExit) as ended:
        megatron_lm._or_refuse(hook)(types.ModuleType("a_module_of_theirs"))
    assert after_import._finder().hooks.pop("a_module_of_theirs"), "it is refused again where it is imported again"
    assert ended.value.code == 2
    assert "MegatronLmRefused: megatron.training.training: nothing fits" in capfd.readouterr().err


def test_a_restore_under_another_name_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aside = tmp_path / "aside" / "iter_0000030.2"
    aside.mkdir(parents=True)
    monkeypatch.setenv("OUTLAST_RESTORE_DIR", str(aside))
    monkeypatch.setenv("OUTLAST_RESTORE_STEP", "30")
    argv = ["pretrain_gpt.py", "--load", str(aside.parent), "--ckpt-step", "30"]
    megatron_lm.place_restore(argv)
    assert (Path(argv[2]) / "iter_0000030").resolve() == aside
    assert (Path(argv[2]) / "latest_checkpointed_iteration.txt").read_text() == "30"


def test_a_restore_under_its_own_name_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_RESTORE_DIR", str(tmp_path / "iter_0000030"))
    monkeypatch.setenv("OUTLAST_RESTORE_STEP", "30")
    argv = ["pretrain_gpt.py", "--load", str(tmp_path)]
    megatron_lm.place_restore(argv)
    assert argv[2] == str(tmp_path)


def test_a_load_that_found_nothing_or_something_else_is_a_checkpoint_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_RESTORE_STEP", "30")

    def ends() -> None:
        raise SystemExit

    for call in (ends, lambda: (0, 0), lambda: (20, 0)):
        with pytest.raises(CheckpointError, match="train_step 30"):
            megatron_lm_steps._checked_load(call)()
    assert megatron_lm_steps._checked_load(lambda: (30, 7))() == (30, 7)


def test_the_wish_to_stop_becomes_their_signal_only_where_somebody_listens() -> None:
    heard: list[int] = []
    megatron_lm_steps.raise_their_signal(types.SimpleNamespace(exit_signal=signal.SIGUSR2))  # default: would end us
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: heard.append(number))
    try:
        megatron_lm_steps.raise_their_signal(types.SimpleNamespace(exit_signal=signal.SIGUSR2))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == [signal.SIGUSR2]


class Told(recorder.Unrecorded):
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float | None, float | None, int, int]] = []
        self.calls: list[str] = []

    def phase(self, name: str) -> None:
        self.calls.append(name)

    def step_closed(self, save_s: float = 0.0) -> None:
        self.calls.append(f"closed {save_s > 0}")

    def step_done(self, train_step: int, **what: object) -> None:  # type: ignore[override]
        names = ("loss", "grad_norm", "samples_from", "samples_to")
        self.steps.append((train_step, *(what[name] for name in names)))  # type: ignore[arg-type]
        self.calls.append(f"done {train_step}")


def test_a_step_is_told_once_and_a_rerun_that_ends_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(recorder, "current", lambda: told)
    args = types.SimpleNamespace(curr_iteration=6, consumed_train_samples=48, micro_batch_size=2, data_parallel_size=2)
    training = types.ModuleType("training")
    training.__dict__.update(get_args=lambda: args, get_num_microbatches=lambda: 2)
    steps = megatron_lm_steps.Steps(training)
    steps.begin()
    steps.take(({"lm loss": 4.5}, 0, False, False, 0, 1.25, None, 0))
    steps.tell()
    steps.tell()
    args.curr_iteration, args.consumed_train_samples = 7, 56
    steps.begin()
    steps.take(({}, True, True, True, 16, None, None, 0))
    steps.tell()
    assert told.steps == [(7, 4.5, 1.25, 48, 56)]


def test_a_step_is_told_before_it_is_evaluated_and_saved_and_closed_after(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(recorder, "current", lambda: told)
    args = types.SimpleNamespace(curr_iteration=0, consumed_train_samples=0, micro_batch_size=2, data_parallel_size=2)
    training, fault_tolerance = types.ModuleType("training"), types.ModuleType("fault_tolerance")
    training.__dict__.update(
        get_args=lambda: args,
        get_num_microbatches=lambda: 2,
        train_step=lambda: ({"lm loss": 4.5}, 0, False, False, 0, 1.25, None, 0),
        evaluate_and_print_results=lambda: None,
        save_checkpoint=lambda: time.sleep(0.001),
        save_checkpoint_and_time=lambda: training.save_checkpoint(),
        checkpoint_and_decide_exit=lambda saves: training.save_checkpoint_and_time() if saves else None,
        load_checkpoint=lambda: None,
        train=lambda: None,
    )
    fault_tolerance.__dict__.update(on_training_step_start=lambda: None, on_training_step_end=lambda: None)
    megatron_lm_steps.hook(training, fault_tolerance)
    for args.curr_iteration, saves in enumerate((False, True)):
        fault_tolerance.on_training_step_start()
        training.train_step()
        fault_tolerance.on_training_step_end()
        training.evaluate_and_print_results()
        training.checkpoint_and_decide_exit(saves)
    plain = ["eval", "train"]
    assert told.calls == [
        *("done 1", *plain, "closed False"),
        *("done 2", *plain, "save", "save", "train", "train", "closed True"),
    ]


def test_a_skipped_step_is_told_without_a_norm_and_odd_results_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(recorder, "current", lambda: told)
    steps = megatron_lm_steps.Steps(types.ModuleType("training"), train_step=3)
    steps.take(({"lm loss": 4.5}, 1, False, False, 0, None, None, 0))
    steps.tell()
    steps.take(None)
    steps.take(())
    steps.begin()  # this "training" has no get_args
    assert [(step, loss, norm) for step, loss, norm, _, _ in told.steps] == [(3, 4.5, None)]


class Machine:
    def validate_state_dict(self, state_dict: dict[str, object] | None) -> bool:
        return state_dict is not None


def test_a_rerun_is_restored_only_as_a_question_without_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_RESTORE_DIR", str(tmp_path))
    rerun = types.ModuleType("rerun")
    rerun.__dict__.update(
        RerunStateMachine=type("One", (Machine,), {}),
        RerunState=types.SimpleNamespace(WILL_RERUN_FROM_CHECKPOINT="asks"),
    )
    megatron_lm_rerun.hook(rerun)
    machine = rerun.RerunStateMachine()
    assert machine.validate_state_dict({"state": "asks"})
    assert not machine.validate_state_dict(None)
    assert not machine.validate_state_dict({"state": "in place"})
    megatron_lm_rerun.note_answer(({}, True, False, True, 16, None))
    assert machine.validate_state_dict({"state": "asks"})
    megatron_lm_rerun.note_answer(({}, True, False, True, 17, None))
    assert not machine.validate_state_dict({"state": "asks"})


def test_only_megatron_sees_the_node_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", os.uname)
    monkeypatch.setenv("OUTLAST_NODE", "b")
    true = os.uname()
    megatron_lm_rerun.bear_node_name()
    inside: dict[str, object] = {"__name__": "megatron.core.rerun_state_machine", "os": os}
    exec("node = os.uname()[1]", inside)
    assert inside["node"] == "b" and os.uname() == true


@pytest.mark.slow
def test_no_save_begins_once_the_attempt_ends(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os.environ[recorder.STOP_FILE_ENV] = str(tmp_path / "stop")
        args = types.SimpleNamespace(save=str(tmp_path))
        training = types.ModuleType("training")
        training.__dict__.update(get_args=lambda: args)
        megatron_lm_saves.Saves(training).begin(4, persistent=False)  # none was told yet: returns
        (tmp_path / "end").touch()
        megatron_lm_saves.Saves(training).begin(4, persistent=False)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == megatron_lm_end.ENDED


@pytest.mark.slow
def test_the_end_file_ends_a_rank_that_waits_and_all_of_its_group(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.environ[recorder.STOP_FILE_ENV] = str(tmp_path / "stop")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        megatron_lm_end.watch()
        signal.pause()
        os._exit(0)
    (tmp_path / "end").touch()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
