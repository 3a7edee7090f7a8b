"""A GPU that NVML calls lost is a verdict of a real supervisor: no kernel log is read here at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.reliability.eventlog import read_events
from outlast.reliability.events import AttemptMoved, Judged, LogEvent, Seen
from outlast.reliability.freeze import freeze
from outlast.reliability.model import GateOutcome, GateSeen, GpuChanged, XidSeen
from outlast.reliability.runfile import Checkpoint, Cluster, Limits, RunFile, Task
from outlast.reliability.verdict import Kind, Scope

pytestmark = pytest.mark.slow
PATIENCE_S = 60.0


@pytest.fixture
def events(tmp_path: Path, nvml: Any) -> Iterator[Callable[[], list[LogEvent]]]:
    """`outlast run` on two local nodes of two GPUs each, and what its log says now."""
    # the local cluster gives no GPUs, and says so of a run file; its agents look at what a run asked for all the same
    run = RunFile(
        name="gpus",
        task=Task(command=("sleep", "600"), kind="plain", workdir=str(tmp_path)),
        cluster=Cluster(kind="local", nodes=1, spares=1, gpus_per_node=2, ranks_per_node=1, kernel_log=""),
        checkpoint=Checkpoint(every_s=1800.0),
        limits=Limits(term_grace_s=1.0),
    )
    run_dir = freeze(run, tmp_path / "runs")
    words = [sys.executable, "-P", "-m", "outlast.reliability.app", "run", "--quiet", "--run-dir", str(run_dir.root)]
    env = {**os.environ, **nvml.env(FAKE_NVML_GPUS="2")}
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=output, stderr=subprocess.STDOUT)
    yield lambda: read_events(run_dir.events).events
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(PATIENCE_S)
    finally:
        process.kill()


def until(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if got := what():
            return got
        time.sleep(0.05)
    pytest.fail(f"not within {PATIENCE_S:.0f} s")


def test_a_gpu_that_falls_off_the_bus_convicts_its_node(events: Callable[[], list[LogEvent]], nvml: Any) -> None:
    until(lambda: [e for e in events() if isinstance(e.body, AttemptMoved) and e.body.state == "starting"])
    gates = [e.body.signal for e in events() if isinstance(e.body, Seen) and isinstance(e.body.signal, GateSeen)]
    assert [(g.outcome, g.findings) for g in gates] == [(GateOutcome.WELL, ())]

    def seen() -> list[XidSeen]:
        return [e.body.signal for e in events() if isinstance(e.body, Seen) and isinstance(e.body.signal, XidSeen)]

    def told() -> list[XidSeen]:
        nvml.xid(1, 79)  # the agents' readers register at their own time
        time.sleep(0.2)
        return seen()

    first = until(told)[0]
    assert (first.code, first.gpu, first.source) == (79, "0000:1b:00", "nvml")
    verdicts = until(lambda: [e.body.verdict for e in events() if isinstance(e.body, Judged)])
    assert (verdicts[0].kind, verdicts[0].node, verdicts[0].gpu) == (Kind.HARDWARE_FAULT, first.node, "0000:1b:00")
    assert verdicts[0].convicts


def test_a_state_that_both_nodes_show_reaches_the_judge_and_blames_none(
    events: Callable[[], list[LogEvent]], nvml: Any
) -> None:
    until(lambda: [e for e in events() if isinstance(e.body, AttemptMoved) and e.body.state == "starting"])
    nvml.set("1 throttle 72", "0 remap_failed 1")
    changed = until(lambda: [e.body.signal for e in events() if isinstance(e.body, Seen) and _is_state(e.body.signal)])
    assert {(c.field, c.gpu) for c in changed} <= {("hw_slowdown", "0000:1b:00"), ("remap_failed", "0000:1a:00")}
    verdicts = until(lambda: [e.body.verdict for e in events() if isinstance(e.body, Judged)])
    # one library for both nodes of this run: the cause reaches all of it, and nobody is blamed
    assert (verdicts[0].kind, verdicts[0].scope) == (Kind.AMBIGUOUS, Scope.EVERYTHING)
    assert not any(v.convicts for v in verdicts)


def _is_state(signal: object) -> bool:
    return isinstance(signal, GpuChanged)
