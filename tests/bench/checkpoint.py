"""What a checkpoint costs: outlast beside every peer and the machine's own limits, in one run.

    4 ranks   each round: limits | each method: baseline, save while training, load      -> lost, durable, load, memory
    2 ranks   load what 4 saved; save
    6 ranks   load what 2 saved                                                          -> reshard load

The limits are measured by the same processes at once, the copy beside each method. The figure is the median over the
rounds; each method has its turn in each round, so that all see the same machine. Lost time is the hold and the excess
of every train_step over the baseline until the save is durable. Memory has ranks of its own for each method
(checkpoint_memory.py): looking at it would disturb the clocks. BENCH_CHECKPOINT_MB sets the size of the state over all
ranks (default 2048).
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from tests.bench.checkpoint_memory import GIB, Extra, find_peak, judge_memory, watch_memory
from tests.bench.checkpoint_rank import Sample, Task
from tests.bench.rows import Row, beside, write

ROUNDS = 5
RANKS, FEWER, MORE = 4, 2, 6
OURS, OVERLAPPED, PRINTED = "outlast", "outlast, overlapped", "outlast, DCP with fingerprints"
COPY, RAW = "limit: memory copy", "limit: O_DIRECT write and read"
PEERS = (
    "torch.save",
    "DCP save",
    "DCP async thread",
    "DCP async process",
    "DCP async process, shared memory",
    "Megatron sync",
    "Megatron async",
    "torchsnapshot async",
)
ASYNCHRONOUS = tuple(name for name in PEERS if "async" in name)
RESHARD = ("DCP save", "Megatron sync", OURS)
SNAPSHOT = ("torchsnapshot==0.1.0", "aiofiles", "nest_asyncio", "importlib_metadata<7", "zipp<4")
_RUN_S = 1800.0
_INSTALL_S = 120.0
_LOOK_S = 0.2


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured: `checkpoint_detail.json`."""

    state_bytes: int
    samples: list[Sample]
    samples_both_cores_computing: list[Sample]
    reshard: dict[str, list[Sample]]
    memory: list[Extra]


def measure(out: Path, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Run it all; write `checkpoint.json` and `checkpoint_detail.json` below `out`."""
    state_bytes = int(os.environ.get("BENCH_CHECKPOINT_MB", "2048")) << 20
    out.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=out))
    try:
        extra = _install_torchsnapshot(out / "torchsnapshot")
        say(f"checkpoint: {state_bytes >> 20} MiB over {RANKS} ranks, {rounds} rounds")
        bench = _Bench(place, state_bytes, extra, say)
        everybody = (*PEERS, OURS, OVERLAPPED, PRINTED)
        samples = bench.run("save", RANKS, rounds, everybody)
        reshard = {f"{RANKS} -> {FEWER}": bench.run("load", FEWER, rounds, RESHARD)}
        bench.run("save", FEWER, 1, RESHARD)
        reshard[f"{FEWER} -> {MORE}"] = bench.run("load", MORE, rounds, RESHARD)
        memory = [bench.measure_memory(method) for method in (*ASYNCHRONOUS, OURS)]
        busy = bench.run("save", RANKS, min(rounds, 2), everybody, busy=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    detail = Detail(
        state_bytes=state_bytes,
        samples=samples,
        samples_both_cores_computing=busy,
        reshard=reshard,
        memory=memory,
    )
    (out / "checkpoint_detail.json").write_bytes(msgspec.json.encode(detail))
    say(_table("the device computes, a core stays free", samples))
    say(_table("both cores compute (no targets)", busy))
    say(_memory_table(memory))
    rows = judge(detail)
    write(out / "checkpoint.json", rows)
    return rows


class _Bench:
    """Starts ranks, and waits for what they have measured."""

    def __init__(self, place: Path, state_bytes: int, extra: str, say: Callable[[str], None]) -> None:
        self.place, self.state_bytes, self.extra, self.say = place, state_bytes, extra, say
        self.starts = 0

    def run(self, what: str, ranks: int, rounds: int, methods: Sequence[str], *, busy: bool = False) -> list[Sample]:
        self.starts += 1
        answer = self.place / f"answer{self.starts}"
        task = Task(
            what=what,
            world_size=ranks,
            state_bytes=self.state_bytes,
            rounds=rounds,
            methods=tuple(methods),
            place=str(self.place),
            answer=str(answer),
            busy=busy,
            port=_find_port(),
        )
        path = self.place / f"task{self.starts}.json"
        path.write_bytes(msgspec.json.encode(task))
        self.say(f"  {what} with {ranks} ranks{', busy' if busy else ''} ...")
        _run_ranks(path, ranks, self.extra, self.say)
        return msgspec.json.decode(answer.read_bytes(), type=list[Sample])

    def measure_memory(self, method: str) -> Extra:
        with watch_memory(self.place / f"task{self.starts + 1}.json.round") as memory:
            (sample,) = self.run("memory", RANKS, 1, (method,))
        return find_peak(sample, memory)


def _find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _run_ranks(task: Path, ranks: int, extra: str, say: Callable[[str], None]) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in (os.environ.get("PYTHONPATH", ""), extra) if p)}
    with open(f"{task}.log", "wb") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.bench.checkpoint_rank", str(task), str(rank)],
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        deadline_s = time.monotonic() + _RUN_S
        try:
            _wait(processes, deadline_s, Path(f"{task}.round"), say)
        finally:
            _end(processes)
    if any(process.returncode for process in processes):
        raise RuntimeError(f"the ranks failed: {Path(f'{task}.log').read_text()[-4000:]}")


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], deadline_s: float, progress: Path, say: Callable[[str], None]
) -> None:
    """Until all have ended, or one has failed; tells which round they are in."""
    said = ""
    while any(process.poll() is None for process in processes) and not any(p.returncode for p in processes):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the ranks did not end within {_RUN_S:.0f} s: {progress.with_suffix('.log')}")
        if progress.exists() and (now := progress.read_text()) != said:
            said = now
            say(f"    {said}")
        time.sleep(_LOOK_S)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """With everything below them: not every peer ends its own processes."""
    below = [child for child in psutil.Process().children(recursive=True)]
    for process in processes:
        if process.poll() is None:
            process.kill()
    for child in below:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    for process in processes:
        process.wait(10)


def _install_torchsnapshot(folder: Path) -> str:
    """The folder to import it from; '' where it does not install. Nothing of it gets into our environment."""
    if not (folder / "torchsnapshot").is_dir():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
        done = subprocess.run(
            [*pip, "--target", str(folder), *SNAPSHOT], capture_output=True, timeout=_INSTALL_S, check=False
        )
        if done.returncode:
            return ""
    return str(folder)


# ---------------------------------------------------------------------- what it says


def _median(samples: Sequence[Sample], method: str, what: str) -> float:
    numbers = [getattr(s, what) for s in samples if s.method == method and not s.error]
    return float(statistics.median(numbers)) if numbers else 0.0


def _peers(samples: Sequence[Sample], what: str, names: Sequence[str] = PEERS) -> dict[str, float]:
    return {name: number for name in names if (number := _median(samples, name, what))}


def judge(detail: Detail) -> list[Row]:
    """The rows: each figure against the machine's limit, and against the best peer."""
    samples = detail.samples
    copy_s, raw_s, read_s = (
        _median(samples, COPY, "lost_s"),
        *(_median(samples, RAW, w) for w in ("durable_s", "load_s")),
    )
    lost, durable = _median(samples, OURS, "lost_s"), _median(samples, OURS, "durable_s")
    thin, load = _median(samples, OVERLAPPED, "lost_s"), _median(samples, OURS, "load_s")
    limits = [
        ("lost training time", "s", lost, "memory copy", copy_s, 1.1),
        ("lost training time, overlapped staging", "s", thin, "memory copy", copy_s, 0.5),
        ("time to durable", "s", durable, "O_DIRECT write", raw_s, 1.25),
        ("time to durable fingerprints", "s", _median(samples, PRINTED, "durable_s"), "O_DIRECT write", raw_s, 3.0),
    ]
    for way, made in detail.reshard.items():
        limits.append((f"reshard load {way}", "s", _median(made, OURS, "load_s"), "O_DIRECT read", read_s, 1.25))
    rows = [
        beside(f"{figure} against the limit", unit, ours, {name: limit}, at_most=most, target=f"<= {most} x {name}")
        for figure, unit, ours, name, limit, most in limits
    ]
    ahead = "<= the best peer"
    rows.append(beside("lost training time", "s", lost, _peers(samples, "lost_s"), at_most=1.0, target=ahead))
    rows.append(beside("time to durable", "s", durable, _peers(samples, "durable_s"), at_most=1.0, target=ahead))
    rows.append(beside("load", "s", load, _peers(samples, "load_s"), at_most=1.0, target=ahead))
    for way, made in detail.reshard.items():
        peers = _peers(made, "load_s", RESHARD[:-1])
        rows.append(beside(f"reshard load {way}", "s", _median(made, OURS, "load_s"), peers, at_most=1.0, target=ahead))
    return rows + judge_memory(detail.memory, OURS, ASYNCHRONOUS, detail.state_bytes)


def _memory_table(memory: Sequence[Extra]) -> str:
    lines = [f"\n{'peak extra memory':34}{'GiB':>9}"]
    lines += [f"{one.method:34}{one.error[:80] or f'{one.extra_bytes / GIB:>9.3f}'}" for one in memory]
    return "\n".join(lines)


def _table(title: str, samples: Sequence[Sample]) -> str:
    names = dict.fromkeys(sample.method for sample in samples)
    lines = [f"\n{title}", f"{'':34}{'lost s':>9}{'hold s':>9}{'durable s':>11}{'load s':>9}"]
    for name in names:
        errors = [sample.error for sample in samples if sample.method == name and sample.error]
        if len(errors) == sum(sample.method == name for sample in samples):
            lines.append(f"{name:34} does not run here: {errors[0][:80]}")
            continue
        numbers = [_median(samples, name, what) for what in ("lost_s", "hold_s", "durable_s", "load_s")]
        cells = "".join(f"{number:>{width}.3f}" for number, width in zip(numbers, (9, 9, 11, 9), strict=True))
        lines.append(f"{name:34}{cells}")
    return "\n".join(lines)
