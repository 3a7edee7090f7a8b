"""Event logs made by hand: `Story` writes lines as a supervisor would, on a clock that a test moves.

Not a simulation: nothing here decides. It is the input from which ledger, history, report and status are tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from outlast.reliability.actions import Action, Feed, RestartInPlace, Shrink, Swap
from outlast.reliability.attempt import Event, State, moved
from outlast.reliability.elastic import places
from outlast.reliability.events import (
    AttemptMoved,
    AttemptPlanned,
    Body,
    EpochTaken,
    Intent,
    Judged,
    LogEvent,
    Outcome,
    RunEnded,
    RunStarted,
    Seen,
    StepsDone,
)
from outlast.reliability.model import (
    AgentJoined,
    AgentLost,
    CheckpointSeen,
    JobId,
    Layout,
    Node,
    Plan,
    Rank,
    RankExited,
    Signal,
    StepSeen,
    XidSeen,
)
from outlast.reliability.verdict import Confidence, Kind, Rejected, Scope, Verdict

NOON_S = 1_770_000_000.0
FULL = Layout(tp=2, dp=2)


class Story:
    """Lines of one run, in the order of a supervisor that logs everything."""

    def __init__(self, *, boot: str = "b0070001") -> None:
        self.events: list[LogEvent] = []
        self.now_s = 0.0
        self.wall_skew_s = 0.0
        self.mono_from_s = 5_000.0
        self.boot = boot
        self.epoch = 1
        self.state: dict[int, State] = {}
        self.acts = 0
        self.step_finishes: list[float] = []

    def say(self, body: Body, *, after_s: float = 0.0) -> int:
        self.now_s += after_s
        event = LogEvent(
            seq=len(self.events) + 1,
            at_s=NOON_S + self.now_s + self.wall_skew_s,
            mono_s=self.mono_from_s + self.now_s,
            boot=self.boot,
            epoch=self.epoch,
            body=body,
        )
        self.events.append(event)
        return event.seq

    def open(self, nodes: Sequence[str] = ("a", "b", "c"), *, train_steps: int = 60, spares: int = 1) -> None:
        self.say(EpochTaken(epoch=1, node="a", pid=100, why="the run begins"))
        self.say(
            RunStarted(
                run="demo",
                run_file_sha256="0" * 64,
                train_steps=train_steps,
                layout=FULL,
                nodes=len(nodes) - spares,
                spares=spares,
            )
        )
        for node in nodes:
            self.see(AgentJoined(node=Node(node), at_s=self.at_s, job=JobId("1"), incarnation=node), after_s=0.2)

    @property
    def at_s(self) -> float:
        return NOON_S + self.now_s

    def see(self, signal: Signal, *, after_s: float = 0.0) -> int:
        return self.say(Seen(signal=signal), after_s=after_s)

    def move(self, attempt: int, event: Event, *, after_s: float = 0.0, why: str = "") -> None:
        self.state[attempt] = moved(self.state.get(attempt, State.PLANNED), event)
        self.say(AttemptMoved(attempt=attempt, event=event, state=self.state[attempt], why=why), after_s=after_s)

    def begin(self, attempt: int, nodes: Sequence[str], *, layout: Layout = FULL, restore_step: int = 0) -> None:
        """From the plan to the first step's state: 0.1 gate, 0.6 start, 0.3 load."""
        plan = Plan(
            attempt=attempt,
            layout=layout,
            nodes=tuple(Node(n) for n in nodes),
            ranks=places(layout, [Node(n) for n in nodes], 2),
            restore_step=restore_step,
        )
        self.say(AttemptPlanned(plan=plan), after_s=0.05)
        self.move(attempt, Event.GATE_ASKED)
        self.move(attempt, Event.GATE_PASSED, after_s=0.1)
        self.move(attempt, Event.LOAD_BEGUN, after_s=0.6)
        self.move(attempt, Event.TRAIN_BEGUN, after_s=0.3)

    def train(self, attempt: int, first: int, last: int, *, step_s: float = 0.25, save_every: int = 10) -> None:
        for step in range(first, last + 1):
            save_s = 0.04 if save_every and step % save_every == 0 else 0.0
            self.now_s += step_s * (3 if self.state[attempt] is State.FIRST_STEP else 1)
            seen = StepSeen(
                train_step=step,
                age_s=0.02,
                step_s=step_s,
                loss=5.5 * math.exp(-step / 40) + 0.05 * math.sin(step * 1.7),
                grad_norm=1.0,
                samples_from=(step - 1) * 8,
                samples_to=step * 8,
                save_s=save_s,
            )
            self.step_finishes.append(self.now_s - 0.02)
            self.say(StepsDone(attempt=attempt, steps=(seen,)))
            if self.state[attempt] is State.FIRST_STEP:
                self.move(attempt, Event.STEP_DONE)
            self.now_s += save_s
            if save_s:
                self.see(
                    CheckpointSeen(
                        at_s=self.at_s,
                        train_step=step,
                        verified=True,
                        path=f"iter_{step:07d}",
                        hold_s=save_s,
                        durable_s=0.3,
                    )
                )

    def judge(self, incident: int, verdict: Verdict, *, after_s: float = 0.0) -> None:
        self.say(Judged(incident=incident, verdict=verdict), after_s=after_s)

    def act(self, action: Action, incident: int, *, ok: bool = True, detail: str = "") -> None:
        self.acts += 1
        self.say(Intent(act=self.acts, action=action, incident=incident))
        self.say(Outcome(act=self.acts, ok=ok, detail=detail), after_s=0.01)

    def stop(self, attempt: int, why: str = "") -> None:
        self.move(attempt, Event.STOP_ASKED, after_s=0.01, why=why)
        self.move(attempt, Event.NODES_CLEAR, after_s=0.4)

    def take_over(self, node: str, *, boot: str, mono_from_s: float, skew_s: float, after_s: float) -> None:
        self.boot, self.mono_from_s, self.wall_skew_s, self.epoch = boot, mono_from_s, skew_s, self.epoch + 1
        self.say(EpochTaken(epoch=self.epoch, node=node, pid=7, why="lease lapsed"), after_s=after_s)

    def finish(self, attempt: int) -> None:
        self.move(attempt, Event.RANKS_FINISHED, after_s=0.3)
        self.move(attempt, Event.NODES_CLEAR, after_s=0.1)
        self.say(RunEnded(outcome="finished", why="train_step 60 is done"), after_s=0.02)

    def write(self, run_dir: Path) -> Path:
        run_dir.mkdir(parents=True, exist_ok=True)
        lines = b"".join(msgspec.json.encode(event) + b"\n" for event in self.events)
        (run_dir / "events.jsonl").write_bytes(lines)
        return run_dir


def three_incidents() -> Story:
    """60 train_steps: a swap after XID 79, a restart in place after an exception, a shrink after a lost node."""
    tale = Story()
    tale.open()
    tale.begin(1, ("a", "b"))
    tale.train(1, 1, 22)
    xid = tale.see(
        XidSeen(node=Node("a"), at_s=tale.at_s, code=79, gpu="0000:3b:00", text="GPU has fallen off the bus."),
        after_s=0.1,
    )
    tale.judge(
        1,
        Verdict(
            key="xid79-a",
            kind=Kind.HARDWARE_FAULT,
            scope=Scope.GPU,
            rule="gpu_lost",
            because="XID 79 (GPU lost) on one GPU of one node; no other node shows it",
            confidence=Confidence.HIGH,
            node=Node("a"),
            gpu="0000:3b:00",
            convicts=True,
            drains=True,
            stops=True,
            evidence=(xid,),
            rejected=(Rejected(alternative="program fault", why="no exception in any rank"),),
        ),
    )
    tale.act(Swap(out=(Node("a"),), into=(Node("c"),), why="c passed its gate"), 1, detail="attempt 2 on b c")
    tale.stop(1, "incident 1")
    tale.begin(2, ("b", "c"), restore_step=20)
    tale.train(2, 21, 34)
    _exception(tale)
    tale.begin(3, ("b", "c"), restore_step=30)
    tale.train(3, 31, 48)
    _lost_node(tale)
    tale.begin(4, ("b",), layout=Layout(tp=2, dp=1), restore_step=40)
    tale.train(4, 41, 60, step_s=0.45)
    tale.finish(4)
    return tale


def _exception(tale: Story) -> None:
    died = tale.see(
        RankExited(
            node=Node("c"),
            at_s=tale.at_s,
            attempt=2,
            rank=Rank(2),
            exit_code=1,
            exception="ValueError: <b>bad</b> \x1b[31mdocument",
            last_words="Traceback\x1b[0m <script>alert(1)</script> NVRM: Xid 79",
            phase="train",
            train_step=34,
        ),
        after_s=0.1,
    )
    verdict = Verdict(
        key="exc-2",
        kind=Kind.APP_FAULT,
        scope=Scope.RANK,
        rule="exception",
        because="rank 2 raised ValueError: <b>bad</b> \x1b[31mdocument; the kernel logs of all nodes are clear",
        rank=Rank(2),
        stops=True,
        evidence=(died,),
        rejected=(Rejected(alternative="hardware", why="no kernel line on node c within 2 s"),),
    )
    tale.judge(2, verdict, after_s=0.2)
    tale.act(RestartInPlace(why="the nodes are clear"), 2)
    tale.stop(2, "incident 2")


def _lost_node(tale: Story) -> None:
    lost = tale.see(AgentLost(node=Node("c"), at_s=tale.at_s, silent_s=1.5, why="connection reset"), after_s=0.4)
    verdict = Verdict(
        key="lost-c",
        kind=Kind.INFRA_EVENT,
        scope=Scope.NODE,
        rule="agent_lost",
        because="node c is silent for 1.5 s and its connection was reset",
        node=Node("c"),
        convicts=True,
        stops=True,
        evidence=(lost,),
    )
    tale.judge(3, verdict)
    tale.act(Shrink(out=(Node("c"),), layout=Layout(tp=2, dp=1), feed=1, why="no spare is left"), 3)
    tale.act(Feed(nodes=1, exclude=(Node("a"), Node("c")), why="grow back"), 3, ok=False, detail="no scheduler")
    tale.stop(3, "incident 3")


@pytest.fixture(scope="session")
def new_story() -> type[Story]:
    return Story


@pytest.fixture(scope="session")
def demo_events() -> tuple[LogEvent, ...]:
    return tuple(three_incidents().events)


@pytest.fixture
def demo_run(tmp_path: Path) -> Path:
    """A run directory with the log of `three_incidents`."""
    return three_incidents().write(tmp_path / "runs" / "demo")
