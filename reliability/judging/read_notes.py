"""Facts of plain words: how far something reaches, who did what, when something began, what could not be seen. Pure.

Words convict nobody. They may widen a scope, clear a node, tell a person's will, or say that a source was blind; a
sentence of which nothing is recognised stays a note.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from outlast.reliability.judging.case import Line
from outlast.reliability.judging.facts import Fact, HashVote
from outlast.reliability.judging.facts_run import Blind, OwnDoing, Reach, Restarted, Stamped, Tried, Will
from outlast.reliability.judging.read_gpu import where
from outlast.reliability.judging.sources import Src, iso_seconds

_NODES: Final = re.compile(r"\b([0-9]{1,6}) (?:different )?(?:nodes|hosts|machines)\b", re.IGNORECASE)
_EVERY: Final = re.compile(
    r"\b(?:any|every|each|all)(?: [A-Za-z0-9]{1,12})? (?:nodes?|hosts?|machines?)\b|\ball (?:racks|nodes)\b",
    re.IGNORECASE,
)
_FINE: Final = re.compile(
    r"\b(?:[0-9]{1,6} )?others? (?:nodes? )?(?:are |is )?(?:fine|well|ok|healthy|flat|unaffected|read it|work)"
    r"|\b[0-9]{1,6} other nodes (?:read|write|work|see)",
    re.IGNORECASE,
)
_SAME: Final = re.compile(r"\bsame (?:[0-9]{1,6} )?(?:nodes|hosts|machines)\b", re.IGNORECASE)
_ROTATES: Final = re.compile(
    r"\b(?:different|another) (?:node|rank|gpu|host|place)s? (?:each|every) (?:time|run|try)"
    r"|\beach time (?:a |an )?(?:different|another)|\bany subset\b",
    re.IGNORECASE,
)
_BLIND: Final = re.compile(
    r"\bretained range\b|\bretention\b|\bvacuumed\b|\blog(?:s|file)? (?:was |were )?rotated\b"
    r"|\blag(?:s|ged|ging)? (?:of |by )?[0-9]|\bkmsg: .{0,60}overrun|\b[0-9]{1,9} messages suppressed"
    r"|\b[Ss]uppressed [0-9]{1,9} messages"
    r"|\bcallbacks suppressed\b|\b[Mm]issed [0-9]{1,12} (?:messages|entries)|\bjournal: .{0,40}corrupt",
    re.IGNORECASE,
)
_UPGRADE: Final = re.compile(
    r"unattended-upgrade|\bUpgrade: \S{1,80} \(|\b(?:dnf|yum|apt)\S{0,12}: .{0,40}[Uu]pgraded?: ?\S"
)
_SCONTROL: Final = re.compile(r"scontrol update nodename=(\S{1,255}) state=(\w{4,12})", re.IGNORECASE)
_SCANCEL: Final = re.compile(r"(?:^|\$ |\b)scancel\b")
_RESTART: Final = re.compile(r"\brestart(?:ed|s)?\b", re.IGNORECASE)
_PERSON: Final = (
    ("reboot", re.compile(r"\breboot", re.IGNORECASE)),
    ("resume", re.compile(r"\b(?:resume|undrain|return)", re.IGNORECASE)),
    ("drain", re.compile(r"\b(?:drain|maintenance)", re.IGNORECASE)),
    ("cancel", re.compile(r"\b(?:scancel|cancel)", re.IGNORECASE)),
    ("inject", re.compile(r"\b(?:inject|drill|dcgmi test)", re.IGNORECASE)),
)
_STEPPED: Final = re.compile(
    r"[Ss]ystem clock was stepped|step time server \S{1,80} offset|clock_step|Forward time jump detected|"
    r"Time has been changed|Clock jumped"
)
_TRY: Final = re.compile(
    r"\bloaded (?:iter(?:ation)? |step )?([0-9]{1,12})\b.{0,60}\b(?:died|failed|crashed) at ([0-9]{1,12})\b"
)
_HASHES: Final = re.compile(r"\b(?:dp|rank) ?([0-9]{1,6})[ :=]{1,2}([0-9a-f]{4,64})\b")
_VOTE: Final = re.compile(r"\bhash", re.IGNORECASE)
_BEGAN: Final = (
    ("boot", re.compile(r"\bboot(?:ed| time:?| at)? (?=[0-9]{4}-)")),
    ("job", re.compile(r"\bjob started (?=[0-9]{4}-)")),
    ("reset", re.compile(r"\breset (?:done )?(?=[0-9]{4}-)")),
)


def read_notes(line: Line) -> Iterator[Fact]:
    """What the words of a line tell beside what machines print."""
    text = line.text
    yield from _reach(line)
    if _BLIND.search(text):
        yield Blind(**where(line), why=text[:200])
    if _UPGRADE.search(text):
        yield Will(**where(line), what="upgrade", note=text[:200])
    for what, regex in _BEGAN:
        m = regex.search(text)
        seconds = iso_seconds(text[m.end() :]) if m else None
        if seconds is not None:
            yield Stamped(id=line.id, what=what, wall_s=seconds)
    if _STEPPED.search(text):
        yield OwnDoing(**where(line), what="clock_step")
    tried = _TRY.search(text)
    if tried:
        yield Tried(**where(line), loaded=int(tried[1]), died=int(tried[2]))
    if _VOTE.search(text):
        yield from _vote(line)
    yield from _people(line)


def _vote(line: Line) -> Iterator[Fact]:
    """`dp0 a1b2 dp1 a1b2 dp2 77fe`: who differs from the majority."""
    found = {int(rank): digest for rank, digest in _HASHES.findall(line.text)}
    if len(found) < 3:
        return
    usual, count = Counter(found.values()).most_common(1)[0]
    if 2 * count > len(found) and count < len(found):
        odd = tuple(rank for rank, digest in found.items() if digest != usual)
        yield HashVote(**where(line), odd=odd, voters=len(found))


def _reach(line: Line) -> Iterator[Fact]:
    text = f"{line.label.raw}; {line.text}"
    many, every, fine = _NODES.search(text), _EVERY.search(text), _FINE.search(text)
    same, rotates = _SAME.search(text), _ROTATES.search(text)
    if many or every or fine or same or rotates:
        yield Reach(
            **where(line),
            nodes=int(many[1]) if many else 0,
            everywhere=bool(every),
            others_fine=bool(fine),
            same_nodes=bool(same),
            rotates=bool(rotates),
        )


def _people(line: Line) -> Iterator[Fact]:
    text = line.text
    told = _SCONTROL.search(text)
    if told:
        what = {"drain": "drain", "down": "drain"}.get(told[2].lower(), "resume")
        yield Will(**where(line, told[1]), what=what, note=text[:200])
    elif _SCANCEL.search(text):
        yield Will(**where(line), what="cancel", note=text[:200])
    elif line.label.kind is Src.PERSON:
        for what, regex in _PERSON:
            if regex.search(text):
                yield Will(**where(line), what=what, note=text[:200])
                break
    elif line.label.kind is Src.SUITE and _RESTART.search(text):
        yield Restarted(**where(line))
