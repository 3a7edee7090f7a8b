"""Which bytes of a stored piece go where, for a slice of it and any window of its bytes. Pure arithmetic.

    stored piece  [rows, columns], row-major      wanted: rows 2..5, columns 1..3      arrived: bytes lo..hi
        -> boxes: (from, to, shape, strides), which cover exactly the wanted bytes in [lo, hi), each once

A file arrives in blocks that know nothing of tensors, and an element may lie across two of them: so all is counted in
bytes. Each window costs a few boxes, however many rows it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Axis:
    """One axis of a stored piece, of which [begin, begin + taken) is wanted."""

    size: int
    begin: int
    taken: int


@dataclass(frozen=True)
class Cut:
    """A slice of a stored piece as few axes, the last one in bytes."""

    axes: tuple[Axis, ...]
    steps: tuple[int, ...]
    """Bytes from one index to the next in the stored piece, axis by axis."""
    taken_steps: tuple[int, ...]
    """The same in the slice, which lies by itself, row-major."""

    @property
    def first(self) -> int:
        """The first wanted byte of the piece."""
        return sum(axis.begin * step for axis, step in zip(self.axes, self.steps, strict=True))

    @property
    def end(self) -> int:
        """One past the last wanted byte."""
        return sum((a.begin + a.taken - 1) * step for a, step in zip(self.axes, self.steps, strict=True)) + 1

    @property
    def taken_bytes(self) -> int:
        return prod(axis.taken for axis in self.axes)


@dataclass(frozen=True)
class Box:
    """A strided copy. `source` counts in the stored piece, `target` in the slice."""

    source: int
    target: int
    shape: tuple[int, ...]
    source_steps: tuple[int, ...]
    target_steps: tuple[int, ...]


def make_cut(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int) -> Cut:
    """The slice [offsets, offsets + lengths) of a piece of this shape. Raises ValueError where it is not inside.

    Axes that are wanted whole are one with the axis before them.
    """
    if not len(shape) == len(offsets) == len(lengths) or itemsize < 1:
        raise ValueError(f"a slice {list(offsets)} + {list(lengths)} of a piece of shape {list(shape)}")
    axes = [Axis(itemsize, 0, itemsize)]
    for size, begin, taken in reversed(list(zip(shape, offsets, lengths, strict=True))):
        if begin < 0 or taken < 1 or begin + taken > size:
            raise ValueError(f"the slice {list(offsets)} + {list(lengths)} is not inside shape {list(shape)}")
        inner = axes[0]
        if inner.taken == inner.size:
            axes[0] = Axis(size * inner.size, begin * inner.size, taken * inner.size)
        else:
            axes.insert(0, Axis(size, begin, taken))
    steps = tuple(prod(axis.size for axis in axes[n + 1 :]) for n in range(len(axes)))
    taken_steps = tuple(prod(axis.taken for axis in axes[n + 1 :]) for n in range(len(axes)))
    return Cut(tuple(axes), steps, taken_steps)


def boxes_between(cut: Cut, lo: int, hi: int) -> Iterator[Box]:
    """The copies that bring the wanted bytes in [lo, hi) of the piece to their places in the slice."""
    return _walk(cut, 0, 0, 0, lo, hi)


def _walk(cut: Cut, level: int, source: int, target: int, lo: int, hi: int) -> Iterator[Box]:
    axis, step, taken_step = cut.axes[level], cut.steps[level], cut.taken_steps[level]
    if level == len(cut.axes) - 1:
        begin, end = max(lo, source + axis.begin), min(hi, source + axis.begin + axis.taken)
        if begin < end:
            yield Box(begin, target + begin - source - axis.begin, (end - begin,), (1,), (1,))
        return
    inner = cut.axes[level + 1 :]
    first = sum(a.begin * s for a, s in zip(inner, cut.steps[level + 1 :], strict=True))
    last = sum((a.begin + a.taken - 1) * s for a, s in zip(inner, cut.steps[level + 1 :], strict=True)) + 1
    low, high = axis.begin, axis.begin + axis.taken
    # index i holds wanted bytes in [source + i * step + first, source + i * step + last)
    begin = _clamp((lo - source - last) // step + 1, low, high)
    end = _clamp(-((source + first - hi) // step), low, high)
    whole = _clamp(-((source + first - lo) // step), begin, end)
    whole_end = _clamp((hi - source - last) // step + 1, whole, end)
    for index in range(begin, whole):
        yield from _walk(cut, level + 1, source + index * step, target + (index - low) * taken_step, lo, hi)
    if whole < whole_end:
        yield Box(
            source + whole * step + first,
            target + (whole - low) * taken_step,
            (whole_end - whole, *(a.taken for a in inner)),
            cut.steps[level:],
            cut.taken_steps[level:],
        )
    for index in range(whole_end, end):
        yield from _walk(cut, level + 1, source + index * step, target + (index - low) * taken_step, lo, hi)


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
