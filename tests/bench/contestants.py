"""Who is measured: outlast, torchrun, ft_launcher -- each started as its user would start it, with the same program.

Nobody is crippled: torchrun and ft_launcher look at their ranks each 0.1 s (their own default), restore from the same
kind of checkpoint without reading its hashes, and have no time-out that a killed rank could run into. outlast runs
with its default limits. All log into files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil

RANKS, TP, SAVE_EVERY, NEVER = 4, 2, 12, 1_000_000
PROGRAM = Path(__file__).with_name("bench_rank.py")
_END_S = 40.0


class Contestant(Protocol):
    name: str

    def words(self, place: Path, data: Path) -> list[str]:
        """The command line; what it needs is written below `place`."""

    def env(self, place: Path) -> dict[str, str]:
        """Added to this process's own."""


def _trainer_flags(place: Path, data: Path) -> list[str]:
    sizes = ["--tp", str(TP), "--global-batch", "8", "--micro-batch", "1", "--train-steps", str(NEVER)]
    saving = ["--save-every", str(SAVE_EVERY), "--checkpoint-dir", str(place / "checkpoints")]
    return ["--data-dir", str(data), *sizes, *saving]


def _elastic_flags(place: Path) -> list[str]:
    own_logs = ["--log-dir", str(place / "logs")]  # else a directory in /tmp that stays
    return ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "3", *own_logs]


class Outlast:
    """`outlast run` on the local cluster: one node of four ranks, all limits at their defaults."""

    name = "outlast"

    def words(self, place: Path, data: Path) -> list[str]:
        run_file = place / "run.yaml"
        run_file.write_text(
            "name: bench\n"
            f"task: {{script: {PROGRAM}, kind: reference, env: {{BENCH_MARKS: {place / 'marks'}}}}}\n"
            f"params: {{data_dir: {data}}}\n"
            f"cluster: {{kind: local, nodes: 1, ranks_per_node: {RANKS}}}\n"
            f"layout: {{tp: {TP}, global_batch: 8, micro_batch: 1}}\n"
            f"train_steps: {NEVER}\n"
            f"checkpoint: {{every: {SAVE_EVERY} steps}}\n"
            f"run_root: {place / 'runs'}\n"
        )
        return [sys.executable, "-P", "-m", "outlast.reliability.app", "run", str(run_file)]

    def env(self, place: Path) -> dict[str, str]:
        return {}


class Torchrun:
    """`torchrun --max-restarts`, at its default monitor interval or another."""

    def __init__(self, name: str = "torchrun", *, monitor_s: float | None = None) -> None:
        self.name = name
        self._interval = [] if monitor_s is None else ["--monitor-interval", f"{monitor_s:g}"]

    def words(self, place: Path, data: Path) -> list[str]:
        own = [*_elastic_flags(place), *self._interval]
        program = [str(PROGRAM), *_trainer_flags(place, data)]
        return [sys.executable, "-P", "-m", "torch.distributed.run", *own, *program]

    def env(self, place: Path) -> dict[str, str]:
        # with the store shared, its default, gloo finds the addresses of the attempt before and every restart fails
        # (pytorch issue 135712, whose workaround this is)
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return {"BENCH_RESTORE_NEWEST": "1", "BENCH_MARKS": str(place / "marks"), **own_store}


class FtLauncher:
    """nvidia-resiliency-ext's ft_launcher, from a directory of its own; heartbeats as its manual says."""

    name = "ft_launcher"

    def __init__(self, packages: Path) -> None:
        self._packages = packages

    def words(self, place: Path, data: Path) -> list[str]:
        own = _elastic_flags(place)
        beats = ["--ft-initial-rank-heartbeat-timeout", "300", "--ft-rank-heartbeat-timeout", "60"]
        program = [str(PROGRAM), *_trainer_flags(place, data)]
        module = "nvidia_resiliency_ext.fault_tolerance.launcher"
        return [sys.executable, "-P", "-m", module, *own, *beats, *program]

    def env(self, place: Path) -> dict[str, str]:
        known = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join([str(self._packages), *([known] if known else [])])
        return {"BENCH_RESTORE_NEWEST": "1", "BENCH_MARKS": str(place / "marks"), "PYTHONPATH": path}


class Running:
    """One contestant at work; `end` leaves nothing of it behind."""

    def __init__(self, who: Contestant, place: Path, data: Path) -> None:
        (place / "marks").mkdir(parents=True)
        words = who.words(place, data)
        # one compute thread a rank for everybody: outlast and torchrun set it themselves
        env = {**os.environ, "OMP_NUM_THREADS": "1", **who.env(place)}
        with (place / "output").open("wb") as output:
            self.process = subprocess.Popen(
                words, cwd=place, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        self.place = place

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """TERM, as a user would; then KILL for it and all that it had started."""
        family = self._family()
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                family = self._family()
                self.process.kill()
                self.process.wait(5.0)
        _kill_all(family)

    def _family(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def _kill_all(family: Sequence[psutil.Process]) -> None:
    for process in family:
        try:
            process.kill()  # checks the start time: never another process of the same pid
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=5.0)
