"""Text for a terminal: visible control characters, JSON, tables. Nothing here decides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import click
import msgspec

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """The same with control characters written out: log text must not steer a person's terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def print_json(value: object) -> None:
    """One indented JSON document on stdout."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Columns padded to their widest cell, two spaces apart; `right` names the columns of numbers."""
    cells = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    for row in (header, *cells):
        padded = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        click.echo("  ".join(padded).rstrip())


def ago(seconds: float) -> str:
    """`2 h ago`, to one unit."""
    for size_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size_s:
            return f"{seconds / size_s:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
