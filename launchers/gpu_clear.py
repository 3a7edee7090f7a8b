"""Whether GPUs of this node still hold memory for processes that should be gone. Asked in a child with a deadline.

NVML calls into the driver, which hangs where a GPU is in trouble: so `still_held` starts this module as a process of
its own and gives up on it in time. Where there is no NVML (no GPU, no nvidia-ml-py) there is nothing to hold.
It knows pids alone: a process of another job on a shared node is not ours to judge.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Collection

ASK_S = 20.0


def still_held(pids: Collection[int]) -> tuple[str, ...]:
    """What is not free, for a person; () where all is, or where there is no NVML to ask. Blocks for ASK_S at most."""
    if not pids or importlib.util.find_spec("pynvml") is None or not _has_library():
        return ()
    words = [sys.executable, "-P", "-m", "outlast.launchers.gpu_clear"]
    try:
        asked = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S, check=False)
    except subprocess.TimeoutExpired:
        return (f"NVML did not answer within {ASK_S:.0f} s: whether GPU memory is free is not known",)
    try:
        holders = {int(pid): int(used_bytes) for pid, used_bytes in json.loads(asked.stdout)}
    except (ValueError, TypeError):
        said = asked.stderr.decode(errors="backslashreplace").strip()[-200:]
        return (f"NVML gave no answer ({said or asked.returncode}): whether GPU memory is free is not known",)
    ours = {pid: used for pid, used in holders.items() if pid in pids or not os.path.exists(f"/proc/{pid}")}
    return tuple(f"pid {pid} still holds {used} bytes of GPU memory" for pid, used in sorted(ours.items()))


@functools.cache
def _has_library() -> bool:
    """Loading it asks no driver; a node without GPUs is spared a process at each stop."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def main() -> int:
    """Print [[pid, used_bytes], ...] of all compute processes as JSON; a GPU that is lost holds nothing for anybody."""
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        sys.stdout.write("[]")  # no driver: no GPU that could be held
        return 0
    found = []
    for i in range(nvml.nvmlDeviceGetCount()):
        for version in ("_v3", "_v2"):  # the older one for older drivers
            with contextlib.suppress(nvml.NVMLError):
                ask = getattr(nvml, f"nvmlDeviceGetComputeRunningProcesses{version}")
                found += ask(nvml.nvmlDeviceGetHandleByIndex(i))
                break
    sys.stdout.write(json.dumps([[p.pid, p.usedGpuMemory or 0] for p in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
