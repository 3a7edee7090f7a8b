"""`outlast check --node N`: the same check on another node, as a Slurm step of its own. Standard library only.

srun exits 1 for troubles of its own too, so its exit code proves nothing about the node: only the report that the
check printed there does. No report is "unknown", with what srun said.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

START_S = 30.0
"""How long the scheduler may take to give the node for a moment; a busy or drained one gives none."""
END_S = 5.0
REPORT_BYTES = 1 << 20


class FarReport(NamedTuple):
    """The answer of another node, or why there is none."""

    report: dict[str, Any] | None
    why: str = ""


def srun_words(node: str, rest: Sequence[str], job: str | None) -> list[str]:
    """Inside an allocation beside what runs there, else in one of its own."""
    inside = ["--overlap", f"--jobid={job}"] if job else [f"--immediate={START_S:.0f}"]
    where = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--quiet", "--input=none", *inside]
    # as a hook an unknown would exit 0 and print nothing: here the report is wanted in any case
    asked = [word for word in rest if word not in ("--hook", "--json")]
    return [*where, sys.executable, "-P", "-m", "outlast.monitors.gate", "--json", *asked]


def ask(node: str, rest: Sequence[str], deadline_s: float) -> FarReport:
    """Run it there. Blocks, at most for the start, the check's own deadline and a moment."""
    words = srun_words(node, rest, os.environ.get("SLURM_JOB_ID"))
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    except OSError as e:
        return FarReport(None, f"srun: {e.strerror}: run it on the node itself")
    try:
        out, err = process.communicate(timeout=START_S + deadline_s + END_S)
    except subprocess.TimeoutExpired:
        _end(process)
        return FarReport(None, f"{node} gave no answer in {START_S + deadline_s + END_S:.0f} s")
    return read_report(out[:REPORT_BYTES], err)


def read_report(out: str, err: str) -> FarReport:
    """The report among what was printed; else srun's own words."""
    import json

    for line in out.splitlines():
        if not line.startswith("{"):
            continue
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(report, dict) and report.get("outcome") in ("well", "fault", "unknown"):
            return FarReport(report)
    said = " ".join(err.split())[-400:]
    return FarReport(None, said or "srun said nothing")


def _end(process: subprocess.Popen[str]) -> None:
    """TERM first: a killed srun leaves its request in the queue for a while."""
    process.terminate()
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
