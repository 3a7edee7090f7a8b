"""The writer process behind a Saver: it outlives its rank, within bounds; memory is bounded; replicas go once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from outlast.checkpoint import reader
from outlast.checkpoint.blocks import BLOCK_BYTES
from outlast.checkpoint.commit import POINTS
from outlast.checkpoint.copying import Copier
from outlast.checkpoint.errors import SaveFailed
from outlast.checkpoint.image import Image
from outlast.checkpoint.points import KILL_AT
from outlast.checkpoint.stager import Stager
from outlast.checkpoint.staging import Budget
from outlast.checkpoint.store import Store
from outlast.checkpoint.verify import verify
from outlast.checkpoint.writer import Saver
from outlast.reliability.model import Layout

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

PATIENCE_S = 20.0


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def make_state(rank: int, world_size: int, value: float, elements: int = 1000) -> dict[str, Any]:
    own = torch.full((elements,), value + rank)
    both = torch.full((elements,), -value, dtype=torch.bfloat16)
    return {
        "own": ShardedTensor.from_rank_offsets("own", own, (0, rank, world_size)),
        "both": ShardedTensor.from_rank_offsets("both", both, replica_id=rank),
        "rng": ShardedObject("rng", {"value": value}, (world_size,), (rank,)),
    }


def save_args(train_step: int, world_size: int) -> dict[str, Any]:
    return {"train_step": train_step, "samples": train_step, "layout": Layout(dp=world_size)}


def load_own(rank: int, world_size: int, path: Path, elements: int = 1000) -> tuple[float, float, float]:
    got, _ = reader.load(make_state(rank, world_size, 0.0, elements), path)
    own, both = got["own"], got["both"]
    assert own.min() == own.max() and both.min() == both.max()
    return float(own[0]), float(both[0]), got["rng"]["value"]


def newest(root: Path) -> int:
    restore = Store(root).choose(quarantined=()).restore
    return -1 if restore is None else restore.train_step


def test_ranks_killed_after_the_copy_lose_nothing_and_leave_nothing(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"

    def body(rank: int) -> None:
        saver = Saver(root)
        saver.save(make_state(rank, 2, 7.0, 4_000_000), **save_args(10, 2))
        (tmp_path / f"writer{saver.writer_pid}").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)

    assert set(run_ranks(2, body).exits.values()) == {-signal.SIGKILL}
    wait_for(lambda: newest(root) == 10)
    writers = [int(path.name.removeprefix("writer")) for path in tmp_path.glob("writer*")]
    assert len(writers) == 2
    wait_for(lambda: not any(map(is_alive, writers)))
    got = run_ranks(2, lambda rank: load_own(rank, 2, root / "iter_0000010", 4_000_000))
    assert got.values == {0: (7.0, -7.0, 7.0), 1: (8.0, -7.0, 7.0)}


def test_a_rank_killed_before_its_copy_leaves_it_uncommitted(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"

    def body(rank: int) -> str:
        if rank == 1:
            os.environ[KILL_AT] = "save.copied"
        saver = Saver(root, budget=Budget(outlive_s=0.3))
        (tmp_path / f"writer{saver.writer_pid}").write_text("")
        saver.save(make_state(rank, 2, 7.0), **save_args(10, 2))
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    run_ranks(2, body)
    writers = [int(path.name.removeprefix("writer")) for path in tmp_path.glob("writer*")]
    wait_for(lambda: not any(map(is_alive, writers)))
    assert len(writers) == 2 and newest(root) == -1


def test_it_ends_with_the_process_that_started_the_rank(tmp_path: Path) -> None:
    """As an agent that is killed: nothing below it may stay, a save in flight or not."""
    said = tmp_path / "pids"
    agent = os.fork()
    if agent == 0:
        try:
            rank = os.fork()
            if rank == 0:
                os.environ[KILL_AT] = ""
                dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
                saver = Saver(tmp_path / "ckpt", reach=lambda point: time.sleep(60 if point == "write.half" else 0))
                saver.save(make_state(0, 1, 1.0), **save_args(10, 1))
                (tmp_path / "tmp").write_text(f"{os.getpid()} {saver.writer_pid}")
                (tmp_path / "tmp").rename(said)
            time.sleep(60)
        finally:
            os._exit(1)
    wait_for(said.exists)
    rank, writer = map(int, said.read_text().split())
    try:
        assert is_alive(writer)
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
        wait_for(lambda: not is_alive(writer))
    finally:
        for pid in (rank, writer):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_real_process_killed_at_points(run_ranks: Any, tmp_path: Path, victim: int) -> None:
    """test_saver.py does so at every point in a fork; here the process is the one that runs have."""
    root = tmp_path / "ckpt"
    points = (
        "write.half",
        "write.done",
        *(("commit.begin", "commit.marker_tmp", "commit.marker") if not victim else ()),
    )
    assert set(points) <= set(POINTS)

    def body(rank: int) -> list[tuple[str, int]]:
        told = []
        for step, point in enumerate(points, start=10):
            os.environ[KILL_AT] = point if rank == victim else ""
            saver = Saver(root, timeout_s=PATIENCE_S)
            with pytest.raises(SaveFailed) as e:
                saver.save(make_state(rank, 2, 1.0), **save_args(step, 2))
                saver.finish()
            told.append((str(e.value), newest(root)))
            saver.close()
            dist.barrier()
        return told

    for n, (words, found) in enumerate(run_ranks(2, body).value(0)):
        assert f"rank {victim}: the writer process was killed by SIGKILL" in words
        assert found == (10 + n if points[n] == "commit.marker" else -1), points[n]


def test_one_process_serves_all_saves_and_layouts_may_change(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"

    def body(rank: int) -> Any:
        saver = Saver(root)
        pids, got = set(), []
        for step, elements in enumerate((1000, 1000, 5000, 5000, 10, 200_000), start=1):
            state = make_state(rank, 2, float(step), elements)
            if step == 2:
                state["rng"].data["longer"] = "x" * 10_000  # an object that grows: places move, the plan stays
            saver.save(state, **save_args(step, 2))
            state["own"].data.fill_(-100.0)
            assert saver.finish() == step
            pids.add(saver.writer_pid)
            got.append(load_own(rank, 2, root / f"iter_{step:07d}", elements))
        saver.close()
        return len(pids), got, saver.counts.durable

    for rank, (processes, got, durable) in run_ranks(2, body).values.items():
        assert processes == 1 and durable == 6
        assert got == [(step + rank, -step, step) for step in map(float, range(1, 7))]


def test_a_copy_ahead_of_an_agreement_that_does_not_come_is_made_again(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's state looks as it did, and is copied before rank 1 says that its own does not."""
    root = tmp_path / "ckpt"
    copies: list[int] = []
    whole = Copier.copy_all
    monkeypatch.setattr(Copier, "copy_all", lambda self, image: (copies.append(1), whole(self, image)))

    def body(rank: int) -> Any:
        saver = Saver(root)
        counts, got = [], []
        for step in range(1, 5):
            state = make_state(rank, 2, float(step))
            if rank == 1 and step >= 3:
                state["rng"].data["longer"] = "x" * 100_000  # its own places move
            if rank == 1 and step == 4:
                state["more"] = ShardedTensor.from_rank_offsets("more", torch.ones(8))  # a plan of its own
            before = len(copies)
            saver.save(state, **save_args(step, 2))
            state["own"].data.fill_(-100.0)
            assert saver.finish() == step
            counts.append(len(copies) - before)
            got.append(load_own(rank, 2, root / f"iter_{step:07d}", 1000))
        saver.close()
        return counts, got

    values = run_ranks(2, body).values
    assert values[0][0] == [1, 1, 2, 2] and values[1][0] == [1, 1, 1, 1]
    for rank, (_, got) in values.items():
        assert got == [(step + rank, -step, step) for step in map(float, range(1, 5))]
    assert all(verify(root / f"iter_{step:07d}").train_step == step for step in range(1, 5))


def test_a_failed_save_has_a_new_process_for_the_next(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"

    def body(rank: int) -> Any:
        saver = Saver(root, on_failure="skip")
        if rank == 1:
            os.kill(saver.writer_pid, signal.SIGKILL)
            wait_for(lambda: not is_alive(saver.writer_pid))
        dist.barrier()
        saver.save(make_state(rank, 2, 1.0), **save_args(10, 2))
        first = saver.finish()
        saver.save(make_state(rank, 2, 2.0), **save_args(20, 2))
        return first, saver.finish(), saver.counts.failed

    values = run_ranks(2, body).values
    # one that died idle is replaced before it is needed
    assert values == {0: (10, 20, 0), 1: (10, 20, 0)}


@pytest.mark.parametrize("how", ["sync", "skip"])
def test_a_state_beyond_the_budget(run_ranks: Any, tmp_path: Path, how: str) -> None:
    root = tmp_path / "ckpt"

    def body(rank: int) -> Any:
        limit = 1_000_000 if rank == 1 else None
        saver = Saver(root, budget=Budget(limit_bytes=limit, when_short=how))
        saver.save(make_state(rank, 2, 5.0), **save_args(5, 2))
        assert saver.finish() == 5
        saver.save(make_state(rank, 2, 10.0, 1_000_000), **save_args(10, 2))
        done = saver.finish()
        return done, saver.counts.synchronous, saver.counts.skipped, saver.counts.why

    values = run_ranks(2, body).values
    if how == "skip":
        assert [value[:3] for value in values.values()] == [(None, 0, 1)] * 2
        assert "its budget is 1,000,000" in values[1][3] and "other ranks" in values[0][3] and newest(root) == 5
        return
    assert values[0] == (10, 0, 0, "") and values[1][:3] == (10, 1, 0) and "its budget is" in values[1][3]
    verify(root / "iter_0000010")
    got = run_ranks(2, lambda rank: load_own(rank, 2, root / "iter_0000010", 1_000_000))
    assert got.values == {0: (10.0, -10.0, 10.0), 1: (11.0, -10.0, 10.0)}


def test_a_save_while_one_is_in_flight_can_be_left_out(run_ranks: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def hold(point: str) -> None:
        while point == "write.begin" and not gate.exists():
            time.sleep(0.002)

    def body(rank: int) -> Any:
        saver = Saver(tmp_path / "ckpt", budget=Budget(when_busy="skip"), reach=hold)
        saver.save(make_state(rank, 1, 1.0), **save_args(1, 1))
        saver.save(make_state(rank, 1, 2.0), **save_args(2, 1))
        gate.write_text("")
        return saver.finish(), saver.counts.skipped, saver.counts.why

    assert run_ranks(1, body).value() == (1, 1, "train_step 1 was still in flight")


def test_an_overlapped_copy_is_of_the_state_before_the_next_step(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"

    def body(rank: int) -> Any:
        saver = Saver(root)
        needed = saver.prepare(make_state(rank, 2, 0.0, 4_000_000))
        state = make_state(rank, 2, 3.0, 4_000_000)
        live = [state["own"].data, state["both"].data]
        begun_s = saver.save(state, **save_args(10, 2), overlap=True)
        assert saver.poll() is None and saver.poll() is None, "not handed over yet"
        rest_s = saver.finish_copy()
        assert saver.finish_copy() == 0.0
        for tensor in live:
            tensor.fill_(-50.0)
        assert saver.finish() == 10
        return needed, begun_s, rest_s

    for needed, begun_s, rest_s in run_ranks(2, body).values.values():
        assert needed >= 4_000_000 * 4 and begun_s > 0 and rest_s > 0
    got = run_ranks(2, lambda rank: load_own(rank, 2, root / "iter_0000010", 4_000_000))
    assert got.values == {0: (3.0, -3.0, 3.0), 1: (4.0, -3.0, 3.0)}


def slow_copy(monkeypatch: pytest.MonkeyPatch, hold: Callable[[int], None]) -> None:
    """hold(bytes) is called whenever so much has been copied and announced."""
    copy = Copier.copy

    def copy_slowly(self: Copier, image: Image) -> Iterator[int]:
        for done in copy(self, image):
            yield done
            hold(done)

    monkeypatch.setattr(Copier, "copy", copy_slowly)


def test_what_is_copied_is_written_before_the_copy_is_whole(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = tmp_path / "ckpt" / "iter_0000010" / "__0_0.distcp"
    blocks = 3
    elements = blocks * BLOCK_BYTES // 4

    def first_block() -> bool:
        with suppress(FileNotFoundError), open(shard, "rb") as file:
            return any(file.read(BLOCK_BYTES)[BLOCK_BYTES // 2 :])
        return False

    def hold(done_bytes: int) -> None:
        if done_bytes > 2 * BLOCK_BYTES:
            wait_for(first_block)

    def body(rank: int) -> Any:
        saver = Saver(tmp_path / "ckpt")
        saver.prepare(make_state(rank, 1, 0.0, elements))
        slow_copy(monkeypatch, hold)
        saver.save(make_state(rank, 1, 3.0, elements), **save_args(10, 1), overlap=True)
        saver.finish_copy()
        return first_block(), saver.finish()

    assert run_ranks(1, body).value() == (True, 10)
    verify(tmp_path / "ckpt" / "iter_0000010")


def test_a_rank_killed_in_its_copy_ends_its_writer_and_commits_nothing(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "ckpt"
    elements = 3 * BLOCK_BYTES // 4

    def hold(done_bytes: int) -> None:
        if done_bytes > 2 * BLOCK_BYTES:
            os.kill(os.getpid(), signal.SIGKILL)

    def body(rank: int) -> None:
        saver = Saver(root, budget=Budget(outlive_s=60.0))
        (tmp_path / f"writer{saver.writer_pid}").write_text("")
        slow_copy(monkeypatch, hold)
        saver.save(make_state(rank, 1, 3.0, elements), **save_args(10, 1), overlap=True)
        time.sleep(60)

    assert run_ranks(1, body).exits == {0: -signal.SIGKILL}
    (writer,) = (int(path.name.removeprefix("writer")) for path in tmp_path.glob("writer*"))
    wait_for(lambda: not is_alive(writer))
    assert newest(root) == -1 and not list(root.rglob("COMMITTED"))


def test_a_save_that_is_closed_in_its_copy_lets_go(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int) -> Any:
        saver = Saver(tmp_path / "ckpt")
        elements = 3 * BLOCK_BYTES // 4
        slow_copy(monkeypatch, lambda done_bytes: time.sleep(0.05))
        saver.save(make_state(rank, 1, 3.0, elements), **save_args(10, 1), overlap=True)
        saver.close()
        return saver.in_flight, newest(tmp_path / "ckpt")

    assert run_ranks(1, body).value() == (None, -1)


def test_a_rank_that_cannot_begin_its_copy_fails_the_save_on_all_in_the_same_poll(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "ckpt"

    def no_room(self: Stager, size_bytes: int) -> Copier:
        raise OSError(12, "Cannot allocate memory")

    def body(rank: int) -> Any:
        saver = Saver(root, on_failure="skip")
        elements = 3 * BLOCK_BYTES // 4
        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(Stager, "make_room", no_room)
            saver.save(make_state(rank, 2, 3.0, elements), **save_args(10, 2), overlap=True)
        said = saver.overlaps, saver.poll(), saver.poll(), saver.in_flight
        saver.finish_copy()
        first = saver.finish()
        saver.save(make_state(rank, 2, 4.0, elements), **save_args(20, 2), overlap=True)
        return said, first, "Cannot allocate memory" in saver.last_failure, saver.finish()

    assert run_ranks(2, body).values == dict.fromkeys((0, 1), ((True, None, None, 10), None, True, 20))
    assert newest(root) == 20


def test_replicas_are_written_once_and_evenly(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"

    def body(rank: int) -> Any:
        state: dict[str, Any] = {
            f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", torch.full((100_000,), float(n)), replica_id=rank)
            for n in range(8)
        }
        saver = Saver(root)
        for step in (1, 2):
            saver.save(dict(state), **save_args(step, 4))
            assert saver.finish() == step

    run_ranks(4, body).value()
    for step in (1, 2):
        sizes = [path.stat().st_size for path in sorted((root / f"iter_{step:07d}").glob("*.distcp"))]
        assert len(sizes) == 4 and max(sizes) - min(sizes) < 1000 and sum(sizes) < 8 * 402_000

    plain = _load_state_dict_from_keys(storage_reader=FileSystemReader(root / "iter_0000002"))
    assert all(torch.equal(plain[f"w{n}"], torch.full((100_000,), float(n))) for n in range(8))
