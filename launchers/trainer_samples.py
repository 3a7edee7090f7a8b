"""The log of samples that each data-parallel replica really read: what proves that each was consumed once."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO


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
