"""Where a rank's part of a DTensor lies in the whole tensor: read from its placements alone. Pure.

    shape (10, 4), mesh (2, 2), (_StridedShard(0, 2), Shard(0)), coordinate (0, 1)   ->   rows 5 .. 7

A second reckoning beside the one of torch that writes and reads checkpoints: where the two differ, a save is refused,
and fingerprints rest on this one, so that a fault in that one does not agree with itself. Splits follow torch.chunk:
equal parts, rounded up, so that the last ones may be short or empty.

Placements are told by the names of their classes and their `dim`: no torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from outlast.checkpoint.fingerprint import Block

Span: TypeAlias = tuple[int, int]
"""Begin, length."""


@runtime_checkable
class Split(Protocol):
    """What is asked of a placement that splits an axis."""

    dim: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's part of a tensor."""

    blocks: tuple[Block, ...] = ()
    """Row-major one behind the other in the rank's own tensor; none where that is empty."""
    why_not: str = ""
    """Why it is not known; '' where it is."""
    scattered: bool = False
    """It is no single block of the whole."""


def place_shard(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[object]
) -> Place:
    """The part that the rank at `coordinate` of the mesh holds."""
    spans: list[list[Span]] = [[(0, size)] for size in shape]
    for size, rank, placement in zip(mesh_shape, coordinate, placements, strict=True):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard") or not isinstance(placement, Split):
            return Place(why_not=f"its placement {placement!r} is not known here")
        axis = placement.dim
        factor = int(getattr(placement, "split_factor", 1)) if kind == "_StridedShard" else 1
        spans[axis] = _join(piece for part in _split(spans[axis], factor) for piece in _pick(part, size, rank))
    if not all(spans):
        return Place()
    if any(len(one) > 1 for one in spans[1:]):
        return Place(why_not="it is split in several pieces along an axis that is not the first", scattered=True)
    behind = [one[0] for one in spans[1:]]
    heads = [[span] for span in spans[0]] if spans else [[]]
    return Place(blocks=tuple(_as_block(shape, [*head, *behind]) for head in heads), scattered=len(heads) > 1)


def _split(spans: Sequence[Span], parts: int) -> list[list[Span]]:
    """These spans, taken as one stretch, in so many equal parts, rounded up; fewer where there is not enough."""
    if parts == 1:
        return [list(spans)]
    return [part for number in range(parts) if (part := _pick(spans, parts, number))]


def _pick(spans: Sequence[Span], parts: int, number: int) -> list[Span]:
    """One of the parts."""
    total = sum(length for _, length in spans)
    each = math.ceil(total / parts)
    first, last = min(total, number * each), min(total, (number + 1) * each)
    found, at = [], 0
    for begin, length in spans:
        low, high = max(first, at), min(last, at + length)
        if low < high:
            found.append((begin + low - at, high - low))
        at += length
    return found


def _join(pieces: Iterable[Span]) -> list[Span]:
    """Neighbours become one."""
    joined: list[Span] = []
    for begin, length in pieces:
        if joined and sum(joined[-1]) == begin:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((begin, length))
    return joined


def _as_block(shape: Sequence[int], spans: Sequence[Span]) -> Block:
    return Block(shape=tuple(shape), offset=tuple(b for b, _ in spans), extent=tuple(n for _, n in spans))
