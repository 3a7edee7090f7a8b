"""Two checkpoints, tensor by tensor: which differ, by how much, and what is not a number.

A checkpoint that is named newer and is bit for bit the older one is a fault of somebody's (a save of stale state, a
frozen optimizer), and so is a NaN in a weight: both are found here. Streams: two tensors are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch

from outlast.checkpoint.tensors import Tensors, is_optimizer
from outlast.reliability.model import Noun

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class TensorDiff(Noun, frozen=True, kw_only=True):
    """One tensor that is in either."""

    name: str
    only_in: str = ""
    """'first' or 'second' where the other has none of this name."""
    change: str = ""
    """'float32[4, 8] -> bfloat16[4, 8]' where they cannot be compared."""
    elements: int = 0
    differing: int = 0
    """Elements whose bits differ."""
    largest: float = 0.0
    """The largest difference of two finite values."""
    nans: tuple[int, int] = (0, 0)
    """In the first, in the second."""
    infinities: tuple[int, int] = (0, 0)

    @property
    def is_same(self) -> bool:
        return not (self.only_in or self.change or self.differing)

    @property
    def is_finite(self) -> bool:
        return not any((*self.nans, *self.infinities))


class Summary(Noun, frozen=True, kw_only=True):
    """What the rows say together."""

    first_step: int
    second_step: int
    tensors: int
    differing: int
    not_finite: int
    weights: int
    weights_same: int
    verdict: str
    is_good: bool
    """The same where it should be the same, another where it should be another, and finite."""


def compare(
    first: Tensors, second: Tensors, on_tensor: Callable[[str], None] = lambda _name: None
) -> Iterator[TensorDiff]:
    """One row a name, in the order of names."""
    for name in sorted(first.tensors.keys() | second.tensors.keys()):
        yield _compare_one(name, first, second)
        on_tensor(name)


def _compare_one(name: str, first: Tensors, second: Tensors) -> TensorDiff:
    a, b = first.tensors.get(name), second.tensors.get(name)
    if a is None or b is None:
        return TensorDiff(name=name, only_in="second" if a is None else "first")
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return TensorDiff(name=name, change=f"{_kind(a.dtype, a.shape)} -> {_kind(b.dtype, b.shape)}")
    x, y = first.read(name), second.read(name)
    nans, infinities = zip(_count_odd(x), _count_odd(y), strict=True)
    return TensorDiff(
        name=name,
        elements=x.numel(),
        differing=count_differing(x, y),
        largest=_largest_difference(x, y),
        nans=nans,
        infinities=infinities,
    )


def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def count_differing(x: torch.Tensor, y: torch.Tensor) -> int:
    """By raw bits: two NaNs of the same bits are the same, 0.0 and -0.0 are not."""
    word = _WORDS[x.element_size()]
    return int((x.reshape(-1).view(word) != y.reshape(-1).view(word)).sum())


def _largest_difference(x: torch.Tensor, y: torch.Tensor) -> float:
    if not x.numel() or x.dtype == torch.bool or x.is_complex():
        return 0.0
    gap = (x.double() - y.double()).abs()
    finite = gap[torch.isfinite(gap)]
    return float(finite.max()) if finite.numel() else 0.0


def _count_odd(x: torch.Tensor) -> tuple[int, int]:
    """(NaN, infinite)"""
    if not x.is_floating_point():
        return 0, 0
    wide = x.float() if x.element_size() == 1 else x  # not all operators know 8-bit floats
    return int(torch.isnan(wide).sum()), int(torch.isinf(wide).sum())


def summarise(first: Tensors, second: Tensors, rows: list[TensorDiff]) -> Summary:
    steps = first.manifest.train_step, second.manifest.train_step
    weights = [row for row in rows if not is_optimizer(row.name)]
    differing = sum(not row.is_same for row in rows)
    not_finite = sum(not row.is_finite for row in rows)
    same = sum(row.is_same for row in weights)
    if steps[0] != steps[1] and weights and same == len(weights):
        verdict = f"every weight is bit-identical, but they are of train_steps {steps[0]} and {steps[1]}"
    elif steps[0] == steps[1] and differing:
        verdict = f"both are of train_step {steps[0]}, but {differing} of {len(rows)} tensors differ"
    elif differing:
        verdict = f"{differing} of {len(rows)} tensors differ; {same} of {len(weights)} weights are unchanged"
    else:
        verdict = f"all {len(rows)} tensors are bit-identical"
    good = not not_finite and (not differing if steps[0] == steps[1] else same < len(weights) or not weights)
    if not_finite:
        verdict += f"; {not_finite} hold NaN or infinities"
    return Summary(
        first_step=steps[0],
        second_step=steps[1],
        tensors=len(rows),
        differing=differing,
        not_finite=not_finite,
        weights=len(weights),
        weights_same=same,
        verdict=verdict,
        is_good=good,
    )
