"""What the process that talks to NVML says to its parent, one JSON object a line. Data only. Pure."""

from __future__ import annotations

from outlast.monitors.gpu_state import GpuState
from outlast.reliability.model import Noun


class GpusSaid(Noun, frozen=True, kw_only=True, tag="gpus"):
    """All GPUs, as just read."""

    gpus: tuple[GpuState, ...]


class XidSaid(Noun, frozen=True, kw_only=True, tag="xid"):
    gpu: str
    """PCI address dddd:bb:dd; '' where it cannot be told."""
    code: int
    instance: str = ""


class EventsAlive(Noun, frozen=True, kw_only=True, tag="events_alive"):
    """Waiting for events came back with none, as it should."""


class NoEvents(Noun, frozen=True, kw_only=True, tag="no_events"):
    """NVML refuses to report events; states go on."""

    why: str


class NoNvml(Noun, frozen=True, kw_only=True, tag="no_nvml"):
    """It cannot be used now; `ever` False: not on this node as it is installed."""

    why: str
    ever: bool


Said = GpusSaid | XidSaid | EventsAlive | NoEvents | NoNvml
