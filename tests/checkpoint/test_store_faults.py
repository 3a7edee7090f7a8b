"""Faults of the file system and of others on it: a quota, a stuck and a slow store, two writers, a reader beside a
prune, a clock that goes back. None costs a committed checkpoint, none makes an uncommitted one true.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.checkpoint.commit import commit, write_bytes
from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.names import name_step
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.store import Store
from outlast.checkpoint.verify import read_manifest, verify
from outlast.reliability.model import Layout

HEALTHY, QUOTA, STUCK, SLOW, QUOTA_AT_SYNC, STUCK_READ = range(6)
SHIM = Path(__file__).with_name("faulty_io.c")


def make(root: Path, step: int, *, who: bytes = b"-", made_at_s: float = 0.0, files: int = 3) -> Path:
    """A committed checkpoint whose every file says who wrote it."""
    ops, directory = RealOps(), root / name_step(step)
    directory.mkdir(parents=True)
    entries = {name: write_bytes(ops, directory / name, who * 1000) for name in (f"f{i}" for i in range(files))}
    manifest = Manifest(
        schema=1, train_step=step, samples=step, layout=Layout(), files=entries, made_at_s=made_at_s, made_by="test"
    )
    commit(ops, directory, manifest)
    return directory


def chosen(root: Path) -> int:
    restore = Store(root).choose(quarantined=()).restore
    if restore is None:
        return -1
    verify(Path(restore.path))
    return restore.train_step


# ---------------------------------------------------------------- quota, stuck, slow: a preloaded write()


class Faulty:
    """A directory below which writes go wrong in the processes that are started with `env`."""

    def __init__(self, library: Path, place: Path) -> None:
        self.root = place / "store"
        self.root.mkdir()
        self._control = place / "control"
        self.set(HEALTHY)
        self.env = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "FAULTY_DIR": str(self.root),
            "FAULTY_CONTROL": str(self._control),
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def set(self, kind: int, left_bytes: int = 0) -> None:
        with open(self._control, "r+b" if self._control.exists() else "w+b") as file:
            file.write(kind.to_bytes(8, "little") + left_bytes.to_bytes(8, "little", signed=True))

    def python(self, program: str, *words: str, timeout_s: float = 60.0) -> Any:
        """What the program says as JSON in its last line."""
        argv = [sys.executable, "-P", "-c", PRELUDE + program, str(self.root), str(self._control), *words]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])


PRELUDE = """
import json, os, sys
from pathlib import Path
root, control = Path(sys.argv[1]), sys.argv[2]
def fault(kind, left=0):
    with open(control, "r+b") as file:
        file.write(kind.to_bytes(8, "little") + left.to_bytes(8, "little", signed=True))
"""


@pytest.fixture
def faulty(tmp_path: Path) -> Faulty:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here, which makes the write() that fails")
    library = tmp_path / "faulty_io.so"
    argv = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SHIM), "-ldl"]
    subprocess.run(argv, check=True, timeout=60, capture_output=True)
    return Faulty(library, tmp_path)


QUOTA_PROGRAM = """
from outlast.checkpoint.commit import commit, write_bytes
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.store import Store
from outlast.reliability.model import Layout
ops, said = RealOps(), []
def save(step):
    directory = root / f"iter_{step:07d}"
    directory.mkdir()
    files = {name: write_bytes(ops, directory / name, b"w" * 3000) for name in ("__0_0.distcp", "common.pt")}
    commit(ops, directory, Manifest(schema=1, train_step=step, samples=step, layout=Layout(), files=files))
save(1)
for step, left in enumerate(range(0, 8000, 250), 2):
    fault(int(sys.argv[3]), left)
    words = ""
    try:
        save(step)
    except OSError as e:
        words = e.strerror
    fault(0)
    said.append((step, left, words, Store(root).choose(quarantined=()).restore.train_step))
save(1000)
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [QUOTA, QUOTA_AT_SYNC])
def test_a_quota_met_anywhere_in_a_save_costs_that_save_alone(faulty: Faulty, kind: int) -> None:
    said = faulty.python(QUOTA_PROGRAM, str(kind))
    newest = 1
    for step, left, words, found in said:
        if words:
            assert words == "Disk quota exceeded"
        # a marker that is there is true, whatever the save was told afterwards
        assert found in (newest, step) and (words or found == step), (step, left, words, found)
        newest = found
    failed = [words for _, _, words, _ in said if words]
    assert len(failed) == len(said) if kind == QUOTA_AT_SYNC else 5 < len(failed) < len(said)
    assert chosen(faulty.root) == 1000


SAVER_PROGRAM = """
import time
import torch, torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from outlast.checkpoint.store import Store
from outlast.checkpoint.writer import Saver
from outlast.reliability.model import Layout
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
saver = Saver(root, on_failure="skip", timeout_s=20.0)
said = {}
def save(step):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((500_000,), float(step)))}
    saver.save(state, train_step=step, samples=step, layout=Layout())
    began_s = time.monotonic()
    durable = saver.finish(4.0)
    return durable, saver.last_failure, time.monotonic() - began_s
said["sound"] = save(5)
fault(1, 1_000_000)
said["quota"] = save(10)
fault(0)
said["after"] = save(15)
fault(2, 1_000_000)
said["stuck"] = save(20)
fault(0)
said["again"] = save(25)
fault(3, 0)
said["slow"] = save(30)
fault(0)
said["steps"] = Store(root).durable_steps()
saver.close()
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.megatron
def test_the_saver_survives_a_quota_a_stuck_and_a_slow_store(faulty: Faulty) -> None:
    said = faulty.python(SAVER_PROGRAM, timeout_s=120.0)
    assert said["sound"][0] == 5 and said["after"][0] == 15 and said["again"][0] == 25
    durable, why, _ = said["quota"]
    assert durable is None and "Disk quota exceeded" in why and "older ones are untouched" in why
    durable, why, waited_s = said["stuck"]
    assert durable is None and "was not saved" in why and waited_s < 15
    assert said["slow"][0] == 30  # late, but true
    assert said["steps"] == [5, 15, 25, 30]
    assert chosen(faulty.root) == 30


STUCK_PROGRAM = """
import asyncio, time
from outlast.checkpoint.store import Store
from outlast.reliability.lane import Lane
from outlast.reliability.ports import PortError
lane, store = Lane("the checkpoint store"), Store(root)
async def ask(timeout_s):
    began_s = time.monotonic()
    try:
        found = (await lane.ask(lambda: store.choose(quarantined=()), timeout_s=timeout_s)).restore.train_step
    except PortError as e:
        found = str(e) if e.again else "final"
    return found, time.monotonic() - began_s
async def main():
    fault(5)
    said = [await ask(0.3), await ask(60.0)]
    # everything else goes on: the pool of threads is whole
    said.append(sum(await asyncio.gather(*(asyncio.to_thread(lambda: 1) for _ in range(40)))))
    if len(sys.argv) > 3:
        fault(0)
        while lane.busy_s is not None:
            await asyncio.sleep(0.01)
        said.append(await ask(60.0))
    return said
print(json.dumps(asyncio.run(main())))
"""


@pytest.mark.slow
@pytest.mark.parametrize("recovers", [False, True])
def test_a_store_whose_reads_are_stuck_holds_nobody_who_asks(faulty: Faulty, recovers: bool) -> None:
    """As the supervisor asks it: refused in words within the deadline, and the process ends all the same."""
    make(faulty.root, 10)
    began_s = time.monotonic()
    said = faulty.python(STUCK_PROGRAM, *(["back"] if recovers else []))
    assert time.monotonic() - began_s < 30.0, "the end of the process waited for the thread"
    (first, waited_s), (second, at_once_s), others = said[:3]
    assert "no answer of the checkpoint store within 0 s" in first and waited_s < 10
    assert "has not answered the last call" in second and at_once_s < 0.2
    assert others == 40
    if recovers:
        assert said[3][0] == 10


@pytest.mark.slow
@pytest.mark.megatron
def test_a_store_that_became_read_only(run_ranks: Any, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True, timeout=10).returncode:
        pytest.skip("no right to mount a small tmpfs")
    root = place / "store"

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(place)], check=True, timeout=10)

    def body(rank: int) -> tuple[Any, ...]:
        import torch
        from megatron.core.dist_checkpointing import ShardedTensor  # type: ignore[import-untyped]

        from outlast.checkpoint.writer import Saver

        saver = Saver(root, on_failure="skip", timeout_s=20.0)

        def save(step: int) -> int | None:
            state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((1000,), float(step)))}
            saver.save(state, train_step=step, samples=step, layout=Layout())
            return saver.finish()

        first = save(5)
        remount("ro")
        refused, why = save(10), saver.last_failure
        remount("rw")
        last = save(15)
        saver.close()
        return first, refused, why, last

    try:
        first, refused, why, last = run_ranks(1, body).value()
        assert (first, refused, last) == (5, None, 15)
        assert "Read-only file system" in why
        assert Store(root).durable_steps() == (5, 15)
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=10)


# ---------------------------------------------------------------- others in the same directory


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except (OSError, CheckpointError):
            code = 3  # refused, as it may be
        finally:
            os._exit(code)
    return pid


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def write_as(root: Path, who: bytes, seed: int) -> None:
    """What a save does, slowly and unevenly: make room, write, commit."""
    rng, ops, store = random.Random(seed), RealOps(), Store(root)
    directory = store.path(30)
    time.sleep(rng.random() / 100)
    store.set_aside(30)
    directory.mkdir()
    files = {}
    for i in range(4):
        time.sleep(rng.random() / 300)
        files[f"f{i}"] = write_bytes(ops, directory / f"f{i}", who * 1000)
    time.sleep(rng.random() / 300)
    commit(ops, directory, Manifest(schema=1, train_step=30, samples=30, layout=Layout(), files=files))


@pytest.mark.slow
def test_two_writers_of_one_step_never_make_a_mixed_checkpoint(tmp_path: Path) -> None:
    outcomes = set()
    for seed in range(40):
        root = tmp_path / str(seed)
        make(root, 20)
        writers = [fork(partial(write_as, root, who, seed * 7 + who[0])) for who in (b"a", b"b")]
        codes = sorted(map(wait, writers))
        assert set(codes) <= {0, 3}
        restore = Store(root).choose(quarantined=()).restore
        assert restore is not None and restore.train_step in (20, 30)
        content = {path.read_bytes() for path in Path(restore.path).glob("f*")}
        assert len(content) == 1, "files of two writers in one checkpoint"
        outcomes.add((restore.train_step, *codes))
    assert len(outcomes) > 1, "the writers never met"


def verify_in_time(path: Path) -> None:
    """A prune that was under way when the lease was taken hides it for a moment."""
    deadline_s = time.monotonic() + 5.0
    while True:
        try:
            verify(path)
            return
        except NotWhole:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.001)


@pytest.mark.slow
def test_a_reader_beside_a_prune_reads_all_or_nothing(tmp_path: Path) -> None:
    """With a lease it always reads all; without, a checkpoint that goes under its hands is told from a whole one."""
    root, stop = tmp_path / "store", tmp_path / "stop"
    for step in range(1, 4):
        make(root, step)

    def read() -> None:
        store, held, lost = Store(root), 0, 0
        while not stop.exists():
            for step in store.durable_steps()[:2]:  # the ones that go next
                try:
                    verify(store.path(step))
                except NotWhole:
                    lost += 1
                try:
                    store.lease(step, f"reader-{os.getpid()}")
                except NotWhole:
                    continue
                held += 1
                verify_in_time(store.path(step))  # raises, and ends this process with 3, if the lease is worth nothing
                store.release(step, f"reader-{os.getpid()}")
        assert held, "never held one"

    readers = [fork(read) for _ in range(2)]
    try:
        for step in range(4, 60):
            make(root, step)
            Store(root).prune(2, keep=())
    finally:
        stop.touch()
        codes = [wait(pid) for pid in readers]
    assert codes == [0, 0]
    assert chosen(root) == 59
    Store(root).prune(2, keep=())
    assert Store(root).durable_steps() == (58, 59)


def test_a_clock_that_goes_back_changes_no_choice(tmp_path: Path) -> None:
    """Neither the manifest's time nor the file system's says which one is newest, or which is old."""
    now_s = time.time()
    for step, age_s in ((10, -1e8), (20, 0.0), (30, 1e8), (40, 2e8)):
        directory = make(tmp_path, step, made_at_s=max(now_s - age_s, 0.0))
        for path in (*directory.iterdir(), directory):
            os.utime(path, (now_s - age_s, now_s - age_s))
    assert chosen(tmp_path) == 40
    assert Store(tmp_path).prune(2, keep=()) == (10, 20)
    assert chosen(tmp_path) == 40


def test_a_file_replaced_under_an_older_time_is_read_again(tmp_path: Path) -> None:
    """A clock that goes back must not make a changed file look like the one that was hashed before."""
    directory, store = make(tmp_path, 10), Store(tmp_path)
    make(tmp_path, 5)
    assert store.choose(quarantined=()).restore is not None
    before = (directory / "f1").stat()
    (directory / "new").write_bytes(b"x" * before.st_size)
    os.utime(directory / "new", ns=(before.st_atime_ns, before.st_mtime_ns - 10**9))
    os.rename(directory / "new", directory / "f1")
    choice = store.choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 5


def test_a_time_before_1970_is_a_time(tmp_path: Path) -> None:
    make(tmp_path, 10, made_at_s=-3600.0)
    assert read_manifest(tmp_path / "iter_0000010").made_at_s == -3600.0
    assert msgspec.json.encode(read_manifest(tmp_path / "iter_0000010"))
