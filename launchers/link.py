"""The agent's end of the agent link: find who supervises, connect, beat, pass signals on, take commands.

    epochs/<n> --highest--> seat --connect, prove--> Hello -> Welcome -> beats, signals -> | supervisor
                             ^                                 pulses, commands  <-------- |
                             '---- a higher epoch appears, or the connection ends, or no pulse for lease_s

It never ends by itself: without a supervisor it looks for one (0.2 to 2 s between tries) while ranks train on. It
follows the highest epoch it has seen and nothing below. Signals stay here until a supervisor says that they are in
the log; a command that comes again is answered again and not carried out again. The shared file system is read in a
thread, so that a hanging one stops neither beats nor the care for ranks.

`lease_age_s` is what election.py goes by.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast

import msgspec

from outlast.launchers.answers import Answers, Key
from outlast.launchers.aside import Aside
from outlast.launchers.outbox import Outbox
from outlast.reliability.fence import FenceError, highest
from outlast.reliability.frames import NONCE_BYTES, AgentSide, FrameError
from outlast.reliability.model import JobId, Node, Signal
from outlast.reliability.rundir import RunDir
from outlast.reliability.wire import (
    Beat,
    CollectStacks,
    Done,
    FromAgent,
    FromSupervisor,
    Gate,
    Hello,
    Leave,
    Pulse,
    RankStack,
    Seat,
    StartRanks,
    StopRanks,
    Welcome,
)

Command = Gate | StartRanks | StopRanks | CollectStacks | Leave
Say = Callable[[RankStack], None]
Handler = Callable[[Command, Say], Awaitable[Done]]
"""Carries a command out. Runs beside others; what it says goes out before its Done."""

MAX_STEPS: Final = 2_000
"""Steps of one beat; the rest follows when these are in the log."""
_TRY_S: Final = (0.2, 2.0)
_CONNECT_S: Final = 5.0
_FILES_S: Final = 5.0
_FULL_BYTES: Final = 1024 * 1024
"""What may lie unsent before beats are left out."""


class LinkError(Exception):
    """The supervisor at the other end is not one to follow, or has fallen silent; the connection is to be closed."""


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """Who this agent is."""

    node: Node
    job: JobId
    incarnation: str
    """New for each start of an agent process."""
    address: str
    """Where other nodes of the run reach this node."""


@dataclass
class _Wire:
    """One connection after its handshake."""

    side: AgentSide
    writer: asyncio.StreamWriter
    epoch: int
    welcomed: bool = False

    @property
    def full(self) -> bool:
        return self.writer.transport.get_write_buffer_size() > _FULL_BYTES

    def send(self, message: FromAgent) -> None:
        # what is not sent on a connection that is ending will be sent on the next one
        if self.side.ready and not self.writer.is_closing():
            self.writer.write(self.side.send(message))


class AgentLink:
    def __init__(
        self,
        *,
        run_dir: RunDir,
        secret: bytes,
        me: Introduction,
        beat: Callable[[], Beat],
        handle: Handler,
        note: Callable[[str], None],
        lease_s: float = 20.0,
        beat_s: float = 1.0,
        poll_s: float = 0.5,
        mono_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`beat` gives the present state, `note` takes lines for whoever reads the agent's log."""
        self.epoch = 0
        """The highest epoch seen, by file or by word."""
        self.roster: tuple[Node, ...] = ()
        self.logged = (0, 0)
        """From the last pulse: attempt, and up to which of its train_steps beats need to bring none."""
        self._run_dir, self._secret, self._me = run_dir, secret, me
        self._beat, self._handle, self._note = beat, handle, note
        self._lease_s, self._beat_s, self._poll_s, self._mono_s = lease_s, beat_s, poll_s, mono_s
        self._lease_mono_s = mono_s()
        self._outbox = Outbox(me.node)
        self._answers = Answers()
        self._aside = Aside()
        self._seat: Seat | None = None
        self._moved = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._wire: _Wire | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._noted = ""
        self._welcomed = False

    # ------------------------------------------------------------ for the agent

    @property
    def connected(self) -> bool:
        """A supervisor has welcomed this agent on the present connection."""
        return self._wire is not None and self._wire.welcomed

    @property
    def lease_age_s(self) -> float:
        """Since the last pulse of the highest epoch, since that epoch was first seen, or since the beginning."""
        return self._mono_s() - self._lease_mono_s

    @property
    def unlogged(self) -> int:
        """Signals that no supervisor has logged yet."""
        return len(self._outbox)

    def report(self, signal: Signal) -> None:
        """Pass a signal on, now or as soon as there is a supervisor."""
        self._outbox.add(signal)
        self._flush()

    def beat_now(self) -> None:
        """Do not wait for the next second: something has changed."""
        self._beat_now.set()

    async def run(self) -> None:
        """Until cancelled."""
        watching = asyncio.create_task(self._watch_seats())
        try:
            await self._follow()
        finally:
            for task in (watching, *self._tasks):
                task.cancel()
            await asyncio.gather(watching, *self._tasks, return_exceptions=True)

    async def flush(self, timeout_s: float) -> bool:
        """Before leaving (not inside a handler): wait until signals are logged, commands answered, bytes written.

        False after the time-out.
        """
        deadline_s = self._mono_s() + timeout_s
        while (
            self._outbox
            or self._tasks
            or (self._wire is not None and self._wire.writer.transport.get_write_buffer_size())
        ):
            if self._mono_s() >= deadline_s:
                return False
            await asyncio.sleep(0.02)
        return True

    # ------------------------------------------------------------ whom to follow

    async def _watch_seats(self) -> None:
        while True:
            silent = self.lease_age_s > self._lease_s
            if silent or not self.connected:
                await self._look()
            if silent and self._wire is not None and self.lease_age_s > self._lease_s:
                self._say(f"no pulse from epoch {self._wire.epoch} for {self.lease_age_s:.1f} s: connecting anew")
                self._wire.writer.transport.abort()
            await asyncio.sleep(self._poll_s)

    async def _look(self) -> None:
        try:
            seat = await self._aside.call(lambda: highest(self._run_dir), timeout_s=_FILES_S)
        except (FenceError, TimeoutError) as error:
            self._say(f"{self._run_dir.epochs}: cannot see who supervises: {error}")
            return
        if seat is None or seat.epoch < self.epoch or seat == self._seat:
            return
        self._seat = seat
        if seat.epoch > self.epoch:
            self.epoch = seat.epoch
            self._lease_mono_s = self._mono_s()
        self._moved.set()

    async def _follow(self) -> None:
        wait_s = _TRY_S[0]
        while True:
            if self._seat is None:
                await self._moved.wait()
            self._moved.clear()
            if await self._meet(cast(Seat, self._seat)):
                wait_s = _TRY_S[0]
            # a crowd that lost its supervisor together must not come back in step
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s * random.uniform(0.5, 1.0)):
                    await self._moved.wait()
            wait_s = min(2 * wait_s, _TRY_S[1])

    async def _meet(self, seat: Seat) -> bool:
        """One connection from beginning to end, or until another seat is to be followed; True where it was welcomed."""
        meeting = asyncio.create_task(self._talk(seat))
        moved = asyncio.create_task(self._moved.wait())
        self._welcomed = False
        try:
            await asyncio.wait({meeting, moved}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (meeting, moved):
                task.cancel()
            await asyncio.wait({meeting, moved})
        if not meeting.cancelled() and (error := meeting.exception()) is not None:
            if not isinstance(error, OSError | FrameError | LinkError | EOFError):
                raise error
            self._say(f"supervisor of epoch {seat.epoch} at {seat.host}:{seat.port}: {error or type(error).__name__}")
        return self._welcomed

    # ------------------------------------------------------------ one connection

    async def _talk(self, seat: Seat) -> None:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(seat.host, seat.port)
        beats: asyncio.Task[None] | None = None
        try:
            nonce = os.urandom(NONCE_BYTES)
            side = AgentSide(secret=self._secret, node=self._me.node, epoch=seat.epoch, nonce=nonce)
            async with asyncio.timeout(_CONNECT_S):
                await _prove(side, reader, writer)
            wire = self._wire = _Wire(side, writer, seat.epoch)
            wire.send(self._hello())
            beats = asyncio.create_task(self._beat_forever(wire))
            hears = asyncio.create_task(self._hear(wire, reader))
            try:
                await asyncio.wait({beats, hears}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                hears.cancel()
                beats.cancel()
                ended = await asyncio.gather(hears, beats, return_exceptions=True)
            for result in ended:
                if isinstance(result, Exception):
                    raise result
        finally:
            self._wire = None
            writer.transport.abort()

    def _hello(self) -> Hello:
        return Hello(
            node=self._me.node,
            job=self._me.job,
            incarnation=self._me.incarnation,
            pid=os.getpid(),
            address=self._me.address,
            attempt=self._beat().attempt,
            highest_epoch=self.epoch,
        )

    async def _beat_forever(self, wire: _Wire) -> None:
        while True:
            self._beat_now.clear()
            if wire.welcomed and not wire.full:
                self._send_beat(wire)
                self._flush()
            with suppress(TimeoutError):
                # not wait_for, which forgets a cancellation that comes together with the event (Python 3.11)
                async with asyncio.timeout(self._beat_s):
                    await self._beat_now.wait()

    def _send_beat(self, wire: _Wire) -> None:
        beat = self._beat()
        if len(beat.steps) > MAX_STEPS:
            beat = msgspec.structs.replace(beat, steps=beat.steps[:MAX_STEPS])
        wire.send(beat)

    async def _hear(self, wire: _Wire, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65_536):
            try:
                messages = wire.side.receive(data)
            except FrameError as error:
                for message in cast("tuple[FromSupervisor, ...]", error.before):
                    self._take(wire, message)
                raise
            for message in messages:
                self._take(wire, message)
        wire.side.end()
        raise LinkError("the supervisor closed the connection")

    def _take(self, wire: _Wire, message: FromSupervisor) -> None:
        match message:
            case Welcome(epoch=epoch, heard=heard):
                self._check(wire, "Welcome", epoch)
                wire.welcomed = self._welcomed = True
                self._noted = ""
                self._lease_mono_s = self._mono_s()
                self._outbox.reconnect(heard)
                self._flush()
                self.beat_now()
            case Pulse(epoch=epoch):
                self._check(wire, "Pulse", epoch)
                self._lease_mono_s = self._mono_s()
                self._outbox.ack(message.heard)
                self.logged = (message.attempt, message.steps_through)
                # () : as before, see reliability/switchboard.py
                self.roster = message.roster or self.roster
                self._flush()
            case _:
                self._check(wire, type(message).__name__, wire.epoch)
                self._command(wire, message)

    def _check(self, wire: _Wire, what: str, epoch: int) -> None:
        if epoch != wire.epoch or epoch < self.epoch:
            raise LinkError(f"found {what} of epoch {epoch}, expected {max(wire.epoch, self.epoch)}: it is fenced")

    def _flush(self) -> None:
        if self._wire is None or not self._wire.welcomed or self._wire.full:
            return
        for heard in self._outbox.take():
            self._wire.send(heard)

    # ------------------------------------------------------------ commands

    def _command(self, wire: _Wire, message: Command) -> None:
        key = (wire.epoch, message.command)
        if not self._answers.begin(key):
            for answer in self._answers.said(key):
                wire.send(answer)
            return
        if isinstance(message, StartRanks) and message.epoch != wire.epoch:
            why = f"found StartRanks of epoch {message.epoch}, expected {wire.epoch}"
            self._answer(key, Done(command=message.command, ok=False, why=why))
            return
        task = asyncio.create_task(self._carry_out(key, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, key: Key, message: Command) -> None:
        try:
            done = await self._handle(message, lambda stack: self._answer(key, stack))
        except Exception as error:  # noqa: BLE001  an agent that cannot do a thing says so, and stays
            done = Done(command=message.command, ok=False, why=f"{type(error).__name__}: {error}"[:2_000])
        self._answer(key, done)

    def _answer(self, key: Key, answer: RankStack | Done) -> None:
        said = self._answers.add(key, answer)
        if self._wire is not None and self._wire.welcomed and self._wire.epoch == key[0]:
            if isinstance(answer, Done):
                self._send_beat(self._wire)  # first: after a stop nobody asks for the last train_steps any more
            self._wire.send(said)

    def _say(self, text: str) -> None:
        """A line for the agent's log, once while the same thing goes on."""
        if text != self._noted:
            self._noted = text
            self._note(f"agent link: {text}")


async def _prove(side: AgentSide, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(side.outgoing())
        if side.ready:
            return
        data = await reader.read(65_536)
        if not data:
            side.end()
        side.receive(data)
