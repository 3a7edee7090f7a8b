"""`outlast demo` as its user meets it: a process, its output, its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.megatron]


def test_the_demo_breaks_a_run_three_times_and_ends_with_the_undisturbed_result(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "outlast.reliability.app", "demo", "--json", "--dir", str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)

    rules = [i["rule"] for i in said["incidents"]]
    assert rules == ["gpu_bus_loss", "program_exception", "agent_lost"], done.stderr[-4000:]
    assert all(i["because"] for i in said["incidents"])
    assert [i["node"] for i in said["incidents"]][1] is None, "an exception blames no node"
    assert said["attempts"] == 4 and said["state"] == "finished"

    ledger = dict(said["ledger"])
    wall_s = ledger.pop("wall_s")
    assert sum(ledger.values()) == pytest.approx(wall_s, rel=0.01)
    assert ledger["other"] <= 0.01 * wall_s

    assert said["reference"]["steps_compared"] == 60
    assert said["reference"]["identical_until_step"] >= 40, "bit-identical while the layout is the same"
    assert said["reference"]["max_relative_loss_difference"] <= 1e-5
    assert said["samples_once"] is True
    assert "<svg" in Path(said["report"]).read_text()
    # what a person sees goes to stderr then, each incident with its reason
    assert done.stderr.count("because:") == 3
