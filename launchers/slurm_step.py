"""Starts a slurm_step that needs nobody: not this process, not its srun, not the node that they run on.

srun forks a helper that kills the whole step as soon as srun itself dies without a goodbye. That would make the
agents' lives hang on one client process, so the helper is ended once the step exists (tried on 22.05 and 24.11: with
the helper gone, tasks outlive a SIGKILL of srun). What stays is a plain srun whose exit code nobody waits for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from outlast.slurm.errors import SlurmError

_OURS = ("SLURM_CONF", "SLURM_JWT")
_INHERITED = ("SLURM_", "SRUN_", "SALLOC_", "SBATCH_", "PMI_", "PMI2_", "PMIX_")
_GPU_VIEW = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_POLL_S = 0.02


def clean_environment(inherited: Mapping[str, str], *, gpus: bool) -> dict[str, str]:
    """The caller's environment without what a job, step or agent around it put there.

    Batch script, agent on another node and head node then start the very same step: an inherited SLURM_NTASKS would
    change the number of tasks, a stale node count would refuse it. SLURMD_NODENAME stays: it says where this client
    runs, and slurmd gives each task its own.
    """
    kept = {k: v for k, v in inherited.items() if k in _OURS or not k.startswith(_INHERITED)}
    for name in ("OUTLAST_NODE", *(_GPU_VIEW if gpus else ())):
        kept.pop(name, None)
    return kept


def launch_step(argv: Sequence[str], *, env: Mapping[str, str], log: Path, timeout_s: float) -> subprocess.Popen[bytes]:
    """Start srun in its own session; returns once Slurm has made the step, with tasks about to start.

    SlurmError with srun's words where it ended first, or where there is no step after `timeout_s` (srun is then ended).
    """
    with log.open("ab") as out:
        begin = out.tell()
        try:
            srun = subprocess.Popen(
                list(argv), env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        except OSError as error:
            raise SlurmError(f"{argv[0]}: cannot be started: {error}", again=False) from None
    deadline = time.monotonic() + timeout_s
    while not (helpers := _helpers(srun.pid)):
        if srun.poll() is not None:
            raise SlurmError(f"srun ended with exit code {srun.returncode}: {_said(log, begin)}", again=True)
        if time.monotonic() > deadline:
            _end(srun)
            raise SlurmError(f"srun made no step within {timeout_s:g} s: {_said(log, begin)}", again=True)
        time.sleep(_POLL_S)
    for pid in helpers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return srun


def _helpers(pid: int) -> list[int]:
    """srun's children that are srun too."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                if Path(f"/proc/{child}/comm").read_text().strip() == "srun":
                    found.append(int(child))
    return found


def _end(srun: subprocess.Popen[bytes]) -> None:
    srun.terminate()
    try:
        srun.wait(timeout=2)
    except subprocess.TimeoutExpired:
        srun.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            srun.wait(timeout=2)


def _said(log: Path, begin: int) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(begin)
        return " ".join(file.read(2000).decode("utf-8", "replace").split()) or "nothing said"
    return "nothing said"
