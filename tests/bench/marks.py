"""What the ranks of one contestant wrote of themselves (bench_rank.py), and the times that follow from it. Pure but
for the reading of the files.

All marks bear CLOCK_MONOTONIC of this machine, so they can be compared between processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

PHASES = ("init", "load", "compile")


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a phase was entered, a train_step finished, or a checkpoint became durable."""

    mono_s: float
    rank: int
    attempt: int
    pid: int
    phase: str = ""
    train_step: int = 0
    durable: int = 0


Marks = Mapping[int, Sequence[Mark]]
"""By rank, in the order of writing."""

_decoder = msgspec.json.Decoder(Mark)


def read_marks(folder: Path) -> dict[int, tuple[Mark, ...]]:
    """All whole lines so far."""
    found: dict[int, tuple[Mark, ...]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        whole = path.read_bytes().rpartition(b"\n")[0]
        marks = tuple(_decoder.decode(line) for line in whole.splitlines())
        if marks:
            found[marks[0].rank] = marks
    return found


def ready_to_kill(marks: Marks, *, ranks: int, save_every: int) -> bool:
    """In the middle between two saves, with a durable checkpoint, on all ranks: the kill meets plain training."""
    if len(marks) < ranks or not any(m.durable for m in marks[ranks - 1]):
        return False
    steps = [max((m.train_step for m in marks[rank]), default=0) for rank in range(ranks)]
    return all(save_every // 4 <= step % save_every <= save_every // 2 and step > save_every for step in steps)


def trains_again(marks: Marks, *, after: int, ranks: int) -> bool:
    """Every rank has finished a train_step in an attempt above `after`."""
    return len(marks) == ranks and all(any(m.attempt > after and m.train_step for m in line) for line in marks.values())


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One kill. Seconds from it, on the slowest rank each."""

    done_s: float
    """The next train_step is finished on every rank: the figure."""
    init_s: float
    """Every rank's program runs again, nothing heavy imported yet by those that must."""
    load_s: float
    """All ranks have met and built the model; the checkpoint is being read."""
    compile_s: float
    """It is read."""
    killed_step: int
    """The last train_step that was finished before the kill."""
    first_step: int
    """The first one that was finished after it."""


def recovery(marks: Marks, *, killed_mono_s: float, after: int) -> Recovery:
    """The times of the one restart that followed the kill. ValueError where a mark is missing or earlier."""
    new = {rank: [m for m in line if m.attempt > after] for rank, line in marks.items()}
    firsts = {rank: next(m for m in line if m.train_step) for rank, line in new.items()}
    at = {name: max(_phase_s(line, name) for line in new.values()) - killed_mono_s for name in PHASES}
    done_s = max(m.mono_s for m in firsts.values()) - killed_mono_s
    steps = {m.train_step for m in firsts.values()}
    if len(steps) != 1 or not 0 < at["init"] <= at["load"] <= at["compile"] <= done_s:
        raise ValueError(f"marks that make no sense: first train_steps {sorted(steps)}, phases {at}, done {done_s:.3f}")
    return Recovery(
        done_s=done_s,
        init_s=at["init"],
        load_s=at["load"],
        compile_s=at["compile"],
        killed_step=max(m.train_step for line in marks.values() for m in line if m.attempt <= after),
        first_step=steps.pop(),
    )


def _phase_s(line: Sequence[Mark], name: str) -> float:
    for mark in line:
        if mark.phase == name:
            return mark.mono_s
    raise ValueError(f"rank {line[0].rank if line else '?'} never entered {name} after the kill")
