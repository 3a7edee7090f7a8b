"""A real agent process with a supervisor made of pipes, and scripts as ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from outlast.launchers import node_env, reap
from outlast.reliability.model import Layout, Node, Placement, Rank, RankExited, Signal
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import Cluster, Limits, RunFile, Task
from outlast.reliability.wire import (
    Beat,
    CollectStacks,
    Done,
    FromAgent,
    FromSupervisor,
    Heard,
    RankSpec,
    RankStack,
    StartRanks,
    StopRanks,
)

HOST = Path(__file__).with_name("agent_host.py")
T = TypeVar("T")
_decoder = msgspec.json.Decoder(FromAgent)


def wait_for(what: Callable[[], T | None], limit_s: float = 15.0, why: str = "") -> T:
    """Poll until it is something; fails the test at the limit."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        got = what()
        if got:
            return got
        time.sleep(0.02)
    pytest.fail(f"waited {limit_s} s in vain: {why or what}")


@dataclass
class AgentProcess:
    """The test's hold on one agent."""

    run_dir: RunDir
    run: RunFile
    node: str = "a"
    messages: list[FromAgent] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each message arrived."""
    command: int = 0

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HOST), str(self.run_dir.root), self.node],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.times.append(time.monotonic())
            self.messages.append(_decoder.decode(line))

    def say(self, message: FromSupervisor) -> None:
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(message) + b"\n")
        self.process.stdin.flush()

    def number(self) -> int:
        self.command += 1
        return self.command

    def wait(self, what: Callable[[], T | None], limit_s: float = 15.0, why: str = "") -> T:
        return wait_for(what, limit_s, why)

    # ---------------------------------------------------------------- commands

    def start(self, *argvs: tuple[str, ...], attempt: int = 1, epoch: int = 1) -> Done:
        """Start one rank for each argument list."""
        ranks = tuple(
            RankSpec(
                placement=Placement(rank=Rank(i), node=Node(self.node), local_rank=i),
                env={**self.run.task.env, "RANK": str(i), "WORLD_SIZE": str(len(argvs))},
                argv=argv,
                reports=i == len(argvs) - 1,
            )
            for i, argv in enumerate(argvs)
        )
        number = self.number()
        layout = Layout(dp=len(argvs))
        self.say(StartRanks(command=number, epoch=epoch, attempt=attempt, layout=layout, ranks=ranks))
        return self.done(number)

    def stop(self, attempt: int = 1, term_s: float = 0.5, kill_s: float = 5.0, save_first: bool = False) -> Done:
        number = self.number()
        self.say(
            StopRanks(
                command=number,
                attempt=attempt,
                term_grace_s=term_s,
                kill_grace_s=kill_s,
                why="test",
                save_first=save_first,
            )
        )
        return self.done(number)

    def stacks(self, attempt: int = 1) -> list[RankStack]:
        number = self.number()
        before = len(self.messages)
        self.say(CollectStacks(command=number, attempt=attempt))
        assert self.done(number).ok
        return [m for m in self.messages[before:] if isinstance(m, RankStack)]

    # ---------------------------------------------------------------- what it said

    def done(self, number: int) -> Done:
        return wait_for(
            lambda: next((m for m in self.messages if isinstance(m, Done) and m.command == number), None),
            30.0,
            f"Done of command {number}",
        )

    def signals(self, kind: type[T]) -> list[T]:
        return [m.signal for m in self.messages if isinstance(m, Heard) and isinstance(m.signal, kind)]

    def all_signals(self) -> list[Signal]:
        return [m.signal for m in self.messages if isinstance(m, Heard)]

    def exited(self, rank: int = 0, attempt: int = 1) -> RankExited:
        return wait_for(
            lambda: next((s for s in self.signals(RankExited) if s.rank == rank and s.attempt == attempt), None),
            why=f"exit of rank {rank}",
        )

    def beat(self, condition: Callable[[Beat], bool] = lambda _: True) -> Beat:
        """A beat from now on that fulfils the condition."""
        before = len(self.messages)
        return wait_for(
            lambda: next((m for m in self.messages[before:] if isinstance(m, Beat) and condition(m)), None),
            why="a beat",
        )

    def output(self, rank: int = 0, attempt: int = 1) -> str:
        path = self.run_dir.rank(attempt, Rank(rank)) / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    # ---------------------------------------------------------------- processes

    def left(self) -> list[int]:
        """Living processes that this run's agents started, wherever they have gone."""
        own = self.process.pid
        found = reap.marked(node_env.TREE_ENV, f"{self.run_dir.root}:{self.node}:")
        return [p.pid for p, _ in found if p.pid != own and not p.empty]

    def end(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin
            self.process.stdin.close()
            try:
                self.process.wait(20.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5.0)
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self._reader.join(5.0)


MakeAgent = Callable[..., AgentProcess]


@pytest.fixture
def make_agent(tmp_path: Path) -> Iterator[MakeAgent]:
    made: list[AgentProcess] = []

    def make(
        task: Task | None = None, *, node: str = "a", kernel_log: str = "", exporter: str = "", **limits: float
    ) -> AgentProcess:
        root = tmp_path / "run"
        root.mkdir(exist_ok=True)
        run = RunFile(
            name="test",
            task=task or Task(script="script.py", preload=("json",), workdir=str(tmp_path)),
            cluster=Cluster(kind="local", kernel_log=kernel_log, exporter=exporter),
            limits=Limits(**limits),  # type: ignore[arg-type]
        )
        run_dir = RunDir(root=root)
        run_dir.run_file.write_bytes(msgspec.json.encode(run))
        made.append(AgentProcess(run_dir, run, node))
        return made[-1]

    yield make
    for agent in made:
        agent.end()


@pytest.fixture
def agent(make_agent: MakeAgent) -> AgentProcess:
    return make_agent()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    """Write a program; gives the argv of a rank that runs it."""
    count = iter(range(1000))

    def write(text: str) -> tuple[str, ...]:
        path = tmp_path / f"program_{next(count)}.py"
        path.write_text(text)
        return (str(path),)

    return write
