"""The step record page: what is written is read, a torn or foreign page is None, a step costs microseconds."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.launchers import recorder
from outlast.monitors import beat
from outlast.monitors.beat import StepReader, StepWriter, create_page, parse_page


@pytest.fixture
def path(tmp_path: Path) -> Path:
    page = tmp_path / "page"
    create_page(page)
    return page


def test_steps_phases_and_placement_are_read_back(path: Path) -> None:
    reader = StepReader(path)
    assert reader.read() is None
    writer = StepWriter(path, node="gpu-07")
    page = reader.read()
    assert page is not None
    assert (page.node, page.pid, page.phase, page.train_step, page.steps) == ("gpu-07", os.getpid(), "", -1, ())
    writer.phase("load")
    writer.step_started(11)
    writer.step_done(11, loss=2.5, grad_norm=None, samples_from=80, samples_to=88, tokens=256, save_s=0.0)
    writer.checkpoint_durable(10, 1.5)
    writer.checkpoint_durable(5, 9.0)
    page = reader.read()
    assert page is not None
    (step,) = page.steps
    assert (page.phase, page.train_step, page.durable_step, page.durable_s) == ("train", 11, 10, 1.5)
    assert (step.train_step, step.loss, step.grad_norm, step.samples_from, step.samples_to) == (11, 2.5, None, 80, 88)
    assert page.moved_mono_s == step.end_mono_s


def test_the_ring_keeps_the_newest_in_order(path: Path) -> None:
    writer, reader = StepWriter(path), StepReader(path)
    for step in range(1, 101):
        writer.step_done(step)
    page = reader.read()
    assert page is not None and [s.train_step for s in page.steps] == list(range(69, 101))


def test_a_step_is_told_before_its_save_and_closed_after_it(path: Path) -> None:
    writer, reader = StepWriter(path), StepReader(path)
    writer.step_closed(9.0)  # of no step
    for step in (1, 2):
        writer.step_started(step)
        writer.step_done(step, save_s=0.25, closed=step != 2)
    page = reader.read()
    assert page is not None and [(s.train_step, s.save_s, s.closed) for s in page.steps] == [
        (1, 0.25, True),
        (2, 0.25, False),
    ]
    writer.step_closed(0.5)
    writer.step_closed(7.0)  # it is closed
    closed = reader.read()
    assert closed is not None and [(s.save_s, s.closed) for s in closed.steps] == [(0.25, True), (0.75, True)]
    assert closed.steps[1].end_mono_s == page.steps[1].end_mono_s, "its save is not part of it"


def test_a_step_that_nobody_closed_is_closed_by_the_next(path: Path) -> None:
    writer, reader = StepWriter(path), StepReader(path)
    writer.step_done(1, closed=False)
    writer.step_started(2)
    page = reader.read()
    assert page is not None and [s.closed for s in page.steps] == [True]
    writer.step_done(2, closed=False)
    writer.step_done(3, closed=False)
    writer.step_closed("long")  # type: ignore[arg-type]
    page = reader.read()
    assert page is not None and [(s.save_s, s.closed) for s in page.steps] == [(0.0, True)] * 3


def test_a_nan_loss_is_a_loss(path: Path) -> None:
    writer, reader = StepWriter(path), StepReader(path)
    writer.step_done(1, loss=math.nan)
    page = reader.read()
    assert page is not None and page.steps[0].loss is not None and math.isnan(page.steps[0].loss)


def test_a_number_that_does_not_fit_never_raises(path: Path) -> None:
    writer, reader = StepWriter(path), StepReader(path)
    writer.step_done(1, tokens=2**70)
    writer.step_done(2, loss="much")  # type: ignore[arg-type]
    writer.phase("no such phase")
    page = reader.read()
    assert page is not None and (page.steps, page.phase) == ((), "idle")


@given(st.binary(max_size=5000))
def test_garbage_is_none(raw: bytes) -> None:
    assert parse_page(raw) is None


@given(st.integers(min_value=0, max_value=3600), st.integers(min_value=1, max_value=255))
def test_a_changed_byte_is_none(at: int, change: int) -> None:
    raw = bytearray(_page())
    raw[at % _used()] ^= change
    page = parse_page(bytes(raw))
    # the sequence number itself is not under the checksum: another even one is another sound page
    assert page is None or page == parse_page(_page())


def test_a_truncated_file_is_none(path: Path) -> None:
    StepWriter(path)
    reader = StepReader(path)
    assert reader.read() is not None
    os.truncate(path, 100)
    assert reader.read() is None


def test_a_reader_meets_no_torn_page_while_threads_write(path: Path) -> None:
    writer, reader = StepWriter(path), StepReader(path)
    until = time.monotonic() + 0.2

    def write(first: int) -> None:
        step = first
        while time.monotonic() < until:
            writer.step_done(step, loss=float(step), samples_from=step, samples_to=step + 1)
            writer.checkpoint_durable(step)
            step += 2

    threads = [threading.Thread(target=write, args=(i,)) for i in (1, 2)]
    for thread in threads:
        thread.start()
    seen = 0
    while time.monotonic() < until:
        page = reader.read()
        if page is not None:
            seen += 1
            assert all(s.loss == s.samples_from == s.train_step for s in page.steps)
    for thread in threads:
        thread.join()
    last = reader.read()
    assert seen and last is not None and last.durable_step > 0


def test_a_posix_signal_in_the_middle_of_a_write_loses_nothing(path: Path) -> None:
    writer, reader = StepWriter(path), StepReader(path)
    hits = 0

    def on_alarm(*_: object) -> None:
        nonlocal hits
        hits += 1
        writer.checkpoint_durable(hits)

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for step in range(5000):
            writer.step_done(step)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    page = reader.read()
    assert page is not None and hits and (page.durable_step, page.train_step) == (hits, 4999)


def test_a_forked_child_does_not_write(path: Path) -> None:
    writer, reader = StepWriter(path), StepReader(path)
    pid = os.fork()
    if pid == 0:
        writer.step_done(99)
        os._exit(0)
    os.waitpid(pid, 0)
    page = reader.read()
    assert page is not None and page.steps == ()


def test_recording_a_step_costs_at_most_20_us(path: Path) -> None:
    writer = StepWriter(path)

    def batch() -> float:
        began = time.perf_counter()
        for step in range(200):
            writer.step_started(step)
            writer.step_done(step, loss=1.0, grad_norm=1.0, samples_from=0, samples_to=8, tokens=1)
        return (time.perf_counter() - began) / 200

    assert min(batch() for _ in range(20)) <= 20e-6


def test_without_a_page_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(recorder, "_here", None)
    monkeypatch.delenv(recorder.STEP_PAGE_ENV, raising=False)
    recorder.current().step_done(1)
    assert isinstance(recorder.current(), recorder.Unrecorded)
    monkeypatch.setattr(recorder, "_here", None)
    monkeypatch.setenv(recorder.STEP_PAGE_ENV, str(path.parent / "missing"))
    assert isinstance(recorder.current(), recorder.Unrecorded)
    monkeypatch.setattr(recorder, "_here", None)
    monkeypatch.setenv(recorder.STEP_PAGE_ENV, str(path))
    assert recorder.current() is recorder.current()
    recorder.current().step_done(7)
    page = StepReader(path).read()
    assert page is not None and page.train_step == 7
    monkeypatch.setattr(recorder, "_here", None)


@pytest.mark.slow
def test_a_spawned_child_does_not_take_the_page_over(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setenv(recorder.STEP_PAGE_ENV, str(path))
    code = "from outlast.launchers.recorder import current; print(type(current()).__name__, flush=True); input()"

    def child() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    writer = StepWriter(path)
    with child() as first:  # only placed so far: the program itself may be a child of what was started
        assert first.stdout and first.stdout.readline() == "StepWriter\n"
        first.communicate("\n", timeout=10.0)
    writer.phase("train")
    with child() as second:
        assert second.stdout and second.stdout.readline() == "Unrecorded\n"
        second.communicate("\n", timeout=10.0)


_CACHE: list[bytes] = []


def _used() -> int:
    return beat._HEAD.size + beat._BODY_BYTES


def _page() -> bytes:
    if not _CACHE:
        import tempfile

        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "page"
            create_page(path)
            writer = StepWriter(path, node="a")
            for step in range(40):
                writer.step_done(step, loss=float(step))
            _CACHE.append(path.read_bytes())
    return _CACHE[0]
