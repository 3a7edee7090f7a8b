"""A copy into staging memory: in parts, by several threads or beside the caller, and always the same bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint import copying
from outlast.checkpoint.copying import Copier, Copying
from outlast.checkpoint.image import Image, Piece

pytestmark = pytest.mark.megatron

GAP = 64


def make_image(sizes: list[int]) -> tuple[Image, bytes]:
    """Tensors of these sizes with bytes between them, and what their memory must be then."""
    image, wanted, pieces = Image(), bytearray(), []
    for n, size in enumerate(sizes):
        pieces.append(Piece(len(wanted), bytes([n + 1]) * GAP))
        wanted += bytes([n + 1]) * GAP
        tensor = torch.arange(size, dtype=torch.int32) * (n + 7)
        square = tensor.view(-1, 2).t() if size % 2 == 0 and n % 2 else tensor  # one that is not contiguous
        pieces.append(Piece(len(wanted), square))
        wanted += square.contiguous().numpy().tobytes()
        wanted += bytes(-len(wanted) % GAP)
    image.add("shard", len(wanted), pieces)
    return image, bytes(wanted)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 3000), max_size=8), chunk=st.sampled_from([64, 1024, 1 << 20]))
def test_however_it_is_copied_it_is_the_same(sizes: list[int], chunk: int) -> None:
    image, wanted = make_image(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "CHUNK_BYTES", chunk)
        for how in ("run", "ahead", "thread"):
            memory, told = bytearray(image.size_bytes + 4096), list[int]()
            one = Copying(Copier(memoryview(memory)), image, told.append, lambda _: None)
            if how == "ahead":
                one.run_ahead()
                assert not told, "nobody is told of it yet"
            if how == "thread":
                one.start()
            else:
                one.run()
            one.wait()
            assert not one.error and memory[: len(wanted)] == wanted and sum(told) == image.size_bytes


def test_what_fails_in_any_thread_is_told_and_nothing_is_announced() -> None:
    for at in range(6):
        image, _ = make_image([100] * 6)
        image.pieces[0][2 * at + 1] = Piece(1 << 40, torch.ones(3))  # far out of the memory
        told: list[int] = []
        one = Copying(Copier(memoryview(bytearray(1 << 16))), image, told.append, lambda _: None)
        one.run_ahead()
        assert not one.error, "it is tried again where somebody is told"
        one.run()
        assert one.error and not told
