"""Last words of a rank: what ended it, told apart from the echo of another rank's end. Pure.

    tail of the log -> cleaned lines -> last traceback (root cause of a chain) + patterns -> LastWords

Not a judge. Everything here is a program's word: a rank that prints `NVRM: Xid 79` has printed something, no more;
hardware is convicted by the kernel log. Never raises on any text, and reads at most the last 64 KiB of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from outlast.monitors.rank_patterns import (
    CHECKPOINT_FRAMES,
    CULPRIT_FACTOR,
    DATA_FRAMES,
    DATA_WORDS,
    PATTERNS,
    TIMEOUT_RAN,
    Pattern,
)
from outlast.reliability.model import Noun

TAIL_CHARS: Final = 65536
LINE_CHARS: Final = 2000
EXCEPTION_CHARS: Final = 300
NEAR_LINES: Final = 400
"""A fatal line further above the end than this belongs to something the program lived through."""


_ANSI: Final = re.compile(
    r"\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|[@-Z\\^_a-z0-9=><])"
)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_HTML: Final = re.compile(
    r"</?(?:a|b|i|p|br|hr|li|ul|ol|td|th|tr|div|pre|img|svg|html|head|body|span|form|link|meta|style|table|iframe|script|"
    r"title|h[1-6])(?:\s[^<>]{0,300})?/?>",
    re.IGNORECASE,
)
_PREFIX: Final = re.compile(r"(?:\[?(?:rank|default|trainer)_?[0-9]{1,6}\]?: ?|[0-9]{1,6}: )")
_TRACEBACK: Final = re.compile(r"Traceback \(most recent call last\):")
_NESTED: Final = re.compile(r"Traceback \(most recent call last\): ?\(RANK [0-9]{1,6}\)")
_CHAIN: Final = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_RAISED: Final = re.compile(r"((?:[A-Za-z_][A-Za-z0-9_]{0,80}\.){0,12}[A-Z][A-Za-z0-9_]{1,80})(?:: ?(.*))?$")
_WRAPPERS: Final = frozenset({"ChildFailedError", "SignalException"})
"""What a launcher raises when its children have died: the cause stands elsewhere."""

_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]{2,16}")
_SOCKET: Final = re.compile(r"\[?\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\]?(?::[0-9]{1,5})?|\[[0-9a-fA-F:]{2,45}\]:[0-9]{1,5}")
_PIDS: Final = re.compile(r"\b(pids?(?:\(s\))?[ =:]{1,3})[0-9]{1,10}(?:, ?[0-9]{1,10}){0,64}")
_PATH: Final = re.compile(r"\.{0,2}/[^\s'\"<>:,;()\[\]]{1,400}")


class LastWords(Noun, frozen=True, kw_only=True):
    """What a rank's output says of its end."""

    key: str = ""
    """Row of reliability/catalog/rank_log.yaml; '' where nothing was recognised."""
    error_class: str = ""
    echo: bool = False
    """True: it only noticed that something else had ended."""
    exception: str = ""
    """`Type: message`, the same for the same error in any process, node and directory; '' for an echo."""
    line: str = ""
    """The line that tells, as printed (cleaned)."""


def clean(text: str) -> str:
    """Terminal codes, HTML tags and invisible characters out; line ends and tabs stay."""
    text = text[-TAIL_CHARS:].replace("\r\n", "\n").replace("\r", "\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "<" in text:
        text = _HTML.sub("", text)
    return _CONTROL.sub("", text)


def normalise_exception(text: str) -> str:
    """`Type: message` without addresses, sockets, pids and directories."""
    text = _SOCKET.sub("*", _ADDRESS.sub("0x*", text))
    text = _PIDS.sub(r"\1*", text)
    text = _PATH.sub(lambda m: m[0] if m[0].count("/") < 2 else m[0].rsplit("/", 1)[-1] or "/", text)
    return " ".join(text.split())[:EXCEPTION_CHARS]


class _Traceback:
    """One traceback of the tail: where it stands, its frames, what was raised."""

    __slots__ = ("chained", "checkpoint", "data", "end", "message", "start", "type")

    def __init__(self, start: int, *, chained: bool) -> None:
        self.start = self.end = start
        self.chained = chained
        self.type = ""
        self.message = ""
        self.data = self.checkpoint = False

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


def _tracebacks(lines: Sequence[str]) -> list[_Traceback]:
    found: list[_Traceback] = []
    chained = False
    current: _Traceback | None = None
    for at, line in enumerate(lines):
        if _TRACEBACK.search(line):
            # a nested one is part of the message of the exception just before it
            current = None if _NESTED.search(line) and found else _Traceback(at, chained=chained)
            chained = False
        elif current is not None:
            current.end = at
            if line.startswith((" ", "\t")) or not line:
                current.data = current.data or bool(DATA_FRAMES.search(line.rstrip()))
                current.checkpoint = current.checkpoint or bool(CHECKPOINT_FRAMES.search(line))
                continue
            m = _RAISED.match(line)
            if m:
                current.type, current.message = m[1].rsplit(".", 1)[-1], (m[2] or "").strip()
                found.append(current)
            current = None
        elif _CHAIN.search(line):
            chained = True
    return found


def _root(found: Sequence[_Traceback]) -> _Traceback | None:
    """The first of the last chain; launchers' wrappers are passed over."""
    own = [t for t in found if t.type not in _WRAPPERS]
    if not own:
        return None
    at = len(own) - 1
    while at > 0 and own[at].chained:
        at -= 1
    return own[at]


def _match(text: str) -> Pattern | None:
    return next((p for p in PATTERNS if p.regex.search(text)), None)


def timeout_class(line: str) -> str:
    """Which side of a collective time-out a watchdog's line speaks for."""
    m = TIMEOUT_RAN.search(line)
    late = m is not None and int(m[2]) > CULPRIT_FACTOR * max(1, int(m[1]))
    return "nccl_timeout_culprit" if late else "nccl_timeout_victim"


def _words(pattern: Pattern, line: str, exception: str = "") -> LastWords:
    class_, echo = pattern.class_, pattern.echo
    if pattern.key == "collective_timeout":
        class_ = timeout_class(line)
        echo = class_ == "nccl_timeout_victim"
    # an echo's exception is not the program's own: it must not count as a failure that came back
    own = "" if echo else exception
    return LastWords(key=pattern.key, error_class=class_, echo=echo, exception=own, line=line[:LINE_CHARS])


def _from_traceback(trace: _Traceback) -> LastWords:
    text = trace.text
    exception = normalise_exception(text)
    pattern = _match(text[:LINE_CHARS])
    if pattern is not None:
        return _words(pattern, text, exception)
    if trace.checkpoint:
        key, class_ = "checkpoint_error", "app_exception"
    elif trace.data or DATA_WORDS.search(text):
        key, class_ = "data_error", "data_error"
    else:
        key, class_ = "python_exception", "app_exception"
    return LastWords(key=key, error_class=class_, exception=exception, line=text[:LINE_CHARS])


def _lines_of(text: str) -> list[str]:
    return [
        _PREFIX.sub("", line[:LINE_CHARS], count=1) if line[:1] in "[rdt0123456789" else line[:LINE_CHARS]
        for line in text.split("\n")
    ]


def _telling(lines: Sequence[str]) -> Iterator[tuple[Pattern, str]]:
    """Lines near the end that match a pattern, last first. Warnings and frames of tracebacks tell nothing."""
    for line in reversed(lines[-NEAR_LINES:]):
        if not line or line.startswith((" ", "\t")) or "Warning" in line[:200]:
            continue
        pattern = _match(line)
        if pattern is not None:
            yield pattern, line


def read_last_words(text: str) -> LastWords:
    """What ended this rank, by the tail of its output.

    A rerun's verdict outranks all else, then the root of the last traceback unless that is an echo, then a fatal
    line of a library; an echo is the answer only where nothing of the rank's own is there.
    """
    lines = _lines_of(clean(text))
    told = list(_telling(lines))
    rerun = [t for t in told if t[0].key.startswith("rerun_")]
    if rerun:
        # the answer of a second rerun before that of the first, and both before the question
        pattern, line = min(rerun, key=lambda t: PATTERNS.index(t[0]))
        return _words(pattern, line)
    root = _root(_tracebacks(lines))
    words = _from_traceback(root) if root is not None else None
    if words is not None and not words.echo:
        return words
    # the earliest of the rank's own lines: what follows is usually its consequence
    own = [(p, line) for p, line in told if not _words(p, line).echo]
    if own:
        pattern, line = own[-1]
        return _words(pattern, line, words.exception if words else "")
    if words is not None:
        return words
    if told:
        pattern, line = told[-1]
        return _words(pattern, line)
    return LastWords()
