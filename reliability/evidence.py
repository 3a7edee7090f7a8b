"""What we know now: a fold over the event log. Pure -- no clock, no files; the same log gives the same evidence.

A signal never changes what an earlier one said, it adds to it; a doubled or late one adds nothing. What is known of a
node, of the present attempt and of earlier attempts is kept with the log's sequence numbers, so that every verdict can
name its evidence. Judging is in policy.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, assert_never

import msgspec

from outlast.reliability import model as m
from outlast.reliability.attempt import State
from outlast.reliability.events import AttemptMoved, AttemptPlanned, LogEvent, Seen, StepsDone
from outlast.reliability.model import JobId, Node, Noun, Plan, Rank
from outlast.reliability.node_facts import GpuFact, KernelFact, NodeFacts, XidFact
from outlast.reliability.saves_seen import SavesSeen, with_end, with_save, with_steps

KEPT_XIDS = 64
KEPT_ATTEMPTS = 64
KEPT_STEP_TIMES = 256


class ExitFact(Noun, frozen=True, kw_only=True):
    seq: int
    seen_s: float
    exit: m.RankExited


class AttemptFacts(Noun, frozen=True, kw_only=True):
    """The present (or last) attempt."""

    plan: Plan
    planned_seq: int
    planned_s: float
    state: State = State.PLANNED
    state_s: float = 0.0
    started_seq: int = 0
    """Log number of the move into STARTING; 0 before."""
    started_s: float = 0.0
    why_stopped: str = ""
    exits: tuple[ExitFact, ...] = ()
    placed: Mapping[Rank, m.RankPlaced] = msgspec.field(default_factory=dict)
    no_progress_seq: int = 0
    no_progress: m.NoProgress | None = None
    last_step: int = -1
    """Highest finished train_step; -1 before the first."""
    step_times_s: tuple[float, ...] = ()

    @property
    def running(self) -> bool:
        return self.state in (State.STARTING, State.LOADING, State.FIRST_STEP, State.TRAINING)

    @property
    def active(self) -> bool:
        """Under way: planned, being gated, or running."""
        return self.state not in (State.STOPPING, State.ENDED)

    @property
    def reached(self) -> int:
        """The train_step it stands at: the last finished one, or where it was restored."""
        return max(self.last_step, self.plan.restore_step)


class Failure(Noun, frozen=True, kw_only=True):
    """How an earlier attempt ended, for the rules that look at repeats."""

    attempt: int
    nodes: tuple[Node, ...]
    restore_step: int
    reached: int
    exception: str = ""
    error_class: str = ""
    phase: str = ""
    node: Node | None = None
    """Where the primary exit was; of a hang, where the rank is that waits for nobody."""
    rank: Rank | None = None
    exit_code: int | None = None
    posix_signal: int | None = None
    hung: bool = False
    for_memory: bool = False
    """That exit was a kill for memory: the program's need, never the node's death."""
    stopped: str = ""
    """Why it was stopped, '' where its ranks ended by themselves."""
    finished: bool = False
    """All its ranks exited 0 by themselves."""


class JobFact(Noun, frozen=True, kw_only=True):
    seq: int
    state: m.JobState


class AskFact(Noun, frozen=True, kw_only=True):
    seq: int
    ask: m.OperatorAsked


class CheckpointFact(Noun, frozen=True, kw_only=True):
    seq: int
    checkpoint: m.CheckpointSeen


class Evidence(Noun, frozen=True, kw_only=True):
    """All that is known, as of the last folded event."""

    nodes: Mapping[Node, NodeFacts] = msgspec.field(default_factory=dict)
    current: AttemptFacts | None = None
    past: tuple[Failure, ...] = ()
    """Earlier attempts, oldest first."""
    jobs: Mapping[JobId, JobFact] = msgspec.field(default_factory=dict)
    asks: tuple[AskFact, ...] = ()
    bad_checkpoints: tuple[CheckpointFact, ...] = ()
    durable_step: int = 0
    furthest_step: int = 0
    """Highest train_step that any attempt finished."""
    saving: SavesSeen = SavesSeen()

    def node(self, node: Node) -> NodeFacts:
        return self.nodes.get(node) or NodeFacts(node=node)

    def let_go(self, node: Node) -> bool:
        """The scheduler took the node from the run, or ended its allocation."""
        job = self.jobs.get(self.node(node).job)
        return job is not None and (job.state.state != "RUNNING" or node not in job.state.nodes)

    @property
    def present(self) -> tuple[Node, ...]:
        """Nodes with an agent, in the order in which they first joined."""
        return tuple(n for n, facts in self.nodes.items() if facts.present)


def replaced(thing: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(thing, **changes)


def _with_node(evidence: Evidence, node: Node, **changes: Any) -> Evidence:
    nodes = dict(evidence.nodes)
    nodes[node] = replaced(evidence.node(node), **changes)
    return replaced(evidence, nodes=nodes)  # type: ignore[no-any-return]


def _with_attempt(evidence: Evidence, attempt: int, **changes: Any) -> Evidence:
    """Changes to the present attempt; a signal of an older one is late and changes nothing."""
    now = evidence.current
    if now is None or now.plan.attempt != attempt:
        return evidence
    return replaced(evidence, current=replaced(now, **changes))  # type: ignore[no-any-return]


def fold(evidence: Evidence, event: LogEvent) -> Evidence:
    """The evidence after this event. Events that are no evidence (intents, notes) change nothing."""
    match event.body:
        case Seen(signal=signal):
            return _fold_signal(evidence, event, signal)
        case AttemptPlanned(plan=plan):
            past = evidence.past
            if evidence.current is not None:
                last = failure_of(evidence.current, evidence)
                past = (*past, last)[-KEPT_ATTEMPTS:]
                evidence = replaced(
                    evidence, saving=with_end(evidence.saving, finished=last.finished, stopped=last.stopped)
                )
            current = AttemptFacts(plan=plan, planned_seq=event.seq, planned_s=event.at_s, state_s=event.at_s)
            return replaced(evidence, past=past, current=current)  # type: ignore[no-any-return]
        case AttemptMoved() as move:
            return _fold_move(evidence, event, move)
        case StepsDone(attempt=attempt, steps=steps) if steps:
            return _fold_steps(evidence, event, attempt, steps)
        case _:
            return evidence


def _fold_move(evidence: Evidence, event: LogEvent, move: AttemptMoved) -> Evidence:
    now = evidence.current
    if now is None or now.plan.attempt != move.attempt:
        return evidence
    changes: dict[str, Any] = {"state": move.state}
    if move.state is not now.state:
        changes["state_s"] = event.at_s
    if move.state is State.STARTING and not now.started_seq:
        changes |= {"started_seq": event.seq, "started_s": event.at_s}
    if move.state is State.STOPPING and not now.why_stopped:
        changes["why_stopped"] = move.why
    return _with_attempt(evidence, move.attempt, **changes)


def _fold_steps(evidence: Evidence, event: LogEvent, attempt: int, steps: tuple[m.StepSeen, ...]) -> Evidence:
    now = evidence.current
    if now is None or now.plan.attempt != attempt or steps[-1].train_step <= now.last_step:
        return evidence
    fresh = [s for s in steps if s.train_step > now.last_step]
    times = (*now.step_times_s, *(s.step_s for s in fresh))[-KEPT_STEP_TIMES:]
    evidence = _with_attempt(
        evidence,
        attempt,
        last_step=fresh[-1].train_step,
        step_times_s=times,
    )
    furthest = max(evidence.furthest_step, fresh[-1].train_step)
    return replaced(evidence, furthest_step=furthest, saving=with_steps(evidence.saving, fresh))  # type: ignore[no-any-return]


def _fold_signal(  # noqa: C901 - a flat dispatch over the closed union
    evidence: Evidence, event: LogEvent, signal: m.Signal
) -> Evidence:
    match signal:
        case m.XidSeen() as xid:
            return _fold_xid(evidence, event, xid)
        case m.KernelSeen() as line:
            return _fold_kernel(evidence, event, line)
        case m.RankExited() as gone:
            now = evidence.current
            if now is None or any(f.exit.rank == gone.rank for f in now.exits):
                return evidence
            fact = ExitFact(seq=event.seq, seen_s=event.at_s, exit=gone)
            return _with_attempt(evidence, gone.attempt, exits=(*now.exits, fact))
        case m.RankPlaced() as placed:
            now = evidence.current
            if now is None:
                return evidence
            return _with_attempt(evidence, placed.attempt, placed={**now.placed, placed.rank: placed})
        case m.NoProgress() as stuck:
            now = evidence.current
            if now is None or now.no_progress_seq:
                return evidence
            return _with_attempt(evidence, stuck.attempt, no_progress_seq=event.seq, no_progress=stuck)
        case m.CheckpointSeen() as checkpoint:
            if checkpoint.verified:
                return _fold_durable(evidence, event, checkpoint)
            fact2 = CheckpointFact(seq=event.seq, checkpoint=checkpoint)
            return replaced(evidence, bad_checkpoints=(*evidence.bad_checkpoints, fact2))  # type: ignore[no-any-return]
        case m.OperatorAsked() as ask:
            return replaced(evidence, asks=(*evidence.asks, AskFact(seq=event.seq, ask=ask)))  # type: ignore[no-any-return]
        case m.JobState() as job:
            before = evidence.jobs.get(job.job)
            # an ending job loses one node after the other: that is one thing, not several
            seq = before.seq if before is not None and before.state.state == job.state else event.seq
            return replaced(evidence, jobs={**evidence.jobs, job.job: JobFact(seq=seq, state=job)})  # type: ignore[no-any-return]
        case _:
            return _fold_node_signal(evidence, event, signal)


def without_saves(evidence: Evidence, train_steps: Collection[int]) -> Evidence:
    """These checkpoints do not count any more; durable_step is the newest of those that are left."""
    if evidence.durable_step not in train_steps:
        return evidence
    left = [s.train_step for s in evidence.saving.saves if s.train_step not in train_steps]
    return replaced(evidence, durable_step=max(left, default=0))  # type: ignore[no-any-return]


def _fold_durable(evidence: Evidence, event: LogEvent, checkpoint: m.CheckpointSeen) -> Evidence:
    plan = evidence.current.plan if evidence.current else None
    return replaced(  # type: ignore[no-any-return]
        evidence,
        durable_step=max(evidence.durable_step, checkpoint.train_step),
        saving=with_save(evidence.saving, event.seq, plan, checkpoint),
    )


def _fold_node_signal(
    evidence: Evidence,
    event: LogEvent,
    signal: m.GpuChanged | m.SourceBlind | m.AgentJoined | m.AgentLost | m.NodeState | m.GateSeen | m.NodeNotClear,
) -> Evidence:
    facts = evidence.node(signal.node)
    match signal:
        case m.GpuChanged() as change:
            return _fold_gpu(evidence, event, change)
        case m.SourceBlind(node=node, hung=hung):
            return _with_node(evidence, node, hung_seq=event.seq, hung_s=event.at_s) if hung else evidence
        case m.AgentJoined() as joined:
            if joined.incarnation == facts.incarnation and facts.present:
                return evidence
            return _with_node(
                evidence,
                joined.node,
                joined_seq=event.seq,
                lost_seq=0,
                lost=None,
                incarnation=joined.incarnation,
                job=joined.job,
                address=joined.address,
            )
        case m.AgentLost() as lost:
            return evidence if facts.lost_seq else _with_node(evidence, lost.node, lost_seq=event.seq, lost=lost)
        case m.NodeState() as state:
            return _with_node(evidence, state.node, state=state, state_seq=event.seq)
        case m.GateSeen() as gate:
            return _with_node(evidence, gate.node, gate=gate, gate_seq=event.seq)
        case m.NodeNotClear() as unclear:
            return _with_node(evidence, unclear.node, unclear=unclear, unclear_seq=event.seq)
        case _:
            assert_never(signal)


def _fold_xid(evidence: Evidence, event: LogEvent, xid: m.XidSeen) -> Evidence:
    facts = evidence.node(xid.node)
    same = (xid.code, xid.gpu, xid.at_s, xid.text)
    if any((f.xid.code, f.xid.gpu, f.xid.at_s, f.xid.text) == same for f in facts.xids):
        return evidence  # the same line, read twice
    attempt = evidence.current.plan.attempt if evidence.current else 0
    fact = XidFact(seq=event.seq, seen_s=event.at_s, attempt=attempt, xid=xid)
    return _with_node(evidence, xid.node, xids=(*facts.xids, fact)[-KEPT_XIDS:])


def _fold_kernel(evidence: Evidence, event: LogEvent, line: m.KernelSeen) -> Evidence:
    facts = evidence.node(line.node)
    if any((f.line.key, f.line.device, f.line.at_s) == (line.key, line.device, line.at_s) for f in facts.kernel):
        return evidence  # the same line, read twice
    attempt = evidence.current.plan.attempt if evidence.current else 0
    fact = KernelFact(seq=event.seq, seen_s=event.at_s, attempt=attempt, line=line)
    return _with_node(evidence, line.node, kernel=(*facts.kernel, fact)[-KEPT_XIDS:])


def _fold_gpu(evidence: Evidence, event: LogEvent, change: m.GpuChanged) -> Evidence:
    facts = evidence.node(change.node)
    if any(f.change == change for f in facts.gpus):
        return evidence
    fact = GpuFact(seq=event.seq, seen_s=event.at_s, change=change)
    return _with_node(evidence, change.node, gpus=(*facts.gpus, fact)[-KEPT_XIDS:])


ECHO_CLASSES = frozenset({"peer_died", "nccl_timeout_victim"})
"""Error classes of a rank that only noticed that another one was gone."""
RERUN_CODES = (16, 17)
RERUN_CLASSES = frozenset({"sdc_suspect", "sdc_confirmed", "instability"})
"""What the rank that computed the doubtful result says. All ranks of the attempt end with its code."""


def primary_exit(exits: tuple[ExitFact, ...]) -> ExitFact | None:
    """The exit that began it: the earliest that was not asked for and is no echo of another rank's end.

    Ranks that saw a peer's connection close, and ranks that were told to end, follow; they never lead unless
    nothing else is there. Of a rerun's exits the one that tells the result leads, whichever came first.
    """
    own = [f for f in exits if not f.exit.asked and (f.exit.exit_code or f.exit.posix_signal)]
    if not own:
        return None
    return min(own, key=lambda f: (f.exit.error_class in ECHO_CLASSES, not tells_rerun(f), f.exit.at_s, f.seq))


def tells_rerun(fact: ExitFact) -> bool:
    """Whether this is the rank whose result was doubtful, and not one of those that only ended with it."""
    return fact.exit.exit_code in RERUN_CODES and fact.exit.error_class in RERUN_CLASSES


OUT_OF_MEMORY = ("oom_job", "oom_node")
"""Kernel lines, and error classes, that say that something was killed for memory."""
SHELLS_KILLED = 137
"""What a shell ends with whose child was killed: 128 + SIGKILL."""


def memory_kills(evidence: Evidence, attempt: int, first: ExitFact) -> tuple[KernelFact, ...]:
    """The lines in which that rank's node says that it killed for memory; () where the rank was not killed."""
    if first.exit.posix_signal != 9 and first.exit.exit_code != SHELLS_KILLED:
        return ()
    kernel = evidence.node(first.exit.node).kernel
    return tuple(f for f in kernel if f.line.key in OUT_OF_MEMORY and f.attempt == attempt)


def failure_of(attempt: AttemptFacts, evidence: Evidence) -> Failure:
    """What the rules about repeats need to remember of an attempt that is over."""
    first = primary_exit(attempt.exits)
    gone = first.exit if first else None
    told = memory_kills(evidence, attempt.plan.attempt, first) if first else ()
    stuck = attempt.no_progress
    return Failure(
        attempt=attempt.plan.attempt,
        nodes=attempt.plan.nodes,
        restore_step=attempt.plan.restore_step,
        reached=attempt.reached,
        exception=gone.exception if gone else "",
        error_class=gone.error_class if gone else "",
        phase=gone.phase if gone else "",
        node=gone.node if gone else stuck.node if stuck else None,
        rank=gone.rank if gone else stuck.suspect if stuck else None,
        exit_code=gone.exit_code if gone else None,
        posix_signal=gone.posix_signal if gone else None,
        hung=stuck is not None,
        for_memory=bool(told) or (gone is not None and gone.error_class in OUT_OF_MEMORY),
        stopped=attempt.why_stopped,
        finished=bool(attempt.exits) and all(f.exit.exit_code == 0 for f in attempt.exits),
    )
