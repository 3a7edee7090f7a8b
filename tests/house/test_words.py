"""Words that have no place in the source: promises, shells, and where it was written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = [
    path
    for room in ("reliability", "monitors", "slurm", "launchers", "checkpoint")
    for path in sorted((ROOT / room).rglob("*"))
    if path.suffix in (".py", ".yaml", ".sbatch", ".sh") and "__pycache__" not in path.parts
]

FORBIDDEN = {
    "a promise": re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"),
    "a part that is not there": re.compile(r"\bNotImplementedError\b"),
    "a shell": re.compile(r"shell\s*=\s*True|\bos\.(system|popen)\("),
    "the place where it was written": re.compile(r"(?<![\w.])/(work|root|home)/"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_source_has_no(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FORBIDDEN[what].search(line)
    ]
    assert not found, "\n".join(found)


def test_there_is_source() -> None:
    assert len(SOURCE) > 100
