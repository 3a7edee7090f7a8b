"""Which changes of a GPU's state are worth a signal, and how often. Pure.

What proves a broken part, or takes that proof back, is told each time. What only tells of slowness or of counted
errors is told once, and again after a while with all that happened in between: a GPU at its thermal limit changes
state at every look, and each signal is a line of the run's log. Rates without a meaning of their own (PCIe replays,
link errors, throttled time) are not told at all: they belong to whoever keeps metrics. It judges nothing.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from outlast.reliability.model import GpuChanged

EACH: Final = frozenset({"lost", "remap_failed", "recovery_action"})
SELDOM: Final = frozenset(
    (
        *("remap_pending", "retired_pending", "hw_slowdown", "pcie_width", "nvlinks_down"),
        *("ecc_uncorrected", "ecc_uncorrected_ever", "remapped_uncorrected", "retired_dbe"),
    )
)
AGAIN_S: Final = 600.0
KEPT: Final = 4096
"""GPUs and fields remembered; a source that names more is not believed beyond them."""

S = TypeVar("S")


class GpuTeller:
    """`pick` gives what of this to tell now; anything that is no GpuChanged passes."""

    def __init__(self, *, again_s: float = AGAIN_S) -> None:
        self._again_s = again_s
        self._told: dict[tuple[str, str, str], tuple[float, int]] = {}
        """When each field was told last, and its value then."""

    def pick(self, found: S) -> S | GpuChanged | None:
        if not isinstance(found, GpuChanged):
            return found
        if found.field in EACH:
            return found
        if found.field not in SELDOM:
            return None
        key = (found.source, found.gpu, found.field)
        last = self._told.get(key)
        if last is None:
            if len(self._told) < KEPT:
                self._told[key] = (found.at_s, found.now)
            return found
        told_s, value = last
        if found.at_s < told_s + self._again_s or found.now == value:
            return None
        self._told[key] = (found.at_s, found.now)
        return msgspec.structs.replace(found, before=value)
