"""Restores with real ranks: what is read while it changes, breaks or hangs; nodes; formats that only torch reads."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from outlast.checkpoint import block_reader, node_memory, reader
from outlast.checkpoint.commit import commit
from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.manifest import SCHEMA, FileEntry, Manifest, hash_bytes
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.verify import Unreadable
from outlast.checkpoint.writer import Saver
from outlast.launchers.megatron_cpu import adapt
from outlast.reliability.model import Layout

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

ROWS, COLUMNS = 12, 5
BIG = 1_500_000
"""Elements in a quarter, 6 MB: a file of two ranks has more than one block."""


def whole(value: float) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + value


def make_state(rank: int, world_size: int, value: float) -> dict[str, Any]:
    """Rows and columns of matrices over ranks, one long row a rank, a replicated vector, an object a rank."""
    rows = ROWS // world_size
    quarters = 4 // world_size
    long = value + torch.arange(4.0)[rank * quarters :][:quarters].repeat_interleave(BIG)
    return {
        "w": ShardedTensor.from_rank_offsets(
            "w", whole(value)[rank * rows : (rank + 1) * rows].clone(), (0, rank, world_size)
        ),
        "long": ShardedTensor.from_rank_offsets("long", long, (0, rank, world_size)),
        "b": ShardedTensor.from_rank_offsets("b", torch.full((3,), value, dtype=torch.bfloat16), replica_id=rank),
        "rng": ShardedObject("rng", {"rank": rank, "value": value}, (world_size,), (rank,)),
        "samples": int(value),
    }


@pytest.fixture
def saved(run_ranks: Any, tmp_path: Path) -> Path:
    """A checkpoint of two ranks, of value 100."""
    root = tmp_path / "ckpt"

    def body(rank: int) -> Any:
        saver = Saver(root, timeout_s=30.0)
        saver.save(make_state(rank, 2, 100.0), train_step=1, samples=8, layout=Layout(dp=2))
        done = saver.finish()
        saver.close()
        return done

    assert run_ranks(2, body).value() == 1
    return root / "iter_0000001"


def load_rows(rank: int, world_size: int, path: Path, **options: Any) -> Any:
    got, _ = reader.load(make_state(rank, world_size, 0.0), path, **options)
    rows = ROWS // world_size
    assert torch.equal(got["w"], whole(100.0)[rank * rows : (rank + 1) * rows])
    assert torch.equal(got["long"], make_state(rank, world_size, 100.0)["long"].data)
    return got["rng"]["value"]


def recommit(directory: Path) -> None:
    """Make what lies there whole again: a manifest and a marker for it."""
    names = [path.name for path in directory.iterdir() if path.name not in ("manifest.json", "COMMITTED")]
    for name in ("manifest.json", "COMMITTED"):
        (directory / name).unlink(missing_ok=True)
    raw = {name: (directory / name).read_bytes() for name in names}
    files = {name: FileEntry(size_bytes=len(data), xxh3_128=hash_bytes(data)) for name, data in raw.items()}
    commit(RealOps(), directory, Manifest(schema=SCHEMA, train_step=1, samples=8, layout=Layout(), files=files))


def same_refusal(run_ranks: Any, body: Callable[[int], Any], kind: type[CheckpointError], ranks: int = 2) -> str:
    """All ranks are told the same."""

    def refused(rank: int) -> str:
        with pytest.raises(kind) as e:
            body(rank)
        assert type(e.value) is kind
        return str(e.value)

    words = run_ranks(ranks, refused)
    assert len({words.value(rank) for rank in range(ranks)}) == 1
    return str(words.value(0))


# ---------------------------------------------------------------- while it is read


def after_each_block(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """`act(fd)` when a block of a file has been read, before anybody has hashed or taken it."""
    read = block_reader._read_block

    def read_and_act(fd: int, *args: Any) -> None:
        read(fd, *args)
        act(fd)

    monkeypatch.setattr(block_reader, "_read_block", read_and_act)


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ 1
        file.seek(at)
        file.write(bytes([byte]))


def dcp_save(place: Path, state: dict[str, Any]) -> Path:
    """What plain DCP writes, committed by us."""
    dcp.save(state, checkpoint_id=place)
    if not dist.is_initialized() or dist.get_rank() == 0:
        recommit(place)
    return place


def test_what_is_used_is_what_was_hashed(run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that changes on disk after it was read is not seen by this load, and is found by the next."""
    place = dcp_save(tmp_path / "ckpt", {"t": torch.full((5,), 7.0)})

    shard = place / "__0_0.distcp"
    at = shard.read_bytes().index(torch.full((5,), 7.0).numpy().tobytes())

    def spoil(fd: int) -> None:
        if shard.read_bytes()[at] == 0:
            flip(shard, at)

    after_each_block(monkeypatch, spoil)
    state = {"t": torch.zeros(5)}
    reader.load_dcp(state, place)
    assert state["t"].tolist() == [7.0] * 5
    with pytest.raises(NotWhole, match=r"model shard __0_0.distcp: xxh3_128 .* \(changed\)"):
        reader.load_dcp(state, place)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_pickle_that_changes_after_its_hash_is_not_unpickled(
    run_ranks: Any, saved: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(saved.parent)
    read = reader.read_content

    def read_and_poison(directory: Path, path: str, *args: Any) -> bytes:
        raw = read(directory, path, *args)
        if path == name:
            dist.barrier()
            (directory / path).write_bytes(pickle.dumps(Evil()))
        return raw

    monkeypatch.setattr(reader, "read_content", read_and_poison)
    assert run_ranks(2, lambda rank: load_rows(rank, 2, saved)).values == {0: 100.0, 1: 100.0}
    assert not (saved.parent / "unpickled").exists()


class Evil:
    """Unpickling it leaves a trace."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


def test_an_object_is_not_unpickled_before_every_rank_has_said_that_its_files_are_whole(
    run_ranks: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damage is in the other rank's file, and in the middle of its tensors."""
    unpickled = []
    plain_load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: unpickled.append(args) or plain_load(*args, **kwargs))
    flip(saved / "__1_0.distcp", (saved / "__1_0.distcp").stat().st_size // 2)

    def body(rank: int) -> None:
        with pytest.raises(NotWhole, match=r"__1_0\.distcp: xxh3_128"):
            reader.load({"rng": make_state(rank, 2, 0.0)["rng"], "long": make_state(rank, 2, 0.0)["long"]}, saved)
        assert len(unpickled) == 1, "common.pt, which had its own hash"

    run_ranks(2, body).value()


@pytest.mark.parametrize("cut", [0, 1, 4096])
def test_a_file_that_is_cut_while_it_is_read(
    run_ranks: Any, saved: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    shard = saved / "__1_0.distcp"
    size = shard.stat().st_size

    look = reader._read_small

    def look_and_shorten(*args: Any) -> Any:
        found = look(*args)  # all sizes were compared before
        os.truncate(shard, size - cut if cut else 0)
        return found

    monkeypatch.setattr(reader, "_read_small", look_and_shorten)
    words = same_refusal(run_ranks, lambda rank: load_rows(rank, 2, saved), NotWhole)
    assert "__1_0.distcp" in words and ("truncated" in words or "not of the size" in words)


# ---------------------------------------------------------------- an index that lies


def lie(directory: Path, change: Callable[[Metadata], None]) -> None:
    index = pickle.loads((directory / ".metadata").read_bytes())
    change(index)
    (directory / ".metadata").write_bytes(pickle.dumps(index))
    recommit(directory)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "manifest.json", "nowhere.distcp", "./__0_0.distcp"])
def test_an_index_that_names_another_file_is_refused(run_ranks: Any, saved: Path, path: str) -> None:
    (saved.parent / "secret").write_bytes((saved / "__0_0.distcp").read_bytes())

    def change(index: Metadata) -> None:
        for where in index.storage_data.values():
            where.relative_path = path

    lie(saved, change)
    words = same_refusal(run_ranks, lambda rank: load_rows(rank, 2, saved), NotWhole)
    assert f".metadata: names {path!r}, which is no file of it" in words


@pytest.mark.parametrize(("offset", "length"), [(-1, 100), (0, 1 << 40), (1 << 40, 1), (0, -1)])
def test_an_index_that_points_out_of_its_file_is_refused(run_ranks: Any, saved: Path, offset: int, length: int) -> None:
    def change(index: Metadata) -> None:
        for where in index.storage_data.values():
            where.offset, where.length = offset, length

    lie(saved, change)
    assert "which has" in same_refusal(run_ranks, lambda rank: load_rows(rank, 2, saved), NotWhole)


def test_a_link_in_place_of_a_file_is_not_followed(run_ranks: Any, saved: Path) -> None:
    shard = saved / "__1_0.distcp"
    shard.rename(saved.parent / "elsewhere")
    shard.symlink_to(saved.parent / "elsewhere")
    assert "symbolic link" in same_refusal(run_ranks, lambda rank: load_rows(rank, 2, saved), NotWhole)


# ---------------------------------------------------------------- what does not answer


def test_a_read_that_does_not_come_back_is_given_up(
    run_ranks: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("__1_0.distcp"):
            threading.Event().wait(50.0)

    after_each_block(monkeypatch, hang)
    began_s = time.monotonic()
    words = same_refusal(run_ranks, lambda rank: load_rows(rank, 2, saved, limit_s=5.0), Unreadable)
    assert "__1_0.distcp: no answer for 5 s at byte" in words and time.monotonic() - began_s < 30.0


def test_a_disk_that_does_not_read_says_nothing_of_the_checkpoint(
    run_ranks: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    after_each_block(monkeypatch, fail)
    assert "cannot be read (Input/output error)" in same_refusal(
        run_ranks, lambda rank: load_rows(rank, 2, saved), Unreadable
    )


@pytest.mark.parametrize("posix_signal", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_while_it_reads_does_not_hang_the_others(
    run_ranks: Any, saved: Path, monkeypatch: pytest.MonkeyPatch, posix_signal: int
) -> None:
    """Its neighbours give up in bounded time; the collective that follows has a timeout of its own."""
    gave_up: list[Any] = []

    def note(self: Any, outcome: Any) -> None:
        gave_up.append(outcome)
        raise CheckpointError(outcome.gave_up)  # instead of waiting for who is not there

    def body(rank: int) -> Any:
        if rank == 1:
            after_each_block(monkeypatch, lambda fd: os.kill(os.getpid(), posix_signal))
            end_after(15.0)
        monkeypatch.setattr(reader.StreamingReader, "_agree", note)
        with contextlib.suppress(Exception):  # the collective that follows has nobody either
            load_rows(rank, 2, saved, limit_s=1.0)
        return gave_up[0].gave_up

    began_s = time.monotonic()
    ranks = run_ranks(2, body)
    # nothing to give up where the other had done by then all that this one needed of it
    assert ranks.values in ({0: "rank 1 of this node said nothing for 1 s"}, {0: ""})
    assert time.monotonic() - began_s < 40.0


def end_after(limit_s: float) -> None:
    """From outside: a stopped process does not end itself."""
    me = os.pidfd_open(os.getpid())  # never another process of the same number
    if os.fork() == 0:
        select.select([me], [], [], limit_s)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(me, signal.SIGKILL)
        os._exit(0)


# ---------------------------------------------------------------- nodes


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1, 0], [0, 1, 2]])
@pytest.mark.parametrize("how", ["hashes", "sizes"])
def test_whoever_shares_memory_gets_the_same(
    run_ranks: Any, saved: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[int], how: str
) -> None:
    """Three ranks, as on one, two and three nodes; and the blocks that each reads."""

    def body(rank: int) -> int:
        read: list[int] = []
        after_each_block(monkeypatch, read.append)
        monkeypatch.setattr(node_memory, "name_node", lambda: f"node {nodes[rank]}")
        state = make_state(0, 1, 0.0)  # all of it on every rank
        wanted = {name: replicate(state[name], rank) for name in ("w", "long")}
        got, _ = reader.load(wanted, saved, verify=how)
        assert torch.equal(got["w"], whole(100.0))
        assert torch.equal(got["long"], make_state(0, 1, 100.0)["long"].data)
        return len(read)

    blocks = sum(-(-path.stat().st_size // node_memory.BLOCK_BYTES) for path in saved.glob("*.distcp"))
    ranks = run_ranks(3, body)
    assert not ranks.errors
    assert sum(ranks.values.values()) == blocks * len(set(nodes)), "each block once a node"


def replicate(tensor: ShardedTensor, rank: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(tensor.key, tensor.data, replica_id=rank)


# ---------------------------------------------------------------- DCP


def make_odd() -> dict[str, Any]:
    """Tensors that torch writes in ways of their own, and things that are none."""
    return {
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "narrow": torch.arange(6).to(torch.uint16),
        "eight": torch.arange(6).to(torch.float8_e4m3fn),
        "complex": torch.arange(6).to(torch.complex64),
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 3),
        "double": torch.arange(5, dtype=torch.float64),
        "object": {"step": 3, "name": "x"},
        "plain": torch.arange(7.0),
    }


def test_what_dcp_writes_comes_back_without_ranks_and_with(run_ranks: Any, tmp_path: Path) -> None:
    place = dcp_save(tmp_path / "ckpt", make_odd())

    def body(_rank: int = 0) -> None:
        state = {
            name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else {"step": 0, "name": ""}
            for name, value in make_odd().items()
        }
        state["double"] = torch.zeros(5)  # in another dtype than it was saved in
        manifest = reader.load_dcp(state, place)
        for name, value in make_odd().items():
            got = state[name]
            if isinstance(value, torch.Tensor):
                assert torch.equal(got.to(value.dtype), value), name
            else:
                assert got == value
        assert manifest.train_step == 1

    body()
    run_ranks(2, body).value()


def test_dtensors_from_two_ranks_into_three_and_one(run_ranks: Any, tmp_path: Path) -> None:
    value = torch.arange(12.0 * 6).reshape(12, 6)
    place = tmp_path / "ckpt"

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        rows, columns = value.chunk(2)[rank].clone(), value.chunk(2, 1)[rank].clone()
        state = {
            "rows": DTensor.from_local(rows, mesh, [Shard(0)]),
            "columns": DTensor.from_local(columns, mesh, [Shard(1)]),
            "all": DTensor.from_local(value.clone(), mesh, [Replicate()]),
        }
        dcp_save(place, state)

    def load(rank: int) -> None:
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,))
        empty = {
            "rows": DTensor.from_local(torch.zeros(12, 6 // world), mesh, [Shard(1)]),
            "columns": DTensor.from_local(torch.zeros(12 // world, 6), mesh, [Shard(0)]),
            "all": DTensor.from_local(torch.zeros(12 // world, 6), mesh, [Shard(0)]),
        }
        reader.load_dcp(empty, place)
        assert all(torch.equal(one.full_tensor(), value) for one in empty.values())

    run_ranks(2, save).value()
    run_ranks(3, load).value()
    run_ranks(1, load).value()


def test_nothing_stays_open(run_ranks: Any, saved: Path) -> None:

    def body(rank: int) -> int:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            load_rows(rank, 2, saved)
        return len(os.listdir("/proc/self/fd")) - before

    assert set(run_ranks(2, body).values.values()) == {0}


# ---------------------------------------------------------------- theirs


def test_what_plain_megatron_wrote_loads_with_ours(run_ranks: Any, tmp_path: Path) -> None:
    place = tmp_path / "theirs"
    place.mkdir()

    def save(rank: int) -> None:
        adapt()
        dist_checkpointing.save(make_state(rank, 2, 100.0), str(place))

    def load(rank: int) -> Any:
        got = reader.load_foreign(make_state(rank, 2, 0.0), place, megatron=True)
        assert torch.equal(got["w"], whole(100.0)[rank * 6 : rank * 6 + 6]) and got["samples"] == 100
        with pytest.raises(NotWhole, match="no COMMITTED"):
            reader.load(make_state(rank, 2, 0.0), place)
        return got["rng"]

    run_ranks(2, save).value()
    assert run_ranks(2, load).values == {rank: {"rank": rank, "value": 100.0} for rank in (0, 1)}
