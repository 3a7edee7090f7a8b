"""A dcgm-exporter page, again and again, as signals: what is new on it, and what it does not say any more. Pure.

    page (exporter_page.py) -> GpuState a GPU -> against what was known before -> XidSeen, GpuChanged, SourceBlind

The XID gauge holds the last code until something resets it, so only its change is an event: the same 31 for six hours
is one, and two equal ones in a row cannot be told apart here -- the kernel log counts them. What stands in the gauge at
the first look is of unknown age and no event. A series or a GPU that was there and is gone (an upgrade, a GPU that
fell off the bus, a fault that disables the monitor) is blindness, said once, and never health. Fetching pages is the
caller's; so is what a signal means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from outlast.monitors.exporter_page import Device, Page
from outlast.monitors.gpu_state import GpuState, changes, merged, restarted
from outlast.monitors.xid_text import normalise_pci
from outlast.reliability.model import GpuChanged, Node, SourceBlind, XidSeen

SOURCE: Final = "dcgm"
XID_GAUGE: Final = "DCGM_FI_DEV_XID_ERRORS"
XID_COUNT: Final = "DCGM_EXP_XID_ERRORS_COUNT"
_MIB: Final = 1 << 20
_HW_SLOWDOWN: Final = 0x8 | 0x40 | 0x80
"""NVML's clocks event reasons that hardware sets: slowdown, thermal slowdown, power brake."""
DEVICES_MAX: Final = 4096
"""GPUs and instances remembered of one exporter; a page that names more is not believed beyond them."""


def _plain(value: float) -> int:
    return int(value)


FIELDS: Final[dict[str, tuple[str, Callable[[float], int]]]] = {
    XID_GAUGE: ("xid_last", _plain),
    **{
        f"DCGM_FI_DEV_{name}": (field, _plain)
        for name, field in (
            ("ECC_DBE_VOL_TOTAL", "ecc_uncorrected"),
            ("ECC_DBE_AGG_TOTAL", "ecc_uncorrected_ever"),
            ("ECC_SBE_VOL_TOTAL", "ecc_corrected"),
            ("UNCORRECTABLE_REMAPPED_ROWS", "remapped_uncorrected"),
            ("CORRECTABLE_REMAPPED_ROWS", "remapped_corrected"),
            ("ROW_REMAP_PENDING", "remap_pending"),
            ("ROW_REMAP_FAILURE", "remap_failed"),
            ("RETIRED_SBE", "retired_sbe"),
            ("RETIRED_DBE", "retired_dbe"),
            ("RETIRED_PENDING", "retired_pending"),
            ("GET_GPU_RECOVERY_ACTION", "recovery_action"),
            ("THERMAL_VIOLATION", "thermal_violation_us"),
            ("POWER_VIOLATION", "power_violation_us"),
            ("PCIE_LINK_WIDTH", "pcie_width"),
            ("PCIE_MAX_LINK_WIDTH", "pcie_width_max"),
            ("PCIE_REPLAY_COUNTER", "pcie_replays"),
            ("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "nvlink_crc_errors"),
            ("NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "nvlink_crc_errors"),
            ("NVLINK_REPLAY_ERROR_COUNT_TOTAL", "nvlink_replay_errors"),
            ("NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "nvlink_recovery_errors"),
            ("GPU_TEMP", "temperature_c"),
        )
    },
    **{
        f"DCGM_FI_DEV_{name}": ("hw_slowdown", lambda v: int(v) & _HW_SLOWDOWN)
        for name in ("CLOCK_THROTTLE_REASONS", "CLOCKS_EVENT_REASONS")
    },
    "DCGM_FI_DEV_FB_USED": ("used_bytes", lambda v: int(v) * _MIB),
}
"""Metric -> field of GpuState and how its value is read. Two metrics of one field are added up."""
WANTED: Final = frozenset((*FIELDS, XID_COUNT))
"""For PageReader: what these signals need."""

Found = XidSeen | GpuChanged | SourceBlind
Key = tuple[str, str]
"""Which GPU and MIG instance, whatever an upgrade made of the other labels."""


def key_of(device: Device) -> Key:
    return (device.uuid or device.pci or device.number, device.instance)


class ExporterMemory:
    """What one exporter last said. `take` gives what is new; `silent` is for a page that could not be had."""

    def __init__(self, node: Node | None = None) -> None:
        """`node`: whose exporter this is; None where its own label is to be believed."""
        self._node = node
        self._states: dict[Key, GpuState] = {}
        self._counts: dict[tuple[Key, int], int] = {}
        self._label = Node("unknown")
        self._metrics: set[str] = set()
        self._said: set[str] = set()
        """What is missing just now, and was said."""
        self._unsure = False
        """Since a restart: an XID gauge at 0 says nothing of what it held before."""

    def take(self, page: Page, at_s: float) -> list[Found]:
        """The signals of this page, XIDs first."""
        states = gpu_states(page)
        if any((was := self._states.get(key_of(d))) and restarted(was, s) for d, s in states.items()):
            self._unsure = True
        found: list[Found] = list(self._xids(states, page, at_s))
        for device, state in states.items():
            key, self._label = key_of(device), self._of(device)
            before = self._states.get(key)
            found += changes(before, state, node=self._label, at_s=at_s, source=SOURCE)
            if before is not None or len(self._states) < DEVICES_MAX:
                self._states[key] = merged(before, self._kept_code(before, state))
        found += self._missing(page, {key_of(d) for d in states}, at_s)
        return found

    def silent(self, why: str, at_s: float) -> list[Found]:
        """No page: unreachable, refused, a time-out. Said once until there is a page again."""
        self._unsure = True
        if "page" in self._said:
            return []
        self._said.add("page")
        return [self._blind(at_s, why)]

    def _kept_code(self, before: GpuState | None, state: GpuState) -> GpuState:
        if before is not None and self._unsure and state.xid_last == 0 and before.xid_last:
            return msgspec.structs.replace(state, xid_last=before.xid_last)
        return state

    def _xids(self, states: dict[Device, GpuState], page: Page, at_s: float) -> Iterable[XidSeen]:
        """Codes that the gauge shows newly or the counter counted up; one a GPU and code, however many instances."""
        told: set[tuple[str, int]] = set()
        for device, code in [*self._gauge_edges(states), *self._count_edges(page)]:
            gpu = normalise_pci(device.pci) if device.pci else None
            name = gpu or device.uuid or device.number
            if (name, code) in told:
                continue
            told.add((name, code))
            text = f"exporter: XID {code} on GPU {device.number or '?'} {device.uuid}".rstrip()
            yield XidSeen(node=self._of(device), at_s=at_s, code=code, gpu=gpu, source=SOURCE, text=text[:400])

    def _gauge_edges(self, states: dict[Device, GpuState]) -> Iterable[tuple[Device, int]]:
        for device, state in states.items():
            before = self._states.get(key_of(device))
            if before is None or before.xid_last is None or not state.xid_last:
                continue
            if state.xid_last != before.xid_last:
                yield device, state.xid_last

    def _count_edges(self, page: Page) -> Iterable[tuple[Device, int]]:
        first = XID_COUNT not in self._metrics and not self._states
        counts: dict[tuple[Key, int], int] = {}
        for series, value in page.samples:
            if series.metric != XID_COUNT or not (series.xid.isascii() and series.xid.isdigit()) or value > 1e9:
                continue
            at = key_of(series.device), int(series.xid[:6])
            counts[at] = int(value)
            if not first and counts[at] > self._counts.get(at, 0):
                yield series.device, at[1]
        # it counts over a window: what is not there has none
        self._counts = counts if len(counts) <= DEVICES_MAX else {}

    def _missing(self, page: Page, there: set[Key], at_s: float) -> list[Found]:
        """What was on an earlier page and is not on this one, said once; what is back is forgotten."""
        names = {s.metric for s, _ in page.samples if s.metric in FIELDS}
        gone = {f"GPU {s.name}" for key, s in self._states.items() if key not in there}
        missing = gone | (self._metrics - names) if page.samples else self._said | {"page"}
        self._metrics |= names
        new, self._said = missing - self._said, missing
        if not new:
            return []
        if "page" in new:
            return [self._blind(at_s, "the page holds no sample of a GPU")]
        listed = ", ".join(sorted(new)[:8]) + (f" and {len(new) - 8} more" if len(new) > 8 else "")
        return [self._blind(at_s, f"not on the page any more: {listed}")]

    def _blind(self, at_s: float, why: str) -> SourceBlind:
        return SourceBlind(node=self._node or self._label, at_s=at_s, source=SOURCE, why=why[:400])

    def _of(self, device: Device) -> Node:
        return self._node or Node(device.node or "unknown")


def gpu_states(page: Page) -> dict[Device, GpuState]:
    """The page's GPUs and MIG instances, in its order."""
    values: dict[Device, dict[str, int]] = {}
    for series, value in page.samples:
        known = FIELDS.get(series.metric)
        if known is None:
            continue
        fields = values.setdefault(series.device, {})
        try:
            number = known[1](value)
        except OverflowError:  # +Inf
            continue
        fields[known[0]] = fields.get(known[0], 0) + number if known[0] == "nvlink_crc_errors" else number
    return {device: _state(device, fields) for device, fields in values.items()}


def _state(device: Device, fields: dict[str, int]) -> GpuState:
    gpu = (normalise_pci(device.pci) if device.pci else None) or device.uuid or device.number or "unknown"
    return GpuState(gpu=gpu, instance=device.instance, uuid=device.uuid, **fields)  # type: ignore[arg-type]
