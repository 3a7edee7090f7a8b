"""The real supervisor in a simulated world: whole runs in milliseconds, killed at every line of the log."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.reliability import model as m
from outlast.reliability import supervisor as supervisor_module
from outlast.reliability import wire
from outlast.reliability.actions import Drain, Hold, Release
from outlast.reliability.attempt import State
from outlast.reliability.catalogue import load_catalogue
from outlast.reliability.eventlog import MAX_BATCH, EventLog, EventLogError, read_events
from outlast.reliability.events import (
    AttemptMoved,
    AttemptPlanned,
    EpochTaken,
    Intent,
    Judged,
    Noted,
    Outcome,
    RunEnded,
    RunStarted,
    Seen,
    StepsDone,
)
from outlast.reliability.fence import Fence, take
from outlast.reliability.goodput import ledger
from outlast.reliability.inbox import Gone
from outlast.reliability.model import Node, Rank
from outlast.reliability.narrate import Narrator
from outlast.reliability.parts import Parts
from outlast.reliability.policy import Policy
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import Checkpoint, Cluster, LayoutAsked, Limits, RunFile, Task
from outlast.reliability.runstate import replay
from outlast.reliability.sim import SimClock, SimLoop, SimWorld
from outlast.reliability.sim_ports import SimBoard, SimCluster, SimStore
from outlast.reliability.supervise import wanted
from outlast.reliability.supervisor import Supervisor
from outlast.reliability.wire import RankSpec, RankStack, Seat

TARGET = 60


class Row(m.Noun, frozen=True, kw_only=True):
    name: str = "x"
    blames: str = "gpu"
    class_: str = "gpu_bus_loss"
    alone: bool = True
    convicts: bool = True
    drains: bool = True
    stops_training: bool = True


def row(code, text=""):
    if code in (79, 95):
        return Row(class_=f"class {code}")
    return Row(blames="program", class_="gpu_app_fault", convicts=False, drains=False)


class Starter:
    def ranks(self, run, run_dir, plan, *, addresses, master_port):
        last = len(plan.ranks) - 1
        return tuple(
            RankSpec(placement=p, env={"RESTORE": str(plan.restore_step)}, argv=("t",), reports=p.rank == last)
            for p in plan.ranks
        )

    def legal(self, run, layout):
        return ""


class Pages:
    def __init__(self):
        self.titles = []

    def page(self, title, text):
        self.titles.append(title)


def suspect(stacks: tuple[RankStack, ...]) -> tuple[Rank | None, str]:
    for stack in stacks:
        if stack.process_state == "T":
            return stack.rank, "stopped (T)"
    return None, "nobody stands out"


class Killed(BaseException):
    """kill -9 of the supervisor."""


class World:
    """One run in a simulated world, over as many supervisors as it takes."""

    def __init__(self, tmp_path, nodes="abc", wanted_nodes=2, nodes_min=1, kind="local", may_drain=True, **limits):
        self.loop = SimLoop()
        self.world = SimWorld(self.loop, nodes, TARGET, may_drain)
        self.run_dir = RunDir(root=tmp_path)
        values = {"wait_for_spare_s": 0.0, "hang_floor_s": 5.0, "settle_s": 1.0, "agent_silent_s": 4.0, **limits}
        self.run = RunFile(
            name="t",
            task=Task(module="t"),
            cluster=Cluster(kind=kind, nodes=wanted_nodes, nodes_min=nodes_min, ranks_per_node=2),
            layout=LayoutAsked(tp=2, global_batch=8),
            train_steps=TARGET,
            checkpoint=Checkpoint(every_steps=10),
            limits=Limits(**values),
        )
        self.pages = Pages()
        self.clock = SimClock(self.loop)
        self.kill_at: int | None = None
        self.policy_notes: list[str] = []
        self.commits: list[list[int]] = []
        """Numbers of the lines that became durable together."""

    def parts(self, board):
        return Parts(
            run_dir=self.run_dir,
            run=self.run,
            cluster=SimCluster(self.world),
            store=SimStore(self.world),
            starter=Starter(),
            pager=self.pages,
            clock=self.clock,
            policy=Policy(xid=row, kernel=load_catalogue().kernel, settle_s=self.run.limits.settle_s, polled_s=1.0),
            board=board,
            find_suspect=suspect,
            policy_notes=lambda: tuple(self.policy_notes),
            can_feed=self.run.cluster.kind == "slurm",
            poll_s=1.0,
        )

    async def _supervise(self) -> int:
        seat = take(self.run_dir, Seat(epoch=0, node="", pid=1, host="", port=1, at_s=0))
        fence = Fence(self.run_dir, seat)
        log, past = EventLog.open(self.run_dir.events, seat.epoch, clock=self.clock, boot="b", guard=fence.check)
        self._kill_in_writing(log)
        supervisor = Supervisor(self.parts(SimBoard(self.world)), log, fence, replay(past.events))
        supervisor.record(EpochTaken(epoch=seat.epoch, node="", pid=1, why="test"))
        if supervisor.state.started is None:
            layout = wanted(self.run.layout, nodes=self.run.cluster.nodes, ranks_per_node=2)
            supervisor.record(
                RunStarted(run="t", run_file_sha256="", train_steps=TARGET, layout=layout, nodes=2, spares=1)
            )
        supervisor.commit()
        living = asyncio.create_task(self.world.live())
        try:
            return await asyncio.wait_for(supervisor.run(), 900)
        finally:
            living.cancel()
            log.close()
            self.state = supervisor.state

    def _kill_in_writing(self, log: EventLog) -> None:
        """kill -9 when line `kill_at` is on disk: what is committed with it and stands behind it is not, and what
        waits for the commit is not done."""
        write = log._write

        def write_or_die(lines: bytes) -> None:
            each = lines.splitlines(keepends=True)
            through = [n for n, line in enumerate(each) if json.loads(line)["seq"] >= (self.kill_at or 1 << 60)]
            if through:
                self.kill_at = None
                write(b"".join(each[: through[0] + 1]))
                raise Killed
            write(lines)
            self.commits.append([json.loads(line)["seq"] for line in each])

        log._write = write_or_die

    def go(self, limit_s: float = 600.0) -> int | None:
        """Until the run is over or virtual time is up (None); a killed supervisor is followed by the next."""
        asyncio.set_event_loop(self.loop)
        while self.loop.now_s < 1_000.0 + limit_s:
            try:
                return self.loop.run_until_complete(asyncio.wait_for(self._supervise(), limit_s))
            except Killed:
                for task in (tasks := asyncio.all_tasks(self.loop)):
                    task.cancel()
                self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
                self.world.board = None
                self.loop.now_s += 2.0
            except TimeoutError:
                return None
        return None

    @property
    def events(self):
        return read_events(self.run_dir.events).events

    def of(self, kind):
        return [e.body for e in self.events if isinstance(e.body, kind)]

    def check_laws(self, *, good_drained: bool = False) -> None:
        """What must hold of every run, whatever happened in it."""
        events = self.events
        # replaying gives exactly the state that the last supervisor had
        assert replay(events) == self.state
        # the ledger sums to the wall time
        book = ledger(events)
        assert sum(e.seconds_s for e in book.entries) == pytest.approx(book.wall_s, abs=1e-6)
        # no good node is drained, never more than the budget
        for node, _ in self.world.drained:
            assert self.world.nodes[node].broken, f"{node} was drained and is good"
        times = [e.at_s for e in events if isinstance(e.body, Intent) and isinstance(e.body.action, Drain)]
        for a in times:
            assert sum(1 for t in times if a - 3600 < t <= a) <= self.run.limits.drains_per_hour
        # an attempt never starts on a convicted node
        convicted: set[Node] = set()
        for event in events:
            match event.body:
                case Judged(verdict=v) if v.convicts and v.node:
                    convicted.add(v.node)
                case AttemptPlanned(plan=plan):
                    assert not convicted & set(plan.nodes)
        # only what is drained is given back, and nothing runs there again
        for act in [b.action for b in self.of(Intent) if isinstance(b.action, Release)]:
            assert (
                "drain" in self.world.nodes[act.node].flags and act.node not in self.state.evidence.current.plan.nodes
            )
        # every act has an intent before it, and no intent stands twice
        acts = [b.act for b in self.of(Intent)]
        assert acts == sorted(set(acts))
        assert len(self.of(Outcome)) == len({b.act for b in self.of(Outcome)})

    def check_finished(self) -> None:
        (ended,) = self.of(RunEnded)
        assert ended.outcome == "finished"
        assert sorted(self.world.lineage) == list(range(1, TARGET + 1))


def test_an_undisturbed_run_finishes_in_one_attempt(tmp_path):
    world = World(tmp_path)
    assert world.go() == 0
    world.check_finished()
    world.check_laws()
    assert len(world.of(AttemptPlanned)) == 1 and not world.of(Judged)


def test_a_gpu_lost_is_swapped_for_the_spare_and_drained(tmp_path):
    world = World(tmp_path)
    world.world.at_step(24, lambda w: w.xid(Node("a"), 79))
    assert world.go() == 0
    world.check_finished()
    world.check_laws()
    assert [n for n, _ in world.world.drained] == ["a"]
    plans = [b.plan for b in world.of(AttemptPlanned)]
    assert [p.nodes for p in plans] == [("a", "b"), ("c", "b")] and plans[1].restore_step == 20


def test_a_drained_node_is_given_back_once_the_swap_has_emptied_it(tmp_path):
    world = World(tmp_path)
    world.world.at_step(24, lambda w: w.xid(Node("a"), 79))
    assert world.go() == 0
    world.check_finished()
    world.check_laws()
    bodies = [e.body for e in world.events]
    release = next(b for b in bodies if isinstance(b, Intent) and isinstance(b.action, Release))
    ended = next(b for b in world.of(AttemptMoved) if b.state is State.ENDED)
    assert bodies.index(release) > bodies.index(ended), "not before nothing of the run is left there"
    assert [o.ok for o in world.of(Outcome) if o.act == release.act] == [True]
    assert world.world.allocations[0].nodes == ("b", "c") and world.world.calls.count("release a") == 1
    assert len(world.of(AttemptPlanned)) == 2 and len(world.of(Judged)) == 1, "its agent's end is nobody's fault"


def test_the_batch_node_and_a_node_that_nobody_drains_stay(tmp_path):
    world = World(tmp_path)
    first = world.world.allocations[0]
    world.world.allocations[0] = msgspec.structs.replace(first, batch_node=Node("a"))
    world.world.at_step(24, lambda w: w.xid(Node("a"), 79))
    assert world.go() == 0 and world.world.allocations[0].nodes == first.nodes
    undrained = World(tmp_path / "undrained", may_drain=False)
    undrained.world.at_step(24, lambda w: w.xid(Node("a"), 79))
    assert undrained.go() == 0 and not any(c.startswith("release") for c in undrained.world.calls)


def test_an_exception_restarts_in_place(tmp_path):
    world = World(tmp_path)
    world.world.at_step(24, lambda w: w.kill_rank(1, exception="ValueError: boom"))
    assert world.go() == 0
    world.check_finished()
    world.check_laws()
    assert [b.plan.nodes for b in world.of(AttemptPlanned)] == [("a", "b"), ("a", "b")]


def test_no_spare_left_shrinks_and_keeps_the_batch(tmp_path):
    world = World(tmp_path, nodes="ab")
    world.world.at_step(24, lambda w: w.crash(Node("b")))
    assert world.go() == 0
    world.check_finished()
    world.check_laws()
    assert [b.plan.layout.dp for b in world.of(AttemptPlanned)] == [2, 1]


def test_a_connection_that_closed_has_its_time_to_come_back_before_anybody_says_that_it_closed(tmp_path):
    """The switchboard knows it at once; Gone comes through two queues, and a turn may fall in between."""
    world = World(tmp_path)

    def cut(w):
        w.nodes[Node("b")].alive = False
        w.gang.dead = True
        w.board.session(Node("b")).connected = False
        w.loop.call_later(2.0, w.board.events.put_nowait, Gone(Node("b"), "the agent closed the connection"))

    world.world.at_step(24, cut)
    assert world.go() == 0
    world.check_laws()
    (lost,) = (b.signal for b in world.of(Seen) if isinstance(b.signal, m.AgentLost))
    assert 3.0 <= lost.silent_s < 4.0 and lost.why == "the agent closed the connection"


def test_a_feeder_brings_a_replacement_and_the_run_grows_back_at_a_checkpoint(tmp_path):
    world = World(tmp_path, nodes="ab", kind="slurm")
    world.world.at_step(24, lambda w: w.crash(Node("b")))
    assert world.go() == 0
    world.check_finished()
    world.check_laws()
    plans = [b.plan for b in world.of(AttemptPlanned)]
    assert [p.layout.dp for p in plans] == [2, 1, 2]
    assert plans[2].restore_step > plans[1].restore_step
    assert world.world.calls.count("feed 1") == 1


def test_a_hang_names_the_rank_and_restarts(tmp_path):
    world = World(tmp_path)
    world.world.at_step(24, lambda w: w.hang(2))
    assert world.go() == 0
    world.check_finished()
    world.check_laws()
    (judged,) = world.of(Judged)
    assert judged.verdict.rank == 2 and not judged.verdict.convicts


def test_the_same_exception_for_ever_is_held_and_goes_on_when_asked(tmp_path):
    world = World(tmp_path, hold_max_s=100.0)

    def again(w):
        w.kill_rank(0, exception="KeyError: doc_881")
        w.at_step(24, again)

    world.world.at_step(24, again)
    assert world.go() == 1
    world.check_laws()
    assert len(world.of(AttemptPlanned)) == 3
    assert world.of(RunEnded)[0].outcome == "failed"
    assert any("held" in title for title in world.pages.titles)


def test_a_held_run_ends_when_its_user_says_so(tmp_path):
    world = World(tmp_path)

    def again(w):
        w.kill_rank(0, exception="KeyError: doc_881")
        w.at_step(24, again)

    def stop_when_held():
        if any(isinstance(i.action, Hold) for i in world.of(Intent)):
            world.run_dir.requests.mkdir(exist_ok=True)
            ask = m.OperatorAsked(at_s=1.0, what="stop", who="ada")
            (world.run_dir.requests / "stop.json").write_bytes(msgspec.json.encode(ask))
        else:
            world.loop.call_later(1.0, stop_when_held)

    world.world.at_step(24, again)
    world.loop.call_later(1.0, stop_when_held)
    assert world.go() == 0
    world.check_laws()
    assert world.of(RunEnded)[0].outcome == "stopped"


@pytest.mark.parametrize(("fault", "kind"), [("exception", "app_fault"), ("xid", "hardware_fault")])
def test_while_the_log_cannot_be_written_ranks_train_on_and_nothing_is_done(tmp_path, monkeypatch, fault, kind):
    world = World(tmp_path)
    commit, drain = EventLog.commit, SimCluster.drain
    full = False

    def drain_if_logged(self, node, reason):
        assert not full
        return drain(self, node, reason)

    def commit_or_fail(self):
        if full and self.room < MAX_BATCH:
            self.drop()
            raise EventLogError("events.jsonl: no space left on device", again=True)
        commit(self)

    def fill(w):
        nonlocal full
        full = True
        w.loop.call_later(8.0, empty)

    def empty():
        nonlocal full
        full = False

    monkeypatch.setattr(EventLog, "commit", commit_or_fail)
    monkeypatch.setattr(SimCluster, "drain", drain_if_logged)
    world.world.at_step(12, fill)
    world.world.at_step(24, FAULTS[fault])
    assert world.go() == 0
    world.check_finished()
    world.check_laws()
    assert sum("cannot be written" in title for title in world.pages.titles) == 1
    assert [b.verdict.kind for b in world.of(Judged)] == [kind], world.of(Judged)
    assert len(world.world.drained) == (fault == "xid")


def test_a_plan_that_cannot_be_written_is_waited_for_and_ends_nothing(tmp_path, monkeypatch):
    world = World(tmp_path)
    write, until_s = Path.write_bytes, 0.0

    def write_or_fail(path, data):
        if path.name == "plan.json" and world.loop.now_s < until_s:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, data)

    def fill(w):
        nonlocal until_s
        until_s = w.loop.now_s + 60.0
        w.kill_rank(1, exception="ValueError: boom")

    monkeypatch.setattr(Path, "write_bytes", write_or_fail)
    world.world.at_step(24, fill)
    assert world.go() == 0
    world.check_finished()
    world.check_laws()
    assert sum("attempt 2 cannot be planned" in b.text and "No space left" in b.text for b in world.of(Noted)) == 1


def test_a_line_its_verdict_and_what_is_to_be_done_become_durable_together(tmp_path):
    world = World(tmp_path)
    world.world.at_step(24, lambda w: w.xid(Node("a"), 79))
    assert world.go() == 0
    kinds = {e.seq: type(getattr(e.body, "signal", e.body)) for e in world.events}
    (xid,) = (seq for seq, kind in kinds.items() if kind is m.XidSeen)
    (together,) = (commit for commit in world.commits if xid in commit)
    told = [kinds[seq] for seq in together if seq >= xid and kinds[seq] is not StepsDone]
    assert told == [m.XidSeen, Judged, Intent, Intent, AttemptMoved]


def test_nothing_is_done_before_what_it_follows_from_is_in_the_log(tmp_path, monkeypatch):
    """Drains after their intents, commands after the moves that ask for them, answers after what they answer."""
    world = World(tmp_path)
    done = []

    def logged(kind, **facts):
        bodies = [b for b in world.of(kind) if all(getattr(b, name) == value for name, value in facts.items())]
        assert bodies, f"{kind.__name__} {facts} is not in the log"
        return bodies

    def drain(self, node, reason):
        assert any(isinstance(b.action, Drain) and b.action.node == node for b in logged(Intent))
        done.append("drain")
        return drained(self, node, reason)

    def command(self, node, message):
        wanted = {wire.Gate: "gating", wire.StartRanks: "starting", wire.StopRanks: "stopping"}.get(type(message))
        if wanted is not None:
            logged(AttemptMoved, attempt=message.attempt, state=wanted)
            done.append(wanted)
        return commanded(self, node, message)

    def ack(self, node, incarnation, number):
        answered = [h.signal for h in self.world.nodes[node].outbox if h.number <= number]
        assert all(logged(Seen, signal=signal) for signal in answered)
        done.append("ack")
        return acked(self, node, incarnation, number)

    drained, commanded, acked = SimCluster.drain, SimBoard.command, SimBoard.ack
    monkeypatch.setattr(SimCluster, "drain", drain)
    monkeypatch.setattr(SimBoard, "command", command)
    monkeypatch.setattr(SimBoard, "ack", ack)
    world.world.at_step(24, lambda w: w.xid(Node("a"), 79))
    assert world.go() == 0
    world.check_finished()
    assert set(done) == {"drain", "gating", "starting", "stopping", "ack"}


def test_a_torn_checkpoint_is_set_aside_and_the_one_before_it_restored(tmp_path):
    world = World(tmp_path)

    def tear(w):
        w.durable[30] = "__3_1.distcp: truncated"
        w.kill_rank(1, exception="ValueError: boom")

    world.world.at_step(34, tear)
    assert world.go() == 0
    world.check_finished()
    world.check_laws()
    assert world.of(AttemptPlanned)[1].plan.restore_step == 20
    assert world.world.set_aside == {30}


def test_an_admins_drain_is_obeyed_at_a_checkpoint_and_left_as_it_is(tmp_path):
    world = World(tmp_path)
    world.world.at_step(24, lambda w: w.admin_drain(Node("a"), "DIMM swap, ticket 5512"))
    assert world.go() == 0
    world.check_finished()
    world.check_laws()
    assert world.of(AttemptPlanned)[1].plan.nodes == ("c", "b")
    assert world.world.nodes[Node("a")].reason == "DIMM swap, ticket 5512" and not world.world.drained


def test_a_cancelled_job_is_one_incident_and_its_end_waits_for_no_agent(tmp_path):
    """Slurm ends the agents first and this process seconds later: by then the end must be in the log."""
    world = World(tmp_path)

    def cancel(sim: SimWorld) -> None:
        job = sim.allocations[0]
        sim.allocations[0] = msgspec.structs.replace(job, state="CANCELLED")
        for node in job.nodes:
            sim.crash(node)
        left = msgspec.structs.replace(sim.allocations[0], nodes=job.nodes[:1])
        sim.loop.call_later(1.2, lambda: sim.allocations.__setitem__(0, left))

    world.world.at_step(24, cancel)
    assert world.go() == 1
    (ended,) = [e for e in world.events if isinstance(e.body, RunEnded)]
    (judged,) = [e for e in world.events if isinstance(e.body, Judged)]
    assert (ended.body.outcome, judged.body.verdict.rule) == ("cancelled", "job_cancelled")
    assert ended.at_s - judged.at_s < 1.0


def test_one_cause_on_many_nodes_drains_none(tmp_path):
    world = World(tmp_path, nodes="abcdef", wanted_nodes=4, nodes_min=4)

    def everywhere(w):
        for node in "abcd":
            w.tell(Node(node), m.XidSeen(node=Node(node), at_s=0, code=79, gpu="0000:3b:00"))

    world.world.at_step(24, everywhere)
    world.go(60)
    world.check_laws()
    assert len(world.world.drained) <= world.run.limits.drains_per_hour


def test_a_failed_remap_is_swapped_and_a_throttled_gpu_trains_on(tmp_path):
    world = World(tmp_path)
    world.world.at_step(12, lambda w: w.gpu(Node("b"), "hw_slowdown", 72))
    world.world.at_step(24, lambda w: w.gpu(Node("a"), "remap_failed", 1))
    assert world.go() == 0
    world.check_finished()
    world.check_laws()
    assert [n for n, _ in world.world.drained] == ["a"]
    assert [(b.verdict.kind, b.verdict.node) for b in world.of(Judged)] == [
        ("hardware_suspect", None),
        ("hardware_fault", "a"),
    ]


def test_a_sites_policy_that_changes_is_noted_once(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_module, "POLICY_S", 1.0)
    world = World(tmp_path)
    world.policy_notes = ["judged by the site's rows"]
    world.world.at_step(24, lambda w: world.policy_notes.append("the site's policy is not as it was"))
    assert world.go() == 0
    world.check_finished()
    assert [b.text for b in world.of(Noted)] == ["judged by the site's rows", "the site's policy is not as it was"]


def test_a_silent_scheduler_costs_no_training(tmp_path):
    world = World(tmp_path)
    world.world.at_step(12, lambda w: setattr(w, "silent_scheduler", True))
    world.world.at_step(24, lambda w: w.kill_rank(1, posix_signal=9))
    assert world.go() == 0
    world.check_finished()
    world.check_laws()


FAULTS = {
    "xid": lambda w: w.xid(next(iter(w.gang.nodes)), 79),
    "exception": lambda w: w.kill_rank(1, exception="ValueError: boom"),
    "sigkill": lambda w: w.kill_rank(0, posix_signal=9),
    "hang": lambda w: w.hang(1),
    "crash": lambda w: w.crash(w.gang.nodes[-1]),
    "remap_failed": lambda w: w.gpu(w.gang.nodes[0], "remap_failed", 1),
    "throttled": lambda w: w.gpu(w.gang.nodes[0], "hw_slowdown", 8),
    "app_xid": lambda w: w.xid(w.gang.nodes[0], 31),
    "drain": lambda w: w.admin_drain(w.gang.nodes[0], "ticket 1"),
}


def broken_run(tmp_path, faults, kill_at=None):
    world = World(tmp_path, nodes="abcdef", attempts_without_progress=6)
    for step, name in faults:
        world.world.at_step(step, FAULTS[name])
    world.kill_at = kill_at
    code = world.go()
    return world, code


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_supervisor_killed_at_lines_of_the_log_loses_nothing_and_does_nothing_twice(tmp_path, fault):
    killed_at(tmp_path, fault, each=7)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_the_supervisor_killed_at_every_line_loses_nothing_and_does_nothing_twice(tmp_path, fault):
    killed_at(tmp_path, fault, each=1)


def killed_at(tmp_path, fault, each):
    plain, code = broken_run(tmp_path / "plain", [(24, fault)])
    assert code == 0
    lines = len(plain.events)
    for n in range(1, lines, each):
        world, code = broken_run(tmp_path / str(n), [(24, fault)], kill_at=n)
        assert code == 0, f"killed at line {n}"
        world.check_finished()
        world.check_laws()
        assert world.world.drained == plain.world.drained or [n for n, _ in world.world.drained] == [
            n for n, _ in plain.world.drained
        ]


counter = itertools.count()


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    faults=st.lists(st.tuples(st.integers(2, 58), st.sampled_from(sorted(FAULTS))), max_size=4),
    kill_at=st.none() | st.integers(1, 120),
)
def test_whatever_happens_the_laws_hold_and_the_run_ends(tmp_path, faults, kill_at):
    world, code = broken_run(tmp_path / str(next(counter)), faults, kill_at)
    world.check_laws()
    assert code == 0
    world.check_finished()


def test_an_allocation_that_ends_is_left_with_a_checkpoint_of_the_last_step(tmp_path):
    world = World(tmp_path)
    world.run = msgspec.structs.replace(
        world.run,
        task=Task(module="t", kind="reference"),
        checkpoint=Checkpoint(every_steps=10, end_margin_s=3.0),
    )

    def announce(w):
        first = w.allocations[0]
        ends_at_s = w.board.world.loop.now_s + 1_700_000_000.0 + 5.0
        w.allocations[0] = msgspec.structs.replace(first, ends_at_s=ends_at_s)

    world.world.at_step(20, announce)
    assert world.go(limit_s=60) is None, "it waits for the allocation's end"
    (stop,) = [b for b in world.of(AttemptMoved) if b.event == "stop_asked"]
    assert "save first: the allocation ends" in stop.why
    assert world.world.durable and max(world.world.durable) == max(world.world.lineage)
    assert len(world.of(AttemptPlanned)) == 1, "nothing is begun that could not save"
    assert any("too soon for another attempt" in b.text for b in world.of(Noted))


def test_an_admins_drain_is_met_by_a_save_where_no_checkpoint_comes(tmp_path):
    world = World(tmp_path, nodes="abc")
    world.run = msgspec.structs.replace(world.run, task=Task(module="t", kind="reference"))
    world.world.SAVE_EVERY, world.world.STEP_S = 1000, 5.0
    world.world.at_step(4, lambda w: w.admin_drain(Node("a"), "DIMM swap"))
    assert world.go(limit_s=900) == 0
    first, second = [b.plan for b in world.of(AttemptPlanned)][:2]
    assert Node("a") in first.nodes and Node("a") not in second.nodes
    assert second.restore_step >= 10, "nothing that was trained is lost"
    steps = [s.train_step for b in world.of(StepsDone) for s in b.steps]
    assert len(steps) == len(set(steps)), "no train_step was done twice"


def test_the_users_retention_is_what_is_pruned_by(tmp_path):
    world = World(tmp_path)
    world.run = msgspec.structs.replace(world.run, checkpoint=Checkpoint(every_steps=10, keep_last=2, keep_every=30))
    world.world.at_step(24, lambda w: w.kill_rank(1, exception="KeyError: x"))
    assert world.go() == 0
    pruned = [call for call in world.world.calls if call.startswith("prune ")]
    assert len(pruned) >= 5
    assert {call.partition(" keep")[0] for call in pruned} == {"prune 2 every 30"}
    assert pruned[-1].endswith("keep [20]"), "nor what the present attempt was restored from"


def test_an_interval_that_follows_is_told_to_the_next_attempt_and_narrated(tmp_path):
    world = World(tmp_path)
    world.run = msgspec.structs.replace(
        world.run,
        task=Task(module="t", kind="reference"),
        checkpoint=Checkpoint(every_steps=10, auto=True, every_min_s=6.0, every_max_s=9.0),
    )
    world.world.at_step(24, lambda w: w.kill_rank(1, exception="KeyError: x"))
    assert world.go() == 0
    first, second = [b.plan for b in world.of(AttemptPlanned)]
    assert (first.save_every, first.save_because) == (0, "")
    assert second.save_every == 30 and "bounded from above" in second.save_because
    said = [line for e in world.events for line in Narrator(TARGET).lines(e)]
    assert any("saves:   every 30 train_steps: a save costs" in line for line in said)


def test_the_interval_follows_while_an_attempt_trains(tmp_path):
    world = World(tmp_path)
    world.run = msgspec.structs.replace(
        world.run,
        task=Task(module="t", kind="reference"),
        checkpoint=Checkpoint(every_steps=10, auto=True, every_min_s=6.0, every_max_s=30.0),
    )
    world.world.STEP_S = 1.0
    assert world.go() == 0
    told = world.run_dir.save_every(1).read_text()
    assert told == "30\n", "as often as the user's bound allows"
    (note,) = [b.text for b in world.of(Noted) if b.text.startswith("from now on a checkpoint")]
    assert "every 30 train_steps (it was 10): a save costs" in note and "bounded from above" in note
