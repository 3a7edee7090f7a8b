"""Tells the core what happened, as a sentence a line: the log's events without files, clocks or agents."""

from __future__ import annotations

from outlast.reliability import model as m
from outlast.reliability.actions import Action
from outlast.reliability.attempt import Event, State, moved
from outlast.reliability.decide import Situation, decide
from outlast.reliability.elastic import places, wanted
from outlast.reliability.events import (
    AttemptMoved,
    AttemptPlanned,
    Body,
    EpochTaken,
    Intent,
    Judged,
    LogEvent,
    RunStarted,
    Seen,
    StepsDone,
)
from outlast.reliability.model import JobId, Node, Rank
from outlast.reliability.planning import SiteView, situation
from outlast.reliability.policy import Judgement, Policy, judge
from outlast.reliability.ports import Allocation
from outlast.reliability.rules import RULES
from outlast.reliability.runfile import Cluster, LayoutAsked, Limits, RunFile, Task
from outlast.reliability.runstate import RunState, advance
from outlast.reliability.verdict import Verdict


class Row(m.Noun, frozen=True, kw_only=True):
    """A catalogue row of a test's own."""

    name: str = "some fault"
    blames: str = "gpu"
    class_: str = "gpu_bus_loss"
    alone: bool = True
    convicts: bool = True
    drains: bool = True
    stops_training: bool = True


ROWS = {
    79: Row(name="GPU has fallen off the bus"),
    95: Row(name="uncontained ECC error", class_="gpu_memory_ue"),
    31: Row(name="MMU fault", blames="program", class_="gpu_app_fault", convicts=False, drains=False),
    63: Row(name="row remap", blames="gpu", class_="gpu_memory_remap", alone=False, convicts=False, drains=False),
    154: Row(name="recovery action", blames="gpu", class_="recovery_hint", drains=True),
}


def row(code: int, text: str = "") -> Row:
    """As the catalogue gives it: XID 154 convicts by what its text asks for."""
    found = ROWS.get(code, Row(name="unknown", convicts=False, drains=False))
    asks_nothing = code == 154 and ("(" not in text or "None)" in text.partition(" to ")[2])
    return Row(name=found.name, convicts=False, drains=False) if asks_nothing else found


POLICY = Policy(xid=row, settle_s=2.0)


def run_file(nodes: int = 2, spares: int = 1, nodes_min: int = 1, **limits: float) -> RunFile:
    return RunFile(
        name="t",
        task=Task(module="outlast.launchers.trainer"),
        cluster=Cluster(kind="local", nodes=nodes, nodes_min=nodes_min, spares=spares, ranks_per_node=2),
        layout=LayoutAsked(tp=2, global_batch=8),
        train_steps=60,
        limits=Limits(wait_for_spare_s=0, **limits),  # type: ignore[arg-type]
    )


class Story:
    """A run from its first line. Time passes only by `later`."""

    def __init__(self, nodes: str = "abc", run: RunFile | None = None) -> None:
        self.run = run or run_file()
        self.state = RunState()
        self.events: list[LogEvent] = []
        self.now_s = 1000.0
        self.epoch = 1
        self.site = SiteView(
            allocations=(Allocation(job=JobId("1"), nodes=tuple(Node(n) for n in nodes), state="RUNNING"),)
        )
        self.log(EpochTaken(epoch=1, node="", pid=1, why="start"))
        layout = wanted(self.run.layout, self.run.cluster.nodes, self.run.ranks_per_node)
        self.log(
            RunStarted(run="t", run_file_sha256="0", train_steps=self.run.train_steps, layout=layout, nodes=2, spares=1)
        )
        for node in nodes:
            self.join(node)

    # -- what happens

    def log(self, body: Body) -> LogEvent:
        event = LogEvent(
            seq=len(self.events) + 1, at_s=self.now_s, mono_s=self.now_s, boot="b", epoch=self.epoch, body=body
        )
        self.events.append(event)
        self.state = advance(self.state, event)
        return event

    def see(self, signal: m.Signal) -> int:
        return self.log(Seen(signal=signal)).seq

    def later(self, seconds: float) -> Story:
        self.now_s += seconds
        return self

    def join(self, node: str, incarnation: str = "1") -> Story:
        self.see(m.AgentJoined(node=Node(node), at_s=self.now_s, job=JobId("1"), incarnation=node + incarnation))
        return self

    def plan(self, nodes: str = "ab", restore: int = 0, layout: m.Layout | None = None) -> Story:
        names = tuple(Node(n) for n in nodes)
        layout = layout or wanted(self.run.layout, len(nodes), self.run.ranks_per_node)
        now = self.state.evidence.current
        attempt = now.plan.attempt + 1 if now else 1
        ranks = places(layout, names, self.run.ranks_per_node)
        self.log(
            AttemptPlanned(plan=m.Plan(attempt=attempt, layout=layout, nodes=names, ranks=ranks, restore_step=restore))
        )
        return self

    def move(self, event: Event, why: str = "") -> Story:
        now = self.state.evidence.current
        assert now is not None
        self.log(AttemptMoved(attempt=now.plan.attempt, event=event, state=moved(now.state, event), why=why))
        return self

    def train(self, nodes: str = "ab", restore: int = 0, through: int = 0) -> Story:
        """An attempt that trains, up to this train_step."""
        self.plan(nodes, restore).move(Event.GATE_ASKED).move(Event.GATE_PASSED)
        self.move(Event.TRAIN_BEGUN).move(Event.STEP_DONE)
        return self.steps(through) if through else self

    def steps(self, through: int, step_s: float = 0.3) -> Story:
        now = self.state.evidence.current
        assert now is not None
        steps = tuple(m.StepSeen(train_step=n, step_s=step_s) for n in range(now.reached + 1, through + 1))
        self.log(StepsDone(attempt=now.plan.attempt, steps=steps))
        return self

    def durable(self, train_step: int) -> Story:
        self.see(m.CheckpointSeen(at_s=self.now_s, train_step=train_step, verified=True, path=f"iter_{train_step}"))
        return self

    def xid(self, node: str, code: int, gpu: str | None = "0000:3b:00", text: str = "", **more: int) -> int:
        return self.see(m.XidSeen(node=Node(node), at_s=self.now_s, code=code, gpu=gpu, text=text, **more))  # type: ignore[arg-type]

    def exit(self, rank: int, code: int | None = 1, exception: str = "", **more: object) -> int:
        now = self.state.evidence.current
        assert now is not None
        node = next(p.node for p in now.plan.ranks if p.rank == rank)
        more.setdefault("phase", "train")
        if "posix_signal" in more:
            code = None
        return self.see(
            m.RankExited(
                node=node,
                at_s=self.now_s,
                attempt=now.plan.attempt,
                rank=Rank(rank),
                exit_code=code,
                exception=exception,
                train_step=now.reached,
                **more,  # type: ignore[arg-type]
            )
        )

    def end(self, why: str = "") -> Story:
        """The attempt stops and every node is clear."""
        now = self.state.evidence.current
        assert now is not None
        if now.state is not State.STOPPING:
            self.move(Event.STOP_ASKED, why)
        return self.move(Event.NODES_CLEAR)

    # -- what the core makes of it

    def judge(self) -> Judgement:
        return judge(
            self.state.evidence,
            now_s=self.now_s,
            policy=POLICY,
            known=self.state.keys,
            excluded=set(self.state.excluded),
            rules=RULES,
            stopped=self.state.stopped,
            barred=self.state.barred,
            target_steps=self.run.train_steps,
        )

    def verdicts(self) -> tuple[Verdict, ...]:
        return self.judge().verdicts

    def verdict(self) -> Verdict:
        (verdict,) = self.verdicts()
        return verdict

    def situation(self) -> Situation:
        return situation(self.state, self.site, self.run, now_s=self.now_s)

    def react(self) -> list[Action]:
        """Judge and decide as the supervisor does, with the log's lines; returns the actions."""
        actions: list[Action] = []
        for verdict in self.verdicts():
            self.log(Judged(incident=len(self.state.incidents) + 1, verdict=verdict))
            for action in decide(verdict, self.situation(), legal=lambda _: ""):
                self.log(Intent(act=self.state.acts + 1, action=action, incident=len(self.state.incidents)))
                actions.append(action)
        return actions
