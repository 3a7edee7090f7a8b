"""Saving with real ranks: what is committed verifies, loads without us and into other sizes; nothing else counts."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from outlast.checkpoint import reader
from outlast.checkpoint.commit import POINTS
from outlast.checkpoint.errors import CheckpointError, NotWhole, SaveFailed
from outlast.checkpoint.points import KILL_AT, RANK_POINTS
from outlast.checkpoint.staging import Budget
from outlast.checkpoint.store import Store
from outlast.checkpoint.verify import verify
from outlast.checkpoint.writer import Saver
from outlast.reliability.model import Layout

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

ROWS, COLUMNS = 12, 5


def whole(value: float) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + value


def make_state(rank: int, world_size: int, value: float) -> dict[str, Any]:
    """Rows of one matrix sharded over ranks, a view into a larger buffer, a replicated vector, an object a rank."""
    rows = ROWS // world_size
    buffer = torch.zeros(4096, COLUMNS)
    buffer[:rows] = whole(value)[rank * rows : (rank + 1) * rows]
    return {
        "model": {
            "w": ShardedTensor.from_rank_offsets("w", buffer[:rows], (0, rank, world_size)),
            "b": ShardedTensor.from_rank_offsets("b", torch.full((3,), value, dtype=torch.bfloat16), replica_id=rank),
        },
        "rng": ShardedObject("rng", {"rank": rank, "value": value}, (world_size,), (rank,)),
        "samples": int(value),
    }


def save_args(train_step: int, world_size: int) -> dict[str, Any]:
    return {"train_step": train_step, "samples": 8 * train_step, "layout": Layout(dp=world_size)}


def poll_until_durable(saver: Saver, timeout_s: float = 30.0) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (durable := saver.poll()) is not None:
            return durable
        time.sleep(0.002)
    raise AssertionError("not durable in time")


def test_a_save_is_a_snapshot_and_loads_without_us_and_into_another_size(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"

    def save(rank: int) -> Any:
        seen = []
        saver = Saver(root, on_durable=lambda *said: seen.append(said))
        state = make_state(rank, 2, 100.0)
        live = [state["model"]["w"].data, state["model"]["b"].data]
        hold_s = saver.save(state, **save_args(10, 2))
        for tensor in live:
            tensor.fill_(-1.0)  # training goes on in place
        assert saver.in_flight == 10
        assert poll_until_durable(saver) == 10
        assert saver.in_flight is None and saver.poll() is None
        saver.close()
        return hold_s, seen

    for hold_s, ((train_step, said_hold_s, durable_s),) in run_ranks(2, save).values.values():
        assert train_step == 10 and said_hold_s == hold_s and 0 < hold_s < durable_s
    choice = Store(root).choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 10 and choice.restore.samples == 80

    shards = list(Path(choice.restore.path).glob("*.distcp"))
    assert len(shards) == 2 and sum(path.stat().st_size for path in shards) < 40_000, "views, not their whole buffers"

    def load_three(rank: int) -> Any:
        template = make_state(rank, 3, 0.0)
        del template["rng"]
        got, manifest = reader.load(template, choice.restore.path)
        assert torch.equal(got["model"]["w"], whole(100.0)[rank * 4 : rank * 4 + 4])
        assert manifest.layout == Layout(dp=2) and manifest.data_frontier.consumed == 80
        return got["model"]["b"].tolist()

    def load_same(rank: int) -> Any:
        got, _ = reader.load(make_state(rank, 2, 0.0), choice.restore.path)
        return got["rng"]

    def load_plain_one(rank: int) -> Any:
        template = make_state(rank, 1, 0.0)
        del template["rng"]
        got = dist_checkpointing.load(template, choice.restore.path)
        assert torch.equal(got["model"]["w"], whole(100.0)) and got["samples"] == 100
        return got["model"]["b"].tolist()

    assert run_ranks(1, load_plain_one).value() == [100.0] * 3
    assert run_ranks(3, load_three).value(2) == [100.0] * 3
    assert run_ranks(2, load_same).values == {r: {"rank": r, "value": 100.0} for r in (0, 1)}


def chosen(root: Path) -> int:
    restore = Store(root).choose(quarantined=()).restore
    if restore is None:
        return -1
    verify(Path(restore.path))
    return restore.train_step


def save_and_finish(root: Path, rank: int, train_step: int, **options: Any) -> int | None:
    saver = Saver(root, timeout_s=20.0, **options)
    try:
        saver.save(make_state(rank, 2, float(train_step)), **save_args(train_step, 2))
        return saver.finish()
    finally:
        saver.close()


def killer(point: str, victim: int = 0, rank: int = 0) -> Any:
    def reach(passed: str) -> None:
        if passed == point and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    return reach


def test_a_second_save_finishes_the_first_and_old_ones_go(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"

    def body(rank: int) -> list[int]:
        said: list[int] = []
        saver = Saver(root, keep_last=2, on_durable=lambda step, hold_s, durable_s: said.append(step))
        for step in (10, 20, 30, 40):
            saver.save(make_state(rank, 2, float(step)), **save_args(step, 2))
        assert said == [10, 20, 30] and saver.in_flight == 40
        assert saver.finish() == 40 and saver.finish() is None
        deadline = time.monotonic() + 20
        while rank == 0 and Store(root).durable_steps() != (30, 40) and time.monotonic() < deadline:
            time.sleep(0.01)
        saver.close()
        saver.close()
        return said

    assert run_ranks(2, body).values == {0: [10, 20, 30, 40], 1: [10, 20, 30, 40]}
    assert Store(root).durable_steps() == (30, 40)
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "40\n"


def test_the_same_train_step_again_costs_nothing_when_it_dies(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    assert run_ranks(2, lambda rank: save_and_finish(root, rank, 10)).values == {0: 10, 1: 10}
    first = (root / "iter_0000010" / "manifest.json").read_bytes()

    def dies(rank: int) -> None:
        with pytest.raises(SaveFailed):
            save_and_finish(root, rank, 10, reach=killer("commit.manifest_tmp"))

    run_ranks(2, dies).value()
    assert chosen(root) == 10
    assert (root / "aside" / "iter_0000010" / "manifest.json").read_bytes() == first
    assert run_ranks(2, lambda rank: save_and_finish(root, rank, 10)).values == {0: 10, 1: 10}
    assert (root / "iter_0000010" / "manifest.json").read_bytes() != first and chosen(root) == 10


@pytest.mark.parametrize("victim", [0, 1])
def test_a_writer_killed_at_each_point_never_leaves_a_lie(run_ranks: Any, tmp_path: Path, victim: int) -> None:
    root = tmp_path / "ckpt"
    points = POINTS if victim == 0 else tuple(p for p in POINTS if p.startswith("write."))

    def body(rank: int) -> list[tuple[str, str, int]]:
        assert save_and_finish(root, rank, 5) == 5
        told = []
        for step, point in enumerate(points, start=10):
            words = ""
            try:
                save_and_finish(root, rank, step, reach=killer(point, victim, rank))
            except SaveFailed as e:
                words = str(e)
            told.append((point, words, chosen(root)))
            dist.barrier()
            if rank == 0 and chosen(root) == step:
                Store(root).quarantine(step, "so that the next point starts from the same place")
            dist.barrier()
        return told

    ranks = run_ranks(2, body)
    assert ranks.value(0) == ranks.value(1), "both ranks were told the same"
    for step, (point, words, found) in enumerate(ranks.value(0), start=10):
        assert f"rank {victim}: the writer process was killed by SIGKILL" in words, point
        promised = point in ("commit.marker", "commit.durable", "commit.tracker")
        assert found == (step if promised else 5), point


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", RANK_POINTS)
def test_a_rank_killed_around_a_save(run_ranks: Any, tmp_path: Path, point: str, victim: int) -> None:
    root = tmp_path / "ckpt"

    def body(rank: int) -> str:
        assert save_and_finish(root, rank, 5) == 5
        if rank == victim:
            os.environ[KILL_AT] = point
        try:
            save_and_finish(root, rank, 10)
        except (CheckpointError, RuntimeError) as e:
            return f"{type(e).__name__}: {e}"
        return ""

    ranks = run_ranks(2, body)
    assert ranks.exits[victim] == -signal.SIGKILL
    assert ranks.value(1 - victim), "the other rank was told"
    assert chosen(root) in ((5, 10) if point == "save.handed_over" else (5,))


def test_a_stopped_writer_is_given_up_in_bounded_time(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"

    def stop(passed: str) -> None:
        if passed == "write.half":
            os.kill(os.getpid(), signal.SIGSTOP)

    def body(rank: int) -> str:
        saver = Saver(root, reach=stop if rank == 1 else None)
        stopped = saver.writer_pid
        saver.save(make_state(rank, 2, 10.0), **save_args(10, 2))
        began_s = time.monotonic()
        with pytest.raises(SaveFailed) as e:
            saver.finish(timeout_s=0.3 if rank == 0 else 0.8)  # who has waited less tells its part too
        assert time.monotonic() - began_s < 5.0
        assert not is_alive(stopped), "the stopped writer is gone"
        assert saver.writer_pid != stopped and is_alive(saver.writer_pid), "there is a new one"
        saver.close()
        return str(e.value)

    ranks = run_ranks(2, body)
    assert "rank 1: writing was not done" in ranks.value(0) and "writer process stuck?" in ranks.value(1)
    assert chosen(root) == -1


def test_term_to_the_whole_group_leaves_it_uncommitted_and_nothing_behind(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    run_ranks(2, lambda rank: save_and_finish(root, rank, 5)).value()

    def slow(passed: str) -> None:
        if passed == "write.half":
            (tmp_path / f"writer{os.getpid()}").write_text("")
            time.sleep(60)

    def body(rank: int) -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        saver = Saver(root, reach=slow, budget=Budget(outlive_s=0.2))
        saver.save(make_state(rank, 2, 10.0), **save_args(10, 2))
        deadline = time.monotonic() + 20
        while len(list(tmp_path.glob("writer*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(0, signal.SIGTERM)
        time.sleep(20)

    assert set(run_ranks(2, body).exits.values()) == {-signal.SIGTERM}
    writers = [int(path.name.removeprefix("writer")) for path in tmp_path.glob("writer*")]
    assert len(writers) == 2
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in writers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_alive(pid) for pid in writers)
    assert chosen(root) == 5


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tensors_in_shared_memory_are_snapshots_too(run_ranks: Any, tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        gate = tmp_path / "gate"

        def hold(passed: str) -> None:
            while passed == "write.begin" and not gate.exists():
                time.sleep(0.002)

        saver = Saver(tmp_path / "ckpt", reach=hold)
        tensor = torch.full((6, 2), 1.0).share_memory_()
        saver.save({"w": ShardedTensor.from_rank_offsets("w", tensor)}, **save_args(10, 1))
        tensor.fill_(-1.0)
        gate.write_text("")
        assert saver.finish() == 10
        template = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6, 2))}
        return reader.load(template, tmp_path / "ckpt" / "iter_0000010")[0]["w"].tolist()

    assert run_ranks(1, body).value() == [[1.0, 1.0]] * 6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """1 MiB that is really full when it is full. Needs the right to mount (root)."""
    place = tmp_path / "disk"
    place.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(argv, check=False, capture_output=True, timeout=10).returncode:
        pytest.skip("no right to mount a small tmpfs; test_a_file_size_limit covers the same path")
    yield place
    subprocess.run(["umount", str(place)], check=True, timeout=10)


def occupy(place: Path) -> None:
    with open(place / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            return


@pytest.mark.parametrize("filled", ["by_the_shards", "before_the_commit", "wholly"])
def test_a_full_disk_costs_only_the_save_that_met_it(run_ranks: Any, small_disk: Path, filled: str) -> None:
    root = small_disk / "ckpt"

    def fill(passed: str) -> None:
        if (
            filled == "before_the_commit"
            and passed == "commit.index"
            and not (root / "iter_0000005/COMMITTED").exists()
        ):
            return
        if filled == "before_the_commit" and passed == "commit.index" and not (small_disk / "enough").exists():
            occupy(small_disk)

    def body(rank: int) -> Any:
        saver = Saver(root, on_failure="skip", timeout_s=20.0, reach=fill)
        saver.save(make_state(rank, 2, 5.0), **save_args(5, 2))
        assert saver.finish() == 5 and saver.last_failure == ""
        state = make_state(rank, 2, 10.0)
        if filled == "by_the_shards":
            state["big"] = ShardedTensor.from_rank_offsets("big", torch.zeros(200_000), (0, rank, 2))
        if filled == "wholly" and rank == 0:
            occupy(small_disk)
        dist.barrier()
        assert saver.save(state, **save_args(10, 2)) > 0
        assert saver.finish() is None
        words, found = saver.last_failure, chosen(root)
        dist.barrier()
        if rank == 0:
            (small_disk / "filler").unlink(missing_ok=True)
            (small_disk / "enough").write_text("")
            for path in (root / "iter_0000010").glob("*.distcp"):
                path.unlink()
        dist.barrier()
        saver.save(make_state(rank, 2, 20.0), **save_args(20, 2))
        assert saver.finish() == 20 and saver.last_failure == ""
        return words, found

    ranks = run_ranks(2, body)
    words, found = ranks.value(0)
    assert ranks.value(1) == (words, found)
    assert found == 5 and "was not saved" in words and "older ones are untouched" in words
    assert "No space left on device" in words
    assert chosen(root) == 20


def test_a_file_size_limit(run_ranks: Any, tmp_path: Path) -> None:
    """What a quota gives: an error in the middle of a write, on one rank only."""
    root = tmp_path / "ckpt"

    def body(rank: int) -> str:
        assert save_and_finish(root, rank, 5) == 5
        saver = Saver(root)
        state = make_state(rank, 2, 10.0)
        if rank == 1:
            resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        state["big"] = ShardedTensor.from_rank_offsets("big", torch.zeros(100_000), (0, rank, 2))
        with pytest.raises(SaveFailed) as e:
            saver.save(state, **save_args(10, 2))
            saver.finish()
        return str(e.value)

    ranks = run_ranks(2, body)
    assert ranks.value(0) == ranks.value(1) and "rank 1: OSError: [Errno 27] File too large" in ranks.value(0)
    assert chosen(root) == 5


def damage_shard(directory: Path) -> None:
    shard = directory / "__1_0.distcp"
    raw = bytearray(shard.read_bytes())
    raw[raw.index(torch.tensor([135.0]).numpy().tobytes())] ^= 1  # in an element of w, past all headers
    shard.write_bytes(raw)


def uncommit(directory: Path) -> None:
    (directory / "COMMITTED").unlink()


class Evil:
    """Unpickling it leaves a trace."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


def poison(directory: Path) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(Evil()))
    torch.save(Evil(), directory / "common.pt")


@pytest.mark.parametrize(
    ("damage", "words"),
    [(damage_shard, "__1_0.distcp: xxh3_128"), (uncommit, "no COMMITTED"), (poison, "shard index .metadata:")],
)
def test_what_is_not_whole_is_refused_on_every_rank(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "ckpt"
    run_ranks(2, lambda rank: save_and_finish(root, rank, 100)).value()
    damage(root / "iter_0000100")

    def body(rank: int) -> str:
        with pytest.raises(NotWhole) as e:
            reader.load(make_state(rank, 2, 0.0), root / "iter_0000100")
        if damage is not damage_shard:
            with pytest.raises(NotWhole):
                reader.load_common(root / "iter_0000100")
        return str(e.value)

    ranks = run_ranks(2, body)
    assert words in ranks.value(0) and ranks.value(0) == ranks.value(1)
    assert not (tmp_path / "unpickled").exists()
    assert chosen(root) == -1


def test_plain_megatron_takes_the_flipped_bit_silently(run_ranks: Any, tmp_path: Path) -> None:
    """Why there is a manifest at all. Should this fail one day, upstream has learned to look."""
    root = tmp_path / "ckpt"
    run_ranks(2, lambda rank: save_and_finish(root, rank, 100)).value()
    damage_shard(root / "iter_0000100")

    def body(rank: int) -> bool:
        got = dist_checkpointing.load(make_state(rank, 2, 0.0), str(root / "iter_0000100"))
        return torch.equal(got["model"]["w"], whole(100.0)[rank * 6 : rank * 6 + 6])

    assert run_ranks(2, body).values == {0: True, 1: False}


def test_what_the_manifest_says(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    run_ranks(2, lambda rank: save_and_finish(root, rank, 10)).value()
    said = json.loads((root / "iter_0000010" / "manifest.json").read_bytes())
    assert sorted(said["files"]) == [".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json"]
    assert (said["train_step"], said["samples"], said["layout"]) == (10, 80, {"dp": 2})
    assert said["made_by"].startswith("outlast ") and abs(said["made_at_s"] - time.time()) < 600
    there = sorted(path.name for path in (root / "iter_0000010").iterdir())
    assert there == sorted([*said["files"], "manifest.json", "COMMITTED"]), "no temporary file stays"

    def body(rank: int) -> Any:
        common, manifest = reader.load_common(root / "iter_0000010")
        return common["samples"], manifest.train_step

    assert run_ranks(1, body).value() == (10, 10)


def test_wrong_use_is_told(run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> None:
        with pytest.raises(CheckpointError, match="on_failure: 'maybe'"):
            Saver(tmp_path, on_failure="maybe")
        with pytest.raises(CheckpointError, match="verify: 'never'"):
            reader.load({}, tmp_path, verify="never")
        monkeypatch.setenv(KILL_AT, "nowhere")
        with pytest.raises(CheckpointError, match="no point 'nowhere'"):
            Saver(tmp_path)
        monkeypatch.delenv(KILL_AT)
        (tmp_path / "file").write_text("")
        saver = Saver(tmp_path / "file" / "ckpt")
        with pytest.raises(SaveFailed, match=r"cannot make .*Not a directory"):
            saver.save(make_state(rank, 1, 1.0), **save_args(1, 1))
        assert saver.in_flight is None

    run_ranks(1, body).value()
    with pytest.raises(CheckpointError, match="no process group"):
        Saver(tmp_path)
