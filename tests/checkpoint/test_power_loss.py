"""Power loss: every prefix of the operations, with what was not synced dropped, is materialised and opened.

`Recorder` does the operations for real and keeps them. `Disk` replays a prefix and says what would be on the platter:
names persist by a directory's fsync (a rename is one journal entry: both sides or none), contents by the file's own.
Between "nothing that was not synced" and "everything" lie the mixtures: some of the pending names, in journal order,
and any part of the pending contents. Large files are written in blocks by several threads: of those any may have
reached the disk and any not, whatever came first, in a file that has its length already. One of the stories is the
writer process's own code (checkpoint/engine.py) with the recorder in the place of the file system.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint import blocks, engine
from outlast.checkpoint.background import Link, Stage
from outlast.checkpoint.commit import commit, write_bytes, write_tracker
from outlast.checkpoint.job import Region, SaveJob
from outlast.checkpoint.manifest import SCHEMA, Manifest
from outlast.checkpoint.names import name_step
from outlast.checkpoint.ops import PAGE_BYTES, BlockSink, RealOps, Sink
from outlast.checkpoint.store import Store
from outlast.checkpoint.verify import verify
from outlast.reliability.model import Layout

Op = tuple[Any, ...]


class Unsynced(RealOps):
    """For looking at what was left: its own syncing is not what is tried here, and costs most of the time."""

    def sync_dir(self, path: Path) -> None:
        pass

    def create(self, path: Path) -> Sink:
        sink = super().create(path)
        sink.sync = lambda: None  # type: ignore[method-assign]
        return sink


class Recorder(RealOps):
    """Does them, and keeps them as (verb, path below root, ...)."""

    def __init__(self, root: Path) -> None:
        self.root, self.ops = root, list[Op]()

    def note(self, *fact: Any) -> None:
        self.ops.append(("note", *fact))

    def _at(self, path: Path) -> str:
        return str(path.relative_to(self.root)) if path != self.root else ""

    def make_dir(self, path: Path) -> None:
        if not path.is_dir():
            self.ops.append(("make_dir", self._at(path)))
        super().make_dir(path)

    def create(self, path: Path) -> Sink:
        self.ops.append(("create", self._at(path)))
        inner, outer, at = super().create(path), self, self._at(path)

        class RecordingSink:
            def write(self, data: bytes | bytearray | memoryview, /) -> int:
                outer.ops.append(("write", at, bytes(data)))
                return inner.write(data)

            def sync(self) -> None:
                outer.ops.append(("sync", at))
                inner.sync()

            def close(self) -> None:
                inner.close()

        return RecordingSink()

    def create_blocks(self, path: Path, size_bytes: int) -> BlockSink:
        at, outer = self._at(path), self
        self.ops.append(("create_blocks", at, size_bytes))
        inner = super().create_blocks(path, size_bytes)

        class RecordingBlocks:
            def write_at(self, pages: memoryview, at_bytes: int, /) -> None:
                inner.write_at(pages, at_bytes)
                outer.ops.append(("write_at", at, at_bytes, bytes(pages)))  # from several threads: append is atomic

            def sync(self) -> None:
                outer.ops.append(("cut", at, size_bytes))
                inner.sync()
                outer.ops.append(("sync", at))

            def close(self) -> None:
                inner.close()

        return RecordingBlocks()

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.ops.append(("rename", self._at(old), self._at(new)))

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.ops.append(("remove", self._at(path)))

    def remove_dir(self, path: Path) -> None:
        super().remove_dir(path)
        self.ops.append(("remove", self._at(path)))

    def sync_dir(self, path: Path) -> None:
        super().sync_dir(path)
        self.ops.append(("sync_dir", self._at(path)))


@dataclass
class File:
    content: bytes = b""
    synced: bytes = b""
    writes: list[tuple[int, bytes]] | None = None
    """Blocks since the last sync, in a file that is written in blocks."""

    def on_disk(self, how: str, rng: random.Random) -> bytes:
        """What is there after the loss: nothing that was not synced, all of it, or any part."""
        if self.writes is None:
            extra = self.content[len(self.synced) :] if self.content.startswith(self.synced) else b""
            return self.synced + extra[: {"drop": 0, "keep": len(extra), "mix": rng.randint(0, len(extra))}[how]]
        if how != "mix":
            return self.content if how == "keep" else self.synced
        # the length may be there before the blocks, and any block without the others
        full = bytearray(self.synced.ljust(rng.choice([0, len(self.content)]), b"\0"))
        for at, block in self.writes:
            if rng.random() < 0.7:
                full = full.ljust(at, b"\0")
                full[at : at + len(block)] = block
        return bytes(full[: len(self.content)])


@dataclass
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    number: int = 0


@dataclass
class Entry:
    """A change of names in the journal: each side is (folder, name, what it is then or None)."""

    sides: list[tuple[Folder, str, File | Folder | None]]
    synced: bool = False


class Disk:
    """The tree as programs see it, and the journal of what of it would survive."""

    def __init__(self) -> None:
        self.root = Folder()
        self.journal: list[Entry] = []

    def find(self, path: str) -> Folder:
        at = self.root
        for part in [p for p in path.split("/") if p]:
            below = at.names[part]
            assert isinstance(below, Folder)
            at = below
        return at

    def split(self, path: str) -> tuple[Folder, str]:
        parent, _, name = path.rpartition("/")
        return self.find(parent), name

    def change(self, *sides: tuple[Folder, str, File | Folder | None]) -> None:
        for folder, name, thing in sides:
            if thing is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = thing
        self.journal.append(Entry(list(sides)))

    def apply(self, op: Op) -> None:
        match op:
            case ("make_dir", path):
                self.change((*self.split(path), Folder()))
            case ("create", path):
                self.change((*self.split(path), File()))
            case ("create_blocks", path, size_bytes):
                self.change((*self.split(path), File(content=bytes(size_bytes), writes=[])))
            case ("write" | "write_at" | "cut" | "sync", path, *data):
                folder, name = self.split(path)
                file = folder.names[name]
                assert isinstance(file, File)
                self.touch(file, op[0], *data)
            case ("rename", old, new):
                folder, name = self.split(old)
                self.change((folder, name, None), (*self.split(new), folder.names[name]))
            case ("remove", path):
                self.change((*self.split(path), None))
            case ("sync_dir", path):
                folder = self.find(path)
                for entry in self.journal:
                    entry.synced |= any(side[0] is folder for side in entry.sides)

    def touch(self, file: File, verb: str, *data: Any) -> None:
        if verb == "write":
            file.content += data[0]
        elif verb == "write_at":
            at, block = data
            content = bytearray(file.content.ljust(at, b"\0"))
            content[at : at + len(block)] = block
            file.content = bytes(content)
            assert file.writes is not None
            file.writes.append((at, block))
        elif verb == "cut":
            file.content = file.content[: data[0]]
        else:
            file.synced = file.content
            file.writes = None if file.writes is None else []

    def materialise(self, target: Path, how: str, rng: random.Random) -> None:
        pending = [e for e in self.journal if not e.synced]
        lucky = {"drop": 0, "keep": len(pending), "mix": rng.randint(0, len(pending))}[how]
        survives = {id(e) for e in pending[:lucky]} | {id(e) for e in self.journal if e.synced}
        trees: dict[int, dict[str, File | Folder]] = {}
        for entry in self.journal:
            if id(entry) in survives:
                for folder, name, thing in entry.sides:
                    names = trees.setdefault(id(folder), {})
                    if thing is None:
                        names.pop(name, None)
                    else:
                        names[name] = thing
        self._write(target, self.root, trees, how, rng)

    def _write(self, at: Path, folder: Folder, trees: dict[int, Any], how: str, rng: random.Random) -> None:
        at.mkdir()
        for name, thing in trees.get(id(folder), {}).items():
            if isinstance(thing, Folder):
                self._write(at / name, thing, trees, how, rng)
                continue
            (at / name).write_bytes(thing.on_disk(how, rng))


def save(ops: Recorder, step: int, *, shards: int = 2) -> None:
    """As the ranks' writers and rank 0's do it, one after the other."""
    directory = ops.root / name_step(step)
    Store(ops.root, ops=ops).set_aside(step)
    ops.make_dir(directory)
    ops.sync_dir(ops.root)
    files = {}
    for rank in range(shards):
        name = f"__{rank}_0.distcp"
        files[name] = write_bytes(ops, directory / name, f"{step}/{rank}".encode() * 9)
        ops.sync_dir(directory)
    for name in ("common.pt", ".metadata", "metadata.json"):
        files[name] = write_bytes(ops, directory / name, f"{step} {name}".encode())
    commit(ops, directory, Manifest(schema=1, train_step=step, samples=step, layout=Layout(), files=files))
    ops.note("durable", step)
    write_tracker(ops, ops.root, step)


def story_of_saves(ops: Recorder) -> None:
    for step in (10, 20, 30):
        save(ops, step)


def story_of_pruning(ops: Recorder) -> None:
    story_of_saves(ops)
    Store(ops.root, ops=ops).prune(1, keep=())
    save(ops, 40)
    Store(ops.root, ops=ops).prune(2, keep=())


def story_of_a_second_try(ops: Recorder) -> None:
    """The same train_step is saved again over the only committed one, then pruned."""
    save(ops, 10)
    save(ops, 10, shards=3)
    Store(ops.root, ops=ops).prune(1, keep=())


def story_of_quarantine(ops: Recorder) -> None:
    story_of_saves(ops)
    ops.note("leaving", 30)
    Store(ops.root, ops=ops).quarantine(30, "suspect")
    ops.note("left", 30)
    save(ops, 40)


class Listener(Link):
    """The writer's end of the link, with nobody at the other one."""

    def __init__(self) -> None:
        self.said: list[Stage] = []

    def report(self, stage: Stage, content: bytes = b"") -> None:
        self.said.append(stage)


def write_as_the_process(ops: Recorder, step: int, *, ranks: int = 2) -> None:
    """One save by checkpoint/engine.py, rank 0's part last, from a staging memory of five and a half pages a rank."""
    directory = ops.root / name_step(step)
    Store(ops.root, ops=ops).set_aside(step)
    ops.make_dir(directory)
    size_bytes = 5 * PAGE_BYTES + PAGE_BYTES // 2
    for rank in reversed(range(ranks)):
        staging = os.memfd_create("staging")
        image = f"{step}/{rank}/".encode() * (2 * PAGE_BYTES)
        os.pwrite(staging, image[: 8 * PAGE_BYTES], 0)
        index = [Region(name=".metadata", at_bytes=6 * PAGE_BYTES, size_bytes=100)]
        index += [Region(name="metadata.json", at_bytes=7 * PAGE_BYTES, size_bytes=20)]
        manifest = Manifest(schema=SCHEMA, train_step=step, samples=step, layout=Layout(), files={})
        job = SaveJob(
            save_id=f"s-{step}",
            rank=rank,
            world_size=ranks,
            root=str(ops.root),
            directory=str(directory),
            image_bytes=8 * PAGE_BYTES,
            shards=(Region(name=f"__{rank}_0.distcp", at_bytes=0, size_bytes=size_bytes),),
            index=() if rank else tuple(index),
            manifest=None if rank else manifest,
            timeout_s=10.0,
        )
        link = Listener()
        copied = memoryview(mmap.mmap(staging, 8 * PAGE_BYTES))
        engine._save(link, copied, job, lambda point: ops.note("durable", step) if point == "commit.durable" else None)
        os.close(staging)
        assert link.said == ([Stage.HALFWAY] if rank else [Stage.HALFWAY, Stage.DONE])


def story_of_the_writer_process(ops: Recorder) -> None:
    for step in (10, 20):
        write_as_the_process(ops, step)
    write_as_the_process(ops, 20)
    Store(ops.root, ops=ops).prune(1, keep=())


STORIES = [
    story_of_saves,
    story_of_pruning,
    story_of_a_second_try,
    story_of_quarantine,
    story_of_the_writer_process,
]


def expect(prefix: list[Op]) -> tuple[int, int]:
    """The train_steps between which the chosen one must lie: the last promised, and the newest begun."""
    promised: set[int] = set()
    begun = {-1}
    for op in prefix:
        if op[0] == "note" and op[1] == "durable":
            promised.add(op[2])
        elif op[0] == "note":
            promised.discard(op[2])
        elif op[0] == "make_dir" and op[1].startswith("iter_"):
            begun.add(int(op[1].removeprefix("iter_")))
    return max(promised, default=-1), max(begun)


@pytest.fixture
def fast_place() -> Iterator[Path]:
    """Thousands of trees are made and thrown away: in memory, where there is such a place."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as place:
        yield Path(place)


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_every_prefix_opens_to_the_newest_whole_one(
    story: Any, tmp_path: Path, fast_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "real")
    recorder.root.mkdir()
    # a block a page: many of them in a small file
    monkeypatch.setattr(blocks, "BLOCK_BYTES", PAGE_BYTES)
    monkeypatch.setattr(blocks, "HASH_BYTES", PAGE_BYTES)
    monkeypatch.setattr(engine, "RealOps", lambda: recorder)
    story(recorder)
    assert len(recorder.ops) > 60
    disk, rng, chosen = Disk(), random.Random(7), set()
    for n, op in enumerate([("note", "start"), *recorder.ops]):
        disk.apply(op)
        prefix = recorder.ops[:n]
        for how in ("drop", "keep", "mix", "mix", "mix"):
            target = fast_place / "lost"
            disk.materialise(target, how, rng)
            step = open_and_check(target, *expect(prefix), f"{how} after {n}: {prefix[-1:]}")
            chosen.add(step)
            shutil.rmtree(target)
    assert chosen >= {-1, 10}


def open_and_check(root: Path, promised: int, begun: int, when: str) -> int:
    store = Store(root, ops=Unsynced())
    restore = store.choose(quarantined=()).restore
    step = restore.train_step if restore else -1
    assert promised <= step <= begun, f"{when}: {step}, promised {promised}"
    if restore:
        verify(Path(restore.path))
    # whatever was left, the next attempt can tidy up, and that costs nothing that counts
    store.prune(1, keep=())
    again = store.choose(quarantined=()).restore
    assert (again.train_step if again else -1) == step, when
    return step


def test_the_model_of_the_disk_forgets_what_was_not_synced(tmp_path: Path) -> None:
    """A check of the check: without any sync nothing survives, with all of them everything does."""
    recorder = Recorder(tmp_path / "real")
    recorder.root.mkdir()
    save(recorder, 10)
    for kept, expected in ((True, 10), (False, -1)):
        disk = Disk()
        for op in recorder.ops:
            if kept or op[0] != "sync_dir":
                disk.apply(op)
        disk.materialise(tmp_path / f"lost{kept}", "drop", random.Random(0))
        restore = Store(tmp_path / f"lost{kept}").choose(quarantined=()).restore
        assert (restore.train_step if restore else -1) == expected
