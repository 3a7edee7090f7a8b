"""Commands that an agent has begun, by epoch and number, and what it answered. Pure.

A supervisor sends a command again after a reconnect. It is the same command: what is running goes on, what is done
is answered again in the same words. Another epoch's numbers are other commands.
"""

from __future__ import annotations

from typing import Final

import msgspec

from outlast.reliability.wire import Done, RankStack

KEPT: Final = 128
"""Twice what a supervisor may have unanswered on one node."""

MAX_TEXT: Final = 100_000

Key = tuple[int, int]
Answer = RankStack | Done


class Answers:
    def __init__(self) -> None:
        self._said: dict[Key, list[Answer]] = {}

    def begin(self, key: Key) -> bool:
        """True where this command is new and is to be carried out now."""
        if key in self._said:
            return False
        self._said[key] = []
        finished = [k for k, said in self._said.items() if said and isinstance(said[-1], Done)]
        for old in finished[: max(0, len(self._said) - KEPT)]:
            del self._said[old]
        return True

    def add(self, key: Key, answer: Answer) -> Answer:
        """Remember what is answered; as it is to be sent, bounded and with nothing in it that cannot be encoded."""
        if isinstance(answer, RankStack):
            answer = msgspec.structs.replace(answer, stack=_printable(answer.stack))
        else:
            answer = msgspec.structs.replace(answer, why=_printable(answer.why))
        self._said.setdefault(key, []).append(answer)
        return answer

    def said(self, key: Key) -> tuple[Answer, ...]:
        """All that was answered so far, in order."""
        return tuple(self._said.get(key, ()))


def _printable(text: str) -> str:
    # file names and process output may hold lone surrogates, which no encoder takes
    return text[:MAX_TEXT].encode("utf-8", "backslashreplace").decode("utf-8")
