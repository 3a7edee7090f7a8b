"""Durations as people write them: `90s`, `20min`, `7d`, `1h30min`. Pure.

Not a date library: no months, no years, and no bare `m`, which half of the world reads as minutes.
"""

from __future__ import annotations

import re
from typing import Final

_UNIT_S: Final = {
    "ms": 0.001,
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604800.0),
}
_PART: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]+)\s*")
_CLOCK: Final = re.compile(r"(?:([0-9]+)-)?([0-9]{1,3}):([0-9]{2})(?::([0-9]{2}))?")

LONGEST_S: Final = 10 * 365 * 86400.0
"""Nothing here lasts ten years; a larger number is a unit gone wrong."""

EXAMPLES: Final = "a duration such as 90s, 20min, 7d or 1h30min, or a number of seconds"


class DurationError(ValueError):
    """Text that is no duration. The message says what was expected and, where it can be told, what was meant."""


def parse_duration(value: str | int | float) -> float:
    """Seconds. A number is seconds already; raises DurationError."""
    seconds = float(value) if isinstance(value, int | float) else _parse_text(value)
    if not 0 <= seconds <= LONGEST_S:  # False for nan too
        raise DurationError(f"expected {EXAMPLES}, from 0 to ten years")
    return seconds


def _parse_text(text: str) -> float:
    parts, at = [], 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or part[2].lower() not in _UNIT_S:
            raise DurationError(f"expected {EXAMPLES}{_meant(text)}")
        parts.append(float(part[1]) * _UNIT_S[part[2].lower()])
        at = part.end()
    if not parts:
        raise DurationError(f"expected {EXAMPLES}")
    return sum(parts)


def _meant(text: str) -> str:
    """What was probably meant by a bare number, `5m`, or Slurm's `days-hours:minutes:seconds`."""
    text = text.strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return f"; did you mean {text}s?"
    if re.fullmatch(r"[0-9]{1,9} ?[mM]", text):
        return f"; did you mean {text[:-1].strip()}min?"
    clock = _CLOCK.fullmatch(text)
    if clock is None or len(text) > 20:
        return ""
    days, first, second, third = clock.groups()
    # as Slurm reads it: with days it is hours:minutes, without and with two fields minutes:seconds
    if third is None and days is None:
        seconds = int(first) * 60 + int(second)
    else:
        seconds = int(days or 0) * 86400 + int(first) * 3600 + int(second) * 60 + int(third or 0)
    return f"; did you mean {render_duration(seconds)}?" if seconds <= LONGEST_S else ""


def render_duration(seconds: float) -> str:
    """The shortest exact form that parse_duration reads back: `7d`, `1h30min`, `0.25s`."""
    if seconds != int(seconds):
        return f"{seconds!r}s" if seconds >= 0.001 else f"{seconds:.12f}s"
    left, text = int(seconds), ""
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size_s)
        text += f"{count}{unit}" if count else ""
    return text or "0s"
