"""A site's rows over the catalogue: what is wrong with them, what they change, and what that means. Pure.

The catalogue's own loader (catalogue.py) decides whether a file can be used; it stops at the first fault. Here all of
them are found, each with its path and what was probably meant, before anything relies on the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from outlast.reliability.catalogue import BLAMES, TABLES, LineRow, SxidRow, XidRow
from outlast.reliability.findings import Finding, show
from outlast.reliability.model import Noun

ROW_TYPES: Final[dict[str, type[Noun]]] = {"xids": XidRow, "sxids": SxidRow, "kernel": LineRow, "rank_log": LineRow}
ACTIONS: Final = frozenset(
    (
        *("ignore", "watch", "follow_other", "collect", "diagnose", "restart_app", "restart_job", "restart_app_watch"),
        *("rerun_elsewhere", "replay_check", "watch_reset_at_idle", "drain_reset", "drain_reboot"),
        *("drain_check_cooling", "drain_field_diag", "drain_rma", "stop_job", "contact_support"),
    )
)
PROGRAM_CLASSES: Final = frozenset(("gpu_app_fault", "gpu_secondary", "app_exception", "benign", "unknown_xid"))
_KEYS: Final = ("code", "key")
Tables = Mapping[str, Mapping[Any, Noun]]


class Change(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """One row that is different at this site."""

    table: str
    key: str
    name: str
    fields: tuple[str, ...]
    """`action: drain_reboot -> watch`"""
    means: tuple[str, ...]
    """What follows from it, a sentence each."""
    beware: tuple[str, ...] = ()


def check_tables(data: object, *, source: str, known: Tables) -> list[Finding]:
    """Everything that keeps this file from being used."""
    if not isinstance(data, dict):
        return [_finding(source, "$", f"found {show(data)}, expected tables: {', '.join(TABLES)}")]
    found: list[Finding] = []
    for table, rows in data.items():
        path = f"$.{table}"
        if table not in TABLES:
            found.append(_finding(source, path, f"no such table{_meant(str(table), TABLES)}"))
        elif not isinstance(rows, dict):
            found.append(_finding(source, path, f"found {show(rows)}, expected rows by key"))
        else:
            for key, row in rows.items():
                found += _check_row(source, str(table), key, row, known)
    return found


def _check_row(source: str, table: str, key: object, row: object, known: Tables) -> Iterable[Finding]:
    path = f"$.{table}.{key}"
    by_code = table in ("xids", "sxids")
    if by_code and (not isinstance(key, int) or isinstance(key, bool)):
        yield _finding(source, path, f"found {show(key)}, expected a code such as 79")
        return
    if not by_code and not isinstance(key, str):
        yield _finding(source, path, f"found {show(key)}, expected the name of a kind of line")
        return
    if not isinstance(row, dict):
        yield _finding(source, path, f"found {show(row)}, expected a row such as {{action: watch}}")
        return
    before = known[table].get(key)
    if before is None and not by_code:
        yield _finding(source, path, f"no kind of line has this key{_meant(str(key), map(str, known[table]))}")
        return
    yield from _check_fields(source, path, ROW_TYPES[table], row)
    if before is None and not any(True for _ in _check_fields(source, path, ROW_TYPES[table], row)):
        missing = [f for f in _required(ROW_TYPES[table]) if f not in row]
        if missing:
            yield _finding(source, path, f"the catalogue has no such row: a new one needs {', '.join(missing)} too")


def _check_fields(source: str, path: str, row_type: type[Noun], row: dict[Any, Any]) -> Iterable[Finding]:
    fields = {f.encode_name: f for f in msgspec.structs.fields(row_type) if f.encode_name not in _KEYS}
    for name, value in row.items():
        where = f"{path}.{name}"
        if name not in fields:
            yield _finding(source, where, f"no such setting{_meant(str(name), fields)}")
            continue
        try:
            msgspec.convert(value, fields[name].type)
        except msgspec.ValidationError:
            expected = "true or false" if fields[name].type is bool else "a text"
            yield _finding(source, where, f"found {show(value)}, expected {expected}")
            continue
        words = {"blames": BLAMES, "action": ACTIONS}.get(name, frozenset())
        if words and value not in words:
            yield _finding(source, where, f"found {show(value)}{_meant(str(value), words)}")


def _required(row_type: type[Noun]) -> list[str]:
    return [f.encode_name for f in msgspec.structs.fields(row_type) if f.required and f.encode_name not in _KEYS]


def _finding(source: str, path: str, text: str) -> Finding:
    return Finding(source=source, path=path, text=text)


def _meant(word: str, words: Iterable[str]) -> str:
    there = sorted(words)
    near = difflib.get_close_matches(word, there, 1, 0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    listed = ", ".join(there[:12])
    return f", expected one of {listed}" + (" ..." if len(there) > 12 else "")


def changes(data: object, *, before: Tables, after: Tables) -> tuple[Change, ...]:
    """The rows that differ, in the file's order. `data` has passed `check_tables`."""
    if not isinstance(data, dict):
        return ()
    found: list[Change] = []
    for table, rows in data.items():
        for key in rows:
            old, new = before[table].get(key), after[table].get(key)
            if new is None or old == new:
                continue
            found.append(_change(table, key, old, new))
    return tuple(found)


def _change(table: str, key: object, old: Noun | None, new: Noun) -> Change:
    was = msgspec.to_builtins(old) if old is not None else {}
    now = msgspec.to_builtins(new)
    names = [f.encode_name for f in msgspec.structs.fields(type(new)) if f.encode_name not in _KEYS]
    defaults = {f.encode_name: f.default for f in msgspec.structs.fields(type(new)) if not f.required}
    fields = tuple(
        f"{n}: {_word(was.get(n, defaults.get(n)), old)} -> {_word(now.get(n, defaults.get(n)), new)}"
        for n in names
        if was.get(n, defaults.get(n)) != now.get(n, defaults.get(n)) or old is None
    )
    means, beware = _meaning(table, old, new)
    name = str(getattr(new, "name", "") or getattr(new, "meaning", ""))
    return Change(table=table, key=str(key), name=name, fields=fields, means=means, beware=beware)


def _word(value: object, row: Noun | None) -> str:
    if row is None:
        return "not there"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value) or "''"


def _meaning(table: str, old: Noun | None, new: Noun) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the change does, and what an admin should think about twice."""

    def pair(name: str) -> tuple[object, object]:
        return getattr(old, name, None), getattr(new, name, None)

    means = [text for name, on, off in _SWITCHES if (text := _switched(*pair(name), on, off))]
    action_was, action = pair("action")
    if action_was != action:
        means.append(f"the line alone asks for {action}" + (f", no longer for {action_was}" if action_was else ""))
    blamed_was, blamed = pair("blames")
    if blamed_was != blamed and blamed is not None:
        means.append(f"it blames {blamed}" + (f" instead of {blamed_was}" if blamed_was else ""))
    beware: list[str] = []
    takes_out = bool(getattr(new, "drains", False)) or str(action).startswith("drain_")
    if takes_out and (getattr(new, "blames", "") == "program" or getattr(new, "class_", "") in PROGRAM_CLASSES):
        beware.append("a program can cause this line: it would take healthy nodes out, one after the other")
    if getattr(new, "drains", False) and not getattr(new, "alone", True):
        beware.append(
            "drains is set, but not alone: the line needs a second witness, so it takes nothing out by itself"
        )
    lost = bool(getattr(old, "drains", False)) and not getattr(new, "drains", False)
    if lost and getattr(new, "stops_training", False):
        beware.append("training stops on it, yet the node stays in service: the next job gets the same GPU")
    if table != "xids" and not means:
        means.append("`outlast classify` and `outlast judge` say it in these words")
    return tuple(means), tuple(beware)


_SWITCHES: Final = (
    ("drains", "one such line may take the node out for everybody", "it takes no node out for everybody any more"),
    ("convicts", "the run that sees it does not use the node any more", "a run goes on using the node"),
    ("alone", "the line needs no second witness", "the line convicts only with a second witness"),
    ("stops_training", "the attempt is stopped at once", "the attempt is not stopped for it"),
    ("echo", "it is taken for the echo of another rank's death", "it is taken for a first cause"),
)


def _switched(was: object, now: object, on: str, off: str) -> str:
    if bool(was) == bool(now):
        return ""
    return on if now else off
