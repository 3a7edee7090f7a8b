"""Where shards lie: against torch's own cutting, over small shapes, meshes and placements; every element once."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.dcp_places import place_shard
from outlast.checkpoint.fingerprint import Block, fingerprint, whole

pytestmark = pytest.mark.slow  # the first one waits for the import of torch

SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)


def draw_placements(data: Any, axes: int, mesh: tuple[int, ...]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    choices = [st.just(Replicate())]
    if axes:
        choices.append(st.builds(Shard, st.integers(0, axes - 1)))
        choices.append(
            st.builds(lambda dim, sf: _StridedShard(dim, split_factor=sf), st.integers(0, axes - 1), st.integers(1, 3))
        )
    return [data.draw(st.one_of(choices)) for _ in mesh]


def cut_by_torch(whole_tensor: Any, mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: list[Any]) -> Any:
    """As distribute_tensor does it, one mesh axis after the other."""
    local = whole_tensor
    for size, rank, placement in zip(mesh, coordinate, placements, strict=True):
        if hasattr(placement, "dim"):
            local = placement._split_tensor(local, size, with_padding=False)[0][rank]
    return local


@given(SHAPES, MESHES, st.data())
def test_places_are_where_torch_cuts(shape: tuple[int, ...], mesh: tuple[int, ...], data: Any) -> None:
    import torch

    placements = draw_placements(data, len(shape), mesh)
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh)):
        place = place_shard(shape, mesh, coordinate, placements)
        local = cut_by_torch(numbers, mesh, coordinate, placements)
        if place.why_not:
            assert place.scattered
            continue
        flat = np.concatenate([take(numbers, block).reshape(-1) for block in place.blocks] or [np.empty(0, int)])
        assert flat.tolist() == local.reshape(-1).tolist()
        assert place.scattered == (len(place.blocks) > 1)


def take(numbers: Any, block: Block) -> Any:
    cut = tuple(slice(begin, begin + size) for begin, size in zip(block.offset, block.extent, strict=True))
    return numbers.numpy()[cut]


@given(st.tuples(st.integers(1, 9), st.integers(1, 5)), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1))
def test_parts_of_all_ranks_add_up_to_the_whole(shape: tuple[int, int], dp: int, tp: int, tp_axis: int) -> None:
    """As FSDP2 cuts a tensor that tensor parallelism has cut before."""
    import torch
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    from outlast.checkpoint.fingerprint import Part
    from outlast.checkpoint.raw_bits import raw_bits
    from outlast.checkpoint.staged_prints import count_blocks

    placements = [_StridedShard(0, split_factor=tp) if tp_axis == 0 else Shard(0), Shard(tp_axis)]
    numbers = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    total = Part()
    for coordinate in itertools.product(range(dp), range(tp)):
        place = place_shard(shape, (dp, tp), coordinate, placements)
        assert not place.why_not
        local = cut_by_torch(numbers, (dp, tp), coordinate, placements)
        total = sum(count_blocks(raw_bits(local.reshape(-1)), place), total)
    assert (total.total, total.elements) == (fingerprint(numbers.numpy()), math.prod(shape))


def test_an_unknown_placement_is_told() -> None:
    from torch.distributed.tensor import Partial

    place = place_shard((4,), (2,), (0,), [Partial()])
    assert "Partial" in place.why_not and not place.blocks and not place.scattered
    assert place_shard((), (), (), []).blocks == (whole(()),)
