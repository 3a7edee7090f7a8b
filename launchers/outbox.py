"""Signals on their way to the supervisor: numbered, kept until they are in the log, bounded. Pure.

A supervisor may be away for long while a kernel log repeats itself. When the box is full, repeats of what is already
in it go first, then what decides least, oldest first; how many went is itself a signal (SourceBlind), never silence.
The first line of a storm stays: the earliest primary event is the one that tells whose fault it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from outlast.reliability import model as m
from outlast.reliability.model import Node, Signal, SourceBlind, XidSeen
from outlast.reliability.wire import Heard

LIMIT: Final = 1_000
MAX_SIGNAL_BYTES: Final = 256 * 1024
SOURCE: Final = "agent_link"
_CRITICAL: Final = (m.RankExited, m.NodeNotClear, m.GateSeen, m.XidSeen, m.KernelSeen, m.GpuChanged)
_ENCODER: Final = msgspec.msgpack.Encoder()


@dataclass
class _Entry:
    signal: Signal
    sent: bool = False
    """On the present connection."""
    ever_sent: bool = False


class Outbox:
    def __init__(self, node: Node, *, limit: int = LIMIT) -> None:
        self._node, self._limit = node, limit
        self._entries: dict[int, _Entry] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, signal: Signal) -> int:
        """Keep it; its number."""
        if why := _unfit(signal):
            return self._lose(signal.at_s, 1, why)
        if len(self._entries) >= self._limit:
            self._thin(signal.at_s)
        return self._put(signal)

    def take(self) -> list[Heard]:
        """What was not sent on this connection yet, in order; from now on it counts as sent."""
        fresh = [(number, entry) for number, entry in self._entries.items() if not entry.sent]
        for _, entry in fresh:
            entry.sent = entry.ever_sent = True
        return [Heard(number=number, signal=entry.signal) for number, entry in fresh]

    def ack(self, number: int) -> None:
        """Up to this number all is in the log."""
        for done in [n for n in self._entries if n <= number]:
            del self._entries[done]

    def reconnect(self, heard: int) -> None:
        """A new connection, whose supervisor has logged up to `heard`: the rest is to be sent again."""
        self.ack(heard)
        for entry in self._entries.values():
            entry.sent = False

    def _put(self, signal: Signal) -> int:
        self._last += 1
        self._entries[self._last] = _Entry(signal)
        return self._last

    def _lose(self, at_s: float, lost: int, why: str) -> int:
        """Tell that signals were lost, together with what was told before and has not left yet."""
        for number, entry in tuple(self._entries.items()):
            told = entry.signal
            if isinstance(told, SourceBlind) and told.source == SOURCE and told.why == why and not entry.ever_sent:
                lost += told.lost
                del self._entries[number]
        return self._put(SourceBlind(node=self._node, at_s=at_s, source=SOURCE, why=why, lost=lost))

    def _thin(self, at_s: float) -> None:
        """Make room for a quarter, so that a storm does not pay for a search with each line."""
        surplus = len(self._entries) - self._limit * 3 // 4
        lost = 0
        for goes in (_repeats(self._entries), lambda e: not isinstance(e.signal, _CRITICAL), lambda _: True):
            for number, entry in tuple(self._entries.items()):
                ours = isinstance(entry.signal, SourceBlind) and entry.signal.source == SOURCE
                if lost < surplus and not ours and goes(entry):
                    del self._entries[number]
                    lost += 1
        self._lose(at_s, lost, "the supervisor was away or slow and the signals kept for it became too many")


def _repeats(entries: dict[int, _Entry]) -> Callable[[_Entry], bool]:
    """Whether an entry says again what an earlier one already says."""
    first: dict[tuple[object, ...], int] = {}
    again: set[int] = set()
    for entry in entries.values():
        key: tuple[object, ...] = ()
        match entry.signal:
            case XidSeen(code=code, gpu=gpu):
                key = (code, gpu)
            case m.GpuChanged(source=source, gpu=gpu, field=field, now=now):
                key = (source, gpu, field, now > 0)
        if key and first.setdefault(key, id(entry)) != id(entry):
            again.add(id(entry))
    return lambda entry: id(entry) in again


def _unfit(signal: Signal) -> str:
    """Why a signal cannot be sent at all; '' where it can."""
    kind = type(signal).__name__
    try:
        size_bytes = len(_ENCODER.encode(signal))
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        return f"a {kind} could not be encoded: {str(error)[:200]}"
    if size_bytes > MAX_SIGNAL_BYTES:
        return f"a {kind} was too large to send (limit {MAX_SIGNAL_BYTES} bytes)"
    return ""
