"""The event log: what was appended is read back, whatever happened to the file or the disk in between."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.reliability import eventlog
from outlast.reliability.eventlog import MAX_BATCH, EventLog, EventLogError, Follower, Replay, boot_id, read_events
from outlast.reliability.events import Body, EpochTaken, LogEvent, Noted, Seen, StepsDone
from outlast.reliability.fence import Fenced
from outlast.reliability.model import Node, StepSeen, XidSeen


class Ticking:
    """A clock that moves one second at each look."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def wall_s(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def mono_s(self) -> float:
        return self.now_s - 500.0


def reopen(path: Path, epoch: int = 1, guard: Callable[[], None] | None = None) -> tuple[EventLog, Replay]:
    return EventLog.open(path, epoch, clock=Ticking(), boot="b00t", guard=guard)


def texts(events: list[LogEvent]) -> list[str]:
    return [e.body.text for e in events if isinstance(e.body, Noted)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def taken(epoch: int) -> EpochTaken:
    return EpochTaken(epoch=epoch, node="n1", pid=1, why="test")


def test_events_come_back_as_they_were_returned(path: Path) -> None:
    log, replay = reopen(path)
    assert replay == ([], [])
    said = [log.append(taken(1)), *log.append_many([Noted(text="a\nb"), Noted(text="ü\x00 \u2028")])]
    log.close()
    assert [e.seq for e in said] == [1, 2, 3] and {e.epoch for e in said} == {1} and said[0].boot == "b00t"
    assert said[1].at_s - said[0].at_s == 1.0 and said[0].mono_s == said[0].at_s - 500.0
    assert read_events(path) == (said, [])
    assert path.stat().st_mode & 0o777 == 0o600
    log, replay = reopen(path, 2)
    assert replay.events == said
    assert log.append(taken(2)).seq == 4


def test_what_is_returned_is_what_a_reader_will_read(path: Path) -> None:
    """JSON has no NaN: the live state must see the same None that a replay will see."""
    log, _ = reopen(path)
    steps = (StepSeen(train_step=1, step_s=0.1, loss=math.nan),)
    event = log.append(StepsDone(attempt=1, steps=steps))
    assert read_events(path).events == [event]
    with pytest.raises(EventLogError, match="no reader could read") as caught:
        log.append(StepsDone(attempt=1, steps=(StepSeen(train_step=1, step_s=math.nan),)))
    assert not caught.value.again
    with pytest.raises(EventLogError, match="cannot be written as JSON"):
        log.append(Noted(text="\udcff"))
    assert log.append(Noted(text="on")).seq == 2
    assert len(read_events(path).events) == 2


def test_a_torn_last_line_is_cut_and_kept(path: Path) -> None:
    log, _ = reopen(path)
    log.append(Noted(text="whole"))
    log.close()
    for n, torn in enumerate((b'{"seq":2,"at_s":1.0,"mo', b"\0" * 5_000), start=1):
        with path.open("ab") as file:
            file.write(torn)
        assert read_events(path).problems == []  # a reader takes it for a line that is being written
        log, replay = reopen(path)
        log.close()
        assert texts(replay.events) == ["whole"]
        assert replay.problems == [f"{path}: an unfinished last line ({len(torn)} bytes) was moved to events.torn-{n}"]
        assert path.with_name(f"events.torn-{n}").read_bytes() == torn
        assert path.read_bytes().endswith(b"}\n")


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_a_log_cut_at_any_byte_opens_and_goes_on(tmp_path: Path, at: int) -> None:
    path = tmp_path / "events.jsonl"
    path.unlink(missing_ok=True)
    log, _ = reopen(path)
    said = [log.append(b) for b in (taken(1), Noted(text="one"), Seen(signal=xid()), Noted(text="two"))]
    log.close()
    whole = path.read_bytes()
    at %= len(whole) + 1
    path.write_bytes(whole[:at])
    log, replay = reopen(path)
    lines = whole[:at].count(b"\n")
    assert replay.events == said[:lines]
    event = log.append(Noted(text="on"))
    log.close()
    assert event.seq == lines + 1
    assert read_events(path) == ([*said[:lines], event], [])


def xid() -> XidSeen:
    return XidSeen(node=Node("n1"), at_s=1.0, code=79)


@pytest.mark.parametrize(
    "bad",
    [b"garbage\n", b"\xff\xfe\n", b"{}\n", b'{"seq":2}\n', b"[" * 100_000 + b"\n", b"\0" * 512 + b"\n", b"null\n"],
)
def test_an_unreadable_middle_line_is_skipped_and_told(path: Path, bad: bytes) -> None:
    log, _ = reopen(path)
    log.append(Noted(text="one"))
    log.close()
    with path.open("ab") as file:
        file.write(bad)
    log, _ = reopen(path)
    log.append(Noted(text="two"))
    log.close()
    events, problems = read_events(path)
    assert texts(events) == ["one", "two"]
    assert problems == [f"{path}: 1 lines cannot be read and were skipped (line 2)"]


def test_a_fenced_writers_lines_are_ignored(path: Path) -> None:
    old, _ = reopen(path, 1)
    old.append(taken(1))
    new, _ = reopen(path, 2)
    new.append(taken(2))
    old.append(Noted(text="from the past"))
    new.append(Noted(text="present"))
    events, problems = read_events(path)
    assert texts(events) == ["present"] and [e.seq for e in events] == [1, 2, 3]
    assert problems == [f"{path}: 1 lines of a supervisor that had been replaced were ignored"]
    with pytest.raises(EventLogError, match="found lines of epoch 2, this is epoch 1"):
        reopen(path, 1)


def test_a_line_slipped_in_before_the_successors_first_is_replaced_by_it(path: Path) -> None:
    """The successor has not read it, so its state does not have it; a replay must not have it either."""
    old, _ = reopen(path, 1)
    old.append(taken(1))
    new, replay = reopen(path, 2)
    old.append(Noted(text="slipped in"))
    said = new.append(taken(2))
    assert read_events(path).events == [*replay.events, said]


def test_the_guard_is_asked_before_each_append(path: Path) -> None:
    def guard() -> None:
        raise Fenced("higher epoch", held=1, found=2)

    log, _ = reopen(path, guard=guard)
    with pytest.raises(Fenced):
        log.append(Noted(text="x"))
    assert path.read_bytes() == b""


def test_batches_are_bounded_and_may_be_empty(path: Path) -> None:
    log, _ = reopen(path)
    assert log.append_many([]) == ()
    with pytest.raises(EventLogError, match=f"found {MAX_BATCH + 1} events"):
        log.append_many([Noted(text="x")] * (MAX_BATCH + 1))


def test_what_is_staged_is_written_together_or_has_not_happened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs, asked, real = 0, 0, os.fsync

    def count(fd: int) -> None:
        nonlocal syncs
        syncs += 1
        real(fd)

    def guard() -> None:
        nonlocal asked
        asked += 1

    log, _ = reopen(path, guard=guard)
    monkeypatch.setattr(eventlog.os, "fsync", count)
    said = [*log.stage([taken(1)]), *log.stage([Noted(text="a"), Noted(text="b")])]
    assert path.read_bytes() == b"" and log.room == MAX_BATCH - 3
    log.commit()
    assert (read_events(path).events, log.room, syncs, asked) == (said, MAX_BATCH, 1, 1)
    log.commit()  # nothing is staged: nothing is asked or written
    (lost,) = log.stage([Noted(text="lost")])
    log.drop()
    log.commit()
    assert (syncs, asked) == (1, 1)
    kept = log.append(Noted(text="kept"))
    assert kept.seq == lost.seq == 4
    assert read_events(path).events == [*said, kept]
    log.stage([Noted(text="x")] * (MAX_BATCH - 1))
    with pytest.raises(EventLogError, match=f"found {MAX_BATCH + 1} events"):
        log.stage([Noted(text="x")] * 2)


def test_a_commit_that_fails_leaves_nothing_staged(path: Path) -> None:
    fenced = False

    def guard() -> None:
        if fenced:
            raise Fenced("epoch 2 is taken", held=1, found=2)

    log, _ = reopen(path, guard=guard)
    one = log.append(Noted(text="one"))
    fenced = True
    log.stage([Noted(text="lost")])
    with pytest.raises(Fenced):
        log.commit()
    assert log.room == MAX_BATCH
    fenced = False
    assert read_events(path).events == [one]
    assert log.append(Noted(text="two")).seq == 2
    assert texts(read_events(path).events) == ["one", "two"]


def test_a_line_that_claims_to_replace_half_the_log_is_damaged(path: Path) -> None:
    log, _ = reopen(path)
    for _ in range(2):
        log.append_many([Noted(text="x")] * MAX_BATCH)
    last = log.append(Noted(text="last"))
    log.close()
    line = path.read_bytes().splitlines(keepends=True)[-1].replace(b'"seq":513', b'"seq":51')
    with path.open("ab") as file:
        file.write(line)
    events, problems = read_events(path)
    assert events[-1] == last and len(events) == 2 * MAX_BATCH + 1
    assert problems == [f"{path}: 1 lines cannot be read and were skipped (line 514)"]


# ---------------------------------------------------------------- a disk that is full, or lies


def limited(path: Path, size_bytes: int) -> None:
    """The process may write files of this size only: EFBIG, after a part was written."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def free() -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.integers(0, 400))
def test_after_a_failed_append_the_log_goes_on_as_if_it_had_not_been(tmp_path: Path, room: int) -> None:
    path = tmp_path / "events.jsonl"
    path.unlink(missing_ok=True)
    log, _ = reopen(path)
    said = [log.append(Noted(text="before"))]
    batch: list[Body] = [Noted(text="one of a batch"), Noted(text="two of a batch")]
    try:
        limited(path, path.stat().st_size + room)
        for _ in range(3):
            try:
                said += log.append_many(batch)
            except EventLogError as error:
                assert error.again
                break
    finally:
        free()
    follower = Follower(path)
    follower.read()
    said.append(log.append(Noted(text="after")))
    log.close()
    events, _ = read_events(path)
    assert events == said
    assert [e.seq for e in events] == list(range(1, len(said) + 1))
    reopened, replay = reopen(path)
    reopened.close()
    assert replay.events == said
    increment = follower.read()
    assert increment.events == (said if increment.afresh else said[-1:])


def test_an_fsync_that_fails_makes_the_event_not_have_happened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails in fsync cannot be had here; the one system call is replaced."""
    log, _ = reopen(path)
    log.append(Noted(text="one"))
    real = os.fsync

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(eventlog.os, "fsync", fail)
    with pytest.raises(EventLogError, match="event 2 not written") as caught:
        log.append(Noted(text="lost"))
    monkeypatch.setattr(eventlog.os, "fsync", real)
    assert caught.value.again
    two = log.append(Noted(text="two"))
    assert two.seq == 2
    assert texts(read_events(path).events) == ["one", "two"]


@pytest.mark.slow
def test_a_full_file_system_is_told_and_survived(tmp_path: Path) -> None:
    """A tmpfs of 64 KiB, in a mount namespace of its own, filled to the brim and emptied again."""
    script = """
import sys, subprocess
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
root = Path(sys.argv[1])
mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(root)], check=False, timeout=20)
if mounted.returncode:
    sys.exit(77)
from outlast.reliability.eventlog import EventLog, EventLogError, read_events
from outlast.reliability.events import Noted
class Clock:
    def wall_s(self): return 1.0
    def mono_s(self): return 1.0
log, _ = EventLog.open(root / "events.jsonl", 1, clock=Clock(), boot="b")
said = [log.append(Noted(text="one"))]
ballast = root / "ballast"
with ballast.open("wb", buffering=0) as file:
    try:
        while True: file.write(b"x" * 1024)
    except OSError: pass
failures = 0
for _ in range(5):
    try: said.append(log.append(Noted(text="y" * 9000)))
    except EventLogError as error:
        assert error.again and "No space left" in str(error) or "bytes written" in str(error), error
        failures += 1
assert failures == 5, failures
ballast.unlink()
said.append(log.append(Noted(text="two")))
events, problems = read_events(root / "events.jsonl")
assert events == said, (events, said)
assert [e.seq for e in events] == [1, 2]
print("survived")
"""
    root = tmp_path / "full"
    root.mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", sys.executable, "-c", script, str(root), os.getcwd()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no mount namespaces here; the size limit test above covers partial writes")
    assert done.stdout == "survived\n", done.stderr


def test_a_removed_or_shortened_log_is_an_error_and_not_a_new_log(path: Path) -> None:
    log, _ = reopen(path)
    log.append(Noted(text="one"))
    path.rename(path.with_name("moved"))
    os.truncate(path.with_name("moved"), 0)
    with pytest.raises(EventLogError, match="was it removed or cut"):
        log.append(Noted(text="two"))
    with pytest.raises(EventLogError, match="not written"):
        log.append(Noted(text="two"))
    assert not path.exists()


def test_an_unreadable_directory_is_an_error_with_again(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EventLogError) as caught:
        reopen(blocked / "events.jsonl")
    assert caught.value.again
    assert read_events(tmp_path / "none" / "events.jsonl") == ([], [])
    with pytest.raises(EventLogError, match="cannot be read"):
        read_events(blocked / "events.jsonl")


# ---------------------------------------------------------------- readers


def test_a_follower_sees_each_event_once_and_no_half_line(path: Path) -> None:
    follower = Follower(path)
    assert follower.read() == ([], False)
    log, _ = reopen(path)
    one = log.append(Noted(text="one"))
    assert follower.read() == ([one], False)
    assert follower.read() == ([], False)
    two = log.append(Noted(text="two"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert follower.read() == ([], False)
    path.write_bytes(whole)
    assert follower.read() == ([two], False)
    assert follower.problems() == []


def test_a_follower_begins_afresh_where_the_log_went_back(path: Path) -> None:
    old, _ = reopen(path, 1)
    follower = Follower(path)
    first = old.append(taken(1))
    new, _ = reopen(path, 2)
    slipped = old.append(Noted(text="slipped in"))
    assert follower.read().events == [first, slipped]
    said = new.append(taken(2))
    assert follower.read() == ([first, said], True)
    assert follower.read() == ([], False)
    path.unlink()
    assert follower.read() == ([], True)
    new, _ = reopen(path, 3)
    again = new.append(taken(3))
    assert follower.read() == ([again], False)


@pytest.mark.slow
@given(st.lists(st.sampled_from([b"x", b"\n", b"{", b"\xff", b'{"seq":1}', b"\0"]), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_file_can_be_read_and_opened(tmp_path: Path, parts: list[bytes]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(parts))
    assert read_events(path).events == []
    assert Follower(path).read().events == []
    log, replay = reopen(path)
    assert replay.events == []
    event = log.append(Noted(text="on"))
    log.close()
    assert read_events(path).events == [event]


def test_boot_id() -> None:
    assert len(boot_id()) == 8
