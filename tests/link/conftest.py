"""A run directory, a switchboard and agents on loopback, in one event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from outlast.launchers.link import AgentLink, Command, Introduction, Say
from outlast.reliability import switchboard as board
from outlast.reliability.fence import take
from outlast.reliability.inbox import Event
from outlast.reliability.model import JobId, Node
from outlast.reliability.rundir import RunDir
from outlast.reliability.switchboard import Switchboard
from outlast.reliability.wire import Beat, Done, Seat

SECRET = b"s" * 32


async def until(what: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Poll a condition; AssertionError after the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.005)


@dataclass
class Agent:
    """An agent link with a handler that does what the test says."""

    link: AgentLink
    notes: list[str]
    commands: list[Command] = field(default_factory=list)
    beat: Beat = field(default_factory=lambda: Beat(attempt=0, state="idle"))
    task: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


class World:
    """The run directory, and what a test started on it; all of it is ended at the end."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.boards: list[Switchboard] = []
        self.agents: list[Agent] = []

    async def supervise(self, *, secret: bytes = SECRET, silent_s: float = 15.0, pulse_s: float = 0.05) -> Switchboard:
        one = Switchboard(secret=secret, pulse_s=pulse_s, silent_s=silent_s, handshake_s=1.0)
        self.boards.append(one)
        host, port = await one.listen("127.0.0.1")
        seat = Seat(epoch=0, node="head", pid=os.getpid(), host=host, port=port, at_s=time.time())
        await one.serve(take(self.run_dir, seat).epoch)
        return one

    def agent(
        self,
        node: str = "n1",
        *,
        incarnation: str = "i1",
        secret: bytes = SECRET,
        lease_s: float = 20.0,
        handle: Callable[[Command, Say], Awaitable[Done]] | None = None,
    ) -> Agent:
        async def obey(message: Command, say: Say) -> Done:
            agent.commands.append(message)
            if handle is not None:
                return await handle(message, say)
            return Done(command=message.command, ok=True)

        notes: list[str] = []
        me = Introduction(node=Node(node), job=JobId("7"), incarnation=incarnation, address="127.0.0.1")
        link = AgentLink(
            run_dir=self.run_dir,
            secret=secret,
            me=me,
            beat=lambda: agent.beat,
            handle=obey,
            note=notes.append,
            lease_s=lease_s,
            beat_s=0.05,
            poll_s=0.02,
        )
        agent = Agent(link, notes)
        agent.task = asyncio.create_task(link.run())
        self.agents.append(agent)
        return agent

    until = staticmethod(until)

    @staticmethod
    def drained(one: Switchboard) -> list[Event]:
        """All events that wait, beats left out."""
        events: list[Event] = []
        while not one.events.empty():
            events.append(one.events.get_nowait())
        return [e for e in events if not isinstance(e, board.Beaten)]

    async def close(self) -> None:
        for agent in self.agents:
            await agent.stop()
        for one in self.boards:
            await one.close()


@pytest.fixture
def in_world(tmp_path: Path) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    """Runs a test's coroutine in a world of its own, for 30 s at most."""

    def run(test: Callable[[World], Awaitable[None]]) -> None:
        async def whole() -> None:
            world = World(RunDir(root=tmp_path))
            try:
                await asyncio.wait_for(test(world), 30.0)
            finally:
                await world.close()

        asyncio.run(whole())

    return run
