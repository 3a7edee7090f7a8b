"""Where a rank's parameter lies in the whole model: splits, gated halves, padding, expert and layer numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.megatron]  # the first one waits for the import of Megatron

ALONE = (0, 1)


def ranks(tp: tuple[int, int] = ALONE, ep: tuple[int, int] = ALONE) -> Any:
    from outlast.checkpoint.placing import Ranks

    return Ranks(tp=tp, dp=ALONE, expert_tp=ALONE, expert_dp=ALONE, ep=ep)


def a_chunk(name: str, tensor: Any, *, split: int | None = None, number: int = 0, **config: Any) -> Any:
    """A model chunk with one parameter under that name; `layers.0` has this layer number."""
    import torch

    chunk: Any = torch.nn.Module()
    chunk.config = SimpleNamespace(gated_linear_unit=False, num_moe_experts=4, **config)
    chunk.share_embeddings_and_output_weights = False
    parameter: Any = torch.nn.Parameter(tensor, requires_grad=False)
    if split is not None:
        parameter.tensor_model_parallel, parameter.partition_dim = True, split
    at = chunk
    *path, last = name.split(".")
    for part in path:
        at.add_module(part, torch.nn.Module())
        at = at.get_submodule(part)
        if part.isdecimal():
            at.layer_number = number + 1
    at.register_parameter(last, parameter)
    return chunk


def total(chunks: list[Any], tp: int, vocabulary: int | None = None) -> tuple[str, tuple[int, ...], Any]:
    """Name, shape and the summed parts of all tp ranks' chunks."""
    from outlast.checkpoint.fingerprint import Part
    from outlast.checkpoint.live_prints import _count, _held_weight
    from outlast.checkpoint.placing import place_parameters

    done, names = Part(), set()
    for rank, chunk in enumerate(chunks):
        placed, left_out = place_parameters([chunk], ranks(tp=(rank, tp)), vocabulary=vocabulary)
        assert not left_out
        for parameter, place in placed.items():
            held = _held_weight(parameter, place)
            done += _count(held, *held.counted)
            names.add((place.name, place.shape))
    ((name, shape),) = names
    return name, shape, done


def expected(tensor: Any) -> Any:
    from outlast.checkpoint.fingerprint import Part, part_of, whole
    from outlast.checkpoint.raw_bits import raw_bits

    part: Part = part_of(raw_bits(tensor.reshape(-1)), whole(tensor.shape))
    return part


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float64"])
def test_a_split_tensor_adds_up_to_the_whole(axis: int, dtype: str) -> None:
    import torch

    tensor = torch.randn(8, 12).to(getattr(torch, dtype))
    parts = [part.contiguous() for part in tensor.chunk(4, axis)]
    chunks = [a_chunk("decoder.layers.0.mlp.linear_fc2.weight", part, split=axis) for part in parts]
    name, shape, done = total(chunks, 4)
    assert (name, shape) == ("decoder.layers.0.mlp.linear_fc2.weight", (8, 12))
    assert done == expected(tensor)


def test_the_halves_of_a_gated_mlp_are_two_tensors_in_one() -> None:
    """Each rank holds its part of the gate and, behind it, its part of up; the whole is all of gate, then all of up."""
    import torch

    gate, up = torch.randn(6, 5), torch.randn(6, 5)
    chunks = []
    for rank in range(3):
        mine = torch.cat([gate[2 * rank : 2 * rank + 2], up[2 * rank : 2 * rank + 2]])
        chunk = a_chunk("decoder.layers.0.mlp.linear_fc1.weight", mine, split=0)
        chunk.config.gated_linear_unit = True
        chunks.append(chunk)
    assert total(chunks, 3)[2] == expected(torch.cat([gate, up]))
    alone = a_chunk("decoder.layers.0.mlp.linear_fc1.weight", torch.cat([gate, up]), split=0)
    alone.config.gated_linear_unit = True
    assert total([alone], 1)[2] == expected(torch.cat([gate, up]))


def test_a_vocabulary_is_the_same_however_it_is_padded() -> None:
    import torch

    words = torch.randn(10, 3)
    found = set()
    for padded, tp in ((10, 1), (12, 4), (16, 2), (20, 4)):
        table = torch.cat([words, torch.randn(padded - 10, 3)])
        chunks = [a_chunk("embedding.word_embeddings.weight", part, split=0) for part in table.chunk(tp)]
        _, shape, done = total(chunks, tp, vocabulary=10)
        assert shape == (10, 3)
        found.add(done)
    assert found == {expected(words)}


def test_a_replicated_tensor_is_counted_once() -> None:
    import torch

    tensor = torch.randn(7)
    chunks = [a_chunk("decoder.final_layernorm.weight", tensor.clone()) for _ in range(3)]
    assert total(chunks, 3)[2] == expected(tensor)


@pytest.mark.parametrize(
    ("name", "ep", "number", "whole_name"),
    [
        ("decoder.layers.1.mlp.linear_fc2.weight", ALONE, 5, "decoder.layers.5.mlp.linear_fc2.weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
            (1, 2),
            7,
            "decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight",
        ),
        (
            "decoder.layers.0.mlp.experts.linear_fc2.weight1",
            (3, 4),
            2,
            "decoder.layers.2.mlp.experts.linear_fc2.weight4",
        ),
        ("output_layer.weight", ALONE, 0, "output_layer.weight"),
    ],
)
def test_names_are_those_in_the_whole_model(name: str, ep: tuple[int, int], number: int, whole_name: str) -> None:
    import torch

    from outlast.checkpoint.placing import global_name

    chunk = a_chunk(name, torch.zeros(2), number=number)
    for module in chunk.modules():
        if hasattr(module, "layer_number"):
            module.layer_number = number + 1
    assert global_name(name, chunk, ranks(ep=ep)) == whole_name


def test_what_cannot_be_placed_is_left_out_by_name() -> None:
    import torch

    from outlast.checkpoint.placing import place_parameters

    mixer = a_chunk("decoder.layers.0.mixer.in_proj.weight", torch.zeros(4, 2), split=0, number=3)
    placed, left_out = place_parameters([mixer], ranks(), vocabulary=None)
    assert not placed
    assert left_out == {
        "decoder.layers.3.mixer.in_proj.weight": "how in_proj is split over tensor parallel is not known here"
    }
    flat = a_chunk("decoder.layers.0.mlp.experts.weight1", torch.zeros(4, 2))
    assert "decoder.layers.0.mlp.experts.weight1" in place_parameters([flat], ranks(), vocabulary=None)[1]


def test_raw_bits_are_the_bits() -> None:
    import torch

    from outlast.checkpoint.raw_bits import raw_bits

    assert raw_bits(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)).tolist() == [0x3F80, 0xC000]
    assert raw_bits(torch.tensor([1.0], dtype=torch.float8_e4m3fn)).tolist() == [0x38]
    assert raw_bits(torch.tensor([-1], dtype=torch.int64)).dtype == np.uint64
    assert raw_bits(torch.tensor([True, False])).tolist() == [1, 0]
