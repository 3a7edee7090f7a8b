"""The trainer started as a program: alone, and by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

SMALL = ("--train-steps", "2", "--hidden", "32", "--seq", "16")


def start(*argv: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK")}
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=clean)


def test_alone_with_no_environment(data_dir: Path) -> None:
    done = start(sys.executable, "-m", "outlast.launchers.trainer", "--data-dir", str(data_dir), *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("train_step 2/2 | loss 5.")
    assert done.stderr == ""  # what upstream has to say about Apex is not the rank's last words


def test_under_torchrun(data_dir: Path) -> None:
    done = start(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "outlast.launchers.trainer", "--data-dir", str(data_dir), *SMALL, "--tp", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "train_step 2/2 | loss 5." in done.stdout


def test_wrong_use_ends_with_2_and_a_reason(data_dir: Path) -> None:
    done = start(sys.executable, "-m", "outlast.launchers.trainer", "--data-dir", str(data_dir), "--tp", "2")
    assert done.returncode == 2
    assert done.stderr == "outlast-trainer: tp 2 x pp 1 = 2 does not divide the 1 ranks\n"
