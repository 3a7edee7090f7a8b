"""Output of ranks: kept within bounds, and never in the way of anybody."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.launchers.last_words import last_chars
from outlast.launchers.logs import QUEUE_BYTES, TAIL_BYTES, Pump, RankLog, visible


@pytest.fixture
def pump() -> Iterator[Pump]:
    made = Pump()
    yield made
    made.close(5.0)


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def read(path: Path) -> bytes:
    """b'' while a full log has been put aside and the next one is not there yet."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def write(pump: Pump, directory: Path, data: bytes, limit_bytes: int = 1 << 20) -> RankLog:
    """What a rank does: write all and end."""
    read_end, write_end = os.pipe()
    log = pump.add(read_end, directory, limit_bytes)
    with os.fdopen(write_end, "wb") as out:
        out.write(data)
    until(lambda: log.ended)
    return log


def test_output_is_written_as_it_came(pump: Pump, tmp_path: Path) -> None:
    data = b"loss 4.2\n\x1b[31mred\x00\xff\n" * 100
    log = write(pump, tmp_path / "r", data)
    path = tmp_path / "r" / "log"
    until(lambda: path.exists() and path.read_bytes() == data)
    assert log.last_bytes() == data[-TAIL_BYTES:]


def test_a_flood_is_bounded_and_keeps_first_and_last(pump: Pump, tmp_path: Path) -> None:
    lines = [b"line %06d\n" % i for i in range(40_000)]
    write(pump, tmp_path / "r", b"".join(lines), limit_bytes=90_000)
    until(lambda: lines[-1] in read(tmp_path / "r" / "log"))
    names = sorted(p.name for p in (tmp_path / "r").iterdir())
    assert names == ["log", "log.1", "log.2"]
    total = sum(p.stat().st_size for p in (tmp_path / "r").iterdir())
    assert total < 90_000 + 3 * 65_536  # a part ends with the write that fills it
    assert (tmp_path / "r" / "log.1").read_bytes().startswith(lines[0])
    assert b"left out between log.1 and log.2" in (tmp_path / "r" / "log").read_bytes()


def test_a_place_that_cannot_be_written_costs_lines_alone(pump: Pump, tmp_path: Path) -> None:
    place = tmp_path / "r"
    place.write_text("a file where the directory should be")
    read_end, write_end = os.pipe()
    log = pump.add(read_end, place, 1 << 20)
    os.write(write_end, b"lost\n")
    until(lambda: log.dropped_bytes == 5)
    place.unlink()
    time_s = time.monotonic()
    os.write(write_end, b"kept\n")
    os.close(write_end)
    until(lambda: (place / "log").exists() and b"kept" in (place / "log").read_bytes())
    text = (place / "log").read_bytes()
    assert b"[outlast: 5 bytes of output dropped here]" in text or b"[outlast: 10 bytes" in text
    assert log.last_bytes() == b"lost\nkept\n" and time.monotonic() - time_s < 5.0


def test_a_file_system_that_hangs_never_blocks_a_rank(pump: Pump, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    os.mkfifo(tmp_path / "r" / "log")  # opening it for writing hangs, like a dead file server
    read_end, write_end = os.pipe()
    log = pump.add(read_end, tmp_path / "r", 1 << 30)
    data = b"x" * 65536

    def rank() -> None:
        with os.fdopen(write_end, "wb") as out:
            for _ in range(2 * QUEUE_BYTES // len(data)):
                out.write(data)

    thread = threading.Thread(target=rank)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
    until(lambda: log.ended)
    assert log.dropped_bytes > 0 and log.queued_bytes <= QUEUE_BYTES and len(log.last_bytes()) == TAIL_BYTES
    other = tmp_path / "other"
    assert write(pump, other, b"still heard\n").last_bytes() == b"still heard\n"
    free = os.open(tmp_path / "r" / "log", os.O_RDONLY | os.O_NONBLOCK)  # let the writer go
    os.close(free)


@given(st.binary(max_size=300))
def test_what_is_visible_has_no_control_characters(raw: bytes) -> None:
    assert all(c in "\n\t" or c.isprintable() for c in visible(raw))


def test_text_stays_text() -> None:
    assert visible("größe\t3\r\n日本".encode()) == "größe\t3\n日本"
    assert visible(b"\x1b[2J\x00\x7f\xff") == "\\x1b[2J\\x00\\x7f\\xff"


@given(st.text(max_size=9000))
def test_last_words_are_bounded_and_the_last(text: str) -> None:
    assert len(last_chars(text)) <= 4000 and text.endswith(last_chars(text))
