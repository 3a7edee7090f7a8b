"""What is restored where a directory of checkpoints has an object store behind it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.checkpoint.commit import commit, write_bytes
from outlast.checkpoint.errors import StoreError
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.names import name_step
from outlast.checkpoint.objects import FsspecObjects
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.remote import Remote
from outlast.checkpoint.store import Store
from outlast.checkpoint.tiered import TieredStore
from outlast.reliability.model import Layout
from outlast.reliability.ports import CheckpointStore, PortError

SHARD = "__0_0.distcp"


def make(root: Path, step: int) -> Path:
    ops, directory = RealOps(), root / name_step(step)
    directory.mkdir(parents=True)
    files = {name: write_bytes(ops, directory / name, name.encode() * step) for name in (SHARD, "common.pt")}
    commit(ops, directory, Manifest(schema=1, train_step=step, samples=8 * step, layout=Layout(), files=files))
    return directory


class Silent:
    """An object store that does not answer."""

    url = "s3://silent/x"

    def _refuse(self) -> None:
        raise StoreError("list s3://silent/x: no answer", again=True)

    def put_file(self, path: Path, name: str) -> None:
        self._refuse()

    def put_bytes(self, data: bytes, name: str) -> None:
        self._refuse()

    def read(self, name: str) -> Iterator[bytes]:
        self._refuse()
        yield b""

    def size_bytes(self, name: str) -> int | None:
        self._refuse()
        return None

    def names(self, prefix: str) -> tuple[str, ...]:
        self._refuse()
        return ()

    def remove(self, name: str) -> None:
        self._refuse()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """10, 20, 30 here; 20, 30 there too."""
    folder = tmp_path / "ckpt"
    for step in (10, 20, 30):
        make(folder, step)
    for step in (20, 30):
        Remote(far(tmp_path)).upload(Store(folder), step)
    return folder


def far(tmp_path: Path) -> FsspecObjects:
    return FsspecObjects(f"file://{tmp_path}/objects")


@pytest.fixture
def store(root: Path, tmp_path: Path) -> TieredStore:
    return TieredStore(root, far=Remote(far(tmp_path)))


def chosen(store: CheckpointStore, *quarantined: int) -> int:
    restore = store.choose(quarantined=quarantined).restore
    return restore.train_step if restore else -1


def test_of_one_train_step_the_nearest_is_taken(store: TieredStore, root: Path) -> None:
    inode = (root / "iter_0000030").stat().st_ino
    assert chosen(store) == 30
    assert (root / "iter_0000030").stat().st_ino == inode, "nothing was brought"


def test_the_newest_that_verifies_is_brought_here(store: TieredStore, root: Path) -> None:
    shutil.rmtree(root / "iter_0000030")
    (root / "iter_0000020" / SHARD).write_bytes(b"torn")
    choice = store.choose(quarantined=())
    assert choice.restore is not None and choice.restore.path == str(root / "iter_0000030")
    # a whole directory that is lost, and another one quarantined by the run
    shutil.rmtree(root)
    assert chosen(store, 30) == 20
    assert not (root / "iter_0000030").exists(), "what must not be restored is not brought"


def test_a_broken_copy_is_passed_over_with_its_reason(store: TieredStore, root: Path, tmp_path: Path) -> None:
    shutil.rmtree(root)
    far(tmp_path).put_bytes(b"torn", f"iter_0000030/{SHARD}")
    choice = store.choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 20
    (bad,) = choice.passed_over
    assert bad.train_step == 30 and bad.unfinished and SHARD in bad.why
    assert sorted(p.name for p in root.iterdir() if p.name.startswith("iter_")) == ["iter_0000020"]


def test_silence_is_no_proof_that_there_is_nothing(root: Path) -> None:
    silent = TieredStore(root, far=Remote(Silent()))
    choice = silent.choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 30
    assert "no answer" in choice.passed_over[0].why and choice.passed_over[0].unfinished
    shutil.rmtree(root)
    with pytest.raises(PortError) as error:
        silent.choose(quarantined=())
    assert error.value.again


class FallsSilent(FsspecObjects):
    """Answers what there is, and gives nothing."""

    def read(self, name: str) -> Iterator[bytes]:
        raise StoreError(f"read {name}: no answer", again=True)


def test_what_is_known_to_be_there_is_waited_for(root: Path, tmp_path: Path) -> None:
    silent = TieredStore(root, far=Remote(FallsSilent(f"file://{tmp_path}/objects")))
    shutil.rmtree(root / "iter_0000030")
    choice = silent.choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 20, "an older one here is better than to wait"
    assert choice.passed_over[0].train_step == 30
    shutil.rmtree(root)
    with pytest.raises(PortError, match="no answer"):
        silent.choose(quarantined=())


def test_without_anything_anywhere_the_answer_is_none(tmp_path: Path) -> None:
    assert TieredStore(tmp_path / "new", far=Remote(far(tmp_path))).choose(quarantined=()).restore is None
