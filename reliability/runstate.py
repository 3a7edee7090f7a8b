"""The run as the log tells it: evidence, incidents, convictions, open acts. Pure fold; replaying a log gives it again.

The supervisor keeps nothing else in memory that a decision depends on: kill it at any line, and its successor stands
where it stood.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from outlast.reliability import model as m
from outlast.reliability.actions import Action, Advise, Drain, EndRun, Feed, Grow, Hold, Release, Requeue, RollBack
from outlast.reliability.attempt import State
from outlast.reliability.events import (
    AttemptMoved,
    AttemptPlanned,
    EpochTaken,
    Intent,
    Judged,
    LogEvent,
    Outcome,
    RunEnded,
    RunStarted,
    Seen,
)
from outlast.reliability.evidence import Evidence, fold, replaced, without_saves
from outlast.reliability.model import JobId, Node, Noun
from outlast.reliability.verdict import Verdict

FIRST = (Drain, Advise, Feed)
"""Actions that come before the one that settles an incident."""


class Exclusion(Noun, frozen=True, kw_only=True):
    """A node that this run does not use, and why."""

    node: Node
    rule: str
    incident: int
    at_s: float


class OpenAct(Noun, frozen=True, kw_only=True):
    """An intent without its outcome yet."""

    act: int
    action: Action
    incident: int
    at_s: float


class Feeder(Noun, frozen=True, kw_only=True):
    """A feeder job that was submitted."""

    job: JobId
    nodes: int
    at_s: float


class Incident(Noun, frozen=True, kw_only=True):
    number: int
    at_s: float
    verdict: Verdict


class RunState(Noun, frozen=True, kw_only=True):
    seq: int = 0
    epoch: int = 0
    started: RunStarted | None = None
    started_s: float = 0.0
    evidence: Evidence = Evidence()
    incidents: tuple[Incident, ...] = ()
    keys: frozenset[str] = frozenset()
    """Identities of all verdicts so far."""
    excluded: Mapping[Node, Exclusion] = msgspec.field(default_factory=dict)
    quarantined: tuple[int, ...] = ()
    acts: int = 0
    """Number of the newest act."""
    open_acts: Mapping[int, OpenAct] = msgspec.field(default_factory=dict)
    drains_s: tuple[float, ...] = ()
    """When drains were intended."""
    feeders: tuple[Feeder, ...] = ()
    released: frozenset[tuple[Node, JobId]] = frozenset()
    """Nodes that were given back, or tried to be, out of which job."""
    requeued_for: frozenset[Node] = frozenset()
    """Nodes for which the allocation was already given back once."""
    failures_without_progress: int = 0
    furthest_before: int = 0
    """Highest train_step that was finished before the present attempt."""
    durable_before: int = 0
    held: str = ""
    held_s: float = 0.0
    waiting_since_s: float | None = None
    """Since when the run has had no attempt and too few nodes; None where it does not wait."""
    ending: EndRun | None = None
    ended: RunEnded | None = None
    must_stop: int = 0
    """The attempt that a verdict said cannot go on; 0 none."""
    must_stop_why: str = ""
    unsettled: Mapping[int, tuple[Action, ...]] = msgspec.field(default_factory=dict)
    """Incidents whose last action is not intended yet, with what is: a supervisor that died in between is continued."""
    at_checkpoint_from: int | None = None
    """A change of nodes that waits for a checkpoint newer than this train_step; None where none waits."""
    at_checkpoint_s: float | None = None
    """Since when it waits."""

    @property
    def stopped(self) -> bool:
        """A verdict has stopped the present attempt."""
        now = self.evidence.current
        return now is not None and self.must_stop == now.plan.attempt

    @property
    def barred(self) -> frozenset[Node]:
        """Nodes that were convicted before the present attempt was planned."""
        now = self.evidence.current
        return frozenset(n for n, e in self.excluded.items() if now is not None and e.at_s < now.planned_s)

    def open(self, kind: type[m.Noun]) -> tuple[OpenAct, ...]:
        return tuple(a for a in self.open_acts.values() if isinstance(a.action, kind))


def replay(events: Iterable[LogEvent]) -> RunState:
    state = RunState()
    for event in events:
        state = advance(state, event)
    return state


def advance(state: RunState, event: LogEvent) -> RunState:
    """The state after this event."""
    state = replaced(state, seq=event.seq, evidence=fold(state.evidence, event))
    match event.body:
        case RunStarted() as started:
            return replaced(state, started=started, started_s=event.at_s, waiting_since_s=event.at_s)  # type: ignore[no-any-return]
        case EpochTaken(epoch=epoch):
            return replaced(state, epoch=epoch)  # type: ignore[no-any-return]
        case Seen(signal=signal):
            return _advance_signal(state, event, signal)
        case Judged() as judged:
            return _advance_judged(state, event, judged)
        case Intent() as intent:
            return _advance_intent(state, event, intent)
        case Outcome() as outcome:
            return _advance_outcome(state, event, outcome)
        case AttemptPlanned():
            return replaced(  # type: ignore[no-any-return]
                state,
                waiting_since_s=None,
                at_checkpoint_from=None,
                at_checkpoint_s=None,
                furthest_before=state.evidence.furthest_step,
                durable_before=state.evidence.durable_step,
            )
        case AttemptMoved(state=State.ENDED):
            return _advance_ended(state, event)
        case RunEnded() as ended:
            return replaced(state, ended=ended)  # type: ignore[no-any-return]
        case _:
            return state


def _advance_signal(state: RunState, event: LogEvent, signal: m.Signal) -> RunState:
    match signal:
        case m.OperatorAsked(what="continue"):
            return replaced(  # type: ignore[no-any-return]
                state, held="", held_s=0.0, failures_without_progress=0, waiting_since_s=event.at_s
            )
        case m.NodeState(node=node, flags=flags) if "drain" not in flags:
            # an admin gave the node back: only what his own drain had excluded is lifted
            if node in state.excluded and state.excluded[node].rule == "admin_drain":
                return replaced(state, excluded={n: e for n, e in state.excluded.items() if n != node})  # type: ignore[no-any-return]
            return state
        case _:
            return state


def _advance_judged(state: RunState, event: LogEvent, judged: Judged) -> RunState:
    v = judged.verdict
    changes: dict[str, Any] = {
        "incidents": (*state.incidents, Incident(number=judged.incident, at_s=event.at_s, verdict=v)),
        "keys": state.keys | {v.key},
        "unsettled": {**state.unsettled, judged.incident: ()},
    }
    now = state.evidence.current
    if v.stops and not v.at_checkpoint and now is not None:
        changes |= {"must_stop": now.plan.attempt, "must_stop_why": v.rule}
    if v.convicts and v.node is not None and v.node not in state.excluded:
        exclusion = Exclusion(node=v.node, rule=v.rule, incident=judged.incident, at_s=event.at_s)
        changes["excluded"] = {**state.excluded, v.node: exclusion}
    if v.at_checkpoint and v.stops:
        changes |= {"at_checkpoint_from": state.evidence.durable_step, "at_checkpoint_s": event.at_s}
    if v.quarantine >= 0:
        bad = (v.quarantine, *v.quarantine_too)
        changes["quarantined"] = tuple(dict.fromkeys((*state.quarantined, *bad)))
        changes["evidence"] = without_saves(state.evidence, bad)
    return replaced(state, **changes)  # type: ignore[no-any-return]


def _advance_intent(state: RunState, event: LogEvent, intent: Intent) -> RunState:
    act = OpenAct(act=intent.act, action=intent.action, incident=intent.incident, at_s=event.at_s)
    changes: dict[str, Any] = {"acts": intent.act, "open_acts": {**state.open_acts, intent.act: act}}
    if intent.incident in state.unsettled:
        unsettled = dict(state.unsettled)
        if isinstance(intent.action, FIRST):
            unsettled[intent.incident] = (*unsettled[intent.incident], intent.action)
        else:
            del unsettled[intent.incident]
        changes["unsettled"] = unsettled
    match intent.action:
        case Drain():
            changes["drains_s"] = (*state.drains_s, event.at_s)
        case Hold(why=why):
            changes |= {"held": why, "held_s": event.at_s}
        case EndRun() as end:
            changes["ending"] = end
        case Requeue(exclude=exclude):
            changes["requeued_for"] = state.requeued_for | set(exclude)
        case Release(node=node, job=job):
            changes["released"] = state.released | {(node, job)}
        case Grow():
            changes |= {"at_checkpoint_from": state.evidence.durable_step, "at_checkpoint_s": event.at_s}
        case _:
            pass
    return replaced(state, **changes)  # type: ignore[no-any-return]


def _advance_outcome(state: RunState, event: LogEvent, outcome: Outcome) -> RunState:
    act = state.open_acts.get(outcome.act)
    if act is None:
        return state
    changes: dict[str, Any] = {"open_acts": {n: a for n, a in state.open_acts.items() if n != outcome.act}}
    if isinstance(act.action, Feed) and outcome.ok:
        feeder = Feeder(job=JobId(outcome.detail), nodes=act.action.nodes, at_s=event.at_s)
        changes["feeders"] = (*state.feeders, feeder)
    if isinstance(act.action, RollBack) and outcome.ok:
        # it lies elsewhere now: a new one of the same train_step is another checkpoint
        moved = {act.action.quarantine, *act.action.too}
        changes["quarantined"] = tuple(s for s in state.quarantined if s not in moved)
    return replaced(state, **changes)  # type: ignore[no-any-return]


def _advance_ended(state: RunState, event: LogEvent) -> RunState:
    now = state.evidence.current
    if now is None:
        return state
    progress = now.last_step > state.furthest_before or state.evidence.durable_step > state.durable_before
    failures = 0 if progress else state.failures_without_progress + 1
    return replaced(state, failures_without_progress=failures, waiting_since_s=event.at_s)  # type: ignore[no-any-return]
