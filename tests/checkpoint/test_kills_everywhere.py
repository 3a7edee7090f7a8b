"""SIGKILL of the real writer process at every point, and of the agent while a save stands at every point.

test_saver.py kills ranks at each of theirs, and forked writers at each of theirs. Whoever is killed wherever: what
was committed before stays, what is committed is whole, nothing is left running, and the next attempt saves again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.commit import POINTS
from outlast.checkpoint.points import KILL_AT, RANK_POINTS
from outlast.checkpoint.store import Store
from outlast.checkpoint.verify import verify
from outlast.reliability.model import Layout

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

PROMISED = ("commit.marker", "commit.durable", "commit.tracker")
"""Past these the checkpoint is true, whatever becomes of those who wrote it."""
PATIENCE_S = 30.0
PR_SET_PDEATHSIG = 1


def make_state(rank: int, value: float) -> dict[str, Any]:
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor  # type: ignore[import-untyped]

    # large enough for the write past the page cache
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((300_000,), value + rank), (0, rank, 2))}


def save(saver: Any, rank: int, step: int) -> None:
    saver.save(make_state(rank, float(step)), train_step=step, samples=step, layout=Layout(dp=2))


def chosen(root: Path) -> int:
    restore = Store(root).choose(quarantined=()).restore
    if restore is None:
        return -1
    verify(Path(restore.path))
    return restore.train_step


def wait_for(what: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("victim", [0, 1])
def test_the_writer_process_killed_at_every_point(run_ranks: Any, tmp_path: Path, victim: int) -> None:
    points = POINTS if victim == 0 else tuple(p for p in POINTS if p.startswith("write."))

    def body(rank: int) -> list[tuple[str, str, int]]:
        import torch.distributed as dist

        from outlast.checkpoint.errors import SaveFailed
        from outlast.checkpoint.writer import Saver

        told = []
        for n, point in enumerate(points):
            root = tmp_path / f"{n}"
            os.environ[KILL_AT] = point if rank == victim else ""
            saver = Saver(root, timeout_s=PATIENCE_S)
            words = ""
            try:
                save(saver, rank, 10)
                saver.finish()
            except SaveFailed as e:
                words = str(e)
            saver.close()
            dist.barrier()
            os.environ[KILL_AT] = ""
            told.append((point, words, chosen(root)))
            dist.barrier()
            saver = Saver(root, timeout_s=PATIENCE_S)  # the next attempt
            save(saver, rank, 20)
            assert saver.finish() == 20
            saver.close()
        return told

    ranks = run_ranks(2, body, timeout_s=240.0)
    for point, words, found in ranks.value(0):
        assert f"rank {victim}: the writer process was killed by SIGKILL" in words, point
        assert found == (10 if point in PROMISED else -1), point
    assert len(ranks.value(0)) == len(points)


CASES = [(0, point) for point in RANK_POINTS + POINTS]
CASES += [(1, point) for point in RANK_POINTS + POINTS if not point.startswith("commit.")]
TELLING = {(0, "save.copied"), (1, "write.done"), (0, "commit.marker"), (0, "commit.durable")}
"""One of each kind runs always; the whole grid, a process tree for each point, in the long run."""


@pytest.mark.parametrize(
    ("victim", "point"), [pytest.param(*c, marks=() if c in TELLING else pytest.mark.long) for c in CASES]
)
def test_the_agent_killed_while_a_save_stands_at(run_ranks: Any, tmp_path: Path, victim: int, point: str) -> None:
    """The agent's ranks die with it by the kernel's hand, and the writers see to their own end."""
    root, pids = tmp_path / "ckpt", tmp_path / "pids"
    pids.mkdir()
    agent = os.fork()
    if agent == 0:
        be_an_agent(root, tmp_path, victim, point)
    os.waitpid(agent, 0)
    assert (tmp_path / "armed").exists(), "the first save was not made"
    named = [int(path.name) for path in pids.iterdir()]
    assert len(named) == 4, "two ranks and two writers"
    wait_for(lambda: not any(map(is_alive, named)), f"left behind: {[p for p in named if is_alive(p)]}")
    allowed = {10} if point in PROMISED else {5, 10} if point == "save.handed_over" else {5}
    assert chosen(root) in allowed

    def next_attempt(rank: int) -> int | None:
        from outlast.checkpoint.writer import Saver

        saver = Saver(root, timeout_s=PATIENCE_S, reach=lambda point: None)  # a fork: it starts faster
        save(saver, rank, 10)
        done: int | None = saver.finish()
        saver.close()
        return done

    assert run_ranks(2, next_attempt).values == {0: 10, 1: 10}
    assert chosen(root) == 10


def be_an_agent(root: Path, place: Path, victim: int, point: str) -> None:
    """Two ranks below this process; whoever of the victim rank's comes to the point kills it. Never returns."""
    agent = os.getpid()
    try:
        for rank in (0, 1):
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                be_a_rank(root, place, rank, agent, point if rank == victim else "")
        time.sleep(5 * PATIENCE_S)  # killed long before; a busy machine may need its time for the first save
    finally:
        os._exit(0)


def be_a_rank(root: Path, place: Path, rank: int, agent: int, point: str) -> None:
    import torch.distributed as dist

    from outlast.checkpoint.writer import Saver

    armed = place / "armed"

    def reach(passed: str) -> None:
        if passed == point and armed.exists():
            os.kill(agent, signal.SIGKILL)
            time.sleep(PATIENCE_S)

    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
        saver = Saver(root, timeout_s=PATIENCE_S, reach=reach)
        save(saver, rank, 5)
        assert saver.finish() == 5
        for pid in (os.getpid(), saver.writer_pid):
            (place / "pids" / str(pid)).touch()
        dist.barrier()
        armed.touch()
        dist.barrier()
        save(saver, rank, 10)
        saver.finish()
        time.sleep(PATIENCE_S)
    except BaseException:  # noqa: BLE001 -- the end of the process
        traceback.print_exc()
    finally:
        os._exit(1)
