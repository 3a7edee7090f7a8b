"""The catalogue: what a code or a line means, whom it blames, and what it alone would justify.

Lookup is pure; `load_catalogue` is the edge that reads reliability/catalog/*.yaml and a site's own file over it. It
decides nothing: history, scope and budgets are judge's and decide's. An unknown code is a row too, which blames
nobody and asks for a person, so that a driver of next year takes no node out by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from outlast.reliability.model import Noun

FILES: Final = Path(__file__).resolve().parent / "catalog"
TABLES: Final = ("xids", "sxids", "kernel", "rank_log")
BLAMES: Final = frozenset("program driver gpu link node fabric data checkpoint unknown".split())  # noqa: SIM905
RECOVERY_XID: Final = 154
NVLINK5_XIDS: Final = range(144, 151)
NVLINK_XID: Final = 74

_SEVERITY_WORD: Final = re.compile(r"\b(?:(Non-?fatal)|(Fatal))\b", re.IGNORECASE)
_INJECTED: Final = re.compile(r"\bXC[0-9] i[1-9]\b")
_RECOVERY: Final = re.compile(r"recovery action changed from .{0,80}? to [^()]{0,16}\(([^()]{1,48})\)")
_FIRST_REGISTER: Final = re.compile(
    r"link {1,2}[0-9]{1,3} {0,2}\(0x([0-9a-fA-F]{1,8})((?:, 0x[0-9a-fA-F]{1,8}){0,8})\)"
)
_IGNORABLE_BITS: Final = 1 << 0 | 1 << 23 | 1 << 30
"""XID 74, first register: bits that NVIDIA's decode calls ignorable."""


class CatalogueError(Exception):
    """A table that cannot be used. `where` is file and key."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where = where


class XidRow(Noun, frozen=True, kw_only=True):
    """One XID."""

    code: int
    name: str
    class_: str = msgspec.field(name="class")
    action: str
    blames: str
    meaning: str = ""
    severity: str = "error"
    """info | warning | error | fatal | by_text"""
    alone: bool = False
    """The line alone is enough to convict."""
    convicts: bool = False
    """The node is not to be used by the run that saw it."""
    drains: bool = False
    """The node may be taken out for everybody."""
    stops_training: bool = msgspec.field(name="stops", default=False)
    """Training cannot go on with this GPU."""
    symbol: str = ""
    """The driver's own name."""


class SxidRow(Noun, frozen=True, kw_only=True):
    """One SXid (NVSwitch)."""

    code: int
    name: str
    action: str
    severity: str
    """nonfatal | link | fabric"""
    word: str = ""
    """What the driver is known to print, where that differs from the severity: fatal | nonfatal."""
    meaning: str = ""
    conflict: str = ""


class LineRow(Noun, frozen=True, kw_only=True):
    """One kind of line, of the kernel or of a rank."""

    key: str
    class_: str = msgspec.field(name="class")
    action: str
    blames: str
    meaning: str
    alone: bool = False
    echo: bool = False


Row = TypeVar("Row", XidRow, SxidRow, LineRow)

UNKNOWN_XID: Final = XidRow(
    code=-1,
    name="unknown to every catalogue",
    class_="unknown_xid",
    action="contact_support",
    blames="unknown",
    meaning="not in the catalogue: a person should look, no node is taken out for it",
)


@dataclass(frozen=True)
class Catalogue:
    """The tables. The ones that a short-lived command does not ask for are not read."""

    xids: Mapping[int, XidRow]
    site: Path | None = None
    changed: tuple[str, ...] = ()
    """What the site's file changed in `xids`: `79.action: drain_reboot -> watch`."""
    _tables: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def xid(self, code: int, text: str = "") -> XidRow:
        """The row of a code; with the line's text, refined by the line's own words, which outrank the table."""
        row = self.xids.get(code)
        if row is None:
            return msgspec.structs.replace(UNKNOWN_XID, code=code, name=f"XID {code}, unknown to every catalogue")
        return refine(row, text) if text else row

    def sxid(self, code: int) -> SxidRow | None:
        rows: Mapping[int, SxidRow] = self._table("sxids")
        return rows.get(code)

    def kernel(self, key: str) -> LineRow | None:
        rows: Mapping[str, LineRow] = self._table("kernel")
        return rows.get(key)

    def rank_log(self, key: str) -> LineRow | None:
        rows: Mapping[str, LineRow] = self._table("rank_log")
        return rows.get(key)

    def _table(self, name: str) -> Any:
        if name not in self._tables:
            self._tables[name] = _read_table(name, self.site)[0]
        return self._tables[name]


def refine(row: XidRow, text: str) -> XidRow:
    """The row as this line's own words make it: 154 by the action it asks for, NVLink by its word and registers."""
    if row.code == RECOVERY_XID:
        return _recovery(row, text)
    if row.code in NVLINK5_XIDS:
        return _nvlink5(row, text)
    if row.code == NVLINK_XID:
        return _nvlink(row, text)
    return row


def _quiet(row: XidRow, action: str, meaning: str, class_: str | None = None) -> XidRow:
    """The same code on a line that takes nothing out."""
    return msgspec.structs.replace(
        row,
        action=action,
        meaning=meaning,
        class_=class_ or row.class_,
        alone=False,
        convicts=False,
        drains=False,
        stops_training=False,
    )


def _loud(row: XidRow, action: str, meaning: str, class_: str) -> XidRow:
    return msgspec.structs.replace(
        row, action=action, meaning=meaning, class_=class_, alone=True, convicts=True, drains=True, stops_training=True
    )


def _recovery(row: XidRow, text: str) -> XidRow:
    m = _RECOVERY.search(text)
    if not m:
        return _quiet(row, "contact_support", "the line is cut short: which recovery it asks for is lost", "unparsed")
    wanted = m[1].strip()
    low = wanted.lower()
    if low == "none":
        return _quiet(row, "ignore", "the driver asks for no recovery")
    action = "drain_reboot" if "reboot" in low else "drain_reset" if "reset" in low or "drain" in low else ""
    if not action:
        return _quiet(row, "contact_support", f"the driver asks for '{wanted}', which is not known")
    return _loud(row, action, f"the driver asks for: {wanted}", row.class_)


def _nvlink5(row: XidRow, text: str) -> XidRow:
    word = _SEVERITY_WORD.search(text)
    fatal = word is not None and word[1] is None
    if _INJECTED.search(text):
        class_ = "nvlink_fatal" if fatal else "nvlink_nonfatal"
        return _quiet(row, "ignore", "the fault was injected on purpose: a drill", class_)
    if fatal:
        return _loud(row, "drain_reset", f"{row.meaning}: fatal by the line's own word", "nvlink_fatal")
    if word is None:
        return _quiet(row, "watch", f"{row.meaning}: the line does not say whether it is fatal", "nvlink_nonfatal")
    return _quiet(row, "watch", f"{row.meaning}: not fatal by the line's own word", "nvlink_nonfatal")


def _nvlink(row: XidRow, text: str) -> XidRow:
    m = _FIRST_REGISTER.search(text)
    if not m:
        return row
    first = int(m[1], 16)
    others = any(int(r, 16) for r in re.findall(r"0x([0-9a-fA-F]{1,8})", m[2]))
    if first and not first & ~_IGNORABLE_BITS and not others:
        return _quiet(row, "ignore", "only register bits that are known to be harmless are set", "nvlink_nonfatal")
    return row


# ---------------------------------------------------------------- the edge


def load_catalogue(site: Path | None = None) -> Catalogue:
    """The catalogue with a site's rows over it. Raises CatalogueError, naming file and key."""
    return _load(site)


@lru_cache(maxsize=4)
def _load(site: Path | None) -> Catalogue:
    rows, changed = _read_table("xids", site)
    return Catalogue(xids=rows, site=site, changed=tuple(changed))


_ROWS: Final[dict[str, tuple[str, type[Any], str]]] = {
    "xids": ("xid.yaml", XidRow, "code"),
    "sxids": ("sxid.yaml", SxidRow, "code"),
    "kernel": ("kernel.yaml", LineRow, "key"),
    "rank_log": ("rank_log.yaml", LineRow, "key"),
}


def _read_table(table: str, site: Path | None) -> tuple[dict[Any, Any], list[str]]:
    name, row_type, key_name = _ROWS[table]
    raw = _read_yaml(FILES / name, {table})[table]
    changed: list[str] = []
    if site is not None:
        for key, over in _read_yaml(site, set(TABLES)).get(table, {}).items():
            if not isinstance(over, dict):
                raise CatalogueError(f"{site}: {table}.{key}", f"expected a row (name: value ...), got {over!r}")
            before = raw.get(key, {})
            changed += [f"{key}.{k}: {before.get(k, 'not set')} -> {v}" for k, v in over.items() if before.get(k) != v]
            raw[key] = {**before, **over}
    return {key: _row(table, row_type, key_name, key, fields, site) for key, fields in raw.items()}, changed


def _row(table: str, row_type: type[Any], key_name: str, key: object, fields: dict[str, Any], site: Path | None) -> Any:
    filled = {key_name: key, **fields}
    if table == "xids" and fields.get("drains"):
        # a line that may take a node out for everybody convicts it, unless the row says otherwise
        filled = {"alone": True, "convicts": True, **filled}
    where = f"{site or FILES / _ROWS[table][0]}: {table}.{key}"
    try:
        row = msgspec.convert(filled, row_type)
    except msgspec.ValidationError as e:
        raise CatalogueError(where, str(e)) from None
    if getattr(row, "blames", "unknown") not in BLAMES:
        raise CatalogueError(f"{where}.blames", f"got {row.blames!r}, expected one of {', '.join(sorted(BLAMES))}")
    return row


def _read_yaml(path: Path, tables: set[str]) -> dict[str, dict[Any, Any]]:
    import yaml  # late: a command that needs no catalogue should not pay for the parser

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        data = yaml.load(path.read_bytes(), Loader=loader)  # a SafeLoader, the C one where there is one
    except OSError as e:
        raise CatalogueError(str(path), e.strerror or "cannot be read") from None
    except yaml.YAMLError as e:
        raise CatalogueError(str(path), f"not YAML: {e}") from None
    if not isinstance(data, dict) or not set(data) <= tables:
        raise CatalogueError(str(path), f"expected only {', '.join(sorted(tables))}, got {_keys(data)}")
    for table, rows in data.items():
        if not isinstance(rows, dict):
            raise CatalogueError(f"{path}: {table}", f"expected rows by key, got {type(rows).__name__}")
    return data


def _keys(data: object) -> str:
    return ", ".join(map(str, data)) if isinstance(data, dict) else type(data).__name__
