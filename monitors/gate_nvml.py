"""What NVML says of this node's GPUs, read in a child of the node gate. nvidia-ml-py only, and only if it is there.

It gives a list of plain values a GPU; a value that this GPU or driver does not have is left out. It judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NO_LIBRARY = "none"


def read() -> str:
    """JSON of one object a GPU, or 'none' where there is no NVML to ask. Runs in the gate's child."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return NO_LIBRARY
    import json

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return NO_LIBRARY
    count = int(pynvml.nvmlDeviceGetCount())
    return json.dumps([_gpu(pynvml, index) for index in range(count)])


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    gpu: dict[str, Any] = {"index": index}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError:
        return {**gpu, "lost": True}
    readers: dict[str, Callable[[], Any]] = {
        "pci": lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "remap_failed": lambda: int(nvml.nvmlDeviceGetRemappedRows(handle)[3]),
        "retired_pending": lambda: int(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)),
        "pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "pcie_width_max": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        "throttle": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "nvlinks_down": lambda: _links_down(nvml, handle),
        "recovery": lambda: _recovery(nvml, handle),
    }
    for key, read_value in readers.items():
        try:
            value = read_value()
        except nvml.NVMLError as e:
            if isinstance(e, nvml.NVMLError_GpuIsLost):
                return {**gpu, "lost": True}
            continue
        except (AttributeError, TypeError, ValueError):
            continue  # an older binding or driver without this call
        if value is not None:
            gpu[key] = int(value) if isinstance(value, int) else value
    return gpu


def _text(value: Any) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


def _links_down(nvml: Any, handle: Any) -> int:
    """Links that are there but not up. A GPU with no link up at all has none wired (a PCIe card)."""
    up = down = 0
    for link in range(int(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                up += 1
            else:
                down += 1
        except nvml.NVMLError:
            break
    return down if up else 0


def _recovery(nvml: Any, handle: Any) -> int | None:
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return None
    value = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    return int(value.value.uiVal) if value.nvmlReturn == 0 else None
