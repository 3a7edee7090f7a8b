"""The gate as an agent runs it: the real program, its real answer, and what is no fault of a node's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.launchers.node_gate import NodeLook, gate_words, look_at_node, parse_answer, rank_marker
from outlast.launchers.recorder import STOP_FILE_ENV
from outlast.reliability.model import GateOutcome

pytestmark = pytest.mark.slow


def look(run_dir: Path, *, gpus: int = 0, marker: str = "", timeout_s: float = 20.0) -> NodeLook:
    helpers: set[int] = set()
    seen = asyncio.run(
        look_at_node("127.0.0.1", gpus=gpus, timeout_s=timeout_s, helpers=helpers, run_dir=run_dir, marker=marker)
    )
    assert not helpers
    return seen


def test_a_well_node_is_well_and_its_run_directory_is_left_as_it_was(tmp_path: Path) -> None:
    seen = look(tmp_path, marker=rank_marker(tmp_path / "nest"))
    assert (seen.outcome, seen.findings) == (GateOutcome.WELL, ()) and seen.free_port > 1023
    assert not list(tmp_path.iterdir())


def test_a_run_directory_that_this_node_does_not_have_is_a_fault(tmp_path: Path) -> None:
    seen = look(tmp_path / "gone")
    assert seen.outcome is GateOutcome.FAULT and "writable" in seen.findings[0]


def test_gpus_that_are_not_there_are_seen(tmp_path: Path) -> None:
    """Without a GPU library there is nobody to ask: unknown, and said so."""
    seen = look(tmp_path, gpus=8)
    assert seen.outcome in (GateOutcome.UNKNOWN, GateOutcome.FAULT) and "gpu" in seen.findings[0]


def test_a_rank_that_was_left_behind_is_a_fault_of_this_node_alone(tmp_path: Path) -> None:
    mine, other = tmp_path / "nest-a", tmp_path / "nest-b"
    env = {**os.environ, STOP_FILE_ENV: str(mine / "attempt-0001" / "stop")}
    left = subprocess.Popen(["sleep", "60"], env=env)
    try:
        seen = look(tmp_path, marker=rank_marker(mine))
        assert seen.outcome is GateOutcome.FAULT and str(left.pid) in seen.findings[0]
        assert look(tmp_path, marker=rank_marker(other)).outcome is GateOutcome.WELL
    finally:
        left.kill()
        left.wait(10)


@pytest.mark.parametrize("text", ["No space left on device", "Disk quota exceeded"])
def test_a_full_file_system_convicts_no_node(text: str) -> None:
    check = {"check": "writable /runs/lm", "outcome": "fault", "found": text, "expected": "a writable directory"}
    outcome, findings = parse_answer(json.dumps({"outcome": "fault", "checks": [check]}).encode())
    assert outcome is GateOutcome.UNKNOWN and text in findings[0]
    shm = {"check": "shm", "outcome": "fault", "found": "0 bytes free"}
    assert parse_answer(json.dumps({"outcome": "fault", "checks": [check, shm]}).encode())[0] is GateOutcome.FAULT
    read_only = {**check, "found": "Read-only file system"}
    assert parse_answer(json.dumps({"outcome": "fault", "checks": [read_only]}).encode())[0] is GateOutcome.FAULT


def test_its_deadline_is_within_the_limit() -> None:
    for limit_s in (2.0, 20.0, 60.0):
        words = gate_words(8, limit_s, run_dir=Path("/runs/x"), marker="A=b")
        assert float(words[words.index("--deadline") + 1]) < limit_s
        assert words[-4:] == ["--path", "/runs/x", "--marker", "A=b"]


@given(st.binary(max_size=300))
def test_any_answer_is_some_outcome(out: bytes) -> None:
    assert parse_answer(out)[0] in GateOutcome
