"""Slurm's host lists: `n[1-3,07-09],login` to names and back. Pure.

Expansion is bounded, since a text of a dozen characters can name a billion nodes. Zero padding is kept: n08 and n8 are
two nodes. Order is kept both ways, so expand(compress(names)) is names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from outlast.reliability.model import Node
from outlast.slurm.errors import SlurmError

NODES_MAX = 100_000
_NONE = ("", "(null)", "None", "None assigned", "N/A")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?")
_NUMBERED = re.compile(r"(.*?)(\d{1,12})", re.DOTALL)


def expand(text: str) -> tuple[Node, ...]:
    """The names, in order; () for Slurm's ways of saying none. SlurmError where it is no host list."""
    text = text.strip()
    if text in _NONE:
        return ()
    names: list[Node] = []
    for part in _split(text):
        for name in _expand_one(part, text):
            if len(names) >= NODES_MAX:
                raise _error(text, f"more than {NODES_MAX:,} names")
            if not _NAME.fullmatch(name):
                raise _error(text, f"{name!r} is no node name")
            names.append(Node(name))
    return tuple(names)


def compress(names: Iterable[str]) -> str:
    """A host list of these names in this order; '' for none."""
    groups: list[tuple[str, list[str]]] = []
    for name in names:
        if not _NAME.fullmatch(name):
            raise _error(name, "no node name")
        match = _NUMBERED.fullmatch(name)
        prefix, digits = (match[1], match[2]) if match else (name, "")
        if digits and groups and groups[-1][0] == prefix and groups[-1][1]:
            groups[-1][1].append(digits)
        else:
            groups.append((prefix, [digits] if digits else []))
    return ",".join(_render(prefix, numbers) for prefix, numbers in groups)


def _render(prefix: str, numbers: Sequence[str]) -> str:
    if not numbers:
        return prefix
    if len(numbers) == 1:
        return prefix + numbers[0]
    runs: list[tuple[str, str]] = []
    for number in numbers:
        if runs and number == str(int(runs[-1][1]) + 1).zfill(len(runs[-1][0])):
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return f"{prefix}[{','.join(low if low == high else f'{low}-{high}' for low, high in runs)}]"


def _split(text: str) -> Iterator[str]:
    """At the commas that are outside brackets."""
    depth, start = 0, 0
    for i, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:i]
            start = i + 1
        if depth not in (0, 1):
            raise _error(text, f"bracket at position {i} does not fit")
    if depth:
        raise _error(text, "a bracket is not closed")
    yield text[start:]


def _expand_one(part: str, text: str) -> Iterator[str]:
    """One part, with any number of bracket groups; the last one varies fastest."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    for number in _numbers(inside, text):
        for tail in _expand_one(after, text):
            yield before + number + tail


def _numbers(inside: str, text: str) -> Iterator[str]:
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece)
        if not match:
            raise _error(text, f"{piece!r} is no number or range")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise _error(text, f"range {piece!r} runs backwards")
        for value in range(int(low), int(high) + 1):
            yield str(value).zfill(len(low))


def _error(text: str, why: str) -> SlurmError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return SlurmError(f"host list {shown!r}: {why}; expected names as in n[1-3,07],login", again=False)
