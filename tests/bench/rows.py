"""The rows that every bench ends with: ours beside the peers', what was asked of it, and whether that was met. Pure.

A row without a number to compare with was not measured: it says so in its figure, and is not met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure. Numbers are in `unit`."""

    figure: str
    unit: str
    ours: float
    peers: dict[str, float]
    """Name -> number, measured in the same run as ours."""
    limit: float | None
    """Ours must not be above; None where nothing was there to compare with."""
    ratio: float | None
    """Ours / the best peer's, where the target speaks of one; else ours / limit."""
    target: str
    met: bool

    @property
    def missed(self) -> bool:
        """Measured, and not met."""
        return self.limit is not None and not self.met


def beside(figure: str, unit: str, ours: float, peers: Mapping[str, float], *, at_most: float, target: str) -> Row:
    """Ours against `at_most` x the best (smallest) of the peers."""
    best = min(peers.values())
    limit = at_most * best
    return Row(
        figure=figure,
        unit=unit,
        ours=round(ours, 4),
        peers={name: round(number, 4) for name, number in peers.items()},
        limit=round(limit, 4),
        ratio=round(ours / best, 4) if best else None,
        target=target,
        met=ours <= limit,
    )


def within(figure: str, unit: str, ours: float, limit: float, *, target: str) -> Row:
    """Ours against a number that no peer has set."""
    return Row(
        figure=figure,
        unit=unit,
        ours=round(ours, 4),
        peers={},
        limit=round(limit, 4),
        ratio=round(ours / limit, 4) if limit else None,
        target=target,
        met=ours <= limit,
    )


def unmeasured(figure: str, unit: str, ours: float, *, target: str, why: str) -> Row:
    """A comparison that could not be made here."""
    return Row(
        figure=f"{figure}: not measured: {why}",
        unit=unit,
        ours=round(ours, 4),
        peers={},
        limit=None,
        ratio=None,
        target=target,
        met=False,
    )


def render(rows: Sequence[Row]) -> str:
    """A table for a terminal."""
    head = ("figure", "unit", "ours", "peers", "limit", "ratio", "target", "met")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    peers = ", ".join(f"{name} {number:.3g}" for name, number in row.peers.items()) or "-"
    met = "yes" if row.met else "NO" if row.missed else "not measured"
    return (row.figure, row.unit, f"{row.ours:.3g}", peers, _number(row.limit), _number(row.ratio), row.target, met)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def write(path: Path, rows: Sequence[Row]) -> None:
    """A JSON list of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(rows)), indent=1) + b"\n")


def read(path: Path) -> tuple[Row, ...]:
    """What `write` wrote; msgspec.ValidationError with a path where it is something else."""
    return msgspec.json.decode(path.read_bytes(), type=tuple[Row, ...])
