"""The example of docs/checkpoints.md, run as it stands there: a rank dies, and the result is the undisturbed run's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.checkpoint.prints import read_prints
from outlast.checkpoint.store import Store
from outlast.reliability.eventlog import read_events
from outlast.reliability.history import RunView, fold
from outlast.reliability.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "fsdp2.py"
OUTLAST = [sys.executable, "-m", "outlast.reliability.app"]
DIE = """
        if step == 30 and (os.environ["OUTLAST_ATTEMPT"], dist.get_rank()) == ("1", 1):
            os.kill(os.getpid(), 9)
"""


def run(place: Path, *, dies: bool) -> tuple[RunView, Path]:
    """60 train_steps, saved every 20."""
    shutil.copytree(EXAMPLE.parent, place / "docs" / "examples")
    text = EXAMPLE.read_text()
    line = "note.step_started(step)\n"
    shorter = text.replace(
        "TRAIN_STEPS, SAVE_EVERY, BATCH = 300, 50, 16", "TRAIN_STEPS, SAVE_EVERY, BATCH = 60, 20, 16"
    )
    assert shorter != text and text.count(line) == 1
    (place / "docs" / "examples" / "fsdp2.py").write_text(shorter.replace(line, line + DIE * dies))
    argv = [*OUTLAST, "run", "docs/examples/fsdp2.yaml"]
    done = subprocess.run(argv, cwd=place, capture_output=True, text=True, timeout=180, check=False)
    root = place / "runs" / "fsdp2-0001"
    logs = "\n".join(log.read_text(errors="replace")[-2000:] for log in root.glob("attempts/*/ranks/*/log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    return fold(tuple(read_events(RunDir(root=root).events).events)), root


@pytest.mark.slow
def test_a_killed_rank_costs_a_restart_and_nothing_of_the_result(tmp_path: Path) -> None:
    undisturbed, there = run(tmp_path / "undisturbed", dies=False)
    view, here = run(tmp_path / "killed", dies=True)
    assert [attempt.plan.restore_step for attempt in view.attempts] == [0, 20]
    losses, expected = ({step.train_step: step.loss for step in one.steps} for one in (view, undisturbed))
    assert losses == expected and len(losses) == 60
    assert Store(here / "checkpoints").durable_steps() == Store(there / "checkpoints").durable_steps() == (20, 40, 60)
    ours, theirs = (read_prints(root / "checkpoints" / "iter_0000060") for root in (here, there))
    assert ours is not None and theirs is not None and ours.tensors == theirs.tensors and not ours.left_out
    manifest = json.loads((here / "checkpoints" / "iter_0000060" / "manifest.json").read_bytes())
    assert (manifest["samples"], manifest["layout"]) == (960, {"dp": 2})


def test_what_the_page_shows_is_what_the_example_does() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    chapter = page.partition("\n## A plain PyTorch run\n")[2].partition("\n## ")[0]
    (shown,) = re.findall(r"^```python\n(.*?)^```$", chapter, re.MULTILINE | re.DOTALL)
    lines = {line.strip() for line in EXAMPLE.read_text(encoding="utf-8").splitlines()}
    missing = [line for line in shown.splitlines() if line.strip() not in lines | {"", "..."}]
    assert not missing
