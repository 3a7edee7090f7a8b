"""What the switchboard hands to the supervisor: small events, in order, in a queue that cannot grow without end.

A beat is a state, not an event: while one of a node waits to be read, a newer one takes its place. Everything else
is kept; past `HIGH` waiting events the queue says so, and the switchboard stops reading from agents until it has
drained. Nothing is lost by that: signals and steps stay with the agents until they are in the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outlast.reliability import wire
from outlast.reliability.model import Node, Signal

HIGH: Final = 20_000
LOW: Final = 5_000


@dataclass(frozen=True, slots=True)
class Joined:
    """An agent connected: for the first time, again, or as a new process (another incarnation)."""

    hello: wire.Hello


@dataclass(frozen=True, slots=True)
class Beaten:
    node: Node
    beat: wire.Beat


@dataclass(frozen=True, slots=True)
class Heard:
    """Each number of an incarnation comes once. Call `Switchboard.ack` when it is in the log."""

    node: Node
    incarnation: str
    number: int
    signal: Signal


@dataclass(frozen=True, slots=True)
class Stacked:
    """May come twice around a reconnect."""

    node: Node
    stack: wire.RankStack


@dataclass(frozen=True, slots=True)
class Done:
    """Once for each command, unless it was withdrawn. `incarnation`: of the agent process that it was sent to."""

    node: Node
    incarnation: str
    done: wire.Done


@dataclass(frozen=True, slots=True)
class Gone:
    """The connection ended. The agent may be back in a moment: this is not yet a lost agent."""

    node: Node
    why: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something on the link that a person may want to know: garbage, a wrong secret. At most one each 10 s a kind."""

    text: str


Event = Joined | Beaten | Heard | Stacked | Done | Gone | Noticed


class Inbox(asyncio.Queue[Event]):
    """An unbounded asyncio.Queue to its reader; to its writer one that says when to stop reading."""

    def __init__(self, on_low: Callable[[], None]) -> None:
        super().__init__()
        self._on_low = on_low
        self._beats: dict[Node, wire.Beat] = {}
        self._was_high = False

    @property
    def high(self) -> bool:
        """Too much waits: stop reading until on_low is called."""
        self._was_high = self._was_high or self.qsize() > HIGH
        return self._was_high

    def offer(self, event: Event) -> None:
        if isinstance(event, Beaten):
            waits = event.node in self._beats
            self._beats[event.node] = event.beat
            if waits:
                return
        self.put_nowait(event)

    def _init(self, maxsize: int) -> None:
        self._queue: deque[Event] = deque()

    def _put(self, item: Event) -> None:
        self._queue.append(item)

    def _get(self) -> Event:
        event = self._queue.popleft()
        if isinstance(event, Beaten):
            event = Beaten(event.node, self._beats.pop(event.node))
        if self._was_high and len(self._queue) < LOW:
            self._was_high = False
            self._on_low()
        return event
