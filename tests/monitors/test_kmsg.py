"""The live kernel log: a file that rotates, and the real /dev/kmsg."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.monitors.follow import LINE_BYTES, FollowedFile
from outlast.monitors.kmsg import Found, KernelDecoder, KernelLog
from outlast.reliability.model import Node, SourceBlind, XidSeen

NODE = Node("n1")
LINE = "NVRM: Xid (PCI:0000:3b:00): 79, pid=71, name=python3, GPU has fallen off the bus.\n"


def read_all(file: FollowedFile, wanted: int, limit_s: float = 5.0) -> list[bytes]:
    """Poll until so many lines were read."""
    lines: list[bytes] = []
    deadline = time.monotonic() + limit_s
    while len(lines) < wanted and time.monotonic() < deadline:
        lines += file.poll()
    return lines


def test_a_file_is_read_from_its_end_through_rotation_and_truncation(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text("old\n")
    file = FollowedFile(path)
    assert file.poll() == []
    with path.open("a") as f:
        f.write("one\ntw")
    assert read_all(file, 1) == [b"one"]
    with path.open("a") as f:
        f.write("o\nlast without newline")
    assert read_all(file, 1) == [b"two"]
    path.rename(tmp_path / "kern.log.1")
    assert file.poll() == []
    path.write_text("new\n")
    assert read_all(file, 2) == [b"last without newline", b"new"]
    path.write_text("s\n")
    assert read_all(file, 1) == [b"s"]
    assert file.truncated == 1
    file.close()


def test_a_file_that_appears_later_is_read_from_its_start(tmp_path: Path) -> None:
    file = FollowedFile(tmp_path / "later.log")
    assert file.poll() == [] and "No such file" in file.why
    (tmp_path / "later.log").write_text("first\n")
    assert read_all(file, 1) == [b"first"]
    assert file.why == ""
    file.close()


def test_an_endless_line_is_cut_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_bytes(b"")
    file = FollowedFile(path)
    file.poll()
    with path.open("ab") as f:
        f.write(b"x" * (LINE_BYTES * 40) + b"\nnext\n")
    lines = read_all(file, 2)
    assert len(lines[0]) <= LINE_BYTES and lines[-1] == b"next"
    file.close()


@given(st.lists(st.binary(max_size=400), max_size=20))
def test_any_bytes_in_any_pieces_give_signals_or_nothing(chunks: list[bytes]) -> None:
    decoder = KernelDecoder(NODE, "kmsg", accept_user_facility=True)
    found: list[Found] = []
    for chunk in chunks:
        found += decoder.record(chunk, 1.0)
        found += decoder.record(b"3,7,9,-;NVRM: " + chunk, 1.0)
        found += decoder.line(b"NVRM: Xid" + chunk, 1.0)
    assert all((f.node, f.at_s, f.source) == (NODE, 1.0, "kmsg") for f in found)
    # whatever came before, a line of the driver's is read
    (last,) = (f for f in decoder.record(record(1 << 40), 2.0) if isinstance(f, XidSeen))
    assert (last.code, last.gpu, last.at_s) == (79, "0000:3b:00", 2.0)


def record(sequence: int, priority: int = 3, text: str = LINE) -> bytes:
    return f"{priority},{sequence},{sequence * 1000},-;{text}".encode()


def test_only_the_kernels_own_facility_counts() -> None:
    strict = KernelDecoder(NODE, "kmsg")
    assert strict.record(record(1, priority=11), 5.0) == []
    (found,) = strict.record(record(2), 5.0)
    assert isinstance(found, XidSeen)
    assert (found.node, found.at_s, found.code, found.gpu, found.source) == (NODE, 5.0, 79, "0000:3b:00", "kmsg")
    testbed = KernelDecoder(NODE, "kmsg", accept_user_facility=True)
    assert len(testbed.record(record(1, priority=11), 5.0)) == 1


def test_an_audit_record_that_quotes_the_driver_is_no_evidence() -> None:
    decoder = KernelDecoder(NODE, "kmsg")
    assert decoder.record(record(1, text=f"audit: type=1400 comm='{LINE.strip()}'\n"), 5.0) == []
    assert decoder.line(f"Jan 25 10:34:54 n1 python3[7]: {LINE}".encode(), 5.0) == []


def test_gaps_are_counted_as_blindness() -> None:
    decoder = KernelDecoder(NODE, "kmsg")
    assert decoder.record(record(10, text="boring\n"), 1.0) == []
    (gap,) = decoder.record(record(15, text="boring\n"), 2.0)
    assert isinstance(gap, SourceBlind) and gap.lost == 4
    (dropped,) = decoder.record(record(16, text="** 32 printk messages dropped **\n"), 3.0)
    assert isinstance(dropped, SourceBlind) and dropped.lost == 32


async def take(signals: AsyncIterator[Found], wanted: Callable[[Found], bool], limit_s: float = 5.0) -> Found:
    """The first signal that is wanted; others are passed over."""

    async def first() -> Found:
        async for found in signals:
            if wanted(found):
                return found
        raise AssertionError("the log ended")

    return await asyncio.wait_for(first(), limit_s)


async def until(what: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


async def opened(path: Path, *, times: int = 1) -> None:
    """This process has it open so often; readers go to its end in the same turn of the loop in which they open it."""

    def links() -> int:
        found = 0
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
                found += os.readlink(fd) == str(path)
        return found

    await until(lambda: links() >= times)


@pytest.mark.slow
def test_a_line_in_a_file_becomes_a_signal_within_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "kern-n1.log"
    path.write_text(LINE)

    async def scenario() -> tuple[Found, float]:
        signals = KernelLog(str(tmp_path / "kern-%n.log"), NODE, clock=lambda: 42.0, file_poll_s=0.01).signals()
        pending = asyncio.ensure_future(take(signals, lambda s: True))
        await opened(path)
        assert not pending.done()
        began = time.monotonic()
        with path.open("a") as f:
            f.write("<3>" + LINE.replace("3b", "4c"))
        found = await pending
        return found, time.monotonic() - began

    found, took_s = asyncio.run(scenario())
    assert isinstance(found, XidSeen)
    assert (found.gpu, found.at_s, found.source) == ("0000:4c:00", 42.0, "kernel_log")
    assert took_s < 1.0


@pytest.mark.slow
def test_a_log_that_cannot_be_read_is_blindness_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    polls, poll = 0, FollowedFile.poll

    def count(file: FollowedFile) -> list[bytes]:
        nonlocal polls
        polls += 1
        return poll(file)

    monkeypatch.setattr(FollowedFile, "poll", count)

    async def scenario() -> list[Found]:
        log = KernelLog(tmp_path / "missing.log", NODE, file_poll_s=0.005)
        heard: list[Found] = []

        async def listen() -> None:
            async for found in log.signals():
                heard.append(found)

        task = asyncio.ensure_future(listen())
        await until(lambda: polls >= 20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return heard

    heard = asyncio.run(scenario())
    assert len(heard) == 1 and isinstance(heard[0], SourceBlind) and "No such file" in heard[0].why


def kmsg_is_ours() -> bool:
    return os.access("/dev/kmsg", os.W_OK | os.R_OK) and os.geteuid() == 0


@pytest.mark.slow
@pytest.mark.skipif(not kmsg_is_ours(), reason="needs root and a writable /dev/kmsg")
def test_a_line_written_to_the_real_kernel_log_becomes_a_signal() -> None:
    # code 14 asks for nothing: other listeners on this machine may hear it too
    gpu = f"{os.getpid() % 0xFFFF:04x}:7f:00"
    line = f"<3>NVRM: Xid (PCI:{gpu}): 14, pid='<unknown>', name=<unknown>, test\n".encode()

    def inject() -> float:
        fd = os.open("/dev/kmsg", os.O_WRONLY)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
        return time.monotonic()

    async def scenario() -> tuple[Found, float]:
        strict = KernelLog("/dev/kmsg", NODE).signals()
        open_to_user = KernelLog("/dev/kmsg", NODE, accept_user_facility=True).signals()
        ours: Callable[[Found], bool] = lambda s: isinstance(s, XidSeen) and s.gpu == gpu  # noqa: E731
        refused = asyncio.ensure_future(take(strict, ours, limit_s=60))
        heard = asyncio.ensure_future(take(open_to_user, ours, limit_s=10))
        await opened(Path("/dev/kmsg"), times=2)
        began = inject()
        found = await heard
        took_s = time.monotonic() - began
        # how long it may take is what it took the other reader, a few times over
        done, _ = await asyncio.wait([refused], timeout=max(0.05, 3 * took_s))
        assert not done, "a line of user space passed for the kernel's"
        refused.cancel()
        await asyncio.gather(refused, return_exceptions=True)
        return found, took_s

    found, took_s = asyncio.run(scenario())
    assert isinstance(found, XidSeen) and found.code == 14
    assert abs(found.at_s - time.time()) < 10
    assert took_s < 1.0
