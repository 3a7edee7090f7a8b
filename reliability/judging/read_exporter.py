"""Facts of an exporter's page: each sample kept, blank or rejected; the last XID; throttle reasons. Pure.

A value that cannot be read costs its line, never the page. DCGM writes numbers near certain powers of two where it has
no value: such a sample is neither an error nor a zero. Names and labels are matched whatever their case.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

from outlast.reliability.judging.case import Line
from outlast.reliability.judging.facts import Fact, PowerLooked, Sample, SeriesGone
from outlast.reliability.judging.sources import Src

_SAMPLE: Final = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]{2,120})(\{.{0,4000}?\})?\s+(\S.{0,200})$")
_EMPTY: Final = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]{2,120})(\{.{0,4000}\})\s*$")
_LABEL: Final = re.compile(r'([A-Za-z_][A-Za-z0-9_]{0,80})="((?:[^"\\]|\\.){0,400})"')
_LABEL_XID: Final = re.compile(r'\b[xX][iI][dD]="([0-9]{1,4})"')
_GONE: Final = re.compile(r"\bno ((?:DCGM|dcgm)_[A-Za-z0-9_]{3,80}(?:, ?(?:DCGM|dcgm)_[A-Za-z0-9_]{3,80}){0,40})")
_NO_SERIES: Final = re.compile(r"\bnone for gpu ([0-9]{1,3})\b", re.IGNORECASE)
_NAMES: Final = re.compile(r"^(?:DCGM_|dcgm_)")

XID_GAUGE: Final = "XID_ERRORS"
_INT64_BLANK: Final = float(0x7FFFFFFFFFFFFFF0)
_INT32_BLANK: Final = 0x7FFFFFF0
_FP64_BLANK: Final = float(1 << 47)
_SCALES: Final = (1.0, 100.0, 1000.0, 0.01, 0.001)
"""Pages between the exporter and us turn ratios into percent and units into others, blanks with them."""


def is_blank(value: float) -> bool:
    """DCGM's marks for no value: int64, int32 and double, also scaled by somebody on the way."""
    if not math.isfinite(value):
        return True
    for scale in _SCALES:
        v = value / scale
        if v >= _INT64_BLANK * 0.999999 and v <= _INT64_BLANK * 1.000001:
            return True
        if 0 <= v - _INT32_BLANK < 16 or abs(v - _FP64_BLANK) < 32 * max(1.0, 1 / scale):
            return True
    return False


def read_samples(line: Line) -> Iterator[Fact]:
    """The sample of a line of an exporter's page, and what is said to be missing on it."""
    text = line.text.strip()
    gone = _GONE.search(text)
    lost = _NO_SERIES.search(text)
    if gone:
        everywhere = bool(re.search(r"\b(?:any|every|all) nodes?\b", text))
        yield SeriesGone(id=line.id, at_s=line.at_s, metrics=tuple(re.split(r", ?", gone[1])), everywhere=everywhere)
    if lost:
        yield SeriesGone(id=line.id, at_s=line.at_s, node=line.label.node, gpu=lost[1])
    if text.startswith("#"):
        return
    m = _SAMPLE.match(text)
    if m and (m[2] or _NAMES.match(text)) and (m[2] or line.label.kind is Src.EXPORTER or _is_number(m[3])):
        yield from _sample(line, m[1], m[2] or "", m[3])
    elif (empty := _EMPTY.match(text)) is not None:
        yield _make(line, empty[1], empty[2], None)


def _is_number(text: str) -> bool:
    try:
        float(text.split()[0])
    except ValueError:
        return False
    return True


def _sample(line: Line, metric: str, labels: str, rest: str) -> Iterator[Fact]:
    value = float(rest.split()[0]) if _is_number(rest) else None
    sample = _make(line, metric, labels, value)
    counted = _LABEL_XID.search(labels)
    if value and counted and metric.upper().endswith("XID_ERRORS_COUNT"):
        # the counter of a window names the code in a label; read as the gauge would show it
        yield _make(line, f"{metric[: -len('_COUNT')]}", labels, float(counted[1]))
        return
    yield sample
    if sample.kept and value is not None and "REASONS" in sample.metric and 0 <= value < 1 << 20:
        yield PowerLooked(id=line.id, at_s=sample.at_s, node=sample.node, gpu=sample.gpu, mask=int(value))


def _make(line: Line, metric: str, labels: str, value: float | None) -> Sample:
    named = {k.lower(): v for k, v in _LABEL.findall(labels)}
    spelled = [k for k, _ in _LABEL.findall(labels)]
    return Sample(
        id=line.id,
        at_s=line.at_s,
        past=line.past,
        node=named.get("hostname") or line.label.node or named.get("instance", "").partition(":")[0] or None,
        metric=metric.upper(),
        gpu=named.get("gpu", "") or named.get("uuid", "").lower(),
        value=value,
        blank=value is not None and is_blank(value),
        lower=metric == metric.lower() and "uuid" in spelled,
    )
