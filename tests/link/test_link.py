"""Agents and a switchboard over real sockets: no signal lost or doubled, no command carried out twice."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.launchers import link
from outlast.launchers.link import Command, Say
from outlast.reliability import switchboard as board
from outlast.reliability.fence import take
from outlast.reliability.frames import NONCE_BYTES, AgentSide, SupervisorSide
from outlast.reliability.inbox import HIGH, LOW, Inbox
from outlast.reliability.model import JobId, Layout, Node, Rank, SourceBlind, StepSeen
from outlast.reliability.wire import (
    Beat,
    CollectStacks,
    Done,
    FromSupervisor,
    Gate,
    Heard,
    Hello,
    Leave,
    Pulse,
    RankStack,
    Seat,
    StartRanks,
    Welcome,
)

World = Any
"""conftest.World; test modules cannot import it."""
SECRET = b"s" * 32
InWorld = Callable[[Callable[[World], Awaitable[None]]], None]
N1 = Node("n1")
READING: list[asyncio.Task[None]] = []
"""Kept, since the event loop itself does not."""


def signal(n: int) -> SourceBlind:
    return SourceBlind(node=N1, at_s=float(n), source="kmsg", why="test", lost=n)


@pytest.mark.slow
def test_an_agent_finds_the_supervisor_joins_beats_and_holds_the_lease(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        agent = world.agent()  # before anybody supervises
        await asyncio.sleep(0.05)
        assert not agent.link.connected and agent.link.epoch == 0 and agent.notes == []
        one = await world.supervise()
        await world.until(lambda: agent.link.connected and agent.link.roster)
        assert (agent.link.epoch, agent.link.roster) == (1, (N1,))
        joined = await one.events.get()
        assert isinstance(joined, board.Joined) and joined.hello.node == N1 and joined.hello.highest_epoch == 1
        agent.beat = Beat(attempt=4, state="running", steps=(StepSeen(train_step=9, step_s=0.1),))
        agent.link.beat_now()
        await world.until(lambda: (s := one.session(N1)) and s.beat == agent.beat)
        one.steps_through(4, 9)
        one.set_roster([N1, Node("n2")])
        await world.until(lambda: agent.link.logged == (4, 9) and agent.link.roster == (N1, "n2"))
        await asyncio.sleep(0.2)
        await world.until(lambda: agent.link.lease_age_s < 0.2)
        assert agent.link.roster == (N1, "n2"), "a pulse without a roster keeps the old one"
        one.steps_through(5, 40)  # another attempt than this agent's: says nothing about its steps
        await world.until(lambda: agent.link.logged == (5, 40))

    in_world(test)


def test_signals_stay_with_the_agent_until_they_are_acknowledged(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        agent = world.agent()
        agent.link.report(signal(1))
        one = await world.supervise()
        await world.until(lambda: agent.link.connected)
        agent.link.report(signal(2))
        await world.until(lambda: (s := one.session(N1)) and s.received == 2)
        heard = [e for e in world.drained(one) if isinstance(e, board.Heard)]
        assert [(h.number, h.signal, h.incarnation) for h in heard] == [(1, signal(1), "i1"), (2, signal(2), "i1")]
        assert agent.link.unlogged == 2
        one.ack(N1, "another", 2)
        one.ack(N1, "i1", 1)
        await world.until(lambda: agent.link.unlogged == 1)
        one.ack(N1, "i1", 99)  # never more than was handed on
        assert await agent.link.flush(5.0)
        session = one.session(N1)
        assert session is not None and session.acked == 2

    in_world(test)


@pytest.mark.slow
def test_a_successor_gets_what_its_predecessor_did_not_log_and_no_more(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        agent = world.agent()
        first = await world.supervise()
        for n in range(1, 4):
            agent.link.report(signal(n))
        await world.until(lambda: (s := first.session(N1)) and s.received == 3)
        first.ack(N1, "i1", 2)
        await world.until(lambda: agent.link.unlogged == 1)
        await first.close()
        await world.until(lambda: not agent.link.connected)
        agent.link.report(signal(4))
        second = await world.supervise()
        await world.until(lambda: agent.link.connected and agent.link.epoch == 2)
        await world.until(lambda: (s := second.session(N1)) and s.received == 4)
        assert [e.signal for e in world.drained(second) if isinstance(e, board.Heard)] == [signal(3), signal(4)]

    in_world(test)


@pytest.mark.slow
def test_a_command_is_carried_out_once_and_answered_through_reconnects(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        go = asyncio.Event()

        async def slowly(message: Command, say: Say) -> Done:
            say(RankStack(attempt=1, rank=Rank(3), process_state="T", stack="frame \udcff"))
            await go.wait()
            return Done(command=message.command, ok=False, why="because")

        one = await world.supervise()
        assert one.command(N1, CollectStacks(command=5, attempt=1))  # it is not there yet
        agent = world.agent(handle=slowly)
        await world.until(lambda: agent.commands)
        for _ in range(3):
            agent.link._wire.writer.transport.abort()  # type: ignore[union-attr]
            await world.until(lambda: not agent.link.connected)
            await world.until(lambda: agent.link.connected)
        assert one.command(N1, CollectStacks(command=5, attempt=1))
        go.set()
        await world.until(lambda: not one._lines[N1].waiting)
        events = world.drained(one)
        done = Done(command=5, ok=False, why="because")
        assert [e for e in events if isinstance(e, board.Done)] == [board.Done(N1, "i1", done)]
        stacks = {e.stack.stack for e in events if isinstance(e, board.Stacked)}
        assert stacks == {"frame \\udcff"} and len(agent.commands) == 1
        # what is done is answered again in the same words
        one._lines[N1].waiting.clear()
        assert one.command(N1, CollectStacks(command=5, attempt=1))
        await world.until(lambda: [e for e in world.drained(one) if isinstance(e, board.Done) and e.done == done])
        assert len(agent.commands) == 1

    in_world(test)


def test_an_answer_brings_the_newest_beat_along(in_world: InWorld) -> None:
    """After a stop nobody asks for what ranks did last, and the next beat would come too late."""

    async def test(world: World) -> None:
        async def stop(message: Command, say: Say) -> Done:
            agent.beat = Beat(attempt=1, state="clear", step_max=9)
            return Done(command=message.command, ok=True)

        one = await world.supervise()
        agent = world.agent(handle=stop)
        agent.link._beat_s = 60.0
        await world.until(lambda: agent.link.connected)
        assert one.command(N1, CollectStacks(command=5, attempt=1))
        seen: list[board.Event] = []

        def answered() -> bool:
            while not one.events.empty():
                seen.append(one.events.get_nowait())
            return any(isinstance(e, board.Done) for e in seen)

        await world.until(answered)
        last = [e.beat.step_max for e in seen if isinstance(e, board.Beaten)][-1:]
        assert isinstance(seen[-1], board.Done) and last == [9]

    in_world(test)


def test_commands_are_bounded_withdrawn_and_a_failing_handler_answers(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        async def fail(message: Command, say: Say) -> Done:
            raise OSError("no such device")

        one = await world.supervise()
        for n in range(board.MAX_COMMANDS):
            assert one.command(N1, Gate(command=n, attempt=1))
        assert not one.command(N1, Gate(command=1_000, attempt=1))
        for n in range(1, board.MAX_COMMANDS):
            one.withdraw(N1, n)
        agent = world.agent(handle=fail)
        await world.until(lambda: not one._lines[N1].waiting)
        [done] = [e.done for e in world.drained(one) if isinstance(e, board.Done)]
        assert done == Done(command=0, ok=False, why="OSError: no such device")
        assert [c.command for c in agent.commands] == [0]
        with pytest.raises(ValueError, match="expected a command"):
            one.command(N1, board.wire.Welcome(epoch=1, heard=0))

    in_world(test)


def test_an_unanswered_command_is_sent_again_after_a_reconnect_and_a_withdrawn_one_is_not(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        one, node = await world.supervise(), Node("n9")
        for n in (1, 2):
            one.command(node, Gate(command=n, attempt=1))
        side, writer, got = await shake(one, SECRET)
        await world.until(lambda: [m.command for m in got if isinstance(m, Gate)] == [1, 2])
        writer.transport.abort()
        await world.until(lambda: (s := one.session(node)) and not s.connected)
        one.withdraw(node, 1)
        side, writer, got = await shake(one, SECRET)
        await world.until(lambda: [m.command for m in got if isinstance(m, Gate)] == [2])
        for n in (1, 2, 2, 77):
            writer.write(side.send(Done(command=n, ok=True)))
        writer.write(side.send(Heard(number=1, signal=signal(1))))
        await world.until(lambda: (s := one.session(node)) and s.received == 1)
        assert [e.done.command for e in world.drained(one) if isinstance(e, board.Done)] == [2]
        writer.close()

    in_world(test)


def test_a_connection_with_a_fault_is_closed_at_once(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        one = await world.supervise()
        host, port = one._server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1")
        assert await asyncio.wait_for(reader.read(), 0.5) == b""
        writer.close()
        side, writer, _ = await shake(one, SECRET)
        writer.write(side.send(Heard(number=1, signal=signal(1))) + b"\xff" * 40)
        await world.until(lambda: (s := one.session(Node("n9"))) and not s.connected and s.received == 1)
        writer.close()

    in_world(test)


@pytest.mark.parametrize("wrong", [Pulse(epoch=2, heard=0, steps_through=0, roster=()), Welcome(epoch=1, heard=0)])
def test_a_supervisor_that_speaks_for_another_epoch_is_left(in_world: InWorld, wrong: Pulse | Welcome) -> None:
    """It proves the secret for epoch 3, as the seat says, and then speaks for another."""

    async def test(world: World) -> None:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            side = SupervisorSide(secret=SECRET, epoch=3, nonce=b"s" * NONCE_BYTES)
            while not side.ready:
                side.receive(await reader.read(4096))
                writer.write(side.outgoing())
            right = Welcome(epoch=3, heard=0)
            writer.write(b"".join(side.send(m) for m in ((right, wrong) if isinstance(wrong, Pulse) else (wrong,))))
            await reader.read(1 << 20)
            while await reader.read(1 << 20):
                pass
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        take(world.run_dir, Seat(epoch=3, node="x", pid=1, host=host, port=port, at_s=0.0))
        agent = world.agent()
        await world.until(lambda: any("expected 3: it is fenced" in n for n in agent.notes))
        await agent.stop()
        server.close()

    in_world(test)


def test_start_ranks_of_another_epoch_is_refused(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        one, agent = await world.supervise(), world.agent()
        await world.until(lambda: agent.link.connected)
        one.command(N1, StartRanks(command=1, epoch=7, attempt=1, layout=Layout(), ranks=()))
        await world.until(lambda: not one._lines[N1].waiting)
        [done] = [e.done for e in world.drained(one) if isinstance(e, board.Done)]
        assert done.why == "found StartRanks of epoch 7, expected 1" and agent.commands == []

    in_world(test)


@pytest.mark.slow
def test_a_new_agent_process_replaces_the_old_and_does_not_inherit_its_commands(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        async def never(message: Command, say: Say) -> Done:
            await asyncio.Event().wait()
            raise AssertionError

        one, old = await world.supervise(), world.agent(handle=never)
        await world.until(lambda: old.link.connected)
        one.command(N1, Gate(command=1, attempt=1))
        await world.until(lambda: old.commands)
        new = world.agent(incarnation="i2")
        await world.until(lambda: new.link.connected)
        await world.until(lambda: (s := one.session(N1)) and s.incarnation == "i2" and s.connected)
        events = [e for e in world.drained(one) if not isinstance(e, board.Noticed)]
        assert [type(e) for e in events] == [board.Joined, board.Gone, board.Done, board.Joined]
        assert isinstance(events[2], board.Done) and not events[2].done.ok and events[2].incarnation == "i1"
        await world.until(lambda: any("closed" in n or "reset" in n for n in old.notes))
        await world.until(lambda: one.counts["unwelcome"] >= 2)  # the old one tries again, and is refused each time
        session = one.session(N1)
        assert session is not None and session.incarnation == "i2" and new.link.connected and new.commands == []

    in_world(test)


@pytest.mark.slow
def test_gone_is_told_when_the_connection_ends_and_when_it_is_silent(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        one, agent = await world.supervise(silent_s=0.3), world.agent()
        await world.until(lambda: agent.link.connected)
        await agent.stop()
        await world.until(lambda: (s := one.session(N1)) and not s.connected)
        assert await one.emptied(1.0)
        assert [e.node for e in world.drained(one) if isinstance(e, board.Gone)] == [N1]
        _, writer, _ = await shake(one, SECRET)  # a peer that says Hello and then nothing
        await world.until(
            lambda: not any(s.connected for s in one.sessions()) and gone(world, one, "nothing was heard")
        )
        writer.close()

    in_world(test)


def gone(world: World, one: board.Switchboard, why: str) -> bool:
    return any(isinstance(e, board.Gone) and why in e.why for e in world.drained(one))


async def shake(
    one: board.Switchboard, secret: bytes, node: str = "n9", epoch: int = 1, reads: bool = True
) -> tuple[AgentSide, asyncio.StreamWriter, list[FromSupervisor]]:
    """A hand-made agent, up to and with its Hello; what it is told is in the list, as it comes."""
    assert one._server is not None
    host, port = one._server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(host, port)
    side = AgentSide(secret=secret, node=Node(node), epoch=epoch, nonce=b"n" * NONCE_BYTES)
    writer.write(side.outgoing())
    side.receive(await reader.read(4096))
    writer.write(side.outgoing())
    hello = Hello(node=Node(node), job=JobId("7"), incarnation="i", pid=1, address="h", attempt=0, highest_epoch=epoch)
    writer.write(side.send(hello))
    got = list(side.receive(await reader.read(4096)))

    async def collect() -> None:
        while data := await reader.read(65_536):
            got.extend(side.receive(data))

    if reads:
        READING.append(asyncio.create_task(collect()))
    return side, writer, got


@pytest.mark.slow
def test_bad_peers_disturb_nobody_and_are_counted(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        one, agent = await world.supervise(), world.agent()
        await world.until(lambda: agent.link.connected)
        assert one._server is not None
        host, port = one._server.sockets[0].getsockname()
        rng = random.Random(5)
        for n in range(40):
            _, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n" if n % 2 else rng.randbytes(rng.randrange(1, 3_000)))
            writer.close()
        intruder = world.agent("n2", secret=b"x" * 32)
        await world.until(lambda: any("proof of the supervisor" in n for n in intruder.notes))
        side, writer, _ = await shake(one, SECRET)
        writer.write(side.send(Done(command=3, ok=True))[:-1] + b"?")
        await world.until(lambda: one.counts["frame MAC"] == 1)
        assert one.counts["handshake length"] >= 20
        notes = [e for e in world.drained(one) if isinstance(e, board.Noticed)]
        assert 1 <= len(notes) <= 6  # one a kind, not one a connection
        agent.link.report(signal(1))
        await world.until(lambda: (s := one.session(N1)) and s.received == 1)
        assert agent.link.connected and one.session(Node("n2")) is None

    in_world(test)


@pytest.mark.slow
def test_many_silent_connections_lock_no_agent_out(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        one = await world.supervise()
        assert one._server is not None
        host, port = one._server.sockets[0].getsockname()
        idle = [await asyncio.open_connection(host, port) for _ in range(board.MAX_UNPROVEN + 20)]
        await world.until(lambda: len(one._unproven) == board.MAX_UNPROVEN)
        assert one.counts["crowd"] == 20
        agent = world.agent()
        await world.until(lambda: agent.link.connected)
        await world.until(lambda: not one._unproven)  # the deadline of the handshake
        assert one.counts["late"] >= board.MAX_UNPROVEN // 2
        for _, writer in idle:
            writer.close()

    in_world(test)


@pytest.mark.slow
def test_a_peer_that_does_not_read_is_dropped(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        one = await world.supervise()
        _, writer, _ = await shake(one, SECRET, reads=False)
        await world.until(lambda: one.session(Node("n9")))
        for n in range(board.MAX_COMMANDS):
            one.command(Node("n9"), Leave(command=n, why="x" * 1_000_000))
        await world.until(lambda: gone(world, one, "does not read"))
        writer.close()

    in_world(test)


@pytest.mark.slow
def test_an_agent_follows_a_new_epoch_and_never_goes_back(in_world: InWorld) -> None:
    """The first supervisor is alive but says nothing: its host was stopped, the connection stands."""

    async def test(world: World) -> None:
        first, agent = await world.supervise(), world.agent(lease_s=0.3)
        await world.until(lambda: agent.link.connected)
        assert first._pulsing is not None
        first._pulsing.cancel()
        await world.until(lambda: agent.link.lease_age_s > 0.3)
        second = await world.supervise()
        await world.until(lambda: (s := second.session(N1)) and s.connected)
        assert agent.link.epoch == 2
        (world.run_dir.epochs / "2").unlink()  # even if only the old seat can be seen
        (world.run_dir.epochs / "latest").unlink()
        await second.close()
        await asyncio.sleep(0.5)
        assert agent.link.epoch == 2 and not agent.link.connected
        assert first.counts["unwelcome"] == 0  # it does not even try
        session = first.session(N1)
        assert session is not None and not session.connected

    in_world(test)


def test_a_report_on_a_connection_that_is_ending_is_kept_for_the_next(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        one, agent = await world.supervise(), world.agent()
        await world.until(lambda: agent.link.connected)
        agent.link._wire.side._close()  # what garbage or the end of the stream does, a moment before the task ends
        agent.link.report(signal(1))
        agent.link._wire.writer.transport.abort()
        await world.until(lambda: (s := one.session(N1)) and s.received == 1)

    in_world(test)


def test_a_hello_before_a_fault_in_the_same_piece_joins_and_goes(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        one = await world.supervise()
        host, port = one._server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        side = AgentSide(secret=SECRET, node=Node("n9"), epoch=1, nonce=b"n" * NONCE_BYTES)
        writer.write(side.outgoing())
        side.receive(await reader.read(4096))
        said = Hello(node=Node("n9"), job=JobId("7"), incarnation="i", pid=1, address="h", attempt=0, highest_epoch=1)
        writer.write(side.outgoing() + side.send(said) + b"\xff" * 40)
        await world.until(lambda: (s := one.session(Node("n9"))) and not s.connected)
        kinds = [type(e) for e in world.drained(one) if not isinstance(e, board.Noticed)]
        assert kinds == [board.Joined, board.Gone]
        writer.close()

    in_world(test)


def test_a_supervisor_that_claims_a_higher_epochs_seat_is_not_believed(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        one = await world.supervise()
        assert one._server is not None
        host, port = one._server.sockets[0].getsockname()
        take(world.run_dir, Seat(epoch=5, node="x", pid=1, host=host, port=port, at_s=0.0))
        agent = world.agent()
        await world.until(lambda: agent.link.epoch == 5)
        await world.until(lambda: one.counts["open"] >= 1)
        assert not agent.link.connected

    in_world(test)


def test_a_hanging_file_system_stops_neither_beats_nor_signals(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: World) -> None:
        one, agent = await world.supervise(), world.agent(lease_s=0.0)  # lapsed always: it looks again and again
        await world.until(lambda: agent.link.connected)
        release, hangs = threading.Event(), threading.Event()

        def hang(_: object) -> None:
            hangs.set()
            release.wait(20.0)

        monkeypatch.setattr(link, "highest", hang)
        agent.link._lease_s = 0.02
        await world.until(hangs.is_set)
        agent.link.report(signal(1))
        await world.until(lambda: (s := one.session(N1)) and s.received == 1)
        release.set()

    in_world(test)


class Chaos:
    """Three agents and one supervisor at a time, of which a test does at random what can happen to them."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.agents = [world.agent(f"n{i}") for i in range(3)]
        self.one: board.Switchboard | None = None
        self.sent = {f"n{i}": 0 for i in range(3)}
        self.logged: dict[str, list[float]] = {node: [] for node in self.sent}
        self.waits: list[board.Heard] = []
        self.commands, self.answered = 0, list[int]()

    def log(self, upto: int = 10_000) -> None:
        """What the supervisor does: into the log, then the acknowledgement."""
        assert self.one is not None
        while not self.one.events.empty():
            event = self.one.events.get_nowait()
            if isinstance(event, board.Heard):
                self.waits.append(event)
            elif isinstance(event, board.Done):
                self.answered.append(event.done.command)
        for event in self.waits[:upto]:
            self.logged[event.node].append(event.signal.at_s)
            self.one.ack(event.node, event.incarnation, event.number)
        del self.waits[:upto]

    def settled(self) -> bool:
        self.log()
        return len(self.answered) == self.commands and not any(a.link.unlogged for a in self.agents)

    async def step(self) -> None:
        assert self.one is not None
        agent = self.rng.choice(self.agents)
        node = agent.link._me.node
        match self.rng.choices(["signal", "command", "agent cuts", "supervisor cuts", "successor"], [50, 12, 8, 4, 1])[
            0
        ]:
            case "signal":
                self.sent[node] += 1
                agent.link.report(signal(self.sent[node]))
            case "command":
                self.commands += 1
                self.one.command(node, Gate(command=self.commands, attempt=1))
            case "agent cuts" if agent.link._wire is not None:
                agent.link._wire.writer.transport.abort()
            case "supervisor cuts":
                for peer in tuple(self.one._peers):
                    peer.drop("cut by the test")
            case "successor":
                await self.world.until(self.settled, 20.0)
                await self.one.close()
                self.one = await self.world.supervise()
        self.log(self.rng.randrange(0, 6))
        await asyncio.sleep(self.rng.random() * 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_disconnects_lose_and_double_nothing(in_world: InWorld, seed: int) -> None:
    """Connections are cut and supervisors replaced at random; signals are logged, and acknowledged, at random."""

    async def test(world: World) -> None:
        chaos = Chaos(world, seed)
        chaos.one = await world.supervise()
        for _ in range(250):
            await chaos.step()
        await world.until(chaos.settled, 20.0)
        for node, count in chaos.sent.items():
            assert chaos.logged[node] == [float(n) for n in range(1, count + 1)], node
        assert sorted(chaos.answered) == list(range(1, chaos.commands + 1))
        assert sum(len(a.commands) for a in chaos.agents) == chaos.commands

    in_world(test)


def test_the_inbox_keeps_one_beat_a_node_and_says_when_it_is_full() -> None:
    async def test() -> None:
        low: list[bool] = []
        inbox = Inbox(lambda: low.append(True))
        for n in range(10):
            inbox.offer(board.Beaten(N1, Beat(attempt=n, state="idle")))
        assert inbox.qsize() == 1 and inbox.get_nowait() == board.Beaten(N1, Beat(attempt=9, state="idle"))
        for n in range(HIGH + 1):
            inbox.offer(board.Heard(N1, "i", n, signal(n)))
        assert inbox.high
        while inbox.qsize() > LOW:
            inbox.get_nowait()
        assert inbox.high and not low
        inbox.get_nowait()
        assert not inbox.high and low == [True]

    asyncio.run(test())


@pytest.mark.slow
def test_a_flood_stops_the_reading_until_the_supervisor_has_caught_up(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: World) -> None:
        monkeypatch.setattr("outlast.reliability.inbox.HIGH", 100)
        monkeypatch.setattr("outlast.reliability.inbox.LOW", 50)
        one = await world.supervise()
        side, writer, _ = await shake(one, SECRET)
        await world.until(lambda: one.session(Node("n9")))
        for n in range(1, 20_001):
            writer.write(side.send(Heard(number=n, signal=signal(n))))
        await world.until(lambda: one.events.high)
        await asyncio.sleep(0.1)
        held = one.events.qsize()
        assert held < 10_000
        got = 0
        while got < 20_000:
            got += isinstance(await asyncio.wait_for(one.events.get(), 5.0), board.Heard)
        writer.close()

    in_world(test)


def test_a_port_that_is_taken_before_the_epoch_answers_only_after_it(tmp_path: Path) -> None:
    async def test() -> None:
        one = board.Switchboard(secret=SECRET)
        host, port = await one.listen("127.0.0.1")
        assert port > 0
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, port)
        await one.serve(4)
        _, writer, _ = await shake(one, SECRET, epoch=4)
        await one.close()
        await one.close()
        writer.close()
        with pytest.raises(RuntimeError, match="listen first"):
            await one.serve(4)

    asyncio.run(test())
