"""A directory of checkpoints on a real file system: what is chosen, why others are passed over, what goes and stays."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.catalogue import survey
from outlast.checkpoint.commit import commit, write_bytes
from outlast.checkpoint.errors import CheckpointError, NotWhole, StoreError
from outlast.checkpoint.manifest import Manifest, encode_marker
from outlast.checkpoint.names import name_step, parse_step
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.retention import list_leases, plan_removal
from outlast.checkpoint.store import Store
from outlast.checkpoint.verify import HashCache, read_manifest, verify
from outlast.reliability.model import Layout
from outlast.reliability.ports import CheckpointStore, PortError

SHARD = "__0_0.distcp"


def make_checkpoint(root: Path, step: int, *, committed: bool = True, content: bytes = b"weights") -> Path:
    """A committed checkpoint without torch: the files have Megatron's names."""
    ops = RealOps()
    directory = root / name_step(step)
    directory.mkdir(parents=True)
    data = {SHARD: content * 100, "common.pt": b"common", ".metadata": b"index", "metadata.json": b"{}"}
    files = {name: write_bytes(ops, directory / name, raw) for name, raw in data.items()}
    if committed:
        commit(ops, directory, Manifest(schema=1, train_step=step, samples=8 * step, layout=Layout(), files=files))
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    for step in (10, 20, 30):
        make_checkpoint(folder, step)
    return folder


def chosen(store: Store, *quarantined: int) -> int:
    restore = store.choose(quarantined=quarantined).restore
    return restore.train_step if restore else -1


def test_it_is_the_port() -> None:
    port: CheckpointStore = Store("nowhere")
    assert port.durable_steps() == ()
    assert port.choose(quarantined=()).restore is None
    assert port.prune(3, keep=()) == ()
    port.quarantine(10, "nothing there")


def test_the_newest_whole_one_is_chosen(root: Path) -> None:
    store = Store(root)
    choice = store.choose(quarantined=())
    assert choice.restore is not None and choice.passed_over == ()
    assert (choice.restore.train_step, choice.restore.samples) == (30, 240)
    assert choice.restore.path == str(root / "iter_0000030")
    assert store.durable_steps() == (10, 20, 30)
    assert chosen(store, 30, 20) == 10
    assert chosen(store, 30, 20, 10) == -1


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    """One bit, size and mtime unchanged: nothing but the hash can tell."""
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def relink(path: Path) -> None:
    moved = path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(moved)


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def edit_json(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"samples": 240', b'"samples": 241'))


DAMAGE = [
    (SHARD, Path.unlink, "model shard __0_0.distcp: missing, manifest says 700 bytes"),
    (SHARD, cut, "model shard __0_0.distcp: 699 bytes, manifest says 700 (truncated)"),
    (SHARD, flip, "(changed)"),
    (SHARD, relink, "is a symbolic link (refused)"),
    (SHARD, make_fifo, "not a regular file (refused)"),
    ("common.pt", flip, "common state common.pt: xxh3_128"),
    (".metadata", flip, "shard index .metadata: xxh3_128"),
    ("metadata.json", cut, "format file metadata.json: 1 bytes, manifest says 2 (truncated)"),
    ("COMMITTED", Path.unlink, "no COMMITTED"),
    ("COMMITTED", cut, "COMMITTED"),
    ("COMMITTED", lambda path: path.write_bytes(b""), "torn or not ours (0 bytes)"),
    ("COMMITTED", lambda path: path.write_bytes(b"x" * 5000), "longer than 4,096 bytes"),
    ("COMMITTED", relink, "COMMITTED: is a symbolic link (refused)"),
    ("COMMITTED", make_fifo, "not a regular file"),
    ("manifest.json", Path.unlink, "manifest.json: missing, though COMMITTED is there"),
    ("manifest.json", edit_json, "changed after the commit"),
    ("manifest.json", cut, "changed after the commit"),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGE)
def test_a_damaged_one_is_passed_over_and_said_why(root: Path, name: str, damage: Any, words: str) -> None:
    damage(root / "iter_0000030" / name)
    choice = Store(root).choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 20
    (bad,) = choice.passed_over
    assert bad.train_step == 30 and words in bad.why, bad.why
    assert bad.unfinished == (words == "no COMMITTED"), "only a save that never finished is no incident"
    with pytest.raises(NotWhole, match="Not restored; take an older one"):
        verify(root / "iter_0000030")


def test_a_hostile_manifest_opens_nothing(root: Path) -> None:
    bad = root / "iter_0000030"
    manifest = json.loads((bad / "manifest.json").read_bytes())
    manifest["files"]["../iter_0000010/__0_0.distcp"] = manifest["files"][SHARD]
    raw = json.dumps(manifest).encode()
    (bad / "manifest.json").write_bytes(raw)
    (bad / "COMMITTED").write_bytes(encode_marker(raw, 30))
    choice = Store(root).choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 20
    assert "'../iter_0000010/__0_0.distcp' has an empty, '.' or '..' part; refused" in choice.passed_over[0].why


def test_a_linked_directory_and_a_renamed_checkpoint_are_refused(root: Path) -> None:
    (root / "iter_0000040").symlink_to(root / "iter_0000010")
    (root / "iter_0000020").rename(root / "iter_0000050")
    choice = Store(root).choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 30
    assert [bad.train_step for bad in choice.passed_over] == [50, 40]
    assert choice.passed_over[0].why == "its manifest says train_step 20"
    assert choice.passed_over[1].why == "is a symbolic link (refused)"


def test_a_framework_checkpoint_without_ours_and_a_pointer_are_not_believed(root: Path) -> None:
    make_checkpoint(root, 40, committed=False)
    (root / "latest_checkpointed_iteration.txt").write_text("40\n")
    choice = Store(root).choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 30
    assert "no COMMITTED" in choice.passed_over[0].why
    assert Store(root).durable_steps() == (10, 20, 30)


def test_leftovers_and_other_names_are_tolerated(root: Path) -> None:
    for name in (".trash-iter_0000040.1", "iter_40", "iter_000000050", "iter_00000000060", "release", "tmp", "iter_x"):
        make_checkpoint(root / "x", 40).rename(root / name)
    (root / "iter_0000070").write_text("a file")
    choice = Store(root).choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 30
    assert [bad.train_step for bad in choice.passed_over] == [70]
    assert Store(root).durable_steps() == (10, 20, 30)
    assert [parse_step(name) for name in ("iter_0000030", "iter_30", "iter_00000030", "iter_12345678")] == [
        30,
        None,
        None,
        12345678,
    ]


def test_quarantine_moves_and_keeps_and_is_idempotent(root: Path) -> None:
    store = Store(root)
    store.quarantine(30, "the same exception three times")
    store.quarantine(30, "again")
    assert store.durable_steps() == (10, 20)
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "20\n"
    kept = root / "quarantine" / "iter_0000030"
    assert verify(kept).train_step == 30
    reason = json.loads((root / "quarantine" / "iter_0000030.reason").read_bytes())
    assert reason["why"] == "the same exception three times" and reason["at_s"] > 0
    make_checkpoint(root, 30)
    store.quarantine(30, "bad again")
    assert verify(root / "quarantine" / "iter_0000030.2").train_step == 30
    assert sorted(os.listdir(root / "quarantine")) == [
        "iter_0000030",
        "iter_0000030.2",
        "iter_0000030.2.reason",
        "iter_0000030.reason",
    ]


def test_what_made_room_counts_until_its_successor_is_true(root: Path) -> None:
    store = Store(root)
    aside = store.set_aside(30)
    assert aside == root / "aside" / "iter_0000030" and store.set_aside(99) is None
    assert store.choose(quarantined=()).restore.path == str(aside)  # type: ignore[union-attr]
    make_checkpoint(root, 30, committed=False)  # a new save that is under way, or died
    assert store.choose(quarantined=()).restore.path == str(aside)  # type: ignore[union-attr]
    assert store.durable_steps() == (10, 20, 30)
    assert store.set_aside(30) == root / "aside" / "iter_0000030.2"
    make_checkpoint(root, 30, content=b"better!")
    assert store.choose(quarantined=()).restore.path == str(root / "iter_0000030")  # type: ignore[union-attr]
    assert chosen(store, 30) == 20
    store.prune(3, keep=())
    assert os.listdir(root / "aside") == []
    store.set_aside(30)
    assert store.prune(1, keep=()) == (10,)
    assert chosen(store) == 30, "the only one that verifies at 30 lies aside, and stays"
    store.quarantine(30, "suspect")
    assert chosen(store) == 20


def test_prune_keeps_what_is_needed(root: Path) -> None:
    store = Store(root)
    make_checkpoint(root, 5, committed=False)
    make_checkpoint(root, 25, committed=False)
    make_checkpoint(root, 40, committed=False)
    for step in (1, 2, 3):
        make_checkpoint(root, step)
    store.lease(2, "eval-7")
    assert store.prune(2, keep=(3,)) == (1, 10)
    assert store.durable_steps() == (2, 3, 20, 30)
    assert sorted(parse_step(n) or 0 for n in os.listdir(root) if parse_step(n)) == [2, 3, 5, 20, 25, 30, 40]
    store.release(2, "eval-7")
    store.release(2, "eval-7")
    assert store.prune(1, keep=()) == (2, 3, 20)
    assert sorted(parse_step(n) or 0 for n in os.listdir(root) if parse_step(n)) == [30, 40]
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "30\n"
    assert store.prune(0, keep=()) == () and store.durable_steps() == (30,)


def test_prune_never_takes_the_only_one_that_verifies(root: Path) -> None:
    flip(root / "iter_0000030" / SHARD)
    cut(root / "iter_0000020" / SHARD)
    store = Store(root)
    assert store.prune(1, keep=()) == ()
    assert chosen(store) == 10
    cut(root / "iter_0000010" / SHARD)
    assert store.prune(1, keep=()) == () and store.durable_steps() == (10, 20, 30)


@pytest.mark.parametrize(
    ("durable", "keep_last", "keep", "verified", "gone"),
    [
        ((10, 20, 30), 2, (), 30, (10,)),
        ((10, 20, 30), 0, (), 30, (10, 20)),
        ((10, 20, 30), 5, (), 30, ()),
        ((10, 20, 30), 1, (10,), 30, (20,)),
        ((10, 20, 30), 1, (), 10, ()),
        ((10, 20, 30), 1, (), 20, (10,)),
        ((), 1, (), 20, ()),
    ],
)
def test_the_plan_of_removal(durable: Any, keep_last: int, keep: Any, verified: int, gone: Any) -> None:
    assert plan_removal(durable, keep_last=keep_last, keep=keep, verified=verified) == gone


@given(
    durable=st.sets(st.integers(0, 300)), every=st.integers(0, 60), keep_last=st.integers(0, 5), more=st.integers(0, 99)
)
def test_every_kth_stays_kept_over_any_number_of_prunes(
    durable: set[int], every: int, keep_last: int, more: int
) -> None:
    """Saving and pruning in turns keeps the first one at or after each multiple, and nothing else that is old."""
    kept: set[int] = set()
    for step in sorted(durable | {max(durable, default=0) + more}):
        kept.add(step)
        gone = plan_removal(sorted(kept), keep_last=keep_last, keep=(), verified=step, keep_every=every)
        assert step not in gone
        kept -= {*gone}
    saved = sorted(durable | {max(durable, default=0) + more})
    newest = {*saved[-max(keep_last, 1) :]}
    multiples = range(every, saved[-1] + 1, every) if every else ()
    spaced = {next(step for step in saved if step >= m) for m in multiples if any(m <= s < m + every for s in saved)}
    assert kept == newest | spaced


def test_named_and_spaced_ones_stay_and_a_plan_changes_nothing(root: Path) -> None:
    store = Store(root)
    for step in (40, 50, 60):
        make_checkpoint(root, step)
    store.lease(10, "named-best")
    before = sorted(os.listdir(root))
    assert store.plan_prune(1, keep=(), keep_every=25) == (20, 40)
    assert sorted(os.listdir(root)) == before
    assert store.prune(1, keep=(), keep_every=25) == (20, 40)
    assert store.durable_steps() == (10, 30, 50, 60)
    assert list_leases(root) == {10: ("named-best",)}


def test_a_lease_needs_something_to_hold(root: Path) -> None:
    with pytest.raises(NotWhole, match="no lease was taken"):
        Store(root).lease(99, "eval")
    assert os.listdir(root / "leases") == []
    with pytest.raises(CheckpointError, match="holder"):
        Store(root).lease(10, "../x")


def test_a_lease_that_comes_late_brings_the_checkpoint_back(root: Path) -> None:
    class LateLease(RealOps):
        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            if new.name == ".leaving-iter_0000010":
                (root / "leases").mkdir(exist_ok=True)
                (root / "leases" / "iter_0000010.eval").write_bytes(b"")

    assert Store(root, ops=LateLease()).prune(1, keep=()) == (20,)
    assert Store(root).durable_steps() == (10, 30)


def test_hashes_are_read_once_while_nothing_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(root)
    assert chosen(store) == 30
    known = dict(store._hashes.known)
    assert len(known) == 4
    assert chosen(store) == 30 and store._hashes.known == known
    shard = root / "iter_0000030" / SHARD
    replaced = shard.read_bytes()[:-1] + b"!"
    shard.write_bytes(replaced)
    assert chosen(store) == 20, "a new mtime is a new key"
    with pytest.raises(NotWhole):
        verify(root / "iter_0000030", cache=HashCache())
    assert read_manifest(root / "iter_0000030").train_step == 30, "the manifest itself is well"


@pytest.fixture
def nobody() -> Iterator[None]:
    """Without root's right to read everything."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, nobody: None) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "ckpt"
        make_checkpoint(root, 10)
        make_checkpoint(root, 20)
        root.chmod(0)
        for ask in (lambda: Store(root).choose(quarantined=()), Store(root).durable_steps):
            with pytest.raises(StoreError, match="Permission denied") as e:
                ask()
            assert e.value.again and isinstance(e.value, PortError) and isinstance(e.value, CheckpointError)
        root.chmod(0o700)
        (root / "iter_0000020" / SHARD).chmod(0)
        choice = Store(root).choose(quarantined=())
        assert choice.restore is not None and choice.restore.train_step == 10
        assert "cannot be read (Permission denied)" in choice.passed_over[0].why
        (root / "iter_0000010").chmod(0)
        with pytest.raises(StoreError, match="2 could not be read") as e:
            Store(root).choose(quarantined=())
        assert e.value.again
        (root / "iter_0000010").chmod(0o700)


def test_a_read_only_directory_refuses_changes_with_words(tmp_path: Path, nobody: None) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "ckpt"
        make_checkpoint(root, 10)
        make_checkpoint(root, 20)
        root.chmod(0o500)
        for change in (lambda: Store(root).prune(1, keep=()), lambda: Store(root).quarantine(20, "bad")):
            with pytest.raises(StoreError, match=r"Permission denied.*writable"):
                change()
        assert Store(root).durable_steps() == (10, 20)
        root.chmod(0o700)


def test_a_file_in_place_of_the_directory_is_final(tmp_path: Path) -> None:
    (tmp_path / "ckpt").write_text("")
    with pytest.raises(StoreError) as e:
        Store(tmp_path / "ckpt").durable_steps()
    assert not e.value.again


@pytest.mark.slow
def test_ten_thousand_checkpoints_are_listed_fast(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    make_checkpoint(root, 10_000)
    for step in range(1, 10_000):
        directory = root / name_step(step)
        directory.mkdir()
        (directory / "COMMITTED").write_bytes(b"{}")
    store = Store(root)
    began_s = time.monotonic()
    assert len(store.durable_steps()) == 10_000
    assert chosen(store) == 10_000
    took_s = time.monotonic() - began_s
    assert took_s < 10.0, f"{took_s:.2f} s"


@pytest.mark.slow
def test_ten_thousand_real_ones_are_chosen_listed_planned_and_pruned_in_time(tmp_path: Path) -> None:
    """Each whole, and the newest damaged: no question costs more than its own files."""
    root = tmp_path / "ckpt"
    first = make_checkpoint(root, 1)
    names = [path.name for path in first.iterdir()]
    for step in range(2, 10_001):  # links of the first one's files: their manifest says another step
        directory = root / name_step(step)
        directory.mkdir()
        for name in names:
            os.link(first / name, directory / name)
    make_checkpoint(root, 20_000)
    flip(make_checkpoint(root, 30_000) / SHARD)

    def timed(what: Callable[[], Any], limit_s: float) -> Any:
        began_s = time.monotonic()
        result = what()
        took_s = time.monotonic() - began_s
        assert took_s < limit_s, f"{took_s:.1f} s"
        return result

    store = Store(root)
    assert timed(lambda: chosen(store), 10.0) == 20_000
    assert len(timed(lambda: list(survey(root)), 60.0)) == 10_002
    assert len(timed(lambda: store.plan_prune(3, keep=(), keep_every=1000), 10.0)) == 9_989
    # as many as a long silence of the supervisor leaves; each goes with three syncs, whatever else lies there
    gone = timed(lambda: store.prune(9_800, keep=(7,), keep_every=100), 60.0)
    assert len(gone) == 198 and 7 not in gone and 100 not in gone
    assert store.durable_steps()[:4] == (7, 100, 200, 202)
