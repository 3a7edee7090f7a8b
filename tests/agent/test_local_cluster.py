"""Agents of the embedded cluster on the real link: joined, commanded, crashed, orphaned, released."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from outlast.launchers import node_env, reap
from outlast.launchers.local import JOB, LocalCluster
from outlast.reliability import wire
from outlast.reliability.fence import highest, take
from outlast.reliability.freeze import freeze
from outlast.reliability.inbox import Done, Event, Gone, Heard, Joined
from outlast.reliability.model import (
    GateOutcome,
    GateSeen,
    JobId,
    Layout,
    Node,
    Placement,
    Rank,
    RankExited,
    RankPlaced,
)
from outlast.reliability.ports import Allocation, PortError
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import Cluster, Limits, RunFile, Task
from outlast.reliability.switchboard import Switchboard

pytestmark = pytest.mark.slow
T = TypeVar("T")
A, B, C, D = (Node(n) for n in "abcd")

STEPS = """
import os, time
from outlast.launchers.recorder import current, stop_asked
for i in range(2):
    if os.fork() == 0:
        os.setsid()
        time.sleep(300)
recorder = current()
recorder.phase("train")
step = 0
while not stop_asked():
    step += 1
    recorder.step_started(step)
    time.sleep(0.02)
    recorder.step_done(step, loss=1.0 / step, samples_from=8 * step - 8, samples_to=8 * step)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "steps.py").write_text(STEPS)
    run = RunFile(
        name="local",
        task=Task(script=str(tmp_path / "steps.py"), kind="plain", preload=("json",), workdir=str(tmp_path)),
        cluster=Cluster(kind="local", nodes=2, nodes_min=2, spares=1, ranks_per_node=1, kernel_log=""),
        limits=Limits(lease_s=2.0, term_grace_s=0.5, kill_grace_s=5.0, gate_timeout_s=20.0),
        run_root=str(tmp_path / "runs"),
    )
    return freeze(run, tmp_path / "runs")


@pytest.fixture
def cluster(run_dir: RunDir) -> Iterator[LocalCluster]:
    made = LocalCluster(run_dir, frozen(run_dir), reserve=1)
    yield made
    made.close()
    assert not left(run_dir)


def frozen(run_dir: RunDir) -> RunFile:
    import yaml

    return msgspec.convert(yaml.safe_load(run_dir.run_file.read_bytes()), RunFile)


def left(run_dir: RunDir, node: str = "") -> list[int]:
    """Living processes below this run's agents, wherever they have gone."""
    prefix = f"{run_dir.root}:{node}:" if node else f"{run_dir.root}:"
    return [p.pid for p, _ in reap.marked(node_env.TREE_ENV, prefix) if not p.empty]


class Desk:
    """A supervisor's desk: the real switchboard, with what it said kept."""

    def __init__(self, run_dir: RunDir, board: Switchboard, epoch: int) -> None:
        self.run_dir, self.board, self.epoch = run_dir, board, epoch
        self.events: list[Event] = []
        self.number = 0

    async def read(self) -> None:
        while True:
            event = await self.board.events.get()
            self.events.append(event)
            if isinstance(event, Heard):
                self.board.ack(event.node, event.incarnation, event.number)

    async def until(self, what: Callable[[], T | None], limit_s: float = 30.0) -> T:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if got := what():
                return got
            await asyncio.sleep(0.02)
        pytest.fail(f"waited {limit_s} s in vain; events: {self.events[-20:]}")

    def joined(self) -> set[Node]:
        return {s.node for s in self.board.sessions() if s.connected}

    def signals(self, kind: type[T]) -> list[T]:
        return [e.signal for e in self.events if isinstance(e, Heard) and isinstance(e.signal, kind)]

    async def command(self, node: Node, make: Callable[[int], wire.FromSupervisor]) -> wire.Done:
        self.number += 1
        number = self.number
        assert self.board.command(node, make(number))
        return await self.until(
            lambda: next((e.done for e in self.events if isinstance(e, Done) and e.done.command == number), None)
        )

    async def start(self, *nodes: Node, attempt: int = 1) -> None:
        for i, node in enumerate(nodes):
            spec = wire.RankSpec(
                placement=Placement(rank=Rank(i), node=node, local_rank=0),
                env={"RANK": str(i)},
                argv=(str(self.run_dir.root.parent.parent / "steps.py"),),
                reports=i == len(nodes) - 1,
            )
            done = await self.command(
                node,
                lambda n, spec=spec: wire.StartRanks(  # type: ignore[misc]
                    command=n, epoch=self.epoch, attempt=attempt, layout=Layout(dp=len(nodes)), ranks=(spec,)
                ),
            )
            assert done.ok, done.why

    def beat(self, node: Node) -> wire.Beat | None:
        session = self.board.session(node)
        return session.beat if session else None


@asynccontextmanager
async def desk(run_dir: RunDir) -> AsyncIterator[Desk]:
    board = Switchboard(secret=bytes.fromhex(run_dir.secret.read_text()), pulse_s=0.2)
    host, port = await board.listen("127.0.0.1")
    seat = take(run_dir, wire.Seat(epoch=0, node="", pid=os.getpid(), host=host, port=port, at_s=time.time()))
    await board.serve(seat.epoch)
    made = Desk(run_dir, board, seat.epoch)
    reading = asyncio.create_task(made.read())
    try:
        yield made
    finally:
        reading.cancel()
        await board.close()


def play(scenario: Awaitable[None]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(scenario, 60.0)

    asyncio.run(whole())


def launch(cluster: LocalCluster, *nodes: Node) -> None:
    cluster.launch_agents(cluster.allocations()[0], nodes)


def test_an_attempt_on_two_nodes_and_the_crash_of_one(cluster: LocalCluster, run_dir: RunDir) -> None:
    async def scenario() -> None:
        launch(cluster, A, B, C)
        async with desk(run_dir) as d:
            await d.until(lambda: d.joined() == {A, B, C})
            assert (await d.command(A, lambda n: wire.Gate(command=n, attempt=1))).ok
            (gate,) = await d.until(lambda: d.signals(GateSeen))
            assert gate.outcome is GateOutcome.WELL, gate.findings
            assert gate.free_port > 0
            await d.start(A, B)
            placed = await d.until(lambda: (p := d.signals(RankPlaced)) and len(p) == 2 and p)
            assert {p.node for p in placed} == {A, B}
            beat = await d.until(lambda: (b := d.beat(B)) and len(b.steps) > 5 and b)
            assert [s.train_step for s in beat.steps] == list(range(1, len(beat.steps) + 1))
            assert beat.phase == "train" and d.beat(A).steps == ()  # type: ignore[union-attr]
            d.board.steps_through(1, 5)
            await d.until(lambda: (b := d.beat(B)) and b.steps and b.steps[0].train_step == 6)
            assert len(left(run_dir, "b")) == 4  # warm process, rank, two that left its group
            await asyncio.to_thread(cluster.crash, B)
            assert not left(run_dir, "b")
            await d.until(lambda: any(isinstance(e, Gone) and e.node == B for e in d.events))
            assert not [s for s in d.signals(RankExited) if s.node == B]  # a dead node says nothing
            launch(cluster, B)
            other = LocalCluster(run_dir, frozen(run_dir))  # as a successor in another process has it
            assert {s.node: s.state for s in other.node_states((A, B, C))} == {
                A: "allocated",
                B: "down",
                C: "allocated",
            }
            assert not left(run_dir, "b") and len(left(run_dir, "a")) == 4
            stop = await d.command(
                A, lambda n: wire.StopRanks(command=n, attempt=1, term_grace_s=0.5, kill_grace_s=5.0, why="node b")
            )
            assert stop.ok and len(left(run_dir, "a")) == 1
            (exited,) = await d.until(lambda: [s for s in d.signals(RankExited) if s.node == A])
            assert exited.asked and exited.posix_signal == signal.SIGTERM
            for node in (A, C):
                assert (await d.command(node, lambda n: wire.Leave(command=n, why="over"))).ok
            assert await d.board.emptied(10.0)
            await d.until(lambda: not left(run_dir))

    play(scenario())


def test_the_reserve_joins_as_an_allocation_of_its_own(cluster: LocalCluster, run_dir: RunDir) -> None:
    async def scenario() -> None:
        async with desk(run_dir) as d:
            with pytest.raises(PortError, match="1 nodes beyond the run's own; 2 were wanted"):
                cluster.feed(2, ())
            job = cluster.feed(1, ())
            assert [(a.job, a.nodes, a.feeder) for a in cluster.allocations()] == [
                (JOB, (A, B, C), False),
                (job, (D,), True),
            ]
            await d.until(lambda: d.joined() == {D})
            cluster.cancel(job)
            await d.until(lambda: not left(run_dir))
            assert [s.state for s in cluster.job_states((job,))] == ["CANCELLED"]

    play(scenario())


def test_what_a_local_cluster_cannot_do_is_refused(cluster: LocalCluster) -> None:
    assert not cluster.may_drain()
    for call in (
        lambda: cluster.drain(A, "bad"),
        lambda: cluster.requeue(JOB, ()),
        lambda: cluster.crash(Node("z")),
        lambda: cluster.launch_agents(Allocation(job=JobId("7"), nodes=(A,), state="RUNNING"), (A,)),
    ):
        with pytest.raises(PortError) as refused:
            call()
        assert not refused.value.again


def test_ranks_train_on_while_a_successor_is_started(cluster: LocalCluster, run_dir: RunDir) -> None:
    async def scenario() -> None:
        launch(cluster, A, B)
        async with desk(run_dir) as d:
            await d.until(lambda: d.joined() == {A, B})
            d.board.set_roster((A, B))
            await d.start(A, B)
            await d.until(lambda: (b := d.beat(B)) and b.step_max > 3)
            placed = await d.until(lambda: (p := d.signals(RankPlaced)) and len(p) == 2 and p)
        # the desk is empty: nobody pulses
        seat = await Desk.until(d, lambda: (s := highest(run_dir)) and s.epoch > d.epoch and s)
        proc = reap.read_proc(seat.pid)
        assert proc is not None and seat.node == "a"
        words = Path(f"/proc/{proc.ppid}/cmdline").read_bytes().split(b"\0")
        assert words[-3:-1] == [b"--node", b"a"]  # below the agent
        assert all(reap.read_proc(p.pid) for p in placed)
        await asyncio.to_thread(cluster.crash, A)
        assert not reap.is_alive(seat.pid, proc.start_ticks) and not left(run_dir, "a")

    play(scenario())


def test_joined_is_an_event_too(cluster: LocalCluster, run_dir: RunDir) -> None:
    async def scenario() -> None:
        async with desk(run_dir) as d:
            launch(cluster, A)
            hello = (await d.until(lambda: [e for e in d.events if isinstance(e, Joined)]))[0].hello
            assert (hello.node, hello.job, hello.attempt, hello.address) == (A, "local", 0, "127.0.0.1")
            await d.until(lambda: (b := d.beat(A)) and b.warm)
            there = left(run_dir, "a")
            launch(cluster, A)  # one is alive: nothing is started
            assert len(there) == 1 and left(run_dir, "a") == there

    play(scenario())
