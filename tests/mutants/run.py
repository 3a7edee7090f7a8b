"""`make mutants`: each patch here breaks judging or deciding on purpose, and the tests that it names must notice.

    a copy of the tree -> patch -> the named tests in it -> red is right, green is a hole in the tests

A patch begins with a line of prose and `tests:`, the tests that are to turn red. Without patches the same tests must be
green. A patch that does not apply any more is an error too: the line it breaks was changed, so break the new one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PARTS = (
    "outlast",
    "reliability",
    "monitors",
    "slurm",
    "launchers",
    "checkpoint",
    "tests",
    "setup.cfg",
    "pyproject.toml",
)
LIMIT_S = 300
SKIP = shutil.ignore_patterns("__pycache__", "*.pyc", "mutants", "megatron_lm", "bench")


def tests_of(patch: Path) -> list[str]:
    line = next(line for line in patch.read_text().splitlines() if line.startswith("tests: "))
    return line.removeprefix("tests: ").split()


def copy_tree(place: Path) -> None:
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, symlinks=True, ignore=SKIP)
        else:
            shutil.copy(source, place / name)


def run(tests: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    return subprocess.run(argv, cwd=place, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def survives(patch: Path) -> str:
    """'' where the tests notice the mutant, else what went wrong."""
    with tempfile.TemporaryDirectory(prefix="outlast-mutant-") as scratch:
        place = Path(scratch)
        copy_tree(place)
        applied = subprocess.run(
            ["git", "apply", str(patch)], cwd=place, capture_output=True, text=True, timeout=60, check=False
        )
        if applied.returncode:
            return f"does not apply any more: {applied.stderr.strip()[:300]}"
        done = run(tests_of(patch), place)
        if done.returncode == 1:
            return ""
        if done.returncode == 0:
            return f"lives: {' '.join(tests_of(patch))} stay green"
        return f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}"


def main() -> int:
    patches = sorted(HERE.glob("*.patch"))
    sound = sorted({test for patch in patches for test in tests_of(patch)})
    with tempfile.TemporaryDirectory(prefix="outlast-mutant-") as scratch:
        copy_tree(Path(scratch))
        done = run(sound, Path(scratch))
    if done.returncode:
        sys.stdout.write(f"the tests are red without any mutant:\n{done.stdout[-3000:]}")
        return 1
    with ThreadPoolExecutor(max_workers=2) as pool:
        outcomes = list(pool.map(survives, patches))
    for patch, why in zip(patches, outcomes, strict=True):
        sys.stdout.write(f"{'noticed' if not why else 'MISSED '}  {patch.name}{f'  {why}' if why else ''}\n")
    sys.stdout.write(f"{sum(not why for why in outcomes)} of {len(patches)} mutants noticed\n")
    return 0 if patches and not any(outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
