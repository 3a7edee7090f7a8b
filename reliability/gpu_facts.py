"""What a changed GPU state is called in the catalogue, and what of it still holds. Pure.

    GpuChanged(field, before, now)  ->  a key of catalog/kernel.yaml, `state_...`; '' where it changed for the better

The driver's library and the exporter's page are read every few seconds, so the same cause is told by each node at its
own time; and a state can be well again before anybody acts on it. What the rows mean is the catalogue's, what follows
from them rules_gpu.py's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from outlast.reliability.model import GpuChanged
from outlast.reliability.node_facts import GpuFact

_KEYS: Final = {
    "lost": "state_lost",
    "remap_failed": "state_remap_failed",
    "remap_pending": "state_remap_pending",
    "retired_pending": "state_remap_pending",
    "hw_slowdown": "state_slowed",
    "nvlinks_down": "state_nvlink_down",
    "ecc_uncorrected": "state_ecc",
    "ecc_uncorrected_ever": "state_ecc",
    "remapped_uncorrected": "state_remapped",
    "retired_dbe": "state_remapped",
}
_RECOVERIES: Final = range(1, 5)
"""Reset, reboot, drain of peer traffic, drain and reset: what drivers of today ask for."""


def key_of(change: GpuChanged) -> str:
    """The row of the catalogue; '' for what is no worse than before, or not told by this name."""
    match change.field:
        case "pcie_width":
            worse = change.now > 0 and (change.before is None or change.now < change.before)
            return "state_pcie_width" if worse else ""
        case "recovery_action":
            known = change.now in _RECOVERIES
            return "state_recovery" if known else "state_recovery_unknown" if change.now > 0 else ""
        case field:
            return _KEYS.get(field, "") if change.now > 0 else ""


def standing(facts: Iterable[GpuFact]) -> tuple[GpuFact, ...]:
    """What holds still: the newest word of each source on each field of each GPU."""
    newest = {(f.change.source, f.change.gpu, f.change.field): f for f in facts}
    return tuple(sorted(newest.values(), key=lambda f: f.seq))
