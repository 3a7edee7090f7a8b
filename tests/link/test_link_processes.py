"""The link between processes: an agent of its own, one that is killed, one stopped; and what many agents cost."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outlast.reliability import switchboard as board
from outlast.reliability.frames import NONCE_BYTES, AgentSide
from outlast.reliability.model import JobId, Node
from outlast.reliability.wire import Beat, Gate, Hello

World = Any
"""conftest.World; test modules cannot import it."""
InWorld = Callable[[Callable[[World], Awaitable[None]]], None]
SECRET = b"s" * 32
N1 = Node("n1")

AGENT = """
import asyncio, sys, os
from pathlib import Path
from outlast.launchers.link import AgentLink, Introduction
from outlast.reliability.model import SourceBlind
from outlast.reliability.rundir import RunDir
from outlast.reliability.wire import Beat, Done
async def obey(message, say):
    link.report(SourceBlind(node="n1", at_s=float(message.command), source="kmsg", why="told"))
    return Done(command=message.command, ok=True)
async def main():
    global link
    me = Introduction(node="n1", job="7", incarnation=sys.argv[2], address="127.0.0.1")
    link = AgentLink(run_dir=RunDir(root=Path(sys.argv[1])), secret=b"s" * 32, me=me,
                     beat=lambda: Beat(attempt=0, state="idle"), handle=obey, note=lambda t: None, beat_s=0.05)
    await link.run()
asyncio.run(main())
"""


def start_agent(world: World, incarnation: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", AGENT, str(world.run_dir.root), incarnation])


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(timeout=10)


@pytest.mark.slow
def test_an_agent_process_is_commanded_stopped_continued_killed_and_replaced(in_world: InWorld) -> None:
    async def test(world: World) -> None:
        one = await world.supervise(silent_s=0.5)
        first = start_agent(world, "p1")
        second: subprocess.Popen[bytes] | None = None
        try:
            await world.until(lambda: one.session(N1), 20.0)
            for n in range(20):
                assert one.command(N1, Gate(command=n, attempt=1))
            await world.until(lambda: (s := one.session(N1)) and s.received == 20)
            first.send_signal(signal.SIGSTOP)
            await world.until(lambda: (s := one.session(N1)) and not s.connected)
            first.send_signal(signal.SIGCONT)
            await world.until(lambda: (s := one.session(N1)) and s.connected)
            first.kill()
            await world.until(lambda: (s := one.session(N1)) and not s.connected)
            assert one.command(N1, Gate(command=99, attempt=1))  # never sent to anyone: it waits for who comes
            second = start_agent(world, "p2")
            await world.until(lambda: (s := one.session(N1)) and s.connected and s.incarnation == "p2", 20.0)
            events: list[Any] = []

            def answered() -> bool:
                events.extend(world.drained(one))
                return sum(isinstance(e, board.Done) for e in events) == 21

            await world.until(answered)
        finally:
            for process in (first, second):
                if process is not None:
                    end(process)
        assert all(e.done.ok for e in events if isinstance(e, board.Done))
        kinds = [type(e).__name__ for e in events if isinstance(e, board.Joined | board.Gone)]
        assert kinds == ["Joined", "Gone", "Joined", "Gone", "Joined"]
        told = [e.signal.at_s for e in events if isinstance(e, board.Heard) and e.incarnation == "p1"]
        assert sorted(told) == [float(n) for n in range(20)]

    in_world(test)


SUPERVISOR = """
import asyncio, json, os, sys, time
from outlast.reliability.switchboard import Switchboard
async def main():
    agents, seconds = int(sys.argv[1]), float(sys.argv[2])
    one = Switchboard(secret=b"s" * 32)
    one.set_roster([f"gpu-{i:04d}" for i in range(agents)])
    host, port = await one.listen("127.0.0.1")
    await one.serve(1)
    print(port, flush=True)
    while sum(s.connected for s in one.sessions()) < agents:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.5)
    seen, cpu_s, wall_s = 0, time.process_time(), time.monotonic()
    while time.monotonic() < wall_s + seconds:
        await one.events.get()
        seen += 1
        while not one.events.empty():
            one.events.get_nowait()
            seen += 1
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    print(json.dumps({"cpu_s": cpu_s, "wall_s": wall_s, "events": seen, "faults": dict(one.counts)}), flush=True)
    os._exit(0)
asyncio.run(main())
"""


class LightAgent(asyncio.Protocol):
    """As little of an agent as there can be: the handshake, Hello, a beat each second; pulses are read and dropped."""

    def __init__(self, i: int) -> None:
        self.i = i
        self.pulses = 0
        node = Node(f"gpu-{i:04d}")
        self.side = AgentSide(secret=SECRET, node=node, epoch=1, nonce=os.urandom(NONCE_BYTES))
        self.hello = Hello(
            node=node, job=JobId("7"), incarnation="i", pid=1, address="10.0.0.1", attempt=1, highest_epoch=1
        )

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.side.outgoing())

    def data_received(self, data: bytes) -> None:
        was = self.side.ready
        self.pulses += len(self.side.receive(data))
        if not was and self.side.ready:
            self.transport.write(self.side.outgoing() + self.side.send(self.hello))
            asyncio.get_running_loop().call_later(self.i % 100 / 100, self.beat)

    def beat(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(self.side.send(BEAT))
            asyncio.get_running_loop().call_later(1.0, self.beat)


BEAT = Beat(
    attempt=1,
    state="running",
    warm=True,
    ranks_alive=8,
    ranks_placed=8,
    phase="train",
    step_min=1_000,
    step_max=1_000,
    stalled_s=0.4,
    durable_step=900,
    output_age_s=1.0,
)


def measure(agents: int, seconds: float) -> dict[str, Any]:
    """CPU seconds of a supervisor process that does nothing but talk to so many agents."""

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8_192)), hard))

    async def talk(port: int) -> str:
        loop = asyncio.get_running_loop()
        made: list[Any] = []
        for i in range(agents):
            transport, light = await loop.create_connection(lambda i=i: LightAgent(i), "127.0.0.1", port)
            made.append((transport, light))
            while not light.side.ready:
                await asyncio.sleep(0)
        assert process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 60.0)
        for transport, _ in made:
            transport.abort()
        return str(line)

    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(agents), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        said: dict[str, Any] = json.loads(asyncio.run(talk(int(process.stdout.readline()))))
    finally:
        end(process)  # type: ignore[arg-type]
    return said


@pytest.mark.slow
def test_2048_agents_at_one_beat_a_second_cost_less_than_a_fifth_of_a_core() -> None:
    """2,048 real connections on loopback; only the supervisor's process is measured."""
    agents = 2_048
    shares = []
    for _ in range(3):  # other programs on this machine can only make it look dearer
        said = measure(agents, 2.0)
        assert said["faults"] == {} and said["events"] > 0.8 * agents * said["wall_s"], said
        shares.append(said["cpu_s"] / said["wall_s"])
        if shares[-1] < 0.20:
            return
    raise AssertionError(f"2,048 agents cost {min(shares):.1%} of a core, expected < 20%")
