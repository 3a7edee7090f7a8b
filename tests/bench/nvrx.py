"""nvidia-resiliency-ext for the bench, in a directory of its own, so that nothing of it gets into our environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VERSION = "0.4.1"  # the newest whose wheel runs with glibc below 2.39
_PACKAGES = (f"nvidia-resiliency-ext=={VERSION}", "defusedxml", "pynvml", "nvidia-ml-py")
_INSTALL_S = 180.0
_START_S = 60.0


def install(folder: Path) -> str:
    """'' where ft_launcher can be started from `folder` now, else why not. Installs it there if need be."""
    if not (folder / "nvidia_resiliency_ext").is_dir():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        # its other dependencies (torch, psutil, packaging, PyYAML) are ours already
        why = _run([*pip, "--no-deps", "--target", str(folder), *_PACKAGES], _INSTALL_S)
        if why:
            return f"nvidia-resiliency-ext {VERSION} does not install here ({why})"
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import nvidia_resiliency_ext.fault_tolerance.launcher"
    why = _run([sys.executable, "-P", "-c", code], _START_S)
    return f"nvidia-resiliency-ext {VERSION} cannot be imported here ({why})" if why else ""


def _run(words: list[str], timeout_s: float) -> str:
    """'' or the last line of what it said."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {timeout_s:.0f} s"
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if done.returncode == 0 else (said[-1].strip()[:200] if said else f"exit code {done.returncode}")
