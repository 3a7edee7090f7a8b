"""One case as `outlast judge` is given it: numbered lines with time and source, and what is known beside them. Pure.

    {"id": ..., "input": "text" | [{"t", "source", "text"}, ...], "context": {...}}  ->  Case

Not a reader of lines: read.py says what they tell. Unknown keys of a case and of its context are ignored; a context
value of another shape than expected is as good as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from outlast.reliability.judging.sources import Label, Src, read_label, read_time
from outlast.reliability.model import Noun

MAX_LINES: Final = 5_000
"""A case is an incident, not a log: what is beyond is not read, and that is said (`cut`)."""
LABEL_CHARS: Final = 400
LINE_CHARS: Final = 8_192
RANKS_PER_NODE: Final = 8


class CaseError(Exception):
    """A case that cannot be read. `where` names it."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where = where


class Line(Noun, frozen=True, kw_only=True):
    """One line of the input."""

    id: int
    """1-based, over all items."""
    item: int
    text: str
    label: Label
    at_s: float | None = None
    """On the case's own time axis; only differences mean something."""
    past: bool = False
    """From the context's history."""


class Context(Noun, frozen=True, kw_only=True):
    """What a case may bring along beside its lines."""

    ranks_per_node: int = RANKS_PER_NODE
    domains: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """NVLink domain or rack -> nodes."""
    versions: Mapping[str, str] = msgspec.field(default_factory=dict)


class Case(Noun, frozen=True, kw_only=True):
    id: str
    lines: tuple[Line, ...]
    whole: bool = False
    """The input was one text, whose lines may belong together; else each item stands for itself."""
    context: Context = msgspec.field(default_factory=Context)
    cut: bool = False
    """There were more lines than are read."""

    @property
    def items(self) -> tuple[tuple[Line, ...], ...]:
        """The lines of each item, in order."""
        found: dict[int, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.item, []).append(line)
        return tuple(tuple(lines) for lines in found.values())


def read_case(raw: object, where: str) -> Case:
    """A case from decoded JSON. CaseError where it has no id or no input."""
    if not isinstance(raw, dict) or not isinstance(raw.get("id"), str):
        raise CaseError(where, "expected an object with id and input")
    given, context = raw.get("input"), raw.get("context")
    context = context if isinstance(context, dict) else {}
    items = [*_history(context.get("history"))]
    past = len(items)
    if isinstance(given, str):
        items.append({"text": given})
    elif isinstance(given, list):
        items.extend(i for i in given if isinstance(i, dict))
    else:
        raise CaseError(f"{where} ({raw['id']})", "input: expected a text or a list of {t, source, text}")
    lines = _lines(items, past)
    return Case(
        id=raw["id"],
        lines=lines[:MAX_LINES],
        whole=isinstance(given, str),
        context=_context(context),
        cut=len(lines) > MAX_LINES,
    )


def _lines(items: list[dict[str, Any]], past: int) -> tuple[Line, ...]:
    lines: list[Line] = []
    before_s: float | None = None
    for number, item in enumerate(items):
        t, source = (str(item.get(k) or "")[:LABEL_CHARS] for k in ("t", "source"))
        at_s = read_time(t, before_s)
        before_s = before_s if at_s is None else at_s
        # a list always has sources; one text alone is a paste, whose lines say themselves where they come from
        label = read_label(source, t) if "source" in item or "t" in item else Label(kind=Src.TEXT)
        for row in str(item.get("text") or "").splitlines() or [""]:
            if len(lines) > MAX_LINES:
                return tuple(lines)
            lines.append(
                Line(id=len(lines) + 1, item=number, text=row[:LINE_CHARS], label=label, at_s=at_s, past=number < past)
            )
    return tuple(lines)


def _history(given: object) -> list[dict[str, Any]]:
    """Earlier events: lines, items, or {node, gpu, xid} records, oldest first."""
    found: list[dict[str, Any]] = []
    for entry in given if isinstance(given, list) else []:
        if isinstance(entry, str):
            found.append({"text": entry})
        elif isinstance(entry, dict) and "text" in entry:
            found.append(entry)
        elif isinstance(entry, dict) and isinstance(entry.get("xid"), int):
            line = f"NVRM: Xid (PCI:{entry.get('gpu', '0000:00:00')}): {entry['xid']}, "
            found.append({"t": entry.get("t", ""), "source": f"kernel {entry.get('node', '')}", "text": line})
    return found


def _context(given: dict[str, Any]) -> Context:
    ranks = given.get("ranks_per_node") or given.get("gpus_per_node")
    topology = given.get("topology")
    domains = given.get("domains") or (topology.get("domains") if isinstance(topology, dict) else None)
    versions = given.get("versions")
    return Context(
        ranks_per_node=ranks if isinstance(ranks, int) and 0 < ranks <= 1024 else RANKS_PER_NODE,
        domains={
            str(name): tuple(str(n) for n in nodes)
            for name, nodes in (domains.items() if isinstance(domains, dict) else ())
            if isinstance(nodes, list)
        },
        versions={str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
    )
