"""`outlast check --node`: srun's own failures prove nothing about a node, and no hook drains for them."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.monitors import gate_elsewhere
from outlast.monitors.gate import main
from outlast.monitors.gate_elsewhere import ask, read_report, srun_words


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in on PATH that does what its script says."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path / "srun"


def script(srun: Path, text: str) -> None:
    srun.write_text(f"#!/bin/sh\n{text}\n")
    srun.chmod(0o755)


HERE = 'while [ "$1" != "$PY" ]; do shift; done; exec "$@"'
"""Runs the check on this machine, as srun would on the other."""


@pytest.mark.slow
def test_the_other_node_s_answer_is_ours(
    srun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PY", sys.executable)
    script(srun, HERE)
    gone = str(tmp_path / "gone")
    assert main(["--node", "n7", "--path", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["--node", "n7", "--path", gone, "--hook"]) == 1
    assert f"writable {gone}: fault" in capsys.readouterr().out
    assert main(["--node", "n7", "--path", gone, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["outcome"] == "fault"
    # its errors are ours to tell, and no proof against the node
    assert main(["--node", "n7", "--path", str(tmp_path), "--skip", "gpu", "--gpus", "8"]) == 0


def test_an_srun_that_fails_proves_nothing(srun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(srun, 'echo "srun: error: Unable to allocate resources: node is drained" >&2; exit 1')
    assert main(["--node", "n7"]) == 75
    assert "node n7: unknown: srun: error: Unable to allocate" in capsys.readouterr().out
    assert main(["--node", "n7", "--hook"]) == 0


def test_no_srun_at_all_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--node", "n7"]) == 75
    assert main(["--node", "n7", "--hook"]) == 0


@pytest.mark.slow
def test_a_node_that_does_not_answer_is_unknown_in_time(srun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_elsewhere, "START_S", 0.3)
    monkeypatch.setattr(gate_elsewhere, "END_S", 0.5)
    script(srun, "trap '' TERM; exec sleep 60")
    began = time.monotonic()
    far = ask("n7", [], 0.2)
    assert far.report is None and "no answer" in far.why
    assert time.monotonic() - began < 10


def test_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = srun_words("n7", ["--gpus", "8", "--hook", "--json"], None)
    assert "--immediate=30" in alone and alone[-2:] == ["--gpus", "8"] and "--hook" not in alone
    assert alone.count("--json") == 1
    inside = srun_words("n7", [], "12")
    assert "--overlap" in inside and "--jobid=12" in inside


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_output_is_a_report_or_none(out: str, err: str) -> None:
    for text in (out, "{" + out, '{"outcome": ' + out):
        far = read_report(text, err)
        assert far.report is None or far.report["outcome"] in ("well", "fault", "unknown")


@pytest.mark.slow
@pytest.mark.slurm
def test_on_a_real_slurm(idle_testbed: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--node", "n3", "--path", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "")
    gone = str(tmp_path / "gone")
    assert main(["--node", "n3", "--path", gone]) == 1
    assert f"writable {gone}: fault" in capsys.readouterr().out
    idle_testbed.run(["scontrol", "update", "nodename=n3", "state=drain", "reason=test"])  # type: ignore[attr-defined]
    monkey = gate_elsewhere.START_S
    gate_elsewhere.START_S = 2.0
    try:
        assert main(["--node", "n3", "--path", gone, "--hook"]) == 0  # a drained node gives no step: unknown
        assert main(["--node", "n3", "--path", gone]) == 75
    finally:
        gate_elsewhere.START_S = monkey
