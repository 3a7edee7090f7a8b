"""One rank of the checkpoint bench: `python -m tests.bench.checkpoint_rank TASK.json RANK`.

    save    each round, each method: baseline steps | save, steps until durable | load    -> lost, durable, load
    load    each method that reshards: load what another number of ranks has saved
    memory  one method: a save between two moments, for whoever samples memory from outside

A train_step is a wait (the device computes; with busy=True this core does) and an in-place update of the whole state,
and all ranks meet at its end. Rank 0 writes what was measured: the worst rank counts.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

TENSORS, COLUMNS = 48, 1024
SLICES = 8
BASE_STEPS = 4
"""On either side of a save: a machine that others share drifts."""
MOST_STEPS = 200
SETTLE_S = 1.0
BLOCK_BYTES = 16 << 20


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks of one start are to do."""

    what: str
    world_size: int
    state_bytes: int
    rounds: int
    methods: tuple[str, ...]
    place: str
    answer: str
    wait_s: float = 0.2
    busy: bool = False
    port: int = 0


class Sample(msgspec.Struct, kw_only=True):
    """One measurement. Seconds; 0 where it was not made."""

    method: str
    lost_s: float = 0.0
    hold_s: float = 0.0
    durable_s: float = 0.0
    load_s: float = 0.0
    began_s: float = 0.0
    """Wall clock, for whoever samples memory from outside."""
    ended_s: float = 0.0
    error: str = ""


def main() -> int:
    task, rank = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task), int(sys.argv[2])
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    from outlast.launchers.megatron_cpu import adapt

    torch.set_num_threads(1)
    adapt()
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE=str(task.world_size))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{task.port}", rank=rank, world_size=task.world_size)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    samples = Bench(task, rank).run()
    if rank == 0:
        Path(task.answer).write_bytes(msgspec.json.encode(samples))
    dist.barrier()
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)  # not every peer lets its threads and processes go


class Bench:
    """One rank's state, and the measurements over it."""

    def __init__(self, task: Task, rank: int) -> None:
        import torch

        from tests.bench import savers

        self.task, self.rank = task, rank
        rows = task.state_bytes // (TENSORS * COLUMNS * 4) // 12 * 12 // task.world_size
        torch.manual_seed(rank)
        self.state = {f"w{n:03d}": torch.randn(rows, COLUMNS) for n in range(TENSORS)}
        self.own_bytes = rows * COLUMNS * 4 * TENSORS
        self.matrix = torch.randn(192, 192)
        known = {method.name: method for method in savers.METHODS}
        self.methods = [known[name](Path(task.place) / name.replace(" ", "_")) for name in task.methods]

    def run(self) -> list[Sample]:
        samples = []
        if self.task.what == "load":
            for method in self.methods:
                samples += [self.guarded(method.name, lambda m=method: self.load(m)) for _ in range(self.task.rounds)]
            return samples
        if self.task.what == "memory":
            return [self.guarded(method.name, lambda m=method: self.hold_memory(m)) for method in self.methods]
        for number in range(self.task.rounds):
            self.tell(f"round {number + 1} of {self.task.rounds}")
            samples += [self.guarded("limit: O_DIRECT write and read", self.write_raw)]
            for method in self.methods:  # the memory is at times half as quick as at others: the limit comes along
                samples += [self.guarded("limit: memory copy", self.copy_memory)]
                samples.append(self.guarded(method.name, lambda m=method: self.save(m)))
        return samples

    def guarded(self, name: str, measure: Callable[[], Sample]) -> Sample:
        """All ranks have failed, or none."""
        sample, began_s = Sample(method=name), time.time()
        try:
            sample = measure()
        except Exception as e:  # noqa: BLE001 -- a peer that does not run here
            if self.rank == 0:
                traceback.print_exc()
            sample.error = f"{type(e).__name__}: {e}"[:300]
        sample.method, sample.began_s, sample.ended_s = name, sample.began_s or began_s, time.time()
        if self.worst(float(bool(sample.error))) and not sample.error:
            sample.error = "failed on another rank"
        return sample

    def worst(self, number: float) -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    # ------------------------------------------------------------------ one train_step

    def step(self, method: Any = None) -> float:
        began_s = time.monotonic()
        for n in range(1, SLICES + 1):
            self.wait_until(began_s + self.task.wait_s * n / SLICES)
            if method is not None:
                method.poll()
        if method is not None:
            method.before_update()
        for rows in self.state.values():
            rows.mul_(1.000001)
        self.worst(0.0)
        return time.monotonic() - began_s

    def wait_until(self, when_s: float) -> None:
        if not self.task.busy:
            time.sleep(max(0.0, when_s - time.monotonic()))
        while time.monotonic() < when_s:
            self.matrix @ self.matrix

    # ------------------------------------------------------------------ measurements

    def save(self, method: Any) -> Sample:
        method.fresh()
        method.durable_at_s = 0.0
        method.open(self.state)
        undisturbed_s = [self.step() for _ in range(BASE_STEPS)]
        kept = float(self.state["w000"][0, 0])
        self.worst(0.0)
        began_s = time.monotonic()
        method.begin(self.state)
        hold_s = self.worst(time.monotonic() - began_s)
        disturbed_s: list[float] = []
        while self.worst(float(not method.durable_at_s)) and len(disturbed_s) < MOST_STEPS:
            disturbed_s.append(self.step(method))
        method.end()
        durable_s = self.worst(method.durable_at_s - began_s)
        undisturbed_s += [self.step() for _ in range(BASE_STEPS)]
        excess_s = sum(disturbed_s) - len(disturbed_s) * statistics.median(undisturbed_s)
        lost_s = self.worst(max(0.0, hold_s + excess_s))
        method.close()
        load_s = self.time_load(method)
        wrong = self.worst(float(abs(float(self.state["w000"][0, 0]) - kept) > 1e-9))
        if wrong:
            raise RuntimeError("what was loaded is not what was saved (torn by later updates?)")
        return Sample(method=method.name, lost_s=lost_s, hold_s=hold_s, durable_s=durable_s, load_s=load_s)

    def hold_memory(self, method: Any) -> Sample:
        """A save as in a round, and nothing else."""
        method.fresh()
        method.durable_at_s = 0.0
        self.step()
        self.tell(f"{method.name} ...")
        time.sleep(SETTLE_S)  # so that somebody who samples has seen how it was before
        self.worst(0.0)
        began_s = time.time()
        method.open(self.state)
        self.step()
        method.begin(self.state)
        steps = 0
        while self.worst(float(not method.durable_at_s)) and steps < MOST_STEPS:
            self.step(method)
            steps += 1
        method.end()
        return Sample(method="", began_s=began_s)

    def tell(self, words: str) -> None:
        if self.rank == 0:
            Path(f"{sys.argv[1]}.round").write_text(words)

    def load(self, method: Any) -> Sample:
        return Sample(method=method.name, load_s=self.time_load(method))

    def time_load(self, method: Any) -> float:
        """From the disk: nothing of it is in the page cache."""
        self.worst(0.0)
        if self.rank == 0:
            for path in method.place.rglob("*"):
                if path.is_file():
                    forget(path)
        self.worst(0.0)
        began_s = time.monotonic()
        method.load(self.state)
        return self.worst(time.monotonic() - began_s)

    def copy_memory(self) -> Sample:
        """All of this rank's state into prefaulted memory, as all ranks do at once, between two train_steps."""
        import torch

        memory = prefault(self.own_bytes)
        target = torch.frombuffer(memory, dtype=torch.float32)
        times = []
        for _ in range(3):
            self.step()  # as a save meets it: the cores wake up, the caches hold something else
            self.worst(0.0)
            began_s, at = time.monotonic(), 0
            for rows in self.state.values():
                target[at : at + rows.numel()].copy_(rows.view(-1))
                at += rows.numel()
            times.append(self.worst(time.monotonic() - began_s))
        return Sample(method="", lost_s=statistics.median(times))

    def write_raw(self) -> Sample:
        """O_DIRECT with fsync, then O_DIRECT read, two blocks in flight; large pages make both quicker."""
        memory = prefault(-(-self.own_bytes // BLOCK_BYTES) * BLOCK_BYTES)
        view, path = memoryview(memory), Path(self.task.place) / f"raw{self.rank}"
        path.unlink(missing_ok=True)
        self.worst(0.0)
        began_s = time.monotonic()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(fd, 0, len(memory))
        in_two_threads(len(memory), lambda at: os.pwrite(fd, view[at : at + BLOCK_BYTES], at))
        os.fsync(fd)
        write_s = self.worst(time.monotonic() - began_s)
        began_s = time.monotonic()
        in_two_threads(len(memory), lambda at: os.preadv(fd, [view[at : at + BLOCK_BYTES]], at))
        read_s = self.worst(time.monotonic() - began_s)
        os.close(fd)
        path.unlink()
        scale = self.own_bytes / len(memory)
        return Sample(method="", durable_s=write_s * scale, load_s=read_s * scale)


def prefault(size_bytes: int) -> mmap.mmap:
    """Memory as good as there is: in large pages where the machine has them, all of it written once."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, size_bytes)
    return memory


def in_two_threads(size_bytes: int, work: Callable[[int], Any]) -> None:
    starts = iter(range(0, size_bytes, BLOCK_BYTES))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            work(start)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
