"""The agent's shelf: started anew when it is killed, gone with its memory when the agent leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.shelf_roster import Roster
from outlast.launchers.shelf_keeper import ShelfKeeper, clear_deserted
from outlast.launchers.tier_places import box_of, failure_domain, shelves_of
from outlast.reliability.model import Node
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile, Task, Tiers

SECRET = bytes(range(32))


def make_run(tmp_path: Path) -> tuple[RunDir, RunFile]:
    run_dir = RunDir(root=tmp_path / "runs" / "toy-0001")
    run_dir.root.mkdir(parents=True)
    run_dir.secret.write_text(SECRET.hex())
    tiers = Tiers(local_dir=f"{tmp_path}/memory/%n", local_every_steps=5)
    return run_dir, RunFile(name="toy", task=Task(script="x.py"), tiers=tiers)


def answers(run_dir: RunDir) -> bool:
    roster = Roster(folder=shelves_of(run_dir), secret=SECRET, me=Node("test"))
    try:
        with roster.call(roster.all()[Node("n1")]):
            return True
    except (KeyError, CheckpointError):
        return False


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline_s, "not in time"
        await asyncio.sleep(0.05)


@pytest.mark.slow
def test_a_killed_shelf_is_started_anew_and_leaves_nothing_in_the_end(tmp_path: Path) -> None:
    run_dir, run = make_run(tmp_path)
    spared: list[int] = []
    keeper = ShelfKeeper(run_dir, run, Node("n1"), "127.0.0.1", keep=spared.append, topology="spine.leaf1.n1")

    async def live() -> None:
        keeping = asyncio.create_task(keeper.keep())
        await until(lambda: answers(run_dir))
        os.kill(spared[0], signal.SIGKILL)
        await until(lambda: len(spared) == 2 and answers(run_dir))
        keeping.cancel()

    try:
        asyncio.run(live())
        found = Roster(folder=shelves_of(run_dir), secret=SECRET, me=Node("test")).all()[Node("n1")]
        assert found.domain == "spine.leaf1" and keeper.box.is_dir()
        secret_seen = Path(f"/proc/{spared[1]}/cmdline").read_bytes() + Path(f"/proc/{spared[1]}/environ").read_bytes()
        assert SECRET.hex().encode() not in secret_seen
    finally:
        keeper.close()
    assert not keeper.box.exists() and not answers(run_dir)
    assert not Path(f"/proc/{spared[1]}").exists()


def test_what_dead_agents_of_other_runs_left_is_freed_and_no_more(tmp_path: Path) -> None:
    mine, old, young = (tmp_path / name for name in ("mine", "old", "young"))
    for box in (mine, old, young):
        box.mkdir()
        (box / "lock").touch()
    long_ago_s = time.time() - 7200
    for box in (mine, old):
        os.utime(box / "lock", (long_ago_s, long_ago_s))
    clear_deserted(mine)
    assert mine.is_dir() and young.is_dir() and not old.exists()


def test_each_node_and_each_run_has_a_place_of_its_own(tmp_path: Path) -> None:
    one, other = RunDir(root=tmp_path / "a" / "toy-0001"), RunDir(root=tmp_path / "b" / "toy-0001")
    places = {box_of(r, "/dev/shm/x/%n", Node(n)) for r in (one, other) for n in ("n1", "n2")}
    assert len(places) == 4 and all(str(place).startswith("/dev/shm/x/n") for place in places)
    assert failure_domain("") == ""
