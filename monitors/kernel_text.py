"""One line of a kernel log, whatever wrote it: the message, and what the prefix says of time, node and origin. Pure.

    <4> | 6,340,4015,-; | kern :err : | [12.3] | [Sun Feb 23 ...] | 2025-01-25T... | Jan 25 10:34:54 host kernel:
        \\______ peeled off one after the other, each at most a few times ______/         then: the message

Not a judge and not a finder of faults: that is xid_text.py and classify. A line counts as the kernel's own by its
facility and its tag (`from_kernel`), never by its words: `python3[71]: NVRM: Xid ...` is a program that prints.
Nothing here raises on any text, and each pattern is bounded, so that a hostile line costs no more than a long one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Final

from outlast.reliability.model import Noun

MAX_CHARS: Final = 8192
"""Longer lines are cut: the kernel's own records end at about 1,000 bytes."""

_MONTHS: Final = {
    name: i + 1
    for i, name in enumerate("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split())  # noqa: SIM905
}
_LEVELS: Final = {
    "emerg": 0,
    "alert": 1,
    "crit": 2,
    "err": 3,
    "warn": 4,
    "notice": 5,
    "info": 6,
    "debug": 7,
}
_FACILITIES: Final = {"kern": 0, "user": 1, "mail": 2, "daemon": 3, "auth": 4, "syslog": 5, "cron": 9}

_MON: Final = "(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_HMS: Final = r"([0-9]{2}):([0-9]{2}):([0-9]{2})(?:[.,]([0-9]{1,9}))?"
_ISO: Final = rf"([0-9]{{4}})-([0-9]{{2}})-([0-9]{{2}})[T ]{_HMS}(Z|[+-][0-9]{{2}}:?[0-9]{{2}})?"

_RECORD: Final = re.compile(r"([0-9]{1,9}),([0-9]{1,19}),([0-9]{1,19}),[^;,\s]{1,8}(?:,[^;\n]{0,200})?;")
_RFC5424: Final = re.compile(rf"(?:<([0-9]{{1,3}})>)?1 (?:{_ISO}|-) (\S{{1,255}}) (\S{{1,48}}) \S{{1,128}} \S{{1,32}} ")
_STRUCTURED: Final = re.compile(r'(?:-|(?:\[[^\s\]]{1,64}(?: [^\s=]{1,64}="(?:[^"\\]|\\.){0,2000}")*\])+)(?: |$)')
_PRIORITY: Final = re.compile(r"<([0-9]{1,3})>")
_DECODED: Final = re.compile(r"([a-z0-9]{1,12}) {0,8}:([a-z]{1,8}) {0,8}: ?")
_UPTIME: Final = re.compile(
    r"\[ {0,12}([0-9]{1,12}\.[0-9]{1,9})(?: <[ +0-9.]{1,24}>)?\](?:\[ {0,8}[TC][0-9]{1,10}\])? ?"
)
_DELTA: Final = re.compile(
    r"\[(?:<?[ +]{1,12}[0-9]{1,12}\.[0-9]{1,9}>?| ?[A-Z][a-z]{2} ?[0-9]{1,2} [0-9]{2}:[0-9]{2})\] ?"
)
_CTIME: Final = re.compile(
    rf"\[(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?{_MON} {{1,2}}([0-9]{{1,2}}) {_HMS} ([0-9]{{4}})\] ?"
)
_BRACKET_ISO: Final = re.compile(rf"\[{_ISO}\] ?")
_ISO_STAMP: Final = re.compile(rf"{_ISO} ")
_FULL_STAMP: Final = re.compile(rf"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) {_ISO} (?:[A-Z]{{3,5}} )?")
"""journalctl -o short-full: only here a zone's name follows, elsewhere a word in capitals begins the message."""
_RFC3164: Final = re.compile(rf"{_MON} {{1,2}}([0-9]{{1,2}}) (?:([0-9]{{4}}) )?{_HMS} ")
_UNIX: Final = re.compile(r"(1[0-9]{9}\.[0-9]{1,9}) ")
_CLOCK: Final = re.compile(r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})? {1,3}")
_HOST_TAG: Final = re.compile(
    r"(?:([^\s:]{1,255}) )?(?:(?:kern|user|daemon|syslog|local[0-7])\.[a-z]{3,7} )?"
    r"([A-Za-z_(][^\s:\[]{0,63})(?:\[([0-9]{1,10})\])?: ?"
)
_KERNEL_TAG: Final = re.compile(r"(?:([^\s:\[\]]{1,255}) )?kernel: ?")
_GATHERED: Final = re.compile(
    r"(?!kernel:|NVRM:)([A-Za-z0-9][A-Za-z0-9._-]{0,254}): {1,2}"
    r"(?=\[ {0,12}[0-9]{1,12}\.[0-9]|\[[A-Z][a-z]{2} |NVRM: |nvidia-nvswitch[0-9]|kernel: |<[0-9]{1,3}>"
    r"|[A-Z][a-z]{2} {1,2}[0-9]{1,2} [0-9]{2}:|[0-9]{4}-[0-9]{2}-[0-9]{2}T)"
)
"""As pdsh and clush put the node's name before what it printed."""
_REPEATED: Final = re.compile(r"message repeated ([0-9]{1,6}) times: ?\[ ?(.*?)\]?$", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\x([0-9a-fA-F]{2})")
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class KernelLine(Noun, frozen=True, kw_only=True):
    """What one line says. None where the prefix does not tell."""

    text: str
    at_s: float | None = None
    uptime_s: float | None = None
    """Seconds since boot, as printed by the kernel."""
    node: str | None = None
    program: str | None = None
    """The syslog tag where it is another than the kernel's."""
    facility: int | None = None
    level: int | None = None
    sequence: int | None = None
    """The record's number, in raw /dev/kmsg form."""
    repeats: int = 1
    """How often the line stands for the same event (a folded 'message repeated N times')."""

    @property
    def from_kernel(self) -> bool:
        """The prefix does not speak against the kernel as the writer."""
        return self.program is None and self.facility in (None, 0)


@dataclass(slots=True)
class _Parts:
    """What was peeled off so far."""

    year: int | None
    host_next: bool = False
    at_s: float | None = None
    uptime_s: float | None = None
    node: str | None = None
    program: str | None = None
    facility: int | None = None
    level: int | None = None
    sequence: int | None = None

    def take_priority(self, value: int) -> None:
        self.facility, self.level = value >> 3, value & 7


def _seconds(
    year: int, month: int, day: int, clock: tuple[str, str, str, str | None], zone: str | None
) -> float | None:
    """UTC seconds; a time without a zone is read as UTC. None for a date that no calendar has."""
    tz: timezone = UTC
    try:
        if zone and zone not in ("Z", "z"):
            sign = -1 if zone[0] == "-" else 1
            tz = timezone(sign * timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:])))
        whole = datetime(year, month, day, int(clock[0]), int(clock[1]), int(clock[2]), tzinfo=tz).timestamp()
    except (ValueError, OverflowError):
        return None
    return whole + (float(f"0.{clock[3]}") if clock[3] else 0.0)


def _iso_seconds(g: tuple[str | None, ...]) -> float | None:
    """From the eight groups of `_ISO`."""
    if g[0] is None:
        return None
    return _seconds(int(g[0]), int(g[1] or 0), int(g[2] or 0), (g[3] or "0", g[4] or "0", g[5] or "0", g[6]), g[7])


def _take_record(p: _Parts, m: re.Match[str]) -> None:
    p.take_priority(int(m[1]))
    p.sequence = int(m[2])
    p.uptime_s = int(m[3]) / 1e6


def _take_rfc5424(p: _Parts, m: re.Match[str]) -> None:
    if m[1]:
        p.take_priority(int(m[1]))
    p.at_s = _iso_seconds(m.groups()[1:9])
    p.node = None if m[10] == "-" else m[10]
    _take_tag(p, m[11])


def _take_tag(p: _Parts, tag: str) -> None:
    if tag not in ("kernel", "-"):
        p.program = tag


def _take_decoded(p: _Parts, m: re.Match[str]) -> None:
    p.facility, p.level = _FACILITIES.get(m[1], 99), _LEVELS.get(m[2])


def _take_ctime(p: _Parts, m: re.Match[str]) -> None:
    p.at_s = _seconds(int(m[7]), _MONTHS[m[1]], int(m[2]), (m[3], m[4], m[5], m[6]), None)


def _take_iso(p: _Parts, m: re.Match[str]) -> None:
    p.at_s = _iso_seconds(m.groups()[:8])
    # dmesg writes a comma before the fraction and no host; syslog and journald a point, then the host
    p.host_next = "," not in m[0]


def _take_rfc3164(p: _Parts, m: re.Match[str]) -> None:
    year = int(m[3]) if m[3] else p.year
    if year is not None:
        p.at_s = _seconds(year, _MONTHS[m[1]], int(m[2]), (m[4], m[5], m[6], m[7]), None)
    p.host_next = True


def _take_unix(p: _Parts, m: re.Match[str]) -> None:
    p.at_s = float(m[1])
    p.host_next = True


def _take_host_tag(p: _Parts, m: re.Match[str]) -> None:
    p.node = m[1] or p.node
    p.host_next = False
    _take_tag(p, m[2])


_STEPS: Final[tuple[tuple[re.Pattern[str], Callable[[_Parts, re.Match[str]], None]], ...]] = (
    (_PRIORITY, lambda p, m: p.take_priority(int(m[1]))),
    (_UPTIME, lambda p, m: setattr(p, "uptime_s", float(m[1]))),
    (_CTIME, _take_ctime),
    (_BRACKET_ISO, lambda p, m: setattr(p, "at_s", _iso_seconds(m.groups()[:8]))),
    (_DELTA, lambda p, m: None),
    (_DECODED, _take_decoded),
    (_ISO_STAMP, _take_iso),
    (_FULL_STAMP, _take_iso),
    (_RFC3164, _take_rfc3164),
    (_UNIX, _take_unix),
    (_CLOCK, lambda p, m: None),
    (_KERNEL_TAG, lambda p, m: setattr(p, "node", m[1] or p.node)),
    (_GATHERED, lambda p, m: setattr(p, "node", p.node or m[1])),
)


def _peel(p: _Parts, rest: str) -> str:
    """Take prefixes off until none is left; a line has at most a handful."""
    for _ in range(8):
        if p.host_next:
            p.host_next = False
            m = _HOST_TAG.match(rest)
            if m:
                _take_host_tag(p, m)
                rest = rest[m.end() :]
                if p.program and p.program.startswith(("NVRM", "nvidia-nvswitch")):
                    # journald splits the first word of an injected line off as if it were a program's name
                    return f"{p.program}: {rest}"
                if p.program:
                    return rest
                continue
        for pattern, take in _STEPS:
            m = pattern.match(rest)
            if m and m.end():
                take(p, m)
                rest = rest[m.end() :]
                break
        else:
            break
    return rest


def parse_kernel_line(line: str, *, year: int | None = None) -> KernelLine:
    """One line in any form. `year` completes RFC 3164 times, which have none; without it they stay unknown."""
    line = _CONTROL.sub("", line[:MAX_CHARS].rstrip("\r\n"))
    if line.startswith("{"):
        found = _parse_journal_json(line)
        if found is not None:
            return found
    p = _Parts(year=year)
    m = _RECORD.match(line)
    if m:
        _take_record(p, m)
        return _finish(p, decode_escapes(line[m.end() :]))
    m = _RFC5424.match(line)
    if m:
        _take_rfc5424(p, m)
        rest = line[m.end() :]
        sd = _STRUCTURED.match(rest)
        rest = rest[sd.end() :] if sd else rest
        return _finish(p, rest.removeprefix("\ufeff") if p.program else _peel(p, rest.removeprefix("\ufeff")))
    if line.startswith("MESSAGE="):
        line = line[len("MESSAGE=") :]
    return _finish(p, _peel(p, line))


def _finish(p: _Parts, text: str) -> KernelLine:
    repeats = 1
    if text.startswith("message repeated"):
        m = _REPEATED.match(text)
        if m:
            repeats, text = max(1, int(m[1])), m[2]
    return KernelLine(
        text=text,
        at_s=p.at_s,
        uptime_s=p.uptime_s,
        node=p.node,
        program=p.program,
        facility=p.facility,
        level=p.level,
        sequence=p.sequence,
        repeats=repeats,
    )


def decode_escapes(text: str) -> str:
    """The kernel writes backslash, control and non-ASCII bytes of a record as \\xNN."""
    if "\\x" not in text:
        return text
    raw = _ESCAPE.sub(lambda m: chr(int(m[1], 16)), text)
    return _CONTROL.sub("", raw.encode("latin-1", "replace").decode("utf-8", "replace").replace("\n", " "))


def _parse_journal_json(line: str) -> KernelLine | None:
    """journalctl -o json: one object a line. None where it is not one."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or "MESSAGE" not in entry:
        return None
    return journal_entry({k: v for k, v in entry.items() if isinstance(k, str)})


def journal_entry(fields: dict[str, object]) -> KernelLine:
    """One journal entry from its fields, as JSON or export give them."""
    message = fields.get("MESSAGE")
    if isinstance(message, list):  # bytes that are no UTF-8 come as a list of numbers
        message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode("utf-8", "replace")
    text = _CONTROL.sub("", str(message or "")[:MAX_CHARS])
    tag = _field(fields, "SYSLOG_IDENTIFIER")
    transport = _field(fields, "_TRANSPORT")
    program = None if tag in ("", "kernel") and transport in ("", "kernel") else (tag or transport)
    if tag == "NVRM" or tag.startswith("nvidia-nvswitch"):
        text = f"{tag}: {text}"
    realtime, uptime = _number(fields, "__REALTIME_TIMESTAMP"), _number(fields, "_SOURCE_MONOTONIC_TIMESTAMP")
    p = _Parts(
        year=None,
        at_s=None if realtime is None else realtime / 1e6,
        uptime_s=None if uptime is None else uptime / 1e6,
        node=_field(fields, "_HOSTNAME") or None,
        program=program,
        facility=_number(fields, "SYSLOG_FACILITY"),
        level=_number(fields, "PRIORITY"),
    )
    return _finish(p, text)


def _field(fields: dict[str, object], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _number(fields: dict[str, object], name: str) -> int | None:
    value = _field(fields, name)
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 20 else None
