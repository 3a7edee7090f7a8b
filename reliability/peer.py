"""One connection to the switchboard: bytes to messages, a deadline for the handshake, a bound on what lies unsent.

It judges nothing but the frames. Whatever is wrong on this connection ends this connection and no other.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, cast

from outlast.reliability.frames import FrameError, SupervisorSide
from outlast.reliability.model import Node
from outlast.reliability.wire import FromAgent, FromSupervisor, Hello

MAX_UNSENT_BYTES: Final = 8 * 1024 * 1024
"""Above one largest frame; an agent that reads slower than this fills is dropped and may come back."""


class Owner(Protocol):
    """What the switchboard does for its connections."""

    def admits(self, peer: Peer) -> bool: ...

    def greeted(self, peer: Peer, hello: Hello) -> None: ...

    def spoke(self, peer: Peer, message: FromAgent) -> None: ...

    def ended(self, peer: Peer, why: str) -> None: ...

    def odd(self, kind: str, text: str) -> None: ...


class Peer(asyncio.Protocol):
    def __init__(self, owner: Owner, side: SupervisorSide, deadline_s: float) -> None:
        self._owner, self._side, self._deadline_s = owner, side, deadline_s
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._why = ""
        self.greeted = False
        self.stuck = False
        """More lies unsent than the socket takes: do not add what can wait."""
        self.where = "?"
        self.begun_s = 0.0

    @property
    def node(self) -> Node:
        """Who it is; proven once `greeted`."""
        return self._side.node

    def send(self, message: FromSupervisor) -> None:
        """Write one message; nothing on a connection that is ending. FrameError where it is too large for a frame."""
        if self._transport is None or self._transport.is_closing() or not self._side.ready:
            return
        self._transport.write(self._side.send(message))
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.drop("it does not read what is sent to it")

    def drop(self, why: str) -> None:
        """End the connection now; `ended` follows."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """End the connection when all is written."""
        self._why = self._why or "the switchboard was closed"
        if self._transport is not None:
            self._transport.close()

    def rest(self, quiet: bool) -> None:
        """Stop or go on reading."""
        if self._transport is None:
            return
        if quiet:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # ------------------------------------------------------------ called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.where = f"{name[0]}:{name[1]}" if name else "?"
        loop = asyncio.get_running_loop()
        self.begun_s = loop.time()
        if not self._owner.admits(self):
            self.drop("too many connections that have proven nothing")
            return
        self._timer = loop.call_later(self._deadline_s, self._late)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._side.receive(data)
        except FrameError as error:
            # what was right before the fault still counts
            for message in cast("tuple[FromAgent, ...]", error.before):
                self._take(message)
            self._owner.odd(error.where, f"connection from {self._name()}: {error}")
            self.drop(str(error))
            return
        if self._transport is not None and (answer := self._side.outgoing()):
            self._transport.write(answer)
        for message in messages:
            self._take(message)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._owner.ended(self, self._why or (str(exc) if exc is not None else "the agent closed the connection"))

    def pause_writing(self) -> None:
        self.stuck = True

    def resume_writing(self) -> None:
        self.stuck = False

    # ------------------------------------------------------------ inside

    def _take(self, message: FromAgent) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self.greeted:
            self._owner.spoke(self, message)
        elif isinstance(message, Hello):
            self.greeted = True
            if self._timer is not None:
                self._timer.cancel()
            self._owner.greeted(self, message)
        else:
            self._owner.odd("no hello", f"{self._name()}: found {type(message).__name__}, expected Hello")
            self.drop("it did not begin with Hello")

    def _late(self) -> None:
        self._owner.odd("late", f"connection from {self._name()}: no handshake within {self._deadline_s:g} s")
        self.drop("no handshake in time")

    def _name(self) -> str:
        return f"{self.where} ({self.node})" if self._side.ready else self.where
