"""How often this attempt saves, where that may change while it trains: a number in a file of the run directory.

The supervisor writes it (reliability/pacing.py), rank 0 reads it now and then, and the ranks agree on it in the small
sum by which they agree on stopping: all of them change at the same train_step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from outlast.reliability.rundir import RunDir

LOOK_S: Final = 2.0
"""On a network file system each look is a request."""


class Pace:
    """Rank 0's look at the file."""

    def __init__(self, path: Path | None, mono_s: Callable[[], float] = time.monotonic) -> None:
        self._path, self._mono_s = path, mono_s
        self._looked_s = float("-inf")

    def look(self) -> int:
        """The train_steps between saves that are asked for; 0 where nothing new is known."""
        if self._path is None or self._mono_s() < self._looked_s + LOOK_S:
            return 0
        self._looked_s = self._mono_s()
        try:
            text = self._path.read_text()
        except (OSError, UnicodeDecodeError):
            return 0
        return int(text) if text.strip().isdecimal() and len(text) < 10 else 0


def open_pace(env: Mapping[str, str], attempt: int, *, wanted: bool) -> Pace:
    place = env.get("OUTLAST_RUN_DIR", "")
    return Pace(RunDir(root=Path(place)).save_every(attempt) if wanted and place else None)
