"""The supervisor's end of the agent link: listens, proves agents, and keeps one session a node.

    agents ==TCP==> Peer (frames) -> Switchboard (sessions) -> events: Inbox -> supervisor
    agents <======= Welcome, Pulse each second, commands <---- command, ack

It decides nothing: a connection that ended is `Gone`, and whether the agent is lost is the supervisor's to say. One
bad peer disturbs no other. Commands stay with a node until it answers Done or they are withdrawn, and are sent again
after a reconnect, since an agent takes a repeated command for the same one; an agent that was started anew does not
inherit its predecessor's commands: each of those is answered here with a Done that says so.

A pulse names the roster only when it has changed since the last one on that connection; () means: as before. 2,048
names to 2,048 agents each second would cost more than everything else together (launchers/link.py puts it back).
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from outlast.reliability import wire
from outlast.reliability.frames import NONCE_BYTES, FrameError, SupervisorSide
from outlast.reliability.inbox import Beaten, Done, Event, Gone, Heard, Inbox, Joined, Noticed, Stacked
from outlast.reliability.model import JobId, Node
from outlast.reliability.peer import Peer
from outlast.reliability.wire import Hello

__all__ = ["Beaten", "Done", "Gone", "Heard", "Hello", "Joined", "Noticed", "Session", "Stacked", "Switchboard"]

NOBODY: Final = Node("")
MAX_UNPROVEN: Final = 64
MAX_COMMANDS: Final = 64
"""Unanswered commands a node; more are refused."""
_WORTH_WAITING_S: Final = 1.0
_NOTE_EACH_S: Final = 10.0
_SLICE: Final = 32
"""Pulses written before others get their turn on the loop."""


@dataclass(kw_only=True)
class Session:
    """One node's agent as the switchboard knows it. For others to read only."""

    node: Node
    job: JobId
    incarnation: str
    address: str
    connected: bool = False
    beat: wire.Beat | None = None
    heard_mono_s: float = 0.0
    """When it last said anything, by this host's monotonic clock."""
    received: int = 0
    """Highest signal number that was handed on."""
    acked: int = 0
    """Highest signal number that is in the log."""


@dataclass
class _Waiting:
    message: wire.FromSupervisor
    sent_to: str = ""
    """The incarnation that it was sent to; '' not sent yet."""


@dataclass
class _Line:
    """What belongs to a node beyond its session: the connection, unanswered commands, processes that are over."""

    peer: Peer | None = None
    roster: tuple[Node, ...] = ()
    """The roster that was last sent on this connection."""
    waiting: dict[int, _Waiting] = field(default_factory=dict)
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=16))


class Switchboard:
    def __init__(
        self,
        *,
        secret: bytes,
        pulse_s: float = 1.0,
        silent_s: float = 15.0,
        handshake_s: float = 5.0,
        mono_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`silent_s`: a connection on which nothing was heard for so long is closed, and the node is Gone."""
        self.events = Inbox(self._read_on)
        self.counts: Counter[str] = Counter()
        """Faults of peers by kind, since the beginning."""
        self._secret, self._pulse_s, self._silent_s = secret, pulse_s, silent_s
        self._handshake_s, self._mono_s = handshake_s, mono_s
        self._epoch = 0
        self._steps = (0, 0)
        self._roster: tuple[Node, ...] | None = None
        self._connected: tuple[Node, ...] | None = None
        self._sessions: dict[Node, Session] = {}
        self._lines: dict[Node, _Line] = {}
        self._peers: set[Peer] = set()
        self._unproven: dict[Peer, None] = {}
        self._noted: dict[str, float] = {}
        self._server: asyncio.Server | None = None
        self._pulsing: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ life

    async def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Bind; nobody is answered before `serve`, since the epoch that is to be taken names this address."""
        _allow_many_files()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port, backlog=1024, start_serving=False)
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def serve(self, epoch: int) -> None:
        """Answer agents, for this epoch, until `close`."""
        if self._server is None:
            raise RuntimeError("listen first")
        self._epoch = epoch
        await self._server.start_serving()
        self._pulsing = asyncio.create_task(self._pulse_forever())

    async def close(self) -> None:
        """Write out what is queued (2 s at most) and stop listening. No events come after this."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        if self._pulsing is not None:
            self._pulsing.cancel()
            with suppress(asyncio.CancelledError):
                await self._pulsing
        for peer in tuple(self._peers):
            peer.close()
        deadline = asyncio.get_running_loop().time() + 2.0
        while self._peers and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for peer in tuple(self._peers):
            peer.drop("closed")
        await server.wait_closed()

    # ------------------------------------------------------------ for the supervisor

    def sessions(self) -> tuple[Session, ...]:
        """Every node that ever joined this supervisor, in the order of joining."""
        return tuple(self._sessions.values())

    def session(self, node: Node) -> Session | None:
        return self._sessions.get(node)

    def command(self, node: Node, message: wire.FromSupervisor) -> bool:
        """Send now or as soon as the node is there. False where too many commands wait for it already.

        `message.command` is unique among this epoch's commands; the same number again is the same command.
        """
        if isinstance(message, wire.Welcome | wire.Pulse):
            raise ValueError(f"found {type(message).__name__}, expected a command")
        line = self._line(node)
        if message.command in line.waiting:
            return True
        if len(line.waiting) >= MAX_COMMANDS:
            return False
        line.waiting[message.command] = _Waiting(message)
        self._transmit(node, line)
        return True

    def withdraw(self, node: Node, command: int) -> None:
        """Do not send it again, and do not hand on its answer. What the agent already began goes on."""
        self._line(node).waiting.pop(command, None)

    def ack(self, node: Node, incarnation: str, number: int) -> None:
        """Signals of this agent process up to this number are in the log: it may forget them."""
        session = self._sessions.get(node)
        if session is not None and session.incarnation == incarnation:
            session.acked = max(session.acked, min(number, session.received))

    def set_roster(self, nodes: Sequence[Node]) -> None:
        """All agents that the supervisor counts, in index order. Before the first call: who is connected."""
        roster = tuple(nodes)
        if roster != self._roster:
            self._roster = roster

    def steps_through(self, attempt: int, train_step: int) -> None:
        """Steps of this attempt up to this one are in the log: agents send what is newer."""
        self._steps = (attempt, train_step)

    async def emptied(self, timeout_s: float, *, but: Node = NOBODY) -> bool:
        """Wait until no agent but this one is connected; False where some still are after the time-out."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while any(s.connected and s.node != but for s in self._sessions.values()):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    # ------------------------------------------------------------ for peers (peer.Owner)

    def admits(self, peer: Peer) -> bool:
        if self._server is None:
            return False
        if len(self._unproven) >= MAX_UNPROVEN:
            # an honest handshake takes milliseconds: who has been at it for long makes room
            oldest = next(iter(self._unproven))
            if peer.begun_s - oldest.begun_s < _WORTH_WAITING_S:
                self.odd("crowd", f"{MAX_UNPROVEN} connections have proven nothing yet; {peer.where} was turned away")
                return False
            oldest.drop("made room for a newer connection")
            self._unproven.pop(oldest, None)
        self._peers.add(peer)
        self._unproven[peer] = None
        return True

    def greeted(self, peer: Peer, hello: Hello) -> None:
        self._unproven.pop(peer, None)
        line = self._line(hello.node)
        if why := self._unwelcome(peer, hello, line):
            self.odd("unwelcome", f"agent of {hello.node} at {peer.where}: {why}")
            peer.drop(why)
            return
        session = self._seat(hello, line)
        if line.peer is not None:
            line.peer.drop("the agent connected anew")
        session.connected, session.address, session.heard_mono_s = True, hello.address, self._mono_s()
        self._connected = None
        line.peer, line.roster = peer, ()
        self._hand_on(Joined(hello))
        peer.send(wire.Welcome(epoch=self._epoch, heard=session.acked))
        self._pulse(session, line, peer)
        for waiting in line.waiting.values():
            waiting.sent_to = ""
        self._transmit(hello.node, line)

    def spoke(self, peer: Peer, message: wire.FromAgent) -> None:
        session, line = self._sessions[peer.node], self._lines[peer.node]
        session.heard_mono_s = self._mono_s()
        match message:
            case wire.Beat():
                session.beat = message
                self._hand_on(Beaten(peer.node, message))
            case wire.Heard(number=number, signal=signal):
                if number > session.received:
                    session.received = number
                    self._hand_on(Heard(peer.node, session.incarnation, number, signal))
            case wire.RankStack():
                self._hand_on(Stacked(peer.node, message))
            case wire.Done(command=command):
                if line.waiting.pop(command, None) is not None:
                    self._hand_on(Done(peer.node, session.incarnation, message))
            case wire.Hello():
                peer.drop("it said Hello twice")

    def ended(self, peer: Peer, why: str) -> None:
        self._peers.discard(peer)
        self._unproven.pop(peer, None)
        line = self._lines.get(peer.node) if peer.greeted else None
        if line is not None and line.peer is peer:
            line.peer = None
            self._sessions[peer.node].connected = False
            self._connected = None
            self._hand_on(Gone(peer.node, why))

    def odd(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        now_s = self._mono_s()
        if now_s - self._noted.get(kind, -_NOTE_EACH_S) >= _NOTE_EACH_S:
            self._noted[kind] = now_s
            self._hand_on(Noticed(f"agent link: {text} ({self.counts[kind]} of this kind so far)"))

    # ------------------------------------------------------------ inside

    def _accept(self) -> Peer:
        side = SupervisorSide(secret=self._secret, epoch=self._epoch, nonce=os.urandom(NONCE_BYTES))
        return Peer(self, side, self._handshake_s)

    def _unwelcome(self, peer: Peer, hello: Hello, line: _Line) -> str:
        if hello.node != peer.node:
            return f"found Hello of {hello.node}, expected {peer.node}, as in the handshake"
        if hello.highest_epoch > self._epoch:
            return f"it has seen epoch {hello.highest_epoch}, this supervisor holds {self._epoch}"
        if hello.incarnation in line.retired:
            return f"agent process {hello.incarnation} was replaced by a newer one on that node"
        return ""

    def _seat(self, hello: Hello, line: _Line) -> Session:
        """The session of this agent process, new where the process is."""
        old = self._sessions.get(hello.node)
        if old is not None and old.incarnation == hello.incarnation:
            return old
        if old is not None:
            line.retired.append(old.incarnation)
            if old.connected:
                self._hand_on(Gone(hello.node, "another agent process took its place"))
            self._answer_for(old, line)
        session = Session(node=hello.node, job=hello.job, incarnation=hello.incarnation, address=hello.address)
        self._sessions[hello.node] = session
        return session

    def _answer_for(self, old: Session, line: _Line) -> None:
        for number, waiting in tuple(line.waiting.items()):
            if waiting.sent_to == old.incarnation:
                del line.waiting[number]
                why = "the agent was started anew before it answered; its ranks ended with the old one"
                done = wire.Done(command=number, ok=False, why=why)
                self._hand_on(Done(old.node, old.incarnation, done))

    def _transmit(self, node: Node, line: _Line) -> None:
        """Send what was not yet sent on this connection, in the order in which it was asked for."""
        if line.peer is None:
            return
        incarnation = self._sessions[node].incarnation
        for number, waiting in tuple(line.waiting.items()):
            if waiting.sent_to:
                continue
            try:
                line.peer.send(waiting.message)
                waiting.sent_to = incarnation
            except FrameError as error:
                del line.waiting[number]
                self._hand_on(Done(node, incarnation, wire.Done(command=number, ok=False, why=str(error))))

    def _line(self, node: Node) -> _Line:
        line = self._lines.get(node)
        if line is None:
            line = self._lines[node] = _Line()
        return line

    def _hand_on(self, event: Event) -> None:
        if self._server is None:
            return
        self.events.offer(event)
        if self.events.high:
            for peer in self._peers:
                peer.rest(True)

    def _read_on(self) -> None:
        for peer in self._peers:
            peer.rest(False)

    async def _pulse_forever(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            for i, session in enumerate(tuple(self._sessions.values())):
                line = self._lines[session.node]
                if line.peer is not None:
                    self._tend(session, line, line.peer)
                if i % _SLICE == _SLICE - 1:
                    await asyncio.sleep(0)
            next_s = max(next_s + self._pulse_s, loop.time())
            await asyncio.sleep(next_s - loop.time())

    def _tend(self, session: Session, line: _Line, peer: Peer) -> None:
        silent_s = self._mono_s() - session.heard_mono_s
        if silent_s > self._silent_s and not self.events.high:
            peer.drop(f"nothing was heard for {silent_s:.0f} s")
        elif not peer.stuck:
            self._pulse(session, line, peer)

    def _pulse(self, session: Session, line: _Line, peer: Peer) -> None:
        roster = self._counted()
        # the same object while nothing has changed: comparing all names for each agent would be the largest cost
        news = () if line.roster is roster else roster
        line.roster = roster
        attempt, train_step = self._steps
        peer.send(
            wire.Pulse(epoch=self._epoch, heard=session.acked, attempt=attempt, steps_through=train_step, roster=news)
        )

    def _counted(self) -> tuple[Node, ...]:
        if self._roster is not None:
            return self._roster
        if self._connected is None:
            self._connected = tuple(s.node for s in self._sessions.values() if s.connected)
        return self._connected


def _allow_many_files() -> None:
    """A connection is an open file; the usual soft limit of 1,024 is below a large run's agents."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 16_384 if hard == resource.RLIM_INFINITY else min(hard, 16_384)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
