"""What is known of one GPU at one moment, whoever read it, and what changed between two moments. Pure.

NVML (nvml.py) and the exporter's page (dcgm.py) fill the same fields, so that nobody after them cares which it was.
A field that is None was not told: a GPU without it, a driver too old, a blank value. None is never health, and a field
that turns None says nothing changed. What a change means is judged elsewhere.
"""

from __future__ import annotations

from typing import Final

import msgspec

from outlast.reliability.model import GpuChanged, Node, Noun


class GpuState(Noun, frozen=True, kw_only=True):
    """One GPU, or one MIG instance of it."""

    gpu: str
    """PCI address dddd:bb:dd, or what the source calls it where it does not say."""
    instance: str = ""
    """The MIG instance; '' for the whole GPU."""
    uuid: str = ""
    lost: bool | None = None
    """The GPU does not answer any more."""
    xid_last: int | None = None
    """A gauge that holds the last XID: a memory, not an event."""
    ecc_uncorrected: int | None = None
    """Since the driver was loaded."""
    ecc_uncorrected_ever: int | None = None
    ecc_corrected: int | None = None
    remapped_uncorrected: int | None = None
    remapped_corrected: int | None = None
    remap_pending: int | None = None
    remap_failed: int | None = None
    retired_sbe: int | None = None
    retired_dbe: int | None = None
    retired_pending: int | None = None
    recovery_action: int | None = None
    """What the driver asks for: 0 nothing, else a reset, a reboot, a drain."""
    hw_slowdown: int | None = None
    """Bits of NVML's clocks throttle reasons that hardware set: slowdown, thermal, power brake."""
    thermal_violation_us: int | None = None
    power_violation_us: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    nvlink_crc_errors: int | None = None
    nvlink_replay_errors: int | None = None
    nvlink_recovery_errors: int | None = None
    nvlinks_down: int | None = None
    temperature_c: int | None = None
    used_bytes: int | None = None
    pids: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return f"{self.gpu}/{self.instance}" if self.instance else self.gpu


FACTS: Final = (
    *("lost", "remap_pending", "remap_failed", "retired_pending", "recovery_action"),
    *("hw_slowdown", "pcie_width", "nvlinks_down"),
)
"""What holds now. An unhealthy one is told at the first look too, since it is true whenever it began."""
COUNTERS: Final = (
    *("ecc_uncorrected", "ecc_uncorrected_ever", "remapped_uncorrected", "retired_sbe", "retired_dbe"),
    *("pcie_replays", "nvlink_crc_errors", "nvlink_replay_errors", "nvlink_recovery_errors"),
    *("thermal_violation_us", "power_violation_us"),
)
"""What only grows. The first look tells nothing (of unknown age); a smaller value is a restart, not a fault."""


def changes(before: GpuState | None, now: GpuState, *, node: Node, at_s: float, source: str) -> list[GpuChanged]:
    """What differs, in the order of the tables above. `before` None: the first look at this GPU."""
    found: list[GpuChanged] = []

    def tell(field: str, was: int | None, value: int) -> None:
        found.append(GpuChanged(node=node, at_s=at_s, source=source, gpu=now.name, field=field, before=was, now=value))

    for field in FACTS:
        value = _number(now, field)
        was = _number(before, field) if before is not None else None
        if value is None or value == was:
            continue
        if was is not None or _unhealthy(now, field, value):
            tell(field, was, value)
    if before is not None:
        for field in COUNTERS:
            value, was = _number(now, field), _number(before, field)
            if value is not None and was is not None and value > was:
                tell(field, was, value)
    return found


def restarted(before: GpuState, now: GpuState) -> bool:
    """A counter went back: the source, the driver or the GPU began anew."""
    pairs = ((_number(before, f), _number(now, f)) for f in COUNTERS)
    return any(was is not None and value is not None and value < was for was, value in pairs)


def merged(before: GpuState | None, now: GpuState) -> GpuState:
    """What is known after `now`: a field that it does not tell keeps its last value."""
    if before is None:
        return now
    kept = {
        field: getattr(before, field)
        for field in now.__struct_fields__
        if getattr(now, field) is None and getattr(before, field) is not None
    }
    return msgspec.structs.replace(now, **kept) if kept else now


def _number(state: GpuState, field: str) -> int | None:
    value = getattr(state, field)
    return None if value is None else int(value)


def _unhealthy(state: GpuState, field: str, value: int) -> bool:
    if field == "pcie_width":
        return state.pcie_width_max is not None and 0 < value < state.pcie_width_max
    return value != 0
