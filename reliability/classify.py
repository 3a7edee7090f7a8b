"""`outlast classify`: what a single line is taken to be, before history, scope and policy are brought in.

A reader (monitors/lines.py, passed in) recognises the line; here the catalogue gives it class and action, and the
row says why. A line alone convicts nobody: this is for pipes, for tests, and for people who ask "what is this?".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import msgspec

from outlast.reliability.catalogue import Catalogue, LineRow, SxidRow
from outlast.reliability.model import Noun

UNPARSED_ACTION: Final = "contact_support"
UNKNOWN_SXID: Final = SxidRow(
    code=-1, name="unknown to every catalogue", action="contact_support", severity="link", meaning="unknown SXid"
)
DRAINS: Final = ("drain_rma", "drain_reboot", "drain_field_diag", "drain_check_cooling", "drain_reset")
STRENGTH: Final = {
    action: rank
    for rank, action in enumerate(
        (
            *DRAINS,
            *("stop_job", "rerun_elsewhere", "replay_check", "watch_reset_at_idle", "restart_app_watch", "restart_job"),
            *("restart_app", "contact_support", "diagnose", "collect", "follow_other", "watch", "ignore"),
        )
    )
}
"""Of the lines of one event the strongest action speaks for it."""


class Reading(Protocol):
    """What a reader recognised (monitors/reading.py)."""

    @property
    def kind(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def table(self) -> str: ...
    @property
    def code(self) -> int | None: ...
    @property
    def node(self) -> str | None: ...
    @property
    def gpu(self) -> str | None: ...
    @property
    def text(self) -> str: ...
    @property
    def companion(self) -> bool: ...
    @property
    def fatal(self) -> bool | None: ...
    @property
    def caused_by(self) -> int | None: ...
    @property
    def unreadable(self) -> bool: ...
    @property
    def note(self) -> str: ...


class Reader(Protocol):
    def read(self, raw: str) -> Reading | None: ...

    def read_block(self, text: str) -> Reading | None: ...


class Row(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """One line's answer, as `outlast classify` prints it."""

    kind: str | None
    """None: no rule knows the line."""
    code: int | None
    node: str | None
    gpu: str | None
    class_: str | None = msgspec.field(name="class")
    action: str
    because: str


NOTHING: Final = Row(
    kind=None, code=None, node=None, gpu=None, class_=None, action="ignore", because="no rule knows this line"
)
"""Unknown is not well: the line says nothing that can be read."""
_encode: Final = msgspec.json.Encoder().encode
_NOTHING_JSON: Final = _encode(NOTHING)


def row_of(reading: Reading, catalogue: Catalogue) -> Row:
    """Class and action of what was recognised."""
    if reading.unreadable:
        return _row(reading, "unparsed", UNPARSED_ACTION, reading.note or "it cannot be read")
    if not reading.key and (reading.kind == "xid" or (reading.kind == "dcgm_exporter" and reading.code)):
        return _xid(reading, catalogue)
    if reading.kind == "sxid":
        return _sxid(reading, catalogue)
    line = catalogue.rank_log(reading.key) if reading.table == "rank_log" else catalogue.kernel(reading.key)
    if line is None:
        return _row(reading, "unparsed", UNPARSED_ACTION, f"no row {reading.key!r} in the catalogue")
    return _line(reading, line)


def _line(reading: Reading, line: LineRow) -> Row:
    because = f"{line.meaning} ({reading.note})" if reading.note else line.meaning
    return _row(reading, line.class_, "ignore" if reading.companion else line.action, because)


def _xid(reading: Reading, catalogue: Catalogue) -> Row:
    code = reading.code or 0
    if reading.caused_by is not None:
        why = f"XID {code}, which the driver says was caused by XID {reading.caused_by}"
        return _row(reading, "gpu_secondary", "follow_other", why)
    row = catalogue.xid(code, reading.text or " ")
    because = f"XID {code}, {row.name}: {row.meaning}; blames {row.blames}"
    if reading.note:
        because += f"; {reading.note}"
    if reading.companion:
        return _row(reading, row.class_, "ignore", f"{because}; a further line of the same event")
    return _row(reading, row.class_, row.action, because)


def _sxid(reading: Reading, catalogue: Catalogue) -> Row:
    row = catalogue.sxid(reading.code or 0) or UNKNOWN_SXID
    # the line's own word first, then what is known to be printed for the code, then the table
    fatal = reading.fatal
    if fatal is None:
        fatal = row.word == "fatal" if row.word else row.severity != "nonfatal"
    class_ = "nvswitch_fatal" if fatal else "nvswitch_nonfatal"
    because = f"SXid {reading.code}, {row.name}" + (f": {row.meaning}" if row.meaning else "")
    if reading.companion:
        return _row(reading, class_, "ignore", f"{because}; a further line of the same event")
    if fatal:
        action = row.action if row.action.startswith("drain") else "drain_reset"
        return _row(reading, class_, action, f"{because}; fatal by {'the line' if reading.fatal else 'the table'}")
    if row.severity == "fabric":
        return _row(reading, class_, "drain_reset", f"{because}; called non-fatal, yet the fabric needs a reset")
    action = row.action if row.action in ("ignore", "watch", "contact_support") else "watch"
    return _row(reading, class_, action, f"{because}; not fatal")


def _row(reading: Reading, class_: str, action: str, because: str) -> Row:
    return Row(
        kind=reading.kind,
        code=reading.code,
        node=reading.node,
        gpu=reading.gpu,
        class_=class_,
        action=action,
        because=because,
    )


def classify_lines(lines: Iterable[str], reader: Reader, catalogue: Catalogue, *, every: bool = True) -> Iterator[Row]:
    """One row a line that is not blank; `every` False leaves out the lines that no rule knows."""
    for line in lines:
        if not line.strip():
            continue
        reading = reader.read(line)
        if reading is not None:
            yield row_of(reading, catalogue)
        elif every:
            yield NOTHING


def classify_stream(
    chunks: Iterable[bytes],
    reader: Reader,
    catalogue: Catalogue,
    *,
    marked: Callable[[bytes], set[int]],
    every: bool = True,
) -> Iterator[bytes]:
    """JSON rows, a chunk of whole lines at a time, for logs of any size. `marked`: the lines that can matter."""
    for chunk in chunks:
        starts = marked(chunk)
        rows: list[bytes] = []
        at = 0
        for line in chunk.split(b"\n"):
            if at in starts:
                reading = reader.read(line.decode("utf-8", "replace"))
                if reading is not None:
                    rows.append(_encode(row_of(reading, catalogue)))
                elif every:
                    rows.append(_NOTHING_JSON)
            elif every and line and not line.isspace():
                rows.append(_NOTHING_JSON)
            at += len(line) + 1
        if rows:
            yield b"\n".join(rows) + b"\n"


def classify_block(text: str, reader: Reader, catalogue: Catalogue) -> Row:
    """All of the text as one event: what it says as a whole, else its strongest line, the earliest of equals."""
    whole = reader.read_block(text)
    if whole is not None:
        return row_of(whole, catalogue)
    rows = list(classify_lines(text.splitlines(), reader, catalogue, every=False))
    return min(rows, key=lambda r: STRENGTH.get(r.action, len(STRENGTH)), default=NOTHING)
