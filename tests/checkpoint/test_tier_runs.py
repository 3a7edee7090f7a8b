"""Real runs that save to their nodes: a node is lost with all that was on it, and no local checkpoint is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.checkpoint.local_tier import LocalTier
from outlast.checkpoint.tiers import Tier
from outlast.launchers.local import LocalCluster
from outlast.reliability.config import load_frozen
from outlast.reliability.eventlog import read_events
from outlast.reliability.events import AttemptPlanned, StepsDone
from outlast.reliability.model import Node, Plan
from outlast.reliability.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.megatron]
PATIENCE_S = 240.0

RUN = """
name: toy
task: {{module: outlast.launchers.trainer}}
cluster: {{kind: local, nodes: 2, {nodes}, ranks_per_node: 2, kernel_log: ''}}
layout: {{global_batch: 8}}
train_steps: 120
checkpoint: {{every: 100 steps}}
tiers: {{local_dir: '{memory}/%n', local_every_steps: 10}}
"""


@pytest.fixture
def memory() -> Iterator[Path]:
    """What the nodes have as their own: a directory below it for each."""
    place = Path(tempfile.mkdtemp(prefix="outlast-tiers-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield place
    shutil.rmtree(place, ignore_errors=True)


def lose_a_after_its_copy(run_dir: RunDir, process: subprocess.Popen[str], memory: Path) -> int:
    """Node a loses its power and its memory once a local checkpoint is copied; its train_step."""
    local, deadline_s = LocalTier(run_dir.checkpoints), time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline_s
        copied = [step for step in local.steps() if local.tier(step) is Tier.COPIED]
        if copied:
            break
        time.sleep(0.005)
    LocalCluster(run_dir, load_frozen(run_dir)).crash(Node("a"))
    shutil.rmtree(memory / "a")
    return copied[-1]


def losses(run_dir: RunDir, attempt: int) -> dict[int, float | None]:
    bodies = [event.body for event in read_events(run_dir.events).events]
    return {s.train_step: s.loss for b in bodies if isinstance(b, StepsDone) and b.attempt == attempt for s in b.steps}


def plans(run_dir: RunDir) -> list[Plan]:
    bodies = (event.body for event in read_events(run_dir.events).events)
    return [body.plan for body in bodies if isinstance(body, AttemptPlanned)]


@pytest.mark.parametrize(
    ("nodes", "then"), [("spares: 1", ("c", "b")), ("nodes_min: 1", ("b",))], ids=["a spare comes", "it shrinks"]
)
def test_a_lost_node_costs_no_local_checkpoint(tmp_path: Path, memory: Path, nodes: str, then: tuple[str, ...]) -> None:
    (tmp_path / "run.yaml").write_text(RUN.format(nodes=nodes, memory=memory))
    process = subprocess.Popen(
        [sys.executable, "-m", "outlast.reliability.app", "run", "run.yaml"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "OUTLAST_RUN_ROOT"},
    )
    run_dir = RunDir(root=tmp_path / "runs" / "toy-0001")
    try:
        least = lose_a_after_its_copy(run_dir, process, memory)
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert process.returncode == 0, output
    first, second = plans(run_dir)
    assert first.restore_step == 0 and second.nodes == tuple(map(Node, then))
    # nothing was on the shared file system yet but the index
    assert second.restore_step >= least and "/local/" in second.restore_path
    log = (run_dir.root / "attempts" / "0002" / "ranks").rglob("log")
    assert any("tensors as saved" in path.read_text() for path in log), "compared with its fingerprints"
    if len(then) == 2:  # the same layout: the same numbers, bit for bit
        before, after = losses(run_dir, 1), losses(run_dir, 2)
        again = [step for step in before if step in after]
        assert all(before[step] == after[step] for step in again)
    assert max(losses(run_dir, 2)) == 120
    # memory is given back, and nothing promises what is gone
    assert not [p for p in memory.rglob("*") if p.is_file()]
    assert LocalTier(run_dir.checkpoints).steps() == ()
    assert json.loads((run_dir.checkpoints / "iter_0000120" / "manifest.json").read_text())["train_step"] == 120
