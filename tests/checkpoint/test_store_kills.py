"""kill -9 at every operation of a prune, a quarantine, a move aside: nothing that counts is lost, a rerun ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.checkpoint.commit import commit, write_bytes
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.names import LEAVING, TRASH, name_step
from outlast.checkpoint.ops import RealOps, Sink
from outlast.checkpoint.store import Store
from outlast.checkpoint.verify import verify
from outlast.reliability.model import Layout


class Killer(RealOps):
    """Ends its process just before its nth operation."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _count(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def make_dir(self, path: Path) -> None:
        self._count()
        super().make_dir(path)

    def create(self, path: Path) -> Sink:
        self._count()
        return super().create(path)

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)

    def remove_dir(self, path: Path) -> None:
        self._count()
        super().remove_dir(path)

    def sync_dir(self, path: Path) -> None:
        self._count()
        super().sync_dir(path)


def make_checkpoint(root: Path, step: int) -> None:
    ops, directory = RealOps(), root / name_step(step)
    directory.mkdir(parents=True)
    files = {name: write_bytes(ops, directory / name, name.encode() * step) for name in ("__0_0.distcp", "common.pt")}
    commit(ops, directory, Manifest(schema=1, train_step=step, samples=step, layout=Layout(), files=files))


def kill_at_every_operation(root: Path, deed: Callable[[Store], object], check: Callable[[bool], None]) -> int:
    """Runs the deed in children that die one operation later each time; check(done) after each. Returns how many."""
    for n in range(200):
        for step in (10, 20, 30):
            make_checkpoint(root / str(n), step)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                deed(Store(root / str(n), ops=Killer(n)))
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL)
        check_at = root / str(n)
        os.chdir(check_at)
        check(code == 0)
        if code == 0:
            return n
    raise AssertionError("the deed never ended")


@pytest.fixture(autouse=True)
def back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def chosen() -> int:
    restore = Store(".").choose(quarantined=()).restore
    assert restore is not None
    verify(Path(restore.path))
    return restore.train_step


@pytest.mark.slow
def test_prune(tmp_path: Path) -> None:
    def check(done: bool) -> None:
        assert chosen() == 30
        Store(".").prune(1, keep=())
        assert chosen() == 30 and Store(".").durable_steps() == (30,)
        assert not [name for name in os.listdir(".") if name.startswith((TRASH, LEAVING))]

    assert kill_at_every_operation(tmp_path, lambda store: store.prune(1, keep=()), check) > 15


@pytest.mark.slow
def test_quarantine(tmp_path: Path) -> None:
    def check(done: bool) -> None:
        assert chosen() in ((20,) if done else (20, 30))
        Store(".").quarantine(30, "bad")
        assert chosen() == 20
        kept = [name for name in os.listdir("quarantine") if name.startswith("iter") and "reason" not in name]
        assert [verify(Path("quarantine") / name).train_step for name in kept] == [30], "moved once, whole"
        assert (Path("quarantine") / f"{kept[0]}.reason").exists()

    assert kill_at_every_operation(tmp_path, lambda store: store.quarantine(30, "bad"), check) > 6


@pytest.mark.slow
def test_set_aside(tmp_path: Path) -> None:
    def check(done: bool) -> None:
        assert chosen() == 30

    assert kill_at_every_operation(tmp_path, lambda store: store.set_aside(30), check) > 3


@pytest.mark.slow
def test_two_pruners_at_once_lose_nothing(tmp_path: Path) -> None:
    for n in range(6):
        root = tmp_path / str(n)
        for step in range(10, 100, 10):
            make_checkpoint(root, step)
        pids = []
        for _ in range(3):
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    Store(root).prune(2, keep=(40,))
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0, 0]
        Store(root).prune(2, keep=(40,))
        assert Store(root).durable_steps() == (40, 80, 90)
        for step in (40, 80, 90):
            verify(root / name_step(step))
