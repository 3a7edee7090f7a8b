"""What is refused before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from outlast.launchers.trainer_args import Settings, parse_settings, why_not

SETTINGS = Settings(data_dir=Path("/data"))


def test_the_command_line_becomes_one_value() -> None:
    settings = parse_settings(["--data-dir", "/data", "--tp", "2", "--lr", "0.1", "--overlap", "--restore-dir", "/c"])
    assert settings == replace(SETTINGS, tp=2, lr=0.1, overlap=True, restore_dir=Path("/c"))
    with pytest.raises(SystemExit):
        parse_settings(["--data-dir", "/data", "--layer", "2", "--no-such-thing"])


@pytest.mark.parametrize(
    ("change", "ranks", "word"),
    [
        ({"cp": 2}, 2, "Transformer Engine"),
        ({"tp": 2, "pp": 2}, 6, "does not divide the 6 ranks"),
        ({"tp": 8}, 8, "4 heads do not divide over tp 8"),
        ({"hidden": 97}, 1, "hidden 97"),
        ({"pp": 4}, 4, "2 layers do not divide over pp 4"),
        ({"pp": 2, "vpp": 2}, 2, "2 layers do not divide over pp 2 x vpp 2"),
        ({"vpp": 2}, 1, "give --pp"),
        ({"pp": 2, "vpp": 2, "layers": 4, "micro_batch": 8}, 2, "1 microbatches a replica"),
        ({"ep": 2}, 2, "give --experts"),
        ({"ep": 2, "experts": 3}, 2, "3 experts do not divide over ep 2"),
        ({"ep": 4, "experts": 4}, 2, "ep 4 does not divide tp x dp = 2"),
        ({"experts": 1}, 1, "router picks two"),
        ({"save_every": 5}, 1, "--checkpoint-dir"),
        ({"micro_batch": 3}, 1, "global batch 8"),
        ({"micro_batch": 0}, 1, "at least 1"),
    ],
)
def test_an_impossible_layout_is_refused_with_a_reason(change: dict[str, int], ranks: int, word: str) -> None:
    assert word in why_not(replace(SETTINGS, **change), ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "ranks"),
    [
        ({}, 1),
        ({}, 4),
        ({"tp": 2}, 4),
        ({"pp": 2}, 2),
        ({"pp": 2, "vpp": 2, "layers": 4}, 2),
        ({"ep": 2, "experts": 4, "tp": 2}, 2),
    ],
)
def test_a_possible_layout_is_not_refused(change: dict[str, int], ranks: int) -> None:
    assert why_not(replace(SETTINGS, **change), ranks) == ""  # type: ignore[arg-type]


@pytest.mark.slow
def test_importing_the_trainer_imports_neither_torch_nor_megatron() -> None:
    code = "import sys, outlast.launchers.trainer; print(sorted({'torch', 'numpy', 'megatron'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
