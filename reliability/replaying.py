"""Yesterday's signals against a policy: what would have been drained, restarted, paged. Pure; it touches nothing.

    timed signals -> the run that held the node then -> fold -> judge -> decide -> one row a verdict
                     (a virtual supervisor of each)      the live core's own functions

Each run is supervised by itself, as it would have been: its own evidence, budget and exclusions. Nothing is known of
its ranks, so its attempts are virtual ones that restart at once, have spares, and make progress where they are left
alone for a while; a held run is continued by a virtual person. Nodes in no run are watched together, and nothing can
be restarted there. What an admin sees is therefore the decisions, not the training.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from outlast.reliability import model as m
from outlast.reliability.actions import Action, RollBack
from outlast.reliability.attempt import Event, State
from outlast.reliability.decide import decide
from outlast.reliability.events import (
    AttemptMoved,
    AttemptPlanned,
    Body,
    Intent,
    Judged,
    LogEvent,
    Outcome,
    Seen,
    StepsDone,
)
from outlast.reliability.model import JobId, Layout, Node, Noun
from outlast.reliability.planning import CHANGES, SiteView, situation
from outlast.reliability.policy import Policy, judge
from outlast.reliability.ports import Allocation
from outlast.reliability.replay_rows import Told, acts_of, words_of
from outlast.reliability.rules import RULES
from outlast.reliability.runfile import Cluster, LayoutAsked, Limits, RunFile, Task
from outlast.reliability.runstate import RunState, advance
from outlast.reliability.verdict import Verdict

TURN_S: Final = 0.05
"""Signals this close together are judged together, as in one turn of the supervisor's loop."""
PROGRESS_S: Final = 300.0
"""A virtual attempt that was left alone this long has trained on."""
CONTINUED_S: Final = 3600.0
"""A held run is looked at by a virtual person after this."""
SOURCES_KEPT: Final = 4096
NO_JOB: Final = "(no job)"
ALL: Final = "(all nodes)"


class JobSpan(Noun, frozen=True, kw_only=True):
    """One run of a job, as accounting tells it."""

    job: JobId
    nodes: tuple[Node, ...]
    start_s: float
    end_s: float | None = None
    state: str = ""
    """How it ended; '' while it ran on."""


class Fed(Noun, frozen=True, kw_only=True):
    """One signal and where it was read."""

    at_s: float
    signal: m.Signal
    source: str = ""


class Setting(Noun, frozen=True, kw_only=True):
    """What a replay assumes besides the signals."""

    limits: Limits = Limits()
    spares: int = 4
    """Virtual nodes of each run that can take a drained one's place."""


class Replay:
    """Feeds signals in the order of their times; `finish` tells. `jobs` () means: one run on all nodes all the time."""

    def __init__(
        self, policy: Policy, setting: Setting, *, jobs: Sequence[JobSpan] = (), nodes: Iterable[Node] = ()
    ) -> None:
        self._policy, self._setting = policy, setting
        self._jobs = _by_node(jobs)
        self._runs: dict[str, VirtualRun] = {}
        self._nodes = tuple(nodes)
        self._told: list[Told] = []

    def feed(self, fed: Fed) -> None:
        node = getattr(fed.signal, "node", None)
        if node is None:
            return
        self._run_of(node, fed.at_s).take(fed)

    def finish(self) -> tuple[Told, ...]:
        """Everything, by time."""
        for run in self._runs.values():
            run.close()
        self._runs.clear()
        return tuple(sorted(self._told, key=lambda t: (t.at_s, t.run)))

    def _run_of(self, node: Node, at_s: float) -> VirtualRun:
        span = _span_at(self._jobs.get(node, ()), at_s)
        key = ALL if not self._jobs else NO_JOB if span is None else f"job {span.job}"
        # a job that was queued again runs anew
        run = self._runs.get(key)
        if run is None or run.span != span:
            self._close_ended(at_s)
            if run is not None:
                run.close()
            run = self._runs[key] = VirtualRun(key, self._policy, self._setting, self._told.append)
            run.begin(at_s, span, self._nodes if key == ALL else ())
        return run

    def _close_ended(self, at_s: float) -> None:
        for key, run in tuple(self._runs.items()):
            if run.span is not None and run.span.end_s is not None and run.span.end_s < at_s:
                run.close()
                del self._runs[key]


def _by_node(jobs: Sequence[JobSpan]) -> dict[Node, list[JobSpan]]:
    found: dict[Node, list[JobSpan]] = {}
    for span in sorted(jobs, key=lambda j: j.start_s):
        for node in span.nodes:
            found.setdefault(node, []).append(span)
    return found


def _span_at(spans: Sequence[JobSpan], at_s: float) -> JobSpan | None:
    place = bisect_right(spans, at_s, key=lambda s: s.start_s)
    for span in reversed(spans[max(0, place - 8) : place]):  # nodes that jobs share: the newest of the last few
        if span.end_s is None or at_s < span.end_s:
            return span
    return None


class VirtualRun:
    """A supervisor without a world: the live core's state, fed by hand."""

    def __init__(self, name: str, policy: Policy, setting: Setting, tell: Callable[[Told], None]) -> None:
        self.name, self._policy, self._setting, self._tell = name, policy, setting, tell
        self._state = RunState()
        self._seq = 0
        self._step = 0
        self._stepped_s = 0.0
        self._again_at_s: float | None = None
        self._waiting: list[Fed] = []
        self._sources: dict[int, str] = {}
        self._trains = False
        """It has ranks: in a job, or taken as one run on all nodes."""
        self._real: set[Node] = set()
        self.span: JobSpan | None = None

    # ------------------------------------------------------------ the world that it does not have

    def begin(self, at_s: float, span: JobSpan | None, nodes: tuple[Node, ...]) -> None:
        self.span, self._trains = span, self.name != NO_JOB
        began_s = span.start_s if span else at_s
        spares = tuple(Node(f"(spare {i + 1})") for i in range(self._setting.spares))
        chosen = span.nodes if span else nodes
        self._real.update(chosen)
        self._join(began_s, *chosen, *spares)
        if self._trains:
            self._plan(began_s, chosen, "begun")

    def _join(self, at_s: float, *nodes: Node) -> None:
        for node in nodes:
            joined = m.AgentJoined(node=node, at_s=at_s, job=JobId(self.name), incarnation=f"{node}:{self._seq}")
            self._record(at_s, Seen(signal=joined))

    def _plan(self, at_s: float, nodes: Sequence[Node], why: str) -> None:
        now = self._state.evidence.current
        number = now.plan.attempt + 1 if now else 1
        self._record(at_s, AttemptPlanned(plan=_plan_of(number, nodes, self._step, why)))
        moves = (Event.GATE_ASKED, State.GATING), (Event.GATE_PASSED, State.STARTING), (Event.STEP_DONE, State.TRAINING)
        self._record(at_s, *(AttemptMoved(attempt=number, event=e, state=s) for e, s in moves))
        self._stepped_s = at_s

    def _appear(self, node: Node, at_s: float) -> None:
        """A node that nobody had named before: it was there all the time."""
        self._real.add(node)
        self._join(at_s, node)
        now = self._state.evidence.current
        if self._trains and now is not None:
            plan = _plan_of(now.plan.attempt, (*now.plan.nodes, node), now.plan.restore_step, now.plan.why)
            # its agent is as old as the others': none was replaced while the attempt ran
            facts = msgspec.structs.replace(self._state.evidence.node(node), joined_seq=1)
            evidence = msgspec.structs.replace(
                self._state.evidence,
                current=msgspec.structs.replace(now, plan=plan),
                nodes={**self._state.evidence.nodes, node: facts},
            )
            self._state = msgspec.structs.replace(self._state, evidence=evidence)

    # ------------------------------------------------------------ time

    def take(self, fed: Fed) -> None:
        if self._waiting and fed.at_s > self._waiting[0].at_s + TURN_S:
            self._turn()
        self._waiting.append(fed)
        if len(self._waiting) >= 10_000:
            self._turn()

    def close(self) -> None:
        """The last turn, the timers that are still open, and how the job ended."""
        self._turn()
        span = self.span
        if span is None or span.end_s is None or not span.state:
            self._pass_time(float("inf"))
            return
        self._pass_time(span.end_s)
        state = m.JobState(job=span.job, at_s=span.end_s, state=span.state, nodes=span.nodes)
        self._record(span.end_s, Seen(signal=state))
        self._judge(span.end_s)

    def _turn(self) -> None:
        if not self._waiting:
            return
        items, self._waiting = self._waiting, []
        at_s = items[-1].at_s
        self._pass_time(items[0].at_s)
        before = self._state.evidence
        for fed in items:
            node = getattr(fed.signal, "node", None)
            if node is not None and node not in self._real:
                self._appear(node, fed.at_s)
            self._back(fed)
            for event in self._record(fed.at_s, Seen(signal=fed.signal)):
                self._sources[event.seq] = fed.source
        while len(self._sources) > SOURCES_KEPT:
            del self._sources[next(iter(self._sources))]
        if self._state.evidence is not before:
            self._judge(at_s)

    def _back(self, fed: Fed) -> None:
        """Outside jobs a node that is back in service is watched anew, by whoever took it out."""
        signal = fed.signal
        if isinstance(signal, m.NodeState) and signal.state not in ("down", "fail") and "drain" not in signal.flags:
            facts = self._state.evidence.node(signal.node)
            if not self._trains and (signal.node in self._state.excluded or facts.lost_seq):
                kept = {n: e for n, e in self._state.excluded.items() if n != signal.node}
                self._state = msgspec.structs.replace(self._state, excluded=kept)
                self._join(fed.at_s, signal.node)

    def _pass_time(self, until_s: float) -> None:
        """What falls due before then: a rule that wanted to wait, progress, a held run's person."""
        for _ in range(1000):
            again_s = self._again_at_s
            if again_s is None or again_s > until_s:
                break
            self._again_at_s = None
            self._judge(again_s)
        now, state = self._state.evidence.current, self._state
        if state.held and until_s >= state.held_s + CONTINUED_S and until_s != float("inf"):
            at_s = state.held_s + CONTINUED_S
            self._record(at_s, Seen(signal=m.OperatorAsked(at_s=at_s, what="continue", who="a person")))
            self._judge(at_s)
            self._restart(at_s, "continued")
        elif now is not None and now.running and until_s >= self._stepped_s + PROGRESS_S:
            self._step += 1
            self._stepped_s = until_s
            step = m.StepSeen(train_step=self._step, step_s=1.0)
            self._record(until_s, StepsDone(attempt=now.plan.attempt, steps=(step,)))

    # ------------------------------------------------------------ judge and decide, as the supervisor does

    def _record(self, at_s: float, *bodies: Body) -> list[LogEvent]:
        events = []
        for body in bodies:
            self._seq += 1
            event = LogEvent(seq=self._seq, at_s=at_s, mono_s=at_s, boot="replay", epoch=1, body=body)
            self._state = advance(self._state, event)
            events.append(event)
        return events

    def _judge(self, now_s: float) -> None:
        judgement = judge(
            self._state.evidence,
            now_s=now_s,
            policy=self._policy,
            known=self._state.keys,
            excluded=set(self._state.excluded),
            rules=RULES,
            stopped=self._state.stopped,
        )
        self._again_at_s = judgement.again_at_s
        changed = ""
        for verdict in judgement.verdicts:
            incident = len(self._state.incidents) + 1
            self._record(now_s, Judged(incident=incident, verdict=verdict))
            actions = self._act(verdict, incident, now_s)
            if verdict.rule != "operator_continue":  # the virtual person's
                self._tell(self._row(verdict, actions, now_s))
            if any(isinstance(a, (*CHANGES, RollBack)) for a in actions):
                changed = verdict.rule
        if changed and not self._state.held and self._state.ending is None:
            self._restart(now_s, changed)
        elif self._state.held or self._state.ending is not None:
            self._stop(now_s, "held")

    def _act(self, verdict: Verdict, incident: int, now_s: float) -> tuple[Action, ...]:
        nodes = tuple(self._state.evidence.nodes)
        given = Allocation(job=JobId(self.name), nodes=nodes, state="RUNNING")
        site = SiteView(allocations=(given,), may_drain=True)
        now = situation(self._state, site, self._run_file(), now_s=now_s)
        actions = decide(verdict, now, legal=lambda _: "")
        for action in actions:
            act = self._state.acts + 1
            self._record(now_s, Intent(act=act, action=action, incident=incident), Outcome(act=act, ok=True))
        return actions

    def _run_file(self) -> RunFile:
        nodes = max(1, len(self._real))
        return RunFile(
            name="replay",
            task=Task(command=("true",)),
            cluster=Cluster(nodes=nodes, nodes_min=1, ranks_per_node=1),
            # a batch that any number of nodes divides well enough: which layout is legal is not asked here
            layout=LayoutAsked(global_batch=nodes),
            limits=self._setting.limits,
        )

    def _stop(self, at_s: float, why: str) -> None:
        now = self._state.evidence.current
        if now is None or not now.running:
            return
        number = now.plan.attempt
        self._record(
            at_s,
            AttemptMoved(attempt=number, event=Event.STOP_ASKED, state=State.STOPPING, why=why),
            AttemptMoved(attempt=number, event=Event.NODES_CLEAR, state=State.ENDED),
        )

    def _restart(self, at_s: float, why: str) -> None:
        """The next attempt, at once: the last one's nodes without those that are out, spares in their places."""
        if not self._trains:
            return
        self._stop(at_s, why)
        now = self._state.evidence.current
        usable = [n for n in self._state.evidence.present if n not in self._state.excluded]
        before = [n for n in (now.plan.nodes if now else ()) if n in usable]
        free = [n for n in usable if n not in before]
        missing = len(now.plan.nodes) - len(before) if now else 0
        nodes = (*before, *free[:missing])
        if nodes:
            self._plan(at_s, nodes, why)

    def _row(self, verdict: Verdict, actions: Sequence[Action], at_s: float) -> Told:
        return Told(
            at_s=at_s,
            run=self.name,
            kind=verdict.kind,
            rule=verdict.rule,
            node=verdict.node,
            gpu=verdict.gpu,
            acts=acts_of(actions),
            detail="; ".join(filter(None, map(words_of, actions))),
            because=verdict.because,
            source=next((self._sources[s] for s in verdict.evidence if s in self._sources), ""),
            evidence=len(verdict.evidence),
        )


def _plan_of(number: int, nodes: Sequence[Node], step: int, why: str) -> m.Plan:
    ranks = tuple(m.Placement(rank=m.Rank(i), node=n, local_rank=0) for i, n in enumerate(nodes))
    layout = Layout(dp=max(1, len(nodes)))
    return m.Plan(attempt=number, layout=layout, nodes=tuple(nodes), ranks=ranks, restore_step=step, why=why)
