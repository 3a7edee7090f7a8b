"""The real clock: ports.Clock. Wall time is anchored once, so that a jump of the system's clock moves no duration."""

from __future__ import annotations

import time


class SteadyClock:
    """Wall time as it was at the start plus monotonic time since: steady within one supervisor's life."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def wall_s(self) -> float:
        return time.monotonic() + self._offset_s

    def mono_s(self) -> float:
        return time.monotonic()
