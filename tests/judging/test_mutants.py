"""The patches of tests/mutants still break what they say; running them is `make mutants`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))


def test_there_are_ten_at_least() -> None:
    assert len(PATCHES) >= 10


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_a_patch_applies_and_its_tests_exist(patch: Path, tmp_path: Path) -> None:
    for name in next(t for t in patch.read_text().splitlines() if t.startswith("tests: ")).split()[1:]:
        file, _, test = name.partition("::")
        assert f"def {test or 'test_'}" in (ROOT / file).read_text(), name
    target = next(t for t in patch.read_text().splitlines() if t.startswith("--- a/")).removeprefix("--- a/")
    (tmp_path / target).parent.mkdir(parents=True)
    shutil.copy(ROOT / target, tmp_path / target)
    done = subprocess.run(
        ["git", "apply", "--check", str(patch)], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
