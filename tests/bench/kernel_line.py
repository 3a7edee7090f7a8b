"""A kernel line to its verdict, on a real supervisor: how long, and where the time goes.

    write to /dev/kmsg -> the agent's reader -> link -> supervisor's turn: signal, verdict -> in the log (one fsync)
    \\___ wall clock of this machine, one boot: all stages can be told apart ___/

Each line is a fresh incident: a GPU of its own, no quiet time, no drain budget to spend. They are sent one by one at
random moments, so that no ticking of a loop is in step with them. Needs root: only root writes to the kernel's log,
and only a run file that accepts user space's lines believes them.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from outlast.reliability.eventlog import Follower
from outlast.reliability.events import AttemptMoved, Judged, LogEvent, Seen
from outlast.reliability.model import XidSeen

KMSG = Path("/dev/kmsg")
SUPERVISOR = Path(__file__).with_name("bench_supervisor.py")
CODE = 31
START_S, VERDICT_S, END_S = 60.0, 20.0, 60.0


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """One line's way, in seconds from the write."""

    agent_s: float
    """The agent has read it."""
    seen_s: float
    """The supervisor has taken it up."""
    judged_s: float
    """The verdict is made; it is written together with the signal."""
    durable_s: float
    """The fsync of both is over."""
    disk_s: float = 0.0
    """One fsync on the same disk right after it: on its way a line waits for one, behind that of the line before."""


class LiveRun:
    """`outlast run` on the local cluster: one node, one rank that sleeps."""

    def __init__(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        (place / "run.yaml").write_text(
            "name: line\n"
            "task: {command: [sleep, '3600'], kind: plain}\n"
            f"cluster: {{kind: local, nodes: 1, ranks_per_node: 1, kernel_log: {KMSG}, accept_user_facility: true}}\n"
            "limits: {term_grace: 1s, drains_per_hour: 1000000}\n"
        )
        words = [sys.executable, "-P", str(SUPERVISOR), "run.yaml"]
        with (place / "output").open("wb") as output:
            self.process = subprocess.Popen(words, cwd=place, stdout=output, stderr=subprocess.STDOUT)
        self.events: list[LogEvent] = []
        self._durable = place / "durable.txt"
        self._follower = Follower(place / "runs" / "line-0001" / "events.jsonl")

    def look(self) -> list[LogEvent]:
        """What is new in its log."""
        new = self._follower.read().events
        self.events += new
        return new

    def durable_at_s(self, seq: int) -> float | None:
        """When this verdict was durable, as the supervisor wrote it down; None while it has not."""
        lines = self._durable.read_text(encoding="utf-8").splitlines() if self._durable.exists() else []
        told = [line.split() for line in lines[-64:]]
        return next((float(words[1]) for words in told if len(words) == 2 and words[0] == str(seq)), None)

    def until(self, what: Callable[[], bool], limit_s: float, why: str) -> None:
        until = time.monotonic() + limit_s
        while not what():
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError(f"not within {limit_s:.0f} s: {why}; exit code {self.process.poll()}")
            time.sleep(0.002)
            self.look()

    def started(self) -> None:
        """Ranks run, and the kernel log's reader with them."""

        def runs() -> bool:
            return any(isinstance(e.body, AttemptMoved) and e.body.state == "starting" for e in self.events)

        self.until(runs, START_S, "ranks started")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(END_S)


def write_line(gpu: str, code: int = CODE) -> float:
    """One driver's line into the kernel's log; when. A new descriptor each time: ten lines are let through by each."""
    text = f"<3>NVRM: Xid (PCI:{gpu}): {code}, pid=1, name=bench, a line of a benchmark\n"
    fd = os.open(KMSG, os.O_WRONLY | os.O_CLOEXEC)
    try:
        at_s = time.time()
        os.write(fd, text.encode())
    finally:
        os.close(fd)
    return at_s


def one_line(run: LiveRun, number: int) -> Taken:
    """Send it and wait for its verdict."""
    gpu = f"0000:{number // 32 % 256:02x}:{number % 32:02x}"
    at_s = write_line(gpu)
    found: dict[str, LogEvent] = {}
    agent_s = 0.0
    durable_s: float | None = None

    def done() -> bool:
        nonlocal agent_s, durable_s
        for event in run.events[-64:]:
            match event.body:
                case Seen(signal=XidSeen(gpu=g, at_s=read_s, source="kmsg")) if g == gpu and read_s > at_s - 1:
                    found.setdefault("seen", event)
                    agent_s = read_s
                case Judged(verdict=verdict) if "seen" in found and found["seen"].seq in verdict.evidence:
                    found.setdefault("judged", event)
        durable_s = run.durable_at_s(found["judged"].seq) if "judged" in found else None
        return durable_s is not None

    run.until(done, VERDICT_S, f"verdict on {gpu}")
    assert durable_s is not None, "done() says so"
    return Taken(
        agent_s=agent_s - at_s,
        seen_s=found["seen"].at_s - at_s,
        judged_s=found["judged"].at_s - at_s,
        durable_s=durable_s - at_s,
    )


def measure_lines(place: Path, lines: int) -> list[Taken]:
    """As many fresh incidents, one by one."""
    chance = random.Random(7)
    run = LiveRun(place)
    try:
        run.started()
        _first_heard(run)
        taken: list[Taken] = []
        for number in range(lines):
            taken.append(msgspec.structs.replace(one_line(run, number), disk_s=one_fsync(place / "probe")))
            time.sleep(chance.uniform(0.0, 0.1))
        return taken
    finally:
        run.end()


def one_fsync(path: Path) -> float:
    """What the disk takes for one event's worth."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        began_s = time.perf_counter()
        os.write(fd, b"x" * 400)
        os.fsync(fd)
        return time.perf_counter() - began_s
    finally:
        os.close(fd)


def _first_heard(run: LiveRun) -> None:
    """The reader begins at the log's end: lines before that moment are nobody's."""
    last = 0.0

    def heard() -> bool:
        nonlocal last
        if time.monotonic() > last + 0.5:
            last = time.monotonic()
            write_line("0000:ff:1f")
        return any(isinstance(e.body, Seen) and isinstance(e.body.signal, XidSeen) for e in run.events)

    run.until(heard, START_S, "the agent reads the kernel log")
    time.sleep(0.5)


def p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
