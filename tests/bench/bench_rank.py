"""What runs as a rank in the restart bench: the reference trainer, with a line in a file for each phase and train_step.

The same program for outlast, torchrun and ft_launcher, started by file path. outlast tells it which checkpoint to
restore; the others do not, so with BENCH_RESTORE_NEWEST it takes the newest committed one itself, by its marker alone
(cheaper than outlast's own choice, which reads all hashes). Below ft_launcher it sends the heartbeats that the
launcher's manual asks for, one at each finished train_step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from outlast.checkpoint.names import parse_step
from outlast.launchers.recorder import Recorder, current
from outlast.launchers.trainer import run
from outlast.launchers.trainer_args import parse_settings

MARKER = "COMMITTED"


class Marks:
    """A recorder that passes everything on, and writes when it was."""

    def __init__(self, inner: Recorder, folder: Path, rank: int, attempt: int, beat: Callable[[], None]) -> None:
        self._inner, self._beat = inner, beat
        self._who = {"rank": rank, "attempt": attempt, "pid": os.getpid()}
        self._file: IO[str] = open(folder / f"rank-{rank}.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def _mark(self, **what: object) -> None:
        self._file.write(json.dumps({"mono_s": time.monotonic(), **self._who, **what}) + "\n")

    def phase(self, name: str) -> None:
        self._inner.phase(name)
        self._mark(phase=name)

    def step_started(self, train_step: int) -> None:
        self._inner.step_started(train_step)

    def step_done(self, train_step: int, **what: Any) -> None:
        self._inner.step_done(train_step, **what)
        self._mark(train_step=train_step)
        self._beat()

    def step_closed(self, save_s: float = 0.0) -> None:
        self._inner.step_closed(save_s)

    def checkpoint_durable(self, train_step: int, durable_s: float = 0.0) -> None:
        self._inner.checkpoint_durable(train_step, durable_s)
        self._mark(durable=train_step)


def newest_committed(folder: Path) -> Path | None:
    """The newest checkpoint with a commit marker; None where there is none."""
    steps = {step: path for path in folder.glob("*") if (step := parse_step(path.name)) is not None}
    return next((steps[step] for step in sorted(steps, reverse=True) if (steps[step] / MARKER).exists()), None)


def heartbeats() -> Callable[[], None]:
    """What sends one to ft_launcher's rank monitor; nothing under the others."""
    if "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ:
        return lambda: None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient  # type: ignore[import-not-found]

    client = RankMonitorClient()
    client.init_workload_monitoring()
    send: Callable[[], None] = client.send_heartbeat
    return send


def main() -> int:
    env = os.environ
    settings = parse_settings(sys.argv[1:])
    if "BENCH_RESTORE_NEWEST" in env and settings.checkpoint_dir is not None:
        settings = replace(settings, restore_dir=newest_committed(settings.checkpoint_dir))
    attempt = int(env.get("OUTLAST_ATTEMPT", env.get("TORCHELASTIC_RESTART_COUNT", "0")))
    marks = Marks(current(), Path(env["BENCH_MARKS"]), int(env["RANK"]), attempt, heartbeats())
    marks.phase("init")
    run(settings, env, marks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
