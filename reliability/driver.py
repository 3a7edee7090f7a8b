"""What the present attempt needs next: the state and the agents' beats in, moves out. Pure.

    planned -> gate every node -> start the ranks -> watch them load and train -> stop, until every node is proven empty

It says what is wanted, not what was already sent: the supervisor sends each wanted command once to each incarnation of
an agent, and agents take a repeated command for the same one. So a successor can go on from the log alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outlast.reliability.attempt import Event, State
from outlast.reliability.evidence import AttemptFacts
from outlast.reliability.model import GateOutcome, Node, Noun
from outlast.reliability.runfile import Limits
from outlast.reliability.runstate import RunState
from outlast.reliability.saves_seen import AFTER_CHECKPOINT
from outlast.reliability.wire import Beat

_PHASES = ("init", "load", "compile", "train", "eval", "save", "idle")


class AgentView(Noun, frozen=True, kw_only=True):
    """What the supervisor sees of one agent now."""

    node: Node
    connected: bool
    incarnation: str = ""
    beat: Beat | None = None
    stop_done: bool = False
    """The agent answered the present attempt's StopRanks: nothing is left, or it said what is."""


class Send(Noun, frozen=True, kw_only=True, tag="send"):
    """A command that this node should have got: gate | start | stop."""

    node: Node
    what: str


class Move(Noun, frozen=True, kw_only=True, tag="move"):
    """An event of the attempt that has come true."""

    event: Event
    why: str = ""


Want = Send | Move


def drive(
    state: RunState, views: Mapping[Node, AgentView], *, now_s: float, limits: Limits, last_call: str = ""
) -> tuple[Want, ...]:
    """Wanted commands first, then at most one move. last_call: why ranks are to save now and then to end; '' : not."""
    now = state.evidence.current
    if now is None:
        return ()
    if state.must_stop == now.plan.attempt and now.state not in (State.STOPPING, State.ENDED):
        return (Move(event=Event.STOP_ASKED, why=state.must_stop_why),)
    match now.state:
        case State.PLANNED:
            return (Move(event=Event.GATE_ASKED),)
        case State.GATING:
            return _gating(state, now, now_s, limits)
        case State.STARTING | State.LOADING | State.FIRST_STEP | State.TRAINING:
            sends = tuple(Send(node=n, what="start") for n in now.plan.nodes)
            move = _due_at_checkpoint(state) or _running(now, views)
            if move is None and last_call:
                move = Move(event=Event.STOP_ASKED, why=last_call)
            return (*sends, move) if move else sends
        case State.STOPPING:
            return _stopping(state, now, views)
        case State.ENDED:
            return ()


def _gating(state: RunState, now: AttemptFacts, now_s: float, limits: Limits) -> tuple[Want, ...]:
    answered: list[Node] = []
    for node in now.plan.nodes:
        facts = state.evidence.node(node)
        if facts.gate is not None and facts.gate_seq > now.planned_seq and facts.gate.attempt == now.plan.attempt:
            answered.append(node)
    silent = [n for n in now.plan.nodes if n not in answered]
    sends = tuple(Send(node=n, what="gate") for n in silent)
    if not silent:
        bad = [n for n in answered if (g := state.evidence.node(n).gate) and g.outcome is GateOutcome.FAULT]
        # a fault has its own verdict, which stops the attempt
        return () if bad else (Move(event=Event.GATE_PASSED),)
    if now_s > now.state_s + limits.gate_timeout_s:
        # no answer is not a fault: if the node is really unwell, the start will show it
        return (Move(event=Event.GATE_PASSED, why=f"no answer of the gate from {', '.join(silent)}: unknown"),)
    return sends


def _due_at_checkpoint(state: RunState) -> Move | None:
    since = state.at_checkpoint_from
    target = state.started.train_steps if state.started else 0
    if since is None or state.evidence.durable_step <= since or 0 < target <= state.evidence.durable_step:
        return None
    return Move(
        event=Event.STOP_ASKED, why=f"{AFTER_CHECKPOINT} {state.evidence.durable_step} is durable: nodes change now"
    )


def _running(now: AttemptFacts, views: Mapping[Node, AgentView]) -> Move | None:
    beats = [v.beat for n in now.plan.nodes if (v := views.get(n)) and v.beat and v.beat.attempt == now.plan.attempt]
    if len(beats) < len(now.plan.nodes):
        return None
    if all(b.finished for b in beats):
        return Move(event=Event.RANKS_FINISHED, why="all ranks exited 0")
    if now.last_step > now.plan.restore_step and now.state is not State.TRAINING:
        return Move(event=Event.STEP_DONE)
    phase = _earliest(beats)
    if now.state is State.STARTING and phase == "load":
        return Move(event=Event.LOAD_BEGUN)
    if now.state in (State.STARTING, State.LOADING) and phase in ("compile", "train", "eval", "save"):
        return Move(event=Event.TRAIN_BEGUN)
    return None


def _earliest(beats: Sequence[Beat]) -> str:
    """The phase that the slowest node is in; '' where one does not say."""
    if any(b.phase not in _PHASES for b in beats):
        return ""
    return min((b.phase for b in beats), key=_PHASES.index)


def _stopping(state: RunState, now: AttemptFacts, views: Mapping[Node, AgentView]) -> tuple[Want, ...]:
    waiting: list[Node] = []
    for node in now.plan.nodes:
        view = views.get(node)
        if not state.evidence.node(node).present:
            continue  # lost: its ranks went with its agent, and it is excluded
        gone = view is None or not view.connected
        if gone and state.ending is not None and state.evidence.let_go(node):
            continue  # its job is over: Slurm ends all that runs there, the agent first, and no attempt follows
        if view is None or gone or not view.stop_done:
            waiting.append(node)
    if waiting:
        return tuple(Send(node=n, what="stop") for n in waiting)
    return (Move(event=Event.NODES_CLEAR),)


def stalled_s(plan_nodes: Sequence[Node], views: Mapping[Node, AgentView], attempt: int) -> float | None:
    """For how long no rank of the attempt has moved; None where a node's word is missing."""
    still: list[float] = []
    for node in plan_nodes:
        view = views.get(node)
        if view is None or view.beat is None or view.beat.attempt != attempt:
            return None
        still.append(view.beat.stalled_s)
    return min(still) if still else None


def hang_limit_s(now: AttemptFacts, limits: Limits, phases: Sequence[str]) -> float:
    """How long without progress is too long now: 3 x the usual p99 of a train_step, but no less than the floor.

    Start, load, save and evaluation have no usual length yet: they get the start's time.
    """
    if now.state is not State.TRAINING or any(p not in ("train", "idle", "") for p in phases):
        return limits.start_timeout_s
    times = sorted(now.step_times_s)
    p99 = times[min(len(times) - 1, int(0.99 * len(times)))] if times else 0.0
    return max(limits.hang_floor_s, 3.0 * p99)
