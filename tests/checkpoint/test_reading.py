"""What is read, by whom, and where it goes: each wanted byte once, in every small world, out of any blocks."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.filling import Filling, Objected, Place, Slice
from outlast.checkpoint.read_plan import Needs, all_blocks, count, holds, plan_reads, to_runs
from outlast.checkpoint.records import find_tensor
from outlast.checkpoint.slices import Cut, boxes_between, make_cut

# ---------------------------------------------------------------- slices


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    lengths = [draw(st.integers(1, size - begin)) for size, begin in zip(shape, offsets, strict=True)]
    return shape, offsets, lengths, draw(st.sampled_from([1, 2, 3, 8]))


@settings(deadline=None, max_examples=150)
@given(cut_of=cuts(), edges=st.lists(st.integers(0, 5000), max_size=5))
def test_whatever_the_windows_every_wanted_byte_is_copied_once(cut_of: Any, edges: list[int]) -> None:
    shape, offsets, lengths, itemsize = cut_of
    cut = make_cut(shape, offsets, lengths, itemsize)
    size = int(np.prod(shape, dtype=int)) * itemsize
    place = np.arange(size).reshape(*shape, itemsize)
    wanted = place[tuple(slice(b, b + n) for b, n in zip(offsets, lengths, strict=True))].reshape(-1)
    copied: dict[int, int] = {}
    ends = sorted({0, size, *(edge % (size + 1) for edge in edges)})
    for lo, hi in itertools.pairwise(ends):
        for source, target in _walk(cut, lo, hi):
            assert lo <= source < hi and target not in copied
            copied[target] = source
    assert [copied[n] for n in range(len(wanted))] == wanted.tolist() and len(copied) == len(wanted)
    assert (cut.first, cut.end, cut.taken_bytes) == (wanted[0], wanted[-1] + 1, len(wanted))


def _walk(cut: Cut, lo: int, hi: int) -> list[tuple[int, int]]:
    found = []
    boxes = list(boxes_between(cut, lo, hi))
    assert len(boxes) <= 2 * len(cut.axes) + 1, "a few boxes, however many rows"
    for box in boxes:
        for index in itertools.product(*map(range, box.shape)):
            steps = [np.dot(index, steps) for steps in (box.source_steps, box.target_steps)]
            found.append((int(box.source + steps[0]), int(box.target + steps[1])))
    return found


def test_a_slice_that_is_not_inside_is_refused() -> None:
    for offsets, lengths in (([-1], [2]), ([0], [0]), ([2], [3]), ([0, 0], [1, 1])):
        with pytest.raises(ValueError, match="slice"):
            make_cut([4], offsets, lengths, 4)


# ---------------------------------------------------------------- who reads what

SIZES = {"a": 1000, "b": 350, "c": 64, "d": 1}
BLOCK = 64


@st.composite
def worlds(draw: st.DrawFn) -> list[Needs]:
    nodes = draw(st.integers(1, 4))
    return [
        Needs(
            node=f"node{draw(st.integers(1, nodes))}",
            files={
                name: to_runs([tuple(sorted(pair)) for pair in pairs], BLOCK)
                for name, size in SIZES.items()
                if (pairs := draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)), max_size=3)))
            },
        )
        for _ in range(draw(st.integers(1, 6)))
    ]


@settings(deadline=None)
@given(needs=worlds(), hashes=st.booleans())
def test_each_block_is_read_once_a_node_and_every_file_is_hashed_somewhere(needs: list[Needs], hashes: bool) -> None:
    plan = plan_reads(needs, SIZES, hashes=hashes, block_bytes=BLOCK)
    read: Counter[tuple[str, str, int]] = Counter()
    delivered: set[tuple[int, str, int]] = set()
    hashed = set()
    for rank, reads in enumerate(plan):
        node = needs[rank].node
        assert reads.readers == sum(bool(plan[r].files) for r, n in enumerate(needs) if n.node == node)
        for file in reads.files:
            read.update((node, file.name, block) for begin, end in file.runs for block in range(begin, end))
            if file.hashed:
                assert hashes and file.runs == all_blocks(SIZES[file.name], BLOCK)
                hashed.add(file.name)
            for taker, runs in file.takers.items():
                assert needs[taker].node == node, "memory is shared on one node alone"
                blocks = {block for begin, end in runs for block in range(begin, end)}
                assert all(holds(file.runs, block) for block in blocks)
                delivered |= {(taker, file.name, block) for block in blocks}
    wanted = {
        (rank, name, block)
        for rank, need in enumerate(needs)
        for name, runs in need.files.items()
        for begin, end in runs
        for block in range(begin, end)
    }
    assert delivered == wanted and set(read.values()) <= {1}
    assert hashed == ({name for _, name, _ in wanted} if hashes else set())
    if not hashes:
        assert set(read) == {(needs[rank].node, name, block) for rank, name, block in wanted}


def test_a_node_that_needs_little_reads_little_and_work_is_even() -> None:
    sizes = {f"f{n}": 100 * BLOCK for n in range(8)}
    all_of_it = {name: all_blocks(size, BLOCK) for name, size in sizes.items()}
    little = {"f0": to_runs([(70, 71)], BLOCK)}
    needs = [Needs(node="one", files=all_of_it) for _ in range(4)] + [Needs(node="two", files=little)]
    plan = plan_reads(needs, sizes, hashes=True, block_bytes=BLOCK)
    assert [sum(count(file.runs) for file in reads.files) for reads in plan] == [200, 200, 200, 200, 1]
    assert not plan[4].files[0].hashed


def test_each_rank_reads_its_own_file_where_the_layout_is_the_same() -> None:
    sizes = {f"f{n}": 10 * BLOCK for n in range(4)}
    needs = [Needs(node="one", files={f"f{n}": all_blocks(10 * BLOCK, BLOCK)}) for n in (2, 0, 3, 1)]
    plan = plan_reads(needs, sizes, hashes=True, block_bytes=BLOCK)
    assert [[file.name for file in reads.files] for reads in plan] == [["f2"], ["f0"], ["f3"], ["f1"]]


# ---------------------------------------------------------------- records


def record_of(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)


@pytest.mark.parametrize("dtype", [*PLAIN, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 1, 5), (70_000,)])
def test_a_plain_tensor_is_found_as_torch_wrote_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(dtype)
    record = record_of(tensor)
    found = find_tensor(record[: len(record) - tensor.nbytes])  # as much as a reader has of it
    assert found is not None and (found.dtype, found.shape) == (str(dtype).removeprefix("torch."), shape)
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert record[found.at_bytes : found.at_bytes + tensor.nbytes] == raw


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, 4).t(),
        torch.zeros(9)[2:5],
        torch.zeros(1).expand(4),
        torch.nn.Parameter(torch.zeros(3)),
        torch.zeros(3, dtype=torch.uint16),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        torch.zeros(3, dtype=torch.complex64),
        [torch.zeros(3), torch.zeros(3)],
        {"a": 1},
    ],
)
def test_what_is_not_plain_is_left_to_torch(value: Any) -> None:
    assert find_tensor(record_of(value)) is None


HEAD = record_of(torch.arange(12.0).reshape(3, 4))


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, len(HEAD) - 1), byte=st.integers(0, 255), cut=st.integers(0, len(HEAD)))
def test_a_changed_or_cut_head_never_raises(at: int, byte: int, cut: int) -> None:
    changed = bytearray(HEAD)
    changed[at] = byte
    found = find_tensor(bytes(changed))
    assert found is None or found.at_bytes <= len(HEAD)
    find_tensor(HEAD[:cut])


@given(raw=st.binary(max_size=200))
def test_noise_never_raises(raw: bytes) -> None:
    assert find_tensor(raw) is None and find_tensor(b"PK\x03\x04" + raw) is None


# ---------------------------------------------------------------- N -> M -> N, over all small worlds


@dataclass(frozen=True)
class Shard:
    """A piece of the whole that one rank holds."""

    begins: tuple[int, int]
    value: torch.Tensor


GRIDS = [(a, b) for a in (1, 2, 3) for b in (1, 2, 3)]
WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)


def cut_up(grid: tuple[int, int]) -> list[Shard]:
    """Rows and columns over a grid of ranks; 7 rows do not divide evenly."""
    rows, columns = (np.array_split(np.arange(size), parts) for size, parts in zip(WHOLE.shape, grid, strict=True))
    return [Shard((int(r[0]), int(c[0])), torch.zeros(len(r), len(c))) for r in rows for c in columns]


def save(shards: list[Shard]) -> tuple[dict[str, bytes], list[tuple[Place, Shard]]]:
    """A file a rank, whose record begins anywhere: the padding before it is odd on purpose."""
    files, index = {}, []
    for rank, shard in enumerate(shards):
        raw, lead = record_of(shard.value.clone()), b"x" * (3 + 7 * rank)
        files[f"f{rank}"] = lead + raw
        index.append((Place(file=f"f{rank}", at_bytes=len(lead), size_bytes=len(raw)), shard))
    return files, index


def want(index: list[tuple[Place, Shard]], shard: Shard) -> list[Slice]:
    found = []
    for place, stored in index:
        ends = [min(b + n, c + m) for b, n, c, m in _bounds(shard, stored)]
        begins = [max(b, c) for b, _, c, _ in _bounds(shard, stored)]
        if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
            continue
        lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        rows, columns = (begin - own for begin, own in zip(begins, shard.begins, strict=True))
        target = shard.value[rows : rows + lengths[0], columns : columns + lengths[1]]
        offsets = [begin - own for begin, own in zip(begins, stored.begins, strict=True)]
        found.append(
            Slice(
                place=place,
                tag="w",
                dtype=torch.float32,
                shape=tuple(stored.value.shape),
                cut=make_cut(stored.value.shape, offsets, lengths, 4),
                resolve=lambda target=target: target,  # type: ignore[misc]
                commit=lambda tensor: None,
                lengths=lengths,
            )
        )
    return found


def _bounds(shard: Shard, stored: Shard) -> list[tuple[int, int, int, int]]:
    return list(zip(shard.begins, shard.value.shape, stored.begins, stored.value.shape, strict=True))


def load(files: dict[str, bytes], index: list[tuple[Place, Shard]], shards: list[Shard], block_bytes: int) -> int:
    """Fill the shards through the plan; the bytes that were read, over two nodes."""
    fillings = [Filling(want(index, shard)) for shard in shards]
    needs = [
        Needs(node=f"node{rank % 2}", files={f: to_runs(r, block_bytes) for f, r in filling.needs().items()})
        for rank, filling in enumerate(fillings)
    ]
    sizes = {name: len(content) for name, content in files.items()}
    read_bytes = 0
    for reads in plan_reads(needs, sizes, hashes=True, block_bytes=block_bytes):
        for file in reads.files:
            for block in (block for begin, end in file.runs for block in range(begin, end)):
                raw = files[file.name][block * block_bytes : (block + 1) * block_bytes]
                read_bytes += len(raw)
                for taker, runs in file.takers.items():
                    if holds(runs, block):
                        fillings[taker].take(file.name, block * block_bytes, memoryview(raw))
    for filling in fillings:
        for record in itertools.chain.from_iterable(filling.records.values()):
            assert isinstance(record, Slice) and record.complete and not record.odd, "each element came, and came once"
    return read_bytes


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("block_bytes", [64, 1001, 1 << 20])
def test_there_and_back_again_is_the_identity(grid: tuple[int, int], block_bytes: int) -> None:
    first = cut_up(grid)
    for shard in first:
        rows, columns = shard.begins
        shard.value.copy_(WHOLE[rows : rows + shard.value.shape[0], columns : columns + shard.value.shape[1]])
    saved = save(first)
    for other in GRIDS:
        between = cut_up(other)
        read_bytes = load(*saved, between, block_bytes)
        assert read_bytes <= 2 * sum(map(len, saved[0].values())), "once a node at most, and there are two"
        again = cut_up(grid)
        load(*save(between), again, block_bytes)
        assert all(torch.equal(a.value, b.value) for a, b in zip(first, again, strict=True)), other


def test_targets_of_every_kind() -> None:
    """Another dtype, another order in memory, a record that only torch can read, an object."""
    value = torch.arange(24.0).reshape(4, 6)
    raw = record_of(value)
    targets = [torch.zeros(4, 6, dtype=torch.float64), torch.zeros(6, 4).t(), torch.zeros(4, 6)]
    committed: list[torch.Tensor] = []
    records = [_whole(raw, target, committed) for target in targets]
    odd_raw = record_of(value.t().contiguous().t())
    odd = _whole(odd_raw.ljust(len(raw), b"\0"), torch.zeros(4, 6), committed)
    thing = Objected(Place(file="f", at_bytes=0, size_bytes=len(raw)), "thing")
    Filling([*records, thing]).take("f", 0, memoryview(raw))
    Filling([odd]).take("f", 0, memoryview(odd_raw.ljust(len(raw), b"\0")))
    assert all(torch.equal(target.to(torch.float32), value) for target in targets)
    assert len(committed) == 3 and bytes(thing.raw) == raw
    assert odd.odd and not odd.complete


def _whole(raw: bytes, target: torch.Tensor, committed: list[torch.Tensor]) -> Slice:
    return Slice(
        place=Place(file="f", at_bytes=0, size_bytes=len(raw)),
        tag="w",
        dtype=torch.float32,
        shape=(4, 6),
        cut=make_cut((4, 6), (0, 0), (4, 6), 4),
        resolve=lambda: target,
        commit=committed.append,
        lengths=(4, 6),
    )
