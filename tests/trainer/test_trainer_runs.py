"""Real ranks training: exact restores, reshards, samples once, stops on request. Ranks are forked, not started."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outlast.launchers.trainer_pace import Pace

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

TP2 = ("--tp", "2")


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of 6 train_steps on tp 2 x dp 2, saved after 3 and 6."""

    result: Any
    checkpoints: Path
    samples: Path

    @property
    def restore(self) -> tuple[str, str]:
        return "--restore-dir", str(self.checkpoints / "iter_0000003")


@pytest.fixture(scope="module")
def reference(fork_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.mktemp("reference")
    result = fork_ranks(
        *TP2, "--save-every", "3", "--checkpoint-dir", str(root / "ck"), ranks=4,
        env={"OUTLAST_SAMPLE_LOG": str(root / "samples")},
    )  # fmt: skip
    return Reference(result.checked(), root / "ck", root / "samples")


def relative_difference(losses: dict[int, float], reference: dict[int, float]) -> float:
    return max(abs(losses[step] - reference[step]) / reference[step] for step in losses)


def test_it_learns_and_tells_its_recorder(reference: Reference) -> None:
    last = reference.result.ranks[-1]
    assert list(reference.result.losses) == [1, 2, 3, 4, 5, 6]
    assert reference.result.losses[6] < reference.result.losses[1] - 0.3
    phases = [r["phase"] for r in last.records if "phase" in r]
    assert phases == ["compile", "train", "save", "train", "save", "train", "save", "idle"]
    assert [r["durable"] for r in last.records if "durable" in r] == [3, 6]
    third = next(r for r in last.records if r.get("train_step") == 3)
    assert (third["samples_from"], third["samples_to"], third["tokens"]) == (16, 24, 8 * 16)
    assert third["grad_norm"] > 0.0
    assert [rank.losses[3] for rank in reference.result.ranks] == [third["loss"]] * 4


def test_a_step_is_told_before_its_save_begins_and_closed_after_it(reference: Reference) -> None:
    for rank in reference.result.ranks:
        records = [{k: v for k, v in r.items() if k != "at_s"} for r in rank.records]
        told = [i for i, r in enumerate(records) if "train_step" in r]
        assert [records[i]["closed"] for i in told] == [True, True, False, True, True, False]
        for i in (told[2], told[5]):
            save, closed, train = records[i + 1 : i + 4]
            assert (save, train) == ({"phase": "save"}, {"phase": "train"}) and closed["closed_s"] > 0.0


def test_two_runs_are_bit_identical_and_saving_changes_nothing(fork_ranks: Any, reference: Reference) -> None:
    again = fork_ranks(*TP2, ranks=4).checked()
    assert again.losses == reference.result.losses
    assert again.digests == reference.result.digests


def test_a_restore_into_the_same_layout_is_bit_identical(fork_ranks: Any, reference: Reference) -> None:
    restored = fork_ranks(*TP2, *reference.restore, ranks=4).checked()
    assert restored.losses == {step: reference.result.losses[step] for step in (4, 5, 6)}
    assert restored.digests == reference.result.digests


def test_a_copy_beside_the_training_is_of_the_state_before_it_and_changes_nothing(
    fork_ranks: Any, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outlast.checkpoint import drafting

    monkeypatch.setattr(drafting, "OVERLAP_FROM_BYTES", 0)  # as a large state is saved
    saved = fork_ranks(*TP2, "--save-every", "2", "--checkpoint-dir", str(tmp_path), ranks=4).checked()
    assert saved.losses == reference.result.losses
    assert saved.digests == reference.result.digests
    assert [r["durable"] for r in saved.ranks[-1].records if "durable" in r] == [2, 4, 6]
    restored = fork_ranks(*TP2, "--restore-dir", str(tmp_path / "iter_0000004"), ranks=4).checked()
    assert "tensors as saved" in restored.ranks[-1].output
    assert restored.digests == reference.result.digests


@pytest.mark.parametrize(
    ("layout", "ranks"), [(TP2, 2), (("--pp", "2"), 2), (("--micro-batch", "2"), 4), ((), 1)], ids=str
)
def test_a_restore_into_another_layout_is_the_same_but_for_rounding(
    fork_ranks: Any, reference: Reference, layout: tuple[str, ...], ranks: int
) -> None:
    restored = fork_ranks(*layout, *reference.restore, ranks=ranks).checked()
    assert list(restored.losses) == [4, 5, 6]
    assert relative_difference(restored.losses, reference.result.losses) < 1e-5


def test_samples_are_consumed_once_and_in_order_over_a_shrink(
    fork_ranks: Any, reference: Reference, tmp_path: Path
) -> None:
    fork_ranks(*TP2, *reference.restore, ranks=2, env={"OUTLAST_SAMPLE_LOG": str(tmp_path)}).checked()
    lines = [
        json.loads(line)
        for folder, steps in ((reference.samples, (1, 2, 3)), (tmp_path, (4, 5, 6)))
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
        if json.loads(line)["train_step"] in steps
    ]
    assert len(lines) == 3 * 2 + 3 * 1  # dp 2, then dp 1
    for step in range(1, 7):
        read = sorted(s for line in lines if line["train_step"] == step for s in line["samples"])
        assert read == list(range((step - 1) * 8, step * 8))
    rows = [row for line in lines for row in line["rows"]]
    assert len(set(rows)) == len(rows) == 48


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (("--pp", "2"), 2),
        (("--experts", "4", "--ep", "2"), 2),
        (("--experts", "4", "--ep", "2", "--tp", "2"), 2),
        (("--overlap",), 2),
        (("--dropout", "0.1", "--tp", "2"), 2),
    ],
    ids=str,
)
def test_every_kind_of_layout_restores_exactly(
    fork_ranks: Any, tmp_path: Path, layout: tuple[str, ...], ranks: int
) -> None:
    whole = fork_ranks(*layout, "--save-every", "3", "--checkpoint-dir", str(tmp_path), ranks=ranks).checked()
    assert whole.losses[6] < whole.losses[1]
    restored = fork_ranks(*layout, "--restore-dir", str(tmp_path / "iter_0000003"), ranks=ranks).checked()
    assert restored.losses == {step: whole.losses[step] for step in (4, 5, 6)}
    assert restored.digests == whole.digests


def test_overlap_does_not_change_what_is_learnt(fork_ranks: Any) -> None:
    plain, overlapped = (fork_ranks(*flags, ranks=2).checked() for flags in ((), ("--overlap",)))
    assert relative_difference(overlapped.losses, plain.losses) < 1e-5


@pytest.mark.parametrize(("change", "word"), [(("--seed", "7"), "seed is 1234"), (("--hidden", "64"), "hidden is 32")])
def test_another_runs_checkpoint_is_refused(
    fork_ranks: Any, reference: Reference, change: tuple[str, ...], word: str
) -> None:
    refused = fork_ranks(*change, *reference.restore, ranks=1)
    assert refused.codes == [1]
    assert f"{word} in the checkpoint" in refused.ranks[0].output


def has_ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for_step(pids: dict[int, int], folder: Path, rank: int, train_step: int) -> None:
    deadline_s = time.monotonic() + 30
    path = folder / f"{rank}.jsonl"
    while not (path.exists() and f'"train_step": {train_step},' in path.read_text()):
        output = (folder / f"{rank}.out").read_text() if (folder / f"{rank}.out").exists() else ""
        assert not has_ended(pids[rank]), output
        assert time.monotonic() < deadline_s, f"rank {rank} never finished train_step {train_step}: {output}"
        time.sleep(0.01)


def on_step(train_step: int, act: Callable[[dict[int, int]], object]) -> Callable[[dict[int, int], Path], None]:
    def watch(pids: dict[int, int], folder: Path) -> None:
        wait_for_step(pids, folder, 0, train_step)
        act(pids)

    return watch


def test_asked_to_stop_it_saves_and_ends_well(fork_ranks: Any, tmp_path: Path) -> None:
    stop, saved = tmp_path / "stop", tmp_path / "ck"
    stopped = fork_ranks(
        "--train-steps", "4000", "--checkpoint-dir", str(saved), ranks=2, env={"OUTLAST_STOP_FILE": str(stop)},
        while_running=on_step(2, lambda _pids: stop.touch()),
    ).checked()  # fmt: skip
    last = max(stopped.losses)
    assert 2 <= last < 4000
    assert (saved / f"iter_{last:07d}" / "COMMITTED").exists()
    assert [r["durable"] for r in stopped.ranks[0].records if "durable" in r] == [last]


def test_term_ends_it_at_once_by_default(fork_ranks: Any) -> None:
    ended = fork_ranks("--train-steps", "4000", while_running=on_step(2, lambda pids: os.kill(pids[0], signal.SIGTERM)))
    assert ended.codes == [-signal.SIGTERM]


def test_term_to_any_rank_saves_first_where_asked(fork_ranks: Any, tmp_path: Path) -> None:
    stopped = fork_ranks(
        "--train-steps", "4000", "--save-on-term", "--checkpoint-dir", str(tmp_path), ranks=2,
        while_running=on_step(2, lambda pids: os.kill(pids[1], signal.SIGTERM)),
    ).checked()  # fmt: skip
    assert (tmp_path / f"iter_{max(stopped.losses):07d}" / "COMMITTED").exists()


def fault(text: str) -> dict[str, str]:
    return {"OUTLAST_FAULT": text}


def test_faults_strike_the_rank_and_train_step_that_they_name(fork_ranks: Any, tmp_path: Path) -> None:
    marker = tmp_path / "struck"
    text = f"exception:rank=1:train_step=3:once={marker}"
    struck = fork_ranks(ranks=2, env=fault(text))
    assert struck.codes[1] == 1
    assert "InjectedFault: injected before train_step 3" in struck.ranks[1].output
    assert max(struck.losses) == 2
    assert max(fork_ranks(ranks=2, env=fault(text)).checked().losses) == 6

    assert fork_ranks(env=fault("exit:17:rank=0:train_step=2")).codes == [17]
    assert fork_ranks(env=fault("sigkill:rank=0:train_step=2")).codes == [-signal.SIGKILL]
    flooded = fork_ranks("--train-steps", "2", env=fault("flood:rank=0:train_step=2:megabytes=2")).checked()
    assert len(flooded.ranks[0].output) > 1_900_000


@pytest.mark.parametrize("kind", ["sigstop", "loop"])
def test_a_stopped_or_spinning_rank_holds_the_others_up(fork_ranks: Any, kind: str) -> None:
    seen: dict[str, str] = {}

    def look(pids: dict[int, int], folder: Path) -> None:
        wait_for_step(pids, folder, 0, 2)
        deadline_s = time.monotonic() + 20
        while '"started": 3' not in (folder / "1.jsonl").read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        while kind == "sigstop" and seen.get("state") != "T":
            assert time.monotonic() < deadline_s
            seen["state"] = Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0]
        seen["step"] = str('"train_step": 3,' in (folder / "0.jsonl").read_text())
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)

    held = fork_ranks(ranks=2, env=fault(f"{kind}:rank=1:train_step=3"), while_running=look)
    assert held.codes == [-signal.SIGKILL] * 2
    assert seen["step"] == "False"


def test_ranks_with_different_texts_are_refused(fork_ranks: Any, tmp_path: Path) -> None:
    def read_elsewhere() -> None:
        from outlast.launchers import trainer_data

        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / "a.py").write_text("another text\n" * 99)
        real = trainer_data.open_corpus
        if os.environ["RANK"] == "1":
            trainer_data.open_corpus = lambda _dir, **how: real(  # type: ignore[assignment]
                tmp_path, **{**how, "source": tmp_path / "source"}
            )

    refused = fork_ranks(ranks=2, before=read_elsewhere)
    assert refused.codes == [1, 1]
    assert "share one --data-dir" in refused.ranks[0].output


def test_a_loss_that_is_not_a_number_ends_the_run(fork_ranks: Any) -> None:
    diverged = fork_ranks("--lr", "1e30")
    assert diverged.codes == [1]
    assert "FloatingPointError: train_step" in diverged.ranks[0].output


def test_it_saves_as_often_as_the_supervisor_asks_while_it_trains(fork_ranks: Any, tmp_path: Path) -> None:
    asked, stop, saved = tmp_path / "run" / "attempts" / "0007" / "save_every", tmp_path / "stop", tmp_path / "ck"
    asked.parent.mkdir(parents=True)

    def ask_and_stop(_pids: dict[int, int]) -> None:
        (tmp_path / "part").write_text("3\n")
        (tmp_path / "part").rename(asked)
        deadline_s = time.monotonic() + 60
        while len(list(saved.glob("iter_*/COMMITTED"))) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        stop.touch()

    run = fork_ranks(
        "--train-steps", "9000", "--save-every", "8000", "--save-follows", "--checkpoint-dir", str(saved), ranks=2,
        env={"OUTLAST_RUN_DIR": str(tmp_path / "run"), "OUTLAST_ATTEMPT": "7", "OUTLAST_STOP_FILE": str(stop)},
        while_running=on_step(2, ask_and_stop),
    ).checked()  # fmt: skip
    durable = [r["durable"] for r in run.ranks[0].records if "durable" in r]
    assert len(durable) >= 3 and all(step % 3 == 0 for step in durable[:-1]), durable
    assert "a save every 3 train_steps from now on, it was 8000" in run.ranks[1].output


def test_junk_in_that_file_changes_nothing(tmp_path: Path) -> None:
    clock = iter(range(0, 1000, 10))
    pace = Pace(tmp_path / "save_every", mono_s=lambda: float(next(clock)))
    assert pace.look() == 0
    for text, wanted in (("12\n", 12), ("-3", 0), ("", 0), ("1e9", 0), ("9" * 30, 0), ("7", 7)):
        (tmp_path / "save_every").write_text(text)
        assert pace.look() == wanted, text
