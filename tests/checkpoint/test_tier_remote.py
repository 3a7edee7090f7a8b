"""Copies of checkpoints in an object store, over the real S3 protocol (moto's server) and over file://."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.checkpoint.commit import commit, write_bytes
from outlast.checkpoint.errors import CheckpointError, NotWhole, StoreError
from outlast.checkpoint.manifest import MANIFEST, MARKER, Manifest
from outlast.checkpoint.names import FETCHING, name_step
from outlast.checkpoint.objects import FsspecObjects, Objects
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.remote import Remote
from outlast.checkpoint.store import Store
from outlast.checkpoint.tiers import Tier, read_tier
from outlast.checkpoint.verify import verify
from outlast.reliability.model import Layout

SHARD = "__0_0.distcp"
BUCKET = "outlast-test"


def make_checkpoint(root: Path, step: int, content: bytes = b"weights") -> Path:
    ops, directory = RealOps(), root / name_step(step)
    directory.mkdir(parents=True)
    data = {SHARD: content * 5000, "common.pt": b"common", ".metadata": b"index", "metadata.json": b"{}"}
    files = {name: write_bytes(ops, directory / name, raw) for name, raw in data.items()}
    commit(ops, directory, Manifest(schema=1, train_step=step, samples=8 * step, layout=Layout(), files=files))
    return directory


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket; keys are in the environment, as for a user."""
    import boto3

    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": s3_server}.items():
        monkeypatch.setenv(name, value)
    s3 = boto3.resource("s3").Bucket(BUCKET)
    s3.create()
    s3.objects.all().delete()
    return f"s3://{BUCKET}/runs/lm"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    for step in (10, 20, 30):
        make_checkpoint(folder, step)
    return folder


def near(tmp_path: Path) -> Objects:
    """The same operations on a directory: quick, and safe to fork with."""
    return FsspecObjects(f"file://{tmp_path}/objects")


class Counted:
    """Objects that end their process, or raise, just before the nth change."""

    def __init__(self, inner: Objects, left: int, *, kill: bool) -> None:
        self.inner, self.left, self.kill = inner, left, kill
        self.url = inner.url
        self.sent: list[str] = []

    def _count(self, name: str) -> None:
        if self.left == 0:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise StoreError("the network is gone", again=True)
        self.left -= 1
        self.sent.append(name)

    def put_file(self, path: Path, name: str) -> None:
        self._count(name)
        self.inner.put_file(path, name)

    def put_bytes(self, data: bytes, name: str) -> None:
        self._count(name)
        self.inner.put_bytes(data, name)

    def remove(self, name: str) -> None:
        self._count(name)
        self.inner.remove(name)

    def read(self, name: str) -> Iterator[bytes]:
        return self.inner.read(name)

    def size_bytes(self, name: str) -> int | None:
        return self.inner.size_bytes(name)

    def names(self, prefix: str) -> tuple[str, ...]:
        return self.inner.names(prefix)


@pytest.mark.slow
def test_up_to_s3_and_back(bucket: str, root: Path, tmp_path: Path) -> None:
    remote, store = Remote(FsspecObjects(bucket)), Store(root)
    assert remote.steps() == ()
    done = remote.upload(store, 20)
    assert (done.train_step, done.sent_bytes) == (20, done.size_bytes)
    assert remote.steps() == (20,)
    assert remote.manifest(20) == verify(root / "iter_0000020")
    record = read_tier(root / "iter_0000020")
    assert record is not None and (record.tier, record.where) == (Tier.REMOTE, bucket)
    assert not list((root / "leases").iterdir())
    # what is there is not sent again
    assert remote.upload(store, 20).sent_bytes == 0

    elsewhere = tmp_path / "elsewhere"
    assert remote.fetch(20, elsewhere) == elsewhere / "iter_0000020"
    choice = Store(elsewhere).choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 20
    for name in (MANIFEST, MARKER, SHARD):
        assert (elsewhere / "iter_0000020" / name).read_bytes() == (root / "iter_0000020" / name).read_bytes()
    assert not list(elsewhere.glob(f"{FETCHING}*"))


@pytest.mark.slow
def test_a_torn_upload_is_no_checkpoint_and_is_finished_by_the_next(bucket: str, root: Path) -> None:
    objects, store = FsspecObjects(bucket), Store(root)
    for left in (0, 1, 1, 1, 1, 1):
        torn = Counted(objects, left, kill=False)
        with pytest.raises(StoreError, match="network is gone"):
            Remote(torn).upload(store, 10)
        assert Remote(objects).steps() == ()
        with pytest.raises(NotWhole, match="no COMMITTED"):
            Remote(objects).fetch(10, root.parent / "elsewhere")
        assert not list((root / "leases").iterdir()), "the lease goes with the upload"
    last = Counted(objects, 1000, kill=False)
    Remote(last).upload(store, 10)
    assert last.sent == ["iter_0000010/COMMITTED"], "all else was there already"
    assert Remote(objects).steps() == (10,)


@pytest.mark.slow
def test_a_missing_or_changed_object_is_found_and_sent_again(bucket: str, root: Path, tmp_path: Path) -> None:
    objects, store = FsspecObjects(bucket), Store(root)
    remote = Remote(objects)
    remote.upload(store, 30)
    for spoil in (
        lambda: objects.remove(f"iter_0000030/{SHARD}"),
        lambda: objects.put_bytes(b"w" * 35000, f"iter_0000030/{SHARD}"),
        lambda: objects.put_bytes(b"w" * 70000, f"iter_0000030/{SHARD}"),
    ):
        spoil()
        with pytest.raises(NotWhole, match=SHARD):
            remote.fetch(30, tmp_path / "elsewhere")
        assert list((tmp_path / "elsewhere").iterdir()) == [], "nothing is left, and nothing has the name"
        assert remote.upload(store, 30).sent_bytes == 35000
    remote.fetch(30, tmp_path / "elsewhere")
    assert verify(tmp_path / "elsewhere" / "iter_0000030").train_step == 30


@pytest.mark.slow
def test_a_store_that_is_not_there_or_refuses_says_so_without_keys(
    bucket: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError) as nowhere:
        Remote(FsspecObjects("s3://no-such-bucket/x")).upload(Store(root), 10)
    assert "no-such-bucket" in str(nowhere.value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "deadbeefsecret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # discard: nobody listens
    with pytest.raises(StoreError) as silent:
        Remote(FsspecObjects(bucket)).steps()
    assert silent.value.again and "deadbeefsecret" not in str(silent.value)
    with pytest.raises(StoreError, match="remote"):
        FsspecObjects("nosuchscheme://x/y").size_bytes("z")


def test_killed_at_every_change_of_an_upload(root: Path, tmp_path: Path) -> None:
    """kill -9 before each put: nothing is believed before all is there, and a rerun ends it."""
    for left in range(7):
        shutil.rmtree(tmp_path / "objects", ignore_errors=True)
        pid = os.fork()
        if pid == 0:
            try:
                Remote(Counted(near(tmp_path), left, kill=True)).upload(Store(root), 20)
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        killed = os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        assert killed == (left < 6)
        assert Remote(near(tmp_path)).steps() == (() if killed else (20,))
        Remote(near(tmp_path)).upload(Store(root), 20)
        Remote(near(tmp_path)).fetch(20, tmp_path / f"back{left}")
        assert verify(tmp_path / f"back{left}" / "iter_0000020").train_step == 20


def test_another_save_of_the_same_train_step_takes_the_place(root: Path, tmp_path: Path) -> None:
    objects = near(tmp_path)
    Remote(objects).upload(Store(root), 30)
    shutil.rmtree(root / "iter_0000030")
    make_checkpoint(root, 30, b"others!")
    # the marker of the old one goes before any of its files changes
    torn = Counted(objects, 1, kill=False)
    with pytest.raises(StoreError):
        Remote(torn).upload(Store(root), 30)
    assert torn.sent == ["iter_0000030/COMMITTED"] and Remote(objects).steps() == ()
    Remote(objects).upload(Store(root), 30)
    Remote(objects).fetch(30, tmp_path / "back")
    assert (tmp_path / "back" / "iter_0000030" / SHARD).read_bytes() == b"others!" * 5000


def test_a_source_that_rots_is_not_promised(root: Path, tmp_path: Path) -> None:
    path = root / "iter_0000030" / SHARD
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(NotWhole, match="sent twice"):
        Remote(near(tmp_path)).upload(Store(root), 30)
    assert Remote(near(tmp_path)).steps() == ()


def test_old_ones_go_marker_first_and_never_the_verified(root: Path, tmp_path: Path) -> None:
    objects = near(tmp_path)
    remote = Remote(objects)
    for step in (10, 20, 30):
        remote.upload(Store(root), step)
    objects.put_bytes(b"half", "iter_0000005/__0_0.distcp")
    assert remote.prune(1, verified=10) == () and remote.steps() == (10, 20, 30)
    watched = Counted(objects, 1000, kill=False)
    assert Remote(watched).prune(2, verified=30, keep=(10,)) == ()
    assert Remote(watched).prune(1, verified=30) == (10, 20)
    assert watched.sent.index("iter_0000010/COMMITTED") < watched.sent.index("iter_0000010/__0_0.distcp")
    assert remote.steps() == (30,) and objects.names("iter_0000005") == ()
    assert remote.prune(1, verified=30) == () and remote.prune(1, verified=7) == ()


def test_what_lies_in_the_way_of_a_download(root: Path, tmp_path: Path) -> None:
    remote, other = Remote(near(tmp_path)), tmp_path / "other"
    remote.upload(Store(root), 30)
    # whole: it stays
    same = make_checkpoint(other, 30)
    inode = same.stat().st_ino
    assert remote.fetch(30, other).stat().st_ino == inode
    # broken: it makes room, and is kept
    (same / SHARD).write_bytes(b"torn")
    remote.fetch(30, other)
    assert verify(other / "iter_0000030") and (other / "aside" / "iter_0000030" / SHARD).read_bytes() == b"torn"
    # perhaps under way
    (other / "iter_0000030" / MARKER).unlink()
    with pytest.raises(CheckpointError, match="under way"):
        remote.fetch(30, other, replace=False)
    # left by a download that died
    (other / f"{FETCHING}iter_0000030.{os.uname().nodename}.999999999").mkdir()
    remote.fetch(30, other)
    assert not list(other.glob(f"{FETCHING}*"))


def test_a_hostile_copy_leads_nowhere(root: Path, tmp_path: Path) -> None:
    """A manifest from the store is decoded as strictly as one from disk."""
    from outlast.checkpoint.manifest import encode_marker

    objects = near(tmp_path)
    Remote(objects).upload(Store(root), 30)
    raw = (root / "iter_0000030" / MANIFEST).read_bytes().replace(b"common.pt", b"../evil.p")
    objects.put_bytes(raw, f"iter_0000030/{MANIFEST}")
    objects.put_bytes(encode_marker(raw, 30), f"iter_0000030/{MARKER}")
    with pytest.raises(NotWhole, match="refused, nothing was opened"):
        Remote(objects).fetch(30, tmp_path / "back")
    # another train_step's marker and manifest under this name
    for name in (MANIFEST, MARKER):
        objects.put_bytes((root / "iter_0000020" / name).read_bytes(), f"iter_0000030/{name}")
    with pytest.raises(NotWhole, match="says train_step 20"):
        Remote(objects).fetch(30, tmp_path / "back")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(marker=st.binary(max_size=200), manifest=st.binary(max_size=400))
def test_garbage_is_refused(tmp_path: Path, marker: bytes, manifest: bytes) -> None:
    objects = near(tmp_path)
    objects.put_bytes(marker, f"iter_0000001/{MARKER}")
    objects.put_bytes(manifest, f"iter_0000001/{MANIFEST}")
    with pytest.raises(NotWhole):
        Remote(objects).fetch(1, tmp_path / "back")
    assert list((tmp_path / "back").iterdir()) == []


def test_a_disk_without_room_is_found_first(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(near(tmp_path))
    remote.upload(Store(root), 30)
    real: Any = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 10, real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda _path: Full)
    with pytest.raises(CheckpointError, match="make room"):
        remote.fetch(30, tmp_path / "back")
    assert list((tmp_path / "back").iterdir()) == []
