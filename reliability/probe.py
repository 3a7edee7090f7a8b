"""Is a supervisor alive behind this seat? Asked by handshake, since a stopped process still has an open port."""

from __future__ import annotations

import asyncio
import os

from outlast.reliability.frames import NONCE_BYTES, AgentSide, FrameError
from outlast.reliability.model import Node
from outlast.reliability.wire import Seat

PROBE = Node("probe")


async def answers(seat: Seat, secret: bytes, *, timeout_s: float = 3.0) -> bool:
    """Whether the seat's holder proves the run's secret within the time."""
    try:
        return await asyncio.wait_for(_prove(seat, secret), timeout_s)
    except (OSError, TimeoutError, FrameError, EOFError):
        return False


async def _prove(seat: Seat, secret: bytes) -> bool:
    reader, writer = await asyncio.open_connection(seat.host, seat.port)
    try:
        side = AgentSide(secret=secret, node=PROBE, epoch=seat.epoch, nonce=os.urandom(NONCE_BYTES))
        writer.write(side.outgoing())
        await writer.drain()
        while not side.ready:
            data = await reader.read(4096)
            if not data:
                return False
            side.receive(data)
        return True
    finally:
        writer.close()
