"""The fingerprint's promises: the same in every sharding, another after any change, parts that add up."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.fingerprint import Block, Part, as_bits, fingerprint, part_of, whole

WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]
Shape = tuple[int, ...]

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)
M = 1 << 64


def scramble(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % M
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % M
    return word ^ (word >> 31)


def by_hand(values: Sequence[int], itemsize: int) -> int:
    """The definition, element by element, in Python's own numbers."""
    golden, total = 0x9E3779B97F4A7C15, 0
    for position, bits in enumerate(values):
        mixed = bits
        if itemsize >= 4:
            mixed = (bits * golden) % M
            mixed ^= mixed >> 32
        low = scramble(((position % 65536) * golden + 0x6F75746C61737431) % M) | 1
        high = scramble(((position // 65536) * golden + 0x6F75746C61737432) % M) | 1
        total += mixed * low * high
    return total % M


def random_bits(data: st.DataObject, shape: Shape) -> Any:
    width = data.draw(st.sampled_from(WIDTHS))
    raw = data.draw(st.binary(min_size=8, max_size=8))
    rng = np.random.default_rng(list(raw))
    return rng.integers(0, np.iinfo(width).max, shape, dtype=width, endpoint=True)


def cuts(data: st.DataObject, size: int) -> list[tuple[int, int]]:
    """[0, size) in one to size pieces."""
    inner = data.draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
    edges = [0, *sorted(inner), size]
    return list(itertools.pairwise(edges))


def blocks(data: st.DataObject, shape: Shape) -> list[Block]:
    """The shape cut along every axis, each axis its own way."""
    grid = itertools.product(*(cuts(data, size) for size in shape))
    return [Block(shape=shape, offset=tuple(a for a, _ in at), extent=tuple(b - a for a, b in at)) for at in grid]


def cut_out(array: Any, block: Block) -> Any:
    where = tuple(slice(o, o + e) for o, e in zip(block.offset, block.extent, strict=True))
    return np.ascontiguousarray(array[where]).reshape(-1)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_it_is_what_its_page_says(dtype: Any) -> None:
    for seed, shape in enumerate([(), (1,), (7,), (3, 5), (2, 3, 4)]):
        array = np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)
        assert fingerprint(array) == by_hand(array.reshape(-1).tolist(), array.dtype.itemsize)


@pytest.mark.slow
def test_it_is_what_its_page_says_beyond_the_first_table() -> None:
    array = np.random.default_rng(1).integers(0, 2**16, 65536 + 117, dtype=np.uint16)
    assert fingerprint(array) == by_hand(array.tolist(), 2)


def test_numbers_that_were_stored_stay_comparable() -> None:
    """A change here makes every stored fingerprint worthless: then SCHEME takes another name."""
    assert fingerprint(np.arange(100_000, dtype=np.float32)) == 0x1F77EE9CCA2AE41E
    assert fingerprint(np.arange(-50, 50, dtype=np.int16).reshape(4, 25)) == 0x54FADE9C823A4806


@given(data=st.data(), shape=shapes)
def test_every_sharding_gives_the_same(data: st.DataObject, shape: Shape) -> None:
    """Any grid of blocks, each block in any flat pieces, in any order."""
    array = random_bits(data, shape)
    parts = []
    for block in blocks(data, shape):
        flat = cut_out(array, block)
        parts += [part_of(flat[a:b], block, begin=a) for a, b in cuts(data, block.size)]
    data.draw(st.randoms()).shuffle(parts)
    assert sum(parts, Part()) == Part(fingerprint(array), array.size)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(40, 30_000), (3, 200, 700), (70_000, 3), (2, 3, 5, 20_000)], ids=str)
def test_every_sharding_gives_the_same_where_tables_and_long_runs_end(shape: Shape) -> None:
    rng = random.Random(str(shape))
    array = np.random.default_rng(7).integers(0, 2**32, shape, dtype=np.uint32)
    expected = Part(fingerprint(array), array.size)
    for axis, size in enumerate(shape):
        edges = [0, *sorted(rng.sample(range(1, size), min(2, size - 1))), size]
        total = Part()
        for a, b in itertools.pairwise(edges):
            offset, extent = [0] * len(shape), list(shape)
            offset[axis], extent[axis] = a, b - a
            block = Block(shape=shape, offset=tuple(offset), extent=tuple(extent))
            flat, middle = cut_out(array, block), rng.randrange(block.size)
            total += part_of(flat[:middle], block) + part_of(flat[middle:], block, begin=middle)
        assert total == expected, f"cut along axis {axis} at {edges}"


@given(data=st.data(), shape=shapes)
def test_any_one_changed_bit_changes_it(data: st.DataObject, shape: Shape) -> None:
    array = random_bits(data, shape)
    before = fingerprint(array)
    flat = array.reshape(-1)
    at = data.draw(st.integers(0, flat.size - 1))
    flat[at] ^= flat.dtype.type(1 << data.draw(st.integers(0, 8 * flat.itemsize - 1)))
    assert fingerprint(flat.reshape(shape)) != before


@given(data=st.data(), shape=shapes.filter(lambda shape: math.prod(shape) > 1))
def test_moving_a_value_changes_it(data: st.DataObject, shape: Shape) -> None:
    array = random_bits(data, shape)
    flat = array.reshape(-1)
    a, b = data.draw(st.tuples(*[st.integers(0, flat.size - 1)] * 2))
    before = fingerprint(array)
    differ = flat[a] != flat[b]
    flat[[a, b]] = flat[[b, a]]
    assert (fingerprint(flat.reshape(shape)) != before) == differ


@given(data=st.data(), shape=shapes.filter(len), padding=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_padding_is_left_out(data: st.DataObject, shape: Shape, padding: list[int]) -> None:
    """Whatever lies beyond the global shape, on any axis of the last block."""
    array = random_bits(data, shape)
    padded = tuple(size + more for size, more in zip(shape, padding, strict=False))
    held = random_bits(data, padded).astype(array.dtype)
    held[tuple(slice(size) for size in shape)] = array
    block = Block(shape=shape, offset=(0,) * len(shape), extent=padded)
    flat = held.reshape(-1)
    total = sum((part_of(flat[a:b], block, begin=a) for a, b in cuts(data, block.size)), Part())
    assert total == Part(fingerprint(array), array.size)


def test_parts_that_overlap_or_leave_a_gap_are_seen() -> None:
    zeros, block = np.zeros(10, np.uint32), whole((10,))
    # the sum alone cannot tell: all of it is zero
    assert (part_of(zeros, block) + part_of(zeros[:3], block)).elements == 13
    assert part_of(zeros[:9], block).elements == 9


def test_elements_are_their_raw_bits() -> None:
    assert fingerprint(np.array([0.0], np.float32)) != fingerprint(np.array([-0.0], np.float32))
    quiet, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert np.isnan(quiet) and np.isnan(other)
    assert fingerprint(np.array([quiet])) != fingerprint(np.array([other]))
    assert fingerprint(np.array([1.5], np.float16)) == fingerprint(np.array([0x3E00], np.uint16))
    assert as_bits(np.array([True, False])).dtype == np.uint8


def test_wrong_use_is_told() -> None:
    with pytest.raises(CheckpointError, match="elements of complex64; expected"):
        fingerprint(np.zeros(3, np.complex64))
    with pytest.raises(CheckpointError, match="from 2 on, expected unsigned numbers, flat, within 3"):
        part_of(np.zeros(2, np.uint8), whole((3,)), begin=2)
    with pytest.raises(CheckpointError, match="does not fit shape"):
        Block(shape=(3,), offset=(0, 0), extent=(3,))
