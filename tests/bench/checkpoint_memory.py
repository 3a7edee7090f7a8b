"""What a save holds of memory beside the state: all processes below this one, sampled, one start of ranks a method.

    rank   state --| one train_step |--> "from here" --> open, save, train_steps until durable --> "to here"
    here   PSS:     the last before                      the most until then                       -> extra

What a method keeps for its next save (staging memory, a process) counts, whenever it was made. PSS counts a page that
several processes have mapped once. The page cache is nobody's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from tests.bench.checkpoint_rank import Sample
from tests.bench.rows import Row, beside, unmeasured, within

SAMPLE_S = 0.1
GIB = 1 << 30
SHARE, MARGIN_BYTES = 1.05, 64 << 20


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of one method."""

    method: str
    extra_bytes: int
    error: str = ""


@contextmanager
def watch_memory(ready: Path) -> Iterator[list[tuple[float, int]]]:
    """(wall clock, bytes) that all processes below this one hold, from when `ready` is there, as long as it lasts."""
    seen: list[tuple[float, int]] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(SAMPLE_S):
            if not ready.exists():
                continue
            seen.append((time.time(), sum(map(_read_pss, psutil.Process().children(recursive=True)))))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _read_pss(process: psutil.Process) -> int:
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def find_peak(sample: Sample, memory: Sequence[tuple[float, int]]) -> Extra:
    """The most that was held during a save, in two looks one after the other, above what was held when it began."""
    if sample.error:
        return Extra(method=sample.method, extra_bytes=0, error=sample.error)
    before = [size for at, size in memory if at <= sample.began_s][-1:]
    during = [size for at, size in memory if sample.began_s < at <= sample.ended_s]
    if not before or not during:
        return Extra(method=sample.method, extra_bytes=0, error="it was not seen")
    # processes are read one after the other: a page that a second one maps in between is counted one and a half times
    steady = map(min, during, during[1:] or during)
    return Extra(method=sample.method, extra_bytes=max(0, max(steady) - before[0]))


def judge_memory(extras: Sequence[Extra], ours: str, peers: Sequence[str], state_bytes: int) -> list[Row]:
    known = {extra.method: extra.extra_bytes / GIB for extra in extras if not extra.error}
    figure, target = "peak extra memory", f"<= {SHARE} x the state + {MARGIN_BYTES >> 20} MiB"
    others = {name: known[name] for name in peers if name in known}
    if ours not in known or not others:
        why = next((extra.error for extra in extras if extra.error), "it was not run")
        return [unmeasured(figure, "GiB", known.get(ours, 0.0), target=target, why=why)]
    limit = (SHARE * state_bytes + MARGIN_BYTES) / GIB
    return [
        within(f"{figure} against the limit", "GiB", known[ours], limit, target=target),
        beside(figure, "GiB", known[ours], others, at_most=1.0, target="<= the best asynchronous peer"),
    ]
