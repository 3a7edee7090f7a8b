"""What the scenarios share: the session's testbed, one run root and one undisturbed reference."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("slurm_harness", Path(__file__).with_name("harness.py"))
assert _spec is not None and _spec.loader is not None
harness = importlib.util.module_from_spec(_spec)
sys.modules["slurm_harness"] = harness
_spec.loader.exec_module(harness)


@pytest.fixture(scope="session")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def reference(testbed: Any, run_root: Path) -> dict[int, float]:
    """Losses of an undisturbed run on Slurm, 2 nodes."""
    run = harness.Run(testbed, run_root, "reference", spares=0, step_s=0.0)
    assert run.until_ended() == "finished", run.story()
    assert len(run.view.attempts) == 1, run.story()
    run.check_samples()
    return harness.losses_of(run)


@pytest.fixture
def start(idle_testbed: Any, run_root: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`start(...)` submits a run named after the test; leftovers are ended by idle_testbed."""

    def start_run(**asked: Any) -> Any:
        name = request.node.name.removeprefix("test_")[:40].rstrip("_").replace("[", "-").replace("]", "")
        return harness.Run(idle_testbed, run_root, name, **asked)

    yield start_run
