"""The forked child: every way in which it can end, be stuck or be left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from outlast.checkpoint.background import Background, Link, Stage
from outlast.checkpoint.errors import CheckpointError

PATIENCE_S = 10.0


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.002)


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[Link], None]], Background]]:
    started: list[Background] = []

    def start(job: Callable[[Link], None]) -> Background:
        started.append(Background(job, name="test"))
        return started[-1]

    yield start
    for child in started:
        child.end()


def process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def ignored_signals(pid: int) -> set[int]:
    """As the kernel has it: bit n-1 for signal n."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def stand_still(link: Link) -> None:
    while True:
        time.sleep(60)


def test_contents_of_any_size_go_both_ways(start: Callable[..., Background]) -> None:
    def job(link: Link) -> None:
        link.report(Stage.HALFWAY, b"x" * 1_000_000)
        link.report(Stage.DONE, link.wait(5)[::-1])

    child = start(job)
    wait_for(lambda: child.stage() is Stage.HALFWAY)
    assert child.result() == b"x" * 1_000_000
    child.answer(b"ab" * 500_000)
    wait_for(lambda: child.stage() is Stage.DONE)
    assert child.result() == b"ba" * 500_000
    wait_for(child.is_gone)
    assert child.stage() is Stage.DONE, "an end after the last mark is no failure"


def test_its_own_error_is_told_in_words(start: Callable[..., Background]) -> None:
    def full(link: Link) -> None:
        raise OSError(28, "No space left on device", "/ckpt/x")

    def wrong(link: Link) -> None:
        {}["key"]

    child = start(full)
    wait_for(lambda: child.stage() is Stage.FAILED)
    assert child.result() == b"OSError: [Errno 28] No space left on device: '/ckpt/x'"
    child = start(wrong)
    wait_for(lambda: child.stage() is Stage.FAILED)
    assert b"Traceback" in child.result() and b"KeyError: 'key'" in child.result()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_a_killed_child_is_seen(start: Callable[..., Background], number: signal.Signals) -> None:
    child = start(stand_still)
    assert child.stage() is Stage.WORKING
    os.kill(child.pid, number)
    wait_for(lambda: child.stage() is Stage.FAILED)
    assert child.result() == f"the writer process was killed by {number.name}".encode()


def test_a_silent_exit_and_a_death_before_the_answer_are_failures(start: Callable[..., Background]) -> None:
    child = start(lambda link: None)
    wait_for(lambda: child.stage() is Stage.FAILED)
    assert child.result() == b"the writer process ended with exit code 0"

    def job(link: Link) -> None:
        link.report(Stage.HALFWAY)
        stand_still(link)

    child = start(job)
    wait_for(lambda: child.stage() is Stage.HALFWAY)
    os.kill(child.pid, signal.SIGKILL)
    wait_for(child.is_gone)
    child.answer(b"too late")
    assert child.stage() is Stage.FAILED
    child.end()
    child.end()


def test_somebody_else_reaps_it(start: Callable[..., Background]) -> None:
    child = start(lambda link: None)
    os.waitpid(child.pid, 0)
    assert child.stage() is Stage.FAILED
    assert b"somebody else reaped it" in child.result()


def test_a_stopped_child_blocks_nothing_and_can_be_ended(start: Callable[..., Background]) -> None:
    def job(link: Link) -> None:
        link.report(Stage.HALFWAY)
        link.report(Stage.DONE, link.wait(5))

    child = start(job)
    wait_for(lambda: child.stage() is Stage.HALFWAY)
    os.kill(child.pid, signal.SIGSTOP)
    wait_for(lambda: process_state(child.pid) == "T")
    began_s = time.monotonic()
    child.answer(b"x" * 1_000_000)
    assert child.stage() is Stage.WORKING
    child.end()
    assert time.monotonic() - began_s < 1.0
    assert process_state(child.pid) == ""


def test_term_and_int_are_the_parents_affair(start: Callable[..., Background]) -> None:
    def job(link: Link) -> None:
        link.report(Stage.HALFWAY)
        link.report(Stage.DONE, link.wait(5))

    child = start(job)
    wait_for(lambda: child.stage() is Stage.HALFWAY)
    assert ignored_signals(child.pid) >= {signal.SIGTERM, signal.SIGINT}
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(child.pid, number)
    assert child.how_it_ended() == ""
    child.answer(b"what comes after them")
    wait_for(child.is_gone)
    assert (child.stage(), child.result()) == (Stage.DONE, b"what comes after them")
    assert child.how_it_ended() == "ended with exit code 0"


def test_an_answer_that_does_not_come(start: Callable[..., Background]) -> None:
    child = start(lambda link: link.report(Stage.DONE, link.wait(0.02)))
    wait_for(lambda: child.stage() is Stage.FAILED)
    assert child.result().startswith(CheckpointError.__name__.encode())
    assert b"did not come within 0 s" in child.result()


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    parent = os.fork()
    if parent == 0:
        try:
            child = Background(stand_still, name="test")
            (tmp_path / "tmp").write_text(str(child.pid))
            (tmp_path / "tmp").rename(said)
            stand_still(None)  # type: ignore[arg-type]
        finally:
            os._exit(1)
    wait_for(said.exists)
    grandchild = int(said.read_text())
    assert process_state(grandchild) in ("S", "R")
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        wait_for(lambda: process_state(grandchild) in ("", "Z"))
    finally:
        with suppress(ProcessLookupError):
            os.kill(grandchild, signal.SIGKILL)
