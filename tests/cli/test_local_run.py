"""Real runs on the local cluster through the command line alone: run, status, stop, continue, report, explain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outlast.reliability.status import Row, read_rows

pytestmark = pytest.mark.slow
OUTLAST = [sys.executable, "-m", "outlast.reliability.app"]
PATIENCE_S = 60.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(
        "name: toy\n"
        "task: {command: [python3, work.py]}\n"
        "cluster: {kind: local, nodes: 1, ranks_per_node: 2, kernel_log: ''}\n"
        "limits: {term_grace: 1s, settle: 0.2s}\n"
    )
    return tmp_path


@pytest.fixture
def running(place: Path) -> Iterator[subprocess.Popen[str]]:
    """`outlast run run.yaml`; ended with everything below it when the test is over."""
    process = subprocess.Popen(
        [*OUTLAST, "run", "run.yaml"], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    process.communicate(timeout=30)


def say(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OUTLAST, *words], cwd=place, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def until(place: Path, what: Callable[[Row], bool]) -> Row:
    """The status row once it is so."""
    run_dir, row = place / "runs" / "toy-0001", None
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        (row,) = read_rows([run_dir])
        if what(row):
            return row
        time.sleep(0.05)
    raise AssertionError(f"not within {PATIENCE_S:.0f} s; last seen: {row}")


def test_a_held_run_goes_on_when_a_person_has_mended_it(place: Path, running: subprocess.Popen[str]) -> None:
    (place / "work.py").write_text("raise KeyError('doc_881')\n")
    row = until(place, lambda row: row.state == "held")
    assert "the same exception" in row.why and row.attempt == 3
    told = say(place, "status", "toy-0001")
    assert told.returncode == 3 and "outlast continue toy-0001" in told.stdout
    explained = say(place, "explain", "toy-0001/1")
    assert explained.returncode == 0 and "KeyError: 'doc_881'" in explained.stdout
    assert say(place, "explain", "toy-0001/99").returncode == 2

    (place / "work.py").write_text("print('well')\n")
    assert say(place, "continue", "toy-0001").returncode == 0
    assert running.wait(PATIENCE_S) == 0
    assert say(place, "status", "toy-0001").returncode == 0
    report = say(place, "report", "toy-0001", "-o", "page.html")
    assert report.returncode == 0 and "finished" in report.stdout
    assert (place / "page.html").read_text().startswith("<!doctype html>")
    assert json.loads(say(place, "report", "toy-0001", "--json").stdout)["state"] == "finished"


def test_stop_ends_the_ranks_and_nothing_is_left(place: Path, running: subprocess.Popen[str]) -> None:
    (place / "work.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('pid-' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    until(place, lambda row: len(list(place.glob("pid-*"))) == 2)
    stopped = say(place, "stop", "toy-0001", "--note", "enough")
    assert stopped.returncode == 0 and "has ended: stopped" in stopped.stdout
    assert running.wait(PATIENCE_S) == 0
    for pid in place.glob("pid-*"):
        assert not alive(int(pid.read_text())), f"rank {pid.name} is still there"
    assert say(place, "stop", "toy-0001").stdout.startswith("toy-0001 has already ended: stopped")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
