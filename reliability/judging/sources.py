"""Where a line of a case was read, and when: labels such as `kernel n07` and times such as `09:03` or `+2s`. Pure.

The kind of a source decides what its lines may prove. The kernel's log, a driver's tool, the exporter and Slurm are
machines that report; what a rank prints is a program's word; everything else is a note, which convicts nobody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from outlast.reliability.model import Noun


class Src(StrEnum):
    KERNEL = "kernel"
    TOOL = "tool"
    """nvidia-smi, NVML, DCGM, fabric manager, a health agent."""
    EXPORTER = "exporter"
    RANK = "rank"
    """Ranks, trainers, jobs: a program's word."""
    SLURM = "slurm"
    SUITE = "suite"
    PERSON = "person"
    NOTE = "note"
    TEXT = "text"
    """A paste without a source: each line says itself what it is."""


_KINDS: Final[Mapping[str, Src]] = {
    word: kind
    for kind, words in {
        Src.KERNEL: "kernel dmesg journal journald journalctl kmsg /dev/kmsg syslog messages kern.log",
        Src.EXPORTER: "scrape exporter dcgm-exporter prometheus metrics",
        Src.TOOL: "nvml nvidia-smi dcgm dcgmi diag agent fabricmanager nv-fabricmanager ibstat nvswitch gate check",
        Src.RANK: "rank ranks task tasks trainer job jobs worker workers launcher python stdout stderr torchrun nccl",
        Src.SLURM: "slurmd slurmctld slurmdbd slurm squeue sinfo sacct scontrol srun sbatch slurmstepd submitit epilog "
        "prolog nhc",
        Src.SUITE: "supervisor suite outlast",
        Src.PERSON: "operator admin user",
    }.items()
    for word in words.split()
}

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_NODE: Final = re.compile(r"\b(?:node[ =]|on )([A-Za-z][A-Za-z0-9_.-]{0,62})")
_DOMAIN: Final = re.compile(r"\b(?:domains?|racks?|rows?) ([A-Za-z]{0,8}[0-9]{1,6}|[A-Z])\b")
_OF_DOMAIN: Final = re.compile(r"\b(\d{1,5}) (?:other )?nodes? of ([A-Za-z][A-Za-z0-9_-]{0,40})")
_RANKS: Final = re.compile(r"\b(?:ranks?|tasks?|workers?) ([0-9]{1,7})(?:-([0-9]{1,7}))?")
_NODES: Final = re.compile(r"\b([0-9]{1,6}) (?:different |other |more )?(?:nodes|hosts|machines)\b")
_RUN: Final = re.compile(r"\b(run|try|attempt|job|restart|day|week) ?#?([0-9]{1,9}|[A-Z])\b", re.IGNORECASE)
_TRIED_ON: Final = re.compile(r"\b(?:run|try|attempt|job|restart) ?#?\w{1,9} on ([A-Za-z][A-Za-z0-9_.-]{0,62})")
_NO_NODE: Final = frozenset({"the", "all", "any", "every", "each", "a", "one", "both", "array"})


class Label(Noun, frozen=True, kw_only=True):
    """What the source of an item says."""

    kind: Src
    raw: str = ""
    node: str | None = None
    domain: str | None = None
    first_rank: int | None = None
    last_rank: int | None = None
    nodes: int = 0
    """How many nodes it speaks of; 0 where it does not say."""
    same_nodes: bool = False
    """It says that these are the nodes of the item before."""
    run: str = ""
    """The run, try, job or day that it speaks of; '' where it does not say."""


def read_label(source: str, t: str = "") -> Label:
    """The kind of a source and the node, domain or ranks that it names. `t` may say which try it was, and where."""
    source = source if source.strip() else t
    words = source.replace("(", " ").replace(")", " ").replace(",", " ").split()
    first = words[0].lower().rstrip(":") if words else ""
    kind = _KINDS.get(first, _KINDS.get(first.partition("/")[0], Src.NOTE))
    if kind is Src.NOTE and len(words) == 1 and any(c.isdigit() for c in first) and _NAME.fullmatch(words[0]):
        kind = Src.TEXT  # a node's name alone: what was read on it, each line says itself in which log
    domain = _DOMAIN.search(source)
    counted = _OF_DOMAIN.search(source)
    ranks = _RANKS.search(source)
    many = _NODES.search(source)
    last = int(ranks[2]) if ranks and ranks[2] else None
    return Label(
        kind=kind,
        raw=source,
        node=_node_of(source, words, kind) or _node_of(t, [], Src.NOTE),
        domain=counted[2] if counted else domain[1] if domain else None,
        first_rank=int(ranks[1]) if ranks else None,
        last_rank=last,
        nodes=int(counted[1]) if counted else int(many[1]) if many else 0,
        run=_run_of(source, t),
        same_nodes=bool(re.search(r"\bsame (?:\d+ )?(?:nodes|hosts|machines)\b", source)),
    )


def _run_of(source: str, t: str) -> str:
    told = _RUN.search(t) or _RUN.search(source)
    return f"{told[1].lower()} {told[2]}" if told else ""


def _node_of(source: str, words: list[str], kind: Src) -> str | None:
    tried = _TRIED_ON.search(source)
    if tried and tried[1] not in _NO_NODE:
        return tried[1]
    named = _NODE.search(source)
    if named and named[1] not in _NO_NODE and (named[0].startswith("node") or any(c.isdigit() for c in named[1])):
        return named[1]
    if kind in (Src.KERNEL, Src.TOOL, Src.EXPORTER, Src.SLURM) and len(words) > 1:
        name = words[1].partition(":")[0]
        return name if _NAME.fullmatch(name) and name not in _NO_NODE else None
    # a source that begins with a name, as in `n07` or `n07 after the reset`
    if kind in (Src.NOTE, Src.TEXT) and words and any(c.isdigit() for c in words[0]) and _NAME.fullmatch(words[0]):
        return words[0]
    return None


# ---------------------------------------------------------------- times

_UNITS: Final[Mapping[str, float]] = {"ms": 1e-3, "": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_OFFSET: Final = re.compile(r"^([+-][0-9]{1,9}(?:\.[0-9]{1,9})?) ?(ms|s|min|m|h|d)?\b")
_ISO: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[T ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]{1,9}))?)?"
)
_CLOCK: Final = re.compile(r"\b([0-9]{1,2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]{1,9}))?)?")
_DATE: Final = re.compile(r"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}([0-9]{1,2})\b")
_MONTHS: Final = {
    m: i + 1
    for i, m in enumerate("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split())  # noqa: SIM905
}
_WEEKDAY: Final = re.compile(r"\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b")
_DAY_S: Final = 86400.0


def iso_seconds(text: str) -> float | None:
    """The first ISO time of a text as UTC seconds."""
    m = _ISO.search(text)
    if not m:
        return None
    try:
        year, month, day, hour, minute = (int(m[i]) for i in range(1, 6))
        whole = datetime(year, month, day, hour, minute, int(m[6] or 0), tzinfo=UTC).timestamp()
    except ValueError:
        return None
    return whole + (float(f"0.{m[7]}") if m[7] else 0.0)


def clock_seconds(text: str) -> float | None:
    """The first time of day of a text, in seconds since midnight."""
    m = _CLOCK.search(text)
    if not m or int(m[1]) > 24:
        return None
    return int(m[1]) * 3600.0 + int(m[2]) * 60 + int(m[3] or 0) + (float(f"0.{m[4]}") if m[4] else 0.0)


def read_time(text: str, before_s: float | None = None) -> float | None:
    """Seconds on the case's time axis; None where the text names no time. `before_s`: the item before this one."""
    offset = _OFFSET.match(text.strip())
    if offset:
        return float(offset[1]) * _UNITS[offset[2] or ""]
    if (iso := iso_seconds(text)) is not None:
        return iso
    clock, date = clock_seconds(text), _DATE.search(text)
    if date:
        return _MONTHS[date[1]] * 31 * _DAY_S + int(date[2]) * _DAY_S + (clock or 0.0)
    day = _WEEKDAY.search(text)
    if clock is None and day is None:
        return None
    clock = clock or 0.0
    if day:
        clock += ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun").index(day[1]) * _DAY_S
    # past midnight: the clock alone would run half a day backwards
    elif before_s is not None and before_s < 40 * _DAY_S and before_s - clock > _DAY_S / 2:
        clock += _DAY_S * -(-(before_s - clock - _DAY_S / 2) // _DAY_S)
    return clock
