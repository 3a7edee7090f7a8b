"""A flipped bit and a cut in each kind of file of a checkpoint, at every place: never restored, never silent.

shard  common.pt  .metadata  metadata.json  manifest.json  COMMITTED     passed over, the one before is chosen
fingerprints.json                                                        the restore refuses it
latest_checkpointed_iteration.txt, leases, quarantine reasons            believed by nobody
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.checkpoint.catalogue import State, survey
from outlast.checkpoint.commit import commit, write_bytes
from outlast.checkpoint.errors import NotWhole
from outlast.checkpoint.manifest import SCHEMA, Manifest
from outlast.checkpoint.names import name_step
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.prints import FILE, Prints, TensorPrint, read_prints, write_prints
from outlast.checkpoint.store import Store
from outlast.checkpoint.verify import read_manifest, verify
from outlast.reliability.model import Layout

HASHED = ("__0_0.distcp", "common.pt", ".metadata", "metadata.json")
OURS = ("manifest.json", "COMMITTED")
STEP_BITS = 37
"""Not every bit of thousands: each 37th meets every byte position of a word and every bit of a byte."""


def make(root: Path, step: int) -> Path:
    ops, directory = RealOps(), root / name_step(step)
    directory.mkdir(parents=True)
    content = {name: f"{name} of {step} ".encode() * 12 for name in HASHED}
    files = {name: write_bytes(ops, directory / name, raw) for name, raw in content.items()}
    commit(ops, directory, Manifest(schema=SCHEMA, train_step=step, samples=step, layout=Layout(dp=2), files=files))
    tensors = {"w": TensorPrint(dtype="float32", shape=(2, 3), fingerprint="0123456789abcdef")}
    write_prints(ops, directory, Prints(scheme="s", train_step=step, tensors=tensors))
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make(tmp_path, 10)
    make(tmp_path, 20)
    return tmp_path


def damages(path: Path) -> Iterator[str]:
    """Each damage done to the file in turn, told; the file is whole again afterwards."""
    whole = path.read_bytes()
    try:
        for bit in range(0, len(whole) * 8, STEP_BITS):
            raw = bytearray(whole)
            raw[bit // 8] ^= 1 << (bit % 8)
            path.write_bytes(raw)
            yield f"bit {bit} flipped"
        for length in {0, 1, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:length])
            yield f"cut to {length} bytes"
        path.write_bytes(whole + b"\0")
        yield "a byte too long"
        path.write_bytes(bytes(len(whole)))
        yield "all zeros"  # as a file system gives a file whose data was never written
        path.unlink()
        yield "gone"
    finally:
        path.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", HASHED + OURS)
def test_damage_of_any_kind_in_any_file(root: Path, name: str) -> None:
    directory = root / name_step(20)
    sound, count = read_manifest(directory), 0
    for what in damages(directory / name):
        count += 1
        choice = Store(root).choose(quarantined=())  # afresh: nothing remembered
        assert choice.restore is not None
        if choice.restore.train_step == 20:
            # a bit in blank space, or in a letter's case: it reads as the very same thing
            assert name in OURS and verify(directory) == sound, what
            continue
        assert choice.restore.train_step == 10, what
        assert [bad.train_step for bad in choice.passed_over] == [20], what
        states = {row.train_step: row.state for row in survey(root, on_bytes=lambda _: None)}
        assert states[10] is State.VERIFIED and states[20] in (State.BROKEN, State.UNFINISHED), what
    assert count > 20
    assert Store(root).choose(quarantined=()).restore.train_step == 20  # type: ignore[union-attr]


@pytest.mark.slow
def test_damaged_fingerprints_are_refused_and_never_taken_for_others(root: Path) -> None:
    directory = root / name_step(20)
    sound = read_prints(directory)
    for what in damages(directory / FILE):
        if what == "gone":
            assert read_prints(directory) is None
            continue
        try:
            assert read_prints(directory) == sound, what
        except NotWhole as e:
            assert FILE in str(e), what


def test_pointers_and_notes_are_believed_by_nobody(root: Path) -> None:
    store = Store(root)
    store.quarantine(20, "a test")
    for junk in (b"", b"\xff\xfe", b"99999999", b"20\n" * 1000):
        (root / "latest_checkpointed_iteration.txt").write_bytes(junk)
        (root / "quarantine" / f"{name_step(20)}.reason").write_bytes(junk)
        (root / "leases").mkdir(exist_ok=True)
        (root / "leases" / "iter_0000010.x").write_bytes(junk)
        assert store.choose(quarantined=()).restore.train_step == 10  # type: ignore[union-attr]
        assert {row.state for row in survey(root)} == {State.COMMITTED, State.QUARANTINED}
    assert store.prune(1, keep=()) == () and os.listdir(root / "quarantine")
