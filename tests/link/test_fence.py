"""The fence: one holder for each epoch, whoever starts at the same time and whatever lies in the directory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.reliability.eventlog import EventLog, read_events
from outlast.reliability.events import EpochTaken, Noted
from outlast.reliability.fence import Fence, Fenced, FenceError, highest, highest_number, take
from outlast.reliability.rundir import RunDir
from outlast.reliability.wire import Seat


class Clock:
    def wall_s(self) -> float:
        return time.time()

    def mono_s(self) -> float:
        return time.monotonic()


def seat(epoch: int = 0, node: str = "n1") -> Seat:
    return Seat(epoch=epoch, node=node, pid=os.getpid(), host="127.0.0.1", port=4000, at_s=1.0)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(root=tmp_path)


def test_epochs_are_taken_one_after_the_other(run_dir: RunDir) -> None:
    assert highest(run_dir) is None and highest_number(run_dir) == 0
    first = take(run_dir, seat())
    fence = Fence(run_dir, first)
    fence.check()
    assert (first.epoch, highest(run_dir)) == (1, first)
    second = take(run_dir, seat(node="n2"))
    assert (second.epoch, highest(run_dir)) == (2, second)
    with pytest.raises(Fenced, match="found epoch 2, this supervisor holds 1"):
        fence.check()
    Fence(run_dir, second).check()
    assert sorted(p.name for p in run_dir.epochs.iterdir()) == ["1", "2", "latest"]


def test_an_epoch_that_another_has_is_not_taken(run_dir: RunDir) -> None:
    assert take(run_dir, seat(epoch=3)).epoch == 3
    with pytest.raises(Fenced, match="wanted to take 3"):
        take(run_dir, seat(epoch=3, node="n2"))
    with pytest.raises(Fenced):
        take(run_dir, seat(epoch=2))
    assert highest(run_dir) == seat(epoch=3)


def test_losing_the_race_is_fenced_and_does_not_take_the_next(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def slow(*args: str, **more: str) -> None:
        monkeypatch.setattr(os, "link", real)
        take(run_dir, seat(node="faster"))
        real(*args)

    monkeypatch.setattr(os, "link", slow)
    with pytest.raises(Fenced, match="a moment ago"):
        take(run_dir, seat())
    found = highest(run_dir)
    assert found is not None and (found.node, found.epoch) == ("faster", 1)
    assert not [p for p in run_dir.epochs.iterdir() if p.name.startswith(".")]


def test_a_lost_answer_of_the_server_is_recognised(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: the link was made, the answer got lost, the second try says EEXIST."""
    real = os.link

    def twice(*args: str) -> None:
        real(*args)
        real(*args)

    monkeypatch.setattr(os, "link", twice)
    assert take(run_dir, seat()).epoch == 1


def test_garbage_beside_the_seats_is_passed_over(run_dir: RunDir) -> None:
    good = take(run_dir, seat())
    for name, content in {"2": b"", "3": b"{", "4": msgspec.json.encode(seat(epoch=9)), "x": b"", "007": b""}.items():
        (run_dir.epochs / name).write_bytes(content)
    (run_dir.epochs / "5").mkdir()
    os.mkfifo(run_dir.epochs / "6")
    assert highest(run_dir) == good
    # the numbers count all the same: whoever took them, ours is not the highest
    assert highest_number(run_dir) == 6
    with pytest.raises(Fenced):
        Fence(run_dir, good).check()
    assert take(run_dir, seat()).epoch == 7


@given(st.binary(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_the_hint_is_only_a_hint(tmp_path: Path, said: bytes) -> None:
    run_dir = RunDir(root=tmp_path)
    if highest_number(run_dir) == 0:
        take(run_dir, seat())
    (run_dir.epochs / "latest").write_bytes(said)
    assert highest_number(run_dir) == 1


def test_a_remembered_listing_does_not_hide_a_higher_epoch(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an NFS client does for up to a minute: the directory as it was; files it opens are current."""
    first = take(run_dir, seat())
    remembered = os.listdir(run_dir.epochs)
    second = take(run_dir, seat(node="n2"))
    monkeypatch.setattr(os, "listdir", lambda _: remembered)
    assert highest(run_dir) == second
    with pytest.raises(Fenced):
        Fence(run_dir, first).check()


def test_a_directory_that_cannot_be_told_from_stops_the_caller(run_dir: RunDir) -> None:
    held = take(run_dir, seat())
    fence = Fence(run_dir, held)
    run_dir.epochs.rename(run_dir.root / "away")
    with pytest.raises(FenceError, match="expected our own 1") as caught:
        fence.check()
    assert caught.value.again and not isinstance(caught.value, Fenced)
    run_dir.epochs.write_text("a file")
    with pytest.raises(FenceError, match="cannot be listed"):
        fence.check()
    with pytest.raises(FenceError):
        take(run_dir, seat())


TAKER = """
import sys
from pathlib import Path
from outlast.reliability.fence import Fenced, take
from outlast.reliability.rundir import RunDir
from outlast.reliability.wire import Seat
run_dir, me, rounds = RunDir(root=Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
won = []
print("ready", flush=True)
sys.stdin.readline()
for epoch in range(1, rounds + 1):
    try:
        won.append(take(run_dir, Seat(epoch=epoch, node=me, pid=1, host="h", port=1, at_s=0.0)).epoch)
    except Fenced:
        pass
print(*won)
"""


@pytest.mark.slow
def test_of_many_processes_exactly_one_takes_each_epoch(run_dir: RunDir) -> None:
    rounds, takers = 40, 6
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TAKER, str(run_dir.root), f"n{i}", str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(takers)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        with ThreadPoolExecutor(takers) as pool:
            said = list(pool.map(lambda p: p.communicate("go\n", timeout=30)[0], processes))
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=10)
    won = sorted(int(n) for line in said for n in line.split())
    # an epoch may be passed over by a slow process, never held by two
    assert len(won) == len(set(won)) and won[-1] == rounds
    for i, line in enumerate(said):
        for epoch in line.split():
            content = msgspec.json.decode((run_dir.epochs / epoch).read_bytes(), type=Seat)
            assert (content.node, content.epoch) == (f"n{i}", int(epoch))


HOLDER = """
import sys, time
from pathlib import Path
from outlast.reliability.eventlog import EventLog
from outlast.reliability.events import EpochTaken, Noted
from outlast.reliability.fence import Fence, Fenced, take
from outlast.reliability.rundir import RunDir
from outlast.reliability.wire import Seat
class Clock:
    wall_s = staticmethod(time.time)
    mono_s = staticmethod(time.monotonic)
run_dir = RunDir(root=Path(sys.argv[1]))
held = take(run_dir, Seat(epoch=0, node="old", pid=1, host="h", port=1, at_s=0.0))
log, _ = EventLog.open(run_dir.events, held.epoch, clock=Clock(), boot="b", guard=Fence(run_dir, held).check)
log.append(EpochTaken(epoch=held.epoch, node="old", pid=1, why="test"))
try:
    for n in range(100_000):
        log.append(Noted(text=f"old {n}"))
except Fenced:
    sys.exit(75)
"""


@pytest.mark.slow
def test_a_supervisor_that_was_only_stopped_finds_itself_fenced(run_dir: RunDir) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run_dir.root)])
    try:
        deadline = time.monotonic() + 20.0
        while len(read_events(run_dir.events).events) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        held = take(run_dir, seat(node="new"))
        assert held.epoch == 2
        fence = Fence(run_dir, held)
        log, replay = EventLog.open(run_dir.events, 2, clock=Clock(), boot="b", guard=fence.check)
        log.append(EpochTaken(epoch=2, node="new", pid=2, why="takeover"))
        process.send_signal(signal.SIGCONT)
        mine = [log.append(Noted(text=f"new {n}")) for n in range(20)]
        assert process.wait(timeout=20) == 75
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait(timeout=10)
    events, _ = read_events(run_dir.events)
    assert events[: len(replay.events)] == replay.events
    assert events[len(replay.events) + 1 :] == mine
