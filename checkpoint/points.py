"""The points in a rank's part of a save where a drill can end it, and the drill itself.

A writer's own points are in commit.py. Both are reached by name: OUTLAST_KILL_AT kills the process that passes it.
"""

from __future__ import annotations

import os
import signal
from typing import Final

from outlast.checkpoint.commit import POINTS, Reach, pass_by
from outlast.checkpoint.errors import CheckpointError

KILL_AT: Final = "OUTLAST_KILL_AT"
RANK_POINTS: Final = ("save.begin", "save.planned", "save.copied", "save.handed_over")


def read_kill_point() -> Reach:
    """For drills: the process that reaches the point named by OUTLAST_KILL_AT ends there, by SIGKILL."""
    point = os.environ.get(KILL_AT, "")
    if not point:
        return pass_by
    if point not in POINTS + RANK_POINTS:
        raise CheckpointError(f"{KILL_AT}: no point {point!r}; there are {', '.join(RANK_POINTS + POINTS)}")

    def reach(passed: str) -> None:
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return reach
