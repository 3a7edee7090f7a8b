"""Where the parameters of a Megatron model lie: each one's name, global shape and place, the same in every layout.

    decoder.layers.1.mlp.linear_fc1.weight on pp rank 1, tp rank 0
        -> decoder.layers.5.mlp.linear_fc1.weight  [512, 128]  rows 0 .. 127 and 256 .. 383 (gate and up)

Read from the live modules: layer numbers, the marks that tensor-parallel layers put on their parameters, the ranks.
On purpose not from sharded_state_dict, which is how a checkpoint is written: a fault in that mapping would otherwise
agree with itself. A parameter that is split in a way not known here is left out by name, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from megatron.core import parallel_state  # type: ignore[import-untyped]

from outlast.checkpoint.fingerprint import Block

_EMBEDDING: Final = "embedding.word_embeddings.weight"
_OUTPUT: Final = "output_layer.weight"
_LAYER: Final = re.compile(r"(?:^|.*\.)layers\.([0-9]+)(?=\.)")
_LOCAL_EXPERT: Final = re.compile(r"(\.experts\.local_experts\.)([0-9]+)(?=\.)")
_GROUPED_EXPERT: Final = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))([0-9]+)$")
_SPLIT_PLAINLY: Final = frozenset(
    (
        *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q", "linear_kv", "linear_q_proj"),
        *("linear_q_up_proj", "linear_kv_up_proj", "word_embeddings", "output_layer"),
    )
)
"""Modules that split one axis into equal parts, in rank order. Others (state-space mixers) mix several in one."""


@dataclass(frozen=True)
class Piece:
    """The elements [begin, begin + block.size) of a rank's own tensor, row-major."""

    begin: int
    block: Block


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One parameter of this rank."""

    name: str
    """Its name in the whole model."""
    shape: tuple[int, ...]
    """Of the whole, without padding."""
    pieces: tuple[Piece, ...]
    copies: int
    """How many data-parallel ranks hold these same elements."""
    copy: int
    """Which of them this rank is."""
    speaks: bool
    """Whether this copy is the one that is counted, where tensor parallel or tied embeddings hold it repeatedly."""
    state_speaks: bool
    """The same for its optimizer state, which data-parallel ranks share out among themselves."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This rank's coordinates, dense and of experts."""

    tp: tuple[int, int]
    """Rank, size; as all here."""
    dp: tuple[int, int]
    expert_tp: tuple[int, int]
    expert_dp: tuple[int, int]
    ep: tuple[int, int]


def read_ranks() -> Ranks:
    p = parallel_state
    return Ranks(
        tp=(p.get_tensor_model_parallel_rank(), p.get_tensor_model_parallel_world_size()),
        dp=(p.get_data_parallel_rank(with_context_parallel=True), p.get_data_parallel_world_size(True)),
        expert_tp=(p.get_expert_tensor_parallel_rank(), p.get_expert_tensor_parallel_world_size()),
        expert_dp=(p.get_expert_data_parallel_rank(), p.get_expert_data_parallel_world_size()),
        ep=(p.get_expert_model_parallel_rank(), p.get_expert_model_parallel_world_size()),
    )


def place_parameters(
    chunks: Sequence[torch.nn.Module], ranks: Ranks, *, vocabulary: int | None
) -> tuple[Mapping[torch.nn.Parameter, Placed], Mapping[str, str]]:
    """Every parameter of this rank's model chunks, and by name those that cannot be placed, with why.

    vocabulary: tokens without the padding that makes it divisible; None where there is none.
    """
    placed: dict[torch.nn.Parameter, Placed] = {}
    left_out: dict[str, str] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            whole_name = global_name(name, chunk, ranks)
            why = _why_unknown(name, parameter)
            if why:
                left_out[whole_name] = why
            else:
                placed[parameter] = _place(whole_name, parameter, chunk, ranks, vocabulary)
    return placed, left_out


def global_name(name: str, chunk: Any, ranks: Ranks) -> str:
    """With the layer's and the expert's number in the whole model."""
    if found := _LAYER.match(name):
        layer = chunk.get_submodule(found[0])
        number = getattr(layer, "layer_number", None)
        if number is not None:
            name = f"{name[: found.start(1)]}{number - 1}{name[found.end(1) :]}"
    for pattern in (_LOCAL_EXPERT, _GROUPED_EXPERT):
        if found := pattern.search(name):
            experts = chunk.config.num_moe_experts // ranks.ep[1]
            number = int(found[2]) + ranks.ep[0] * experts
            name = f"{name[: found.start(2)]}{number}{name[found.end(2) :]}"
    return name


def _why_unknown(name: str, parameter: torch.nn.Parameter) -> str:
    """'' for a parameter that can be placed."""
    if parameter.dtype.is_complex:
        return "complex numbers"
    if re.search(r"\.experts\.weight[12]$", name):
        return "all experts of a rank in one flat tensor"
    module = name.rpartition(".")[0].rpartition(".")[2]
    if getattr(parameter, "tensor_model_parallel", False) and module not in _SPLIT_PLAINLY:
        return f"how {module} is split over tensor parallel is not known here"
    return ""


def _place(name: str, parameter: torch.nn.Parameter, chunk: Any, ranks: Ranks, vocabulary: int | None) -> Placed:
    expert = ".experts." in name
    tp_rank, tp = ranks.expert_tp if expert else ranks.tp
    split = bool(getattr(parameter, "tensor_model_parallel", False)) and tp > 1
    tied_copy = name == _OUTPUT and bool(getattr(chunk, "share_embeddings_and_output_weights", False))
    if tied_copy:
        name = _EMBEDDING
    shape: tuple[int, ...] = tuple(parameter.shape)
    pieces: tuple[Piece, ...] = (Piece(0, _whole(parameter)),)
    if split:
        shape, pieces = _split(parameter, tp_rank, tp, stride=_stride(name, parameter, chunk))
    if vocabulary is not None and name in (_EMBEDDING, _OUTPUT):
        shape, pieces = _without_padding(shape, pieces, vocabulary)
    copy, copies = ranks.expert_dp if expert else ranks.dp
    # Megatron marks what is reduced over the experts' own data-parallel group; the optimizer follows the same mark
    state_rank = tp_rank if expert and not getattr(parameter, "allreduce", True) else ranks.tp[0]
    return Placed(
        name=name,
        shape=shape,
        pieces=pieces,
        copies=copies,
        copy=copy,
        speaks=not tied_copy and (split or tp_rank == 0),
        state_speaks=not tied_copy and (split or state_rank == 0),
    )


def _whole(parameter: torch.nn.Parameter) -> Block:
    shape = tuple(parameter.shape)
    return Block(shape=shape, offset=(0,) * len(shape), extent=shape)


def _stride(name: str, parameter: torch.nn.Parameter, chunk: Any) -> int:
    """How many equal tensors lie in this one, one behind the other: 2 for the gate and up halves of a gated MLP."""
    gated = ".linear_fc1." in name and bool(getattr(chunk.config, "gated_linear_unit", False))
    return max(int(getattr(parameter, "partition_stride", 1)), 2 if gated else 1)


def _split(
    parameter: torch.nn.Parameter, rank: int, size: int, *, stride: int
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    axis, local = int(parameter.partition_dim), list(parameter.shape)  # type: ignore[attr-defined]
    shape = [n * size if i == axis else n for i, n in enumerate(local)]
    stride = stride if axis == 0 else 1
    extent = [n // stride if i == axis else n for i, n in enumerate(local)]
    pieces = []
    for part in range(stride):
        offset = [0] * len(local)
        offset[axis] = part * (shape[axis] // stride) + rank * extent[axis]
        block = Block(shape=tuple(shape), offset=tuple(offset), extent=tuple(extent))
        pieces.append(Piece(part * block.size, block))
    return tuple(shape), tuple(pieces)


def _without_padding(
    shape: tuple[int, ...], pieces: Sequence[Piece], vocabulary: int
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    cut = (min(vocabulary, shape[0]), *shape[1:])
    return cut, tuple(Piece(p.begin, Block(shape=cut, offset=p.block.offset, extent=p.block.extent)) for p in pieces)


def overlaps(placed: Placed, begin: int, end: int) -> Iterator[tuple[Piece, int, int]]:
    """The pieces of [begin, end) of this rank's tensor: piece, from where to where, counted from `begin`."""
    for piece in placed.pieces:
        first, last = max(begin, piece.begin), min(end, piece.begin + piece.block.size)
        if first < last:
            yield piece, first - begin, last - begin
