"""The process that talks to NVML: `python -m outlast.monitors.nvml_child POLL_S`. Its parent is nvml.py.

A driver that waits for a dead GPU never comes back from a call, and no signal but KILL ends it. So the calls are made
here, and what is read goes up a pipe, one JSON object a line. One thread polls states, one waits for XID events; each
says something at least every few seconds, and its parent concludes from silence. It judges nothing, uses nvidia-ml-py
as it is, and ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from outlast.monitors.gpu_state import GpuState
from outlast.monitors.nvml_words import EventsAlive, GpusSaid, NoEvents, NoNvml, Said, XidSaid
from outlast.monitors.xid_text import normalise_pci

WAIT_MS: Final = 1000
_PR_SET_PDEATHSIG: Final = 1
_HW_SLOWDOWN: Final = 0x8 | 0x40 | 0x80
_ALL_INSTANCES: Final = 0xFFFFFFFF


class Pipe:
    """stdout, a whole line at a time from either thread. A parent that is gone ends this process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def say(self, said: Said) -> None:
        line = msgspec.json.encode(said) + b"\n"
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:
                os._exit(0)


def main(argv: list[str]) -> int:
    """Until NVML cannot be used any more (1), there is none (0), or the parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe = Pipe(1)
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        pipe.say(NoNvml(why="nvidia-ml-py is not installed", ever=False))
        return 0
    try:
        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as e:
        missing = isinstance(e, pynvml.NVMLError_LibraryNotFound)
        pipe.say(NoNvml(why=_error(e), ever=not missing))
        return 0
    threading.Thread(target=_wait_on, args=(pynvml, count, pipe), daemon=True).start()
    poll_s = float(argv[0]) if argv else 10.0
    names: dict[int, str] = {}
    while True:
        pipe.say(GpusSaid(gpus=tuple(_state(pynvml, index, names) for index in range(count))))
        time.sleep(poll_s)


# ---------------------------------------------------------------- XID events


def _wait_on(nvml: Any, count: int, pipe: Pipe) -> None:
    """XID events for ever; where NVML refuses to wait, that is said and the states go on."""
    try:
        events, names = _register(nvml, count)
        while True:
            try:
                found = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
            except nvml.NVMLError_Timeout:
                pipe.say(EventsAlive())
                continue
            except nvml.NVMLError_GpuIsLost:
                # the others can still speak: wait anew without the lost one
                time.sleep(WAIT_MS / 1000)
                nvml.nvmlEventSetFree(events)
                events, names = _register(nvml, count)
                pipe.say(EventsAlive())
                continue
            if found.eventType == nvml.nvmlEventTypeXidCriticalError:
                pipe.say(
                    XidSaid(
                        gpu=names.get(_address(found.device), ""), code=int(found.eventData), instance=_where(found)
                    )
                )
    except (nvml.NVMLError, AttributeError) as e:
        pipe.say(NoEvents(why=_error(e)))


def _register(nvml: Any, count: int) -> tuple[Any, dict[int, str]]:
    """An event set of all GPUs that answer, and their names by handle."""
    events = nvml.nvmlEventSetCreate()
    names: dict[int, str] = {}
    refused: Exception | None = None
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            names[_address(handle)] = _pci(nvml, handle)
        except nvml.NVMLError as e:
            refused = e
    if not names and refused is not None and not isinstance(refused, nvml.NVMLError_GpuIsLost):
        raise refused
    return events, names


def _address(handle: Any) -> int:
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)


def _where(found: Any) -> str:
    return "" if found.gpuInstanceId == _ALL_INSTANCES else str(found.gpuInstanceId)


# ---------------------------------------------------------------- states


def _state(nvml: Any, index: int, names: dict[int, str]) -> GpuState:
    """One GPU now. A field that this GPU, driver or binding does not have is left out."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        names[index] = _pci(nvml, handle)
    except nvml.NVMLError as e:
        lost = isinstance(e, nvml.NVMLError_GpuIsLost) or index in names
        return GpuState(gpu=names.get(index, f"index {index}"), lost=True if lost else None)
    fields: dict[str, Any] = {}
    for read in _READERS:
        try:
            fields |= read(nvml, handle)
        except nvml.NVMLError as e:
            if isinstance(e, nvml.NVMLError_GpuIsLost):
                return GpuState(gpu=names[index], lost=True)
        except (AttributeError, TypeError, ValueError, IndexError):
            continue  # an older binding without this call
    return GpuState(gpu=names[index], lost=False, **fields)


def _pci(nvml: Any, handle: Any) -> str:
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    text = bus.decode("ascii", "replace") if isinstance(bus, bytes) else str(bus)
    return normalise_pci(text) or text


def _uuid(nvml: Any, handle: Any) -> dict[str, Any]:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return {"uuid": uuid.decode("ascii", "replace") if isinstance(uuid, bytes) else str(uuid)}


def _ecc(field: str, error: str, counter: str) -> Callable[[Any, Any], dict[str, Any]]:
    def read(nvml: Any, handle: Any) -> dict[str, Any]:
        return {field: int(nvml.nvmlDeviceGetTotalEccErrors(handle, getattr(nvml, error), getattr(nvml, counter)))}

    return read


def _rows(nvml: Any, handle: Any) -> dict[str, Any]:
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return {
        "remapped_corrected": int(corrected),
        "remapped_uncorrected": int(uncorrected),
        "remap_pending": int(pending),
        "remap_failed": int(failed),
    }


def _retired(nvml: Any, handle: Any) -> dict[str, Any]:
    single, double = (
        len(nvml.nvmlDeviceGetRetiredPages(handle, cause))
        for cause in (
            nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
            nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
        )
    )
    return {"retired_sbe": single, "retired_dbe": double}


def _retired_pending(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"retired_pending": int(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))}


def _recovery(nvml: Any, handle: Any) -> dict[str, Any]:
    value = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0]
    return {"recovery_action": int(value.value.uiVal)} if value.nvmlReturn == 0 else {}


def _throttle(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"hw_slowdown": int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) & _HW_SLOWDOWN}


def _pcie(nvml: Any, handle: Any) -> dict[str, Any]:
    return {
        "pcie_width": int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "pcie_width_max": int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }


def _replays(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"pcie_replays": int(nvml.nvmlDeviceGetPcieReplayCounter(handle))}


def _links(nvml: Any, handle: Any) -> dict[str, Any]:
    """A GPU with no link up at all has none wired (a PCIe card)."""
    up = down = 0
    errors = {"nvlink_crc_errors": 0, "nvlink_replay_errors": 0, "nvlink_recovery_errors": 0}
    counted = False
    for link in range(int(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                down += 1
                continue
            up += 1
        except nvml.NVMLError_GpuIsLost:
            raise
        except nvml.NVMLError:
            break
        counted |= _add_link(nvml, handle, link, errors)
    return {"nvlinks_down": down if up else 0, **(errors if counted else {})}


def _add_link(nvml: Any, handle: Any, link: int, errors: dict[str, int]) -> bool:
    """Newer GPUs do not have these counters."""
    kinds = (
        ("nvlink_crc_errors", nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
        ("nvlink_crc_errors", nvml.NVML_NVLINK_ERROR_DL_CRC_DATA),
        ("nvlink_replay_errors", nvml.NVML_NVLINK_ERROR_DL_REPLAY),
        ("nvlink_recovery_errors", nvml.NVML_NVLINK_ERROR_DL_RECOVERY),
    )
    try:
        for field, counter in kinds:
            errors[field] += int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter))
    except nvml.NVMLError_GpuIsLost:
        raise
    except nvml.NVMLError:
        return False
    return True


def _memory(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"used_bytes": int(nvml.nvmlDeviceGetMemoryInfo(handle).used)}


def _temperature(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"temperature_c": int(nvml.nvmlDeviceGetTemperature(handle, 0))}


def _processes(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"pids": tuple(sorted(int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)))}


_READERS: Final[tuple[Callable[[Any, Any], dict[str, Any]], ...]] = (
    _uuid,
    _ecc("ecc_uncorrected", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"),
    _ecc("ecc_uncorrected_ever", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_AGGREGATE_ECC"),
    _ecc("ecc_corrected", "NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_VOLATILE_ECC"),
    *(_rows, _retired, _retired_pending, _recovery, _throttle, _pcie, _replays, _links, _memory, _temperature),
    _processes,
)


def _error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
