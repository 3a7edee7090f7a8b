"""Where the trainer tells what it does: the step recorder, and the log of samples that a test can read.

`Recorder` is what the trainer needs; the real one writes a shared-memory page (outlast.launchers.recorder) and is found
there when it has been put in place before the script. Without it nothing is recorded and training is the same.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol, cast


class Recorder(Protocol):
    """Told of every phase and train_step. Never raises into training."""

    def phase(self, name: str) -> None:
        """init load compile train eval save idle."""

    def step_started(self, train_step: int) -> None: ...

    def step_done(
        self,
        train_step: int,
        *,
        loss: float | None,
        grad_norm: float | None,
        samples_from: int,
        samples_to: int,
        tokens: int,
        save_s: float,
    ) -> None:
        """`loss` is None on ranks that do not hold it; the last rank always does. `save_s`: a save's hold within."""

    def checkpoint_durable(self, train_step: int) -> None: ...


class NoRecorder:
    """Records nothing."""

    def phase(self, name: str) -> None: ...

    def step_started(self, train_step: int) -> None: ...

    def step_done(
        self,
        train_step: int,
        *,
        loss: float | None,
        grad_norm: float | None,
        samples_from: int,
        samples_to: int,
        tokens: int,
        save_s: float,
    ) -> None: ...

    def checkpoint_durable(self, train_step: int) -> None: ...


def current_recorder() -> Recorder:
    """The recorder that was put in place before this script, or one that records nothing."""
    try:
        module = importlib.import_module("outlast.launchers.recorder")
    except ModuleNotFoundError as error:
        if error.name != "outlast.launchers.recorder":
            raise
        return NoRecorder()
    return cast(Recorder, module.current())


class SampleLog:
    """One JSON line a train_step: what this rank really read. Ordinals of the stream, and rows of the corpus.

    A file a rank, appended to over all attempts; `attempt` (or `at_s`) tells which line for a train_step is the last.
    """

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._attempt = attempt
        self._file: IO[str] = open(folder / f"rank-{rank:05d}.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def write(self, train_step: int, dp_rank: int, samples: Sequence[int], rows: Sequence[int]) -> None:
        line = {
            "train_step": train_step,
            "dp": dp_rank,
            "samples": list(samples),
            "rows": list(rows),
            "attempt": self._attempt,
            "at_s": time.time(),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
