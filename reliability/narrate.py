"""Events as lines for a person who watches a run in the foreground. Pure; routine events say nothing."""

from __future__ import annotations

from collections.abc import Iterator

from outlast.reliability import model as m
from outlast.reliability.actions import Action, Wait
from outlast.reliability.attempt import Event, State
from outlast.reliability.events import (
    AttemptMoved,
    AttemptPlanned,
    EpochTaken,
    Intent,
    Judged,
    LogEvent,
    Noted,
    Outcome,
    RunEnded,
    Seen,
    StepsDone,
)
from outlast.reliability.wording import one_line, tell_action, tell_signal, utc, visible

_INDENT = " " * 10


class Narrator:
    """Remembers what a line needs from earlier events: the plan, the step, the incident's time."""

    def __init__(self, target: int, every: int = 10) -> None:
        self.target, self.every = target, every
        self.plan: m.Plan | None = None
        self.actions: dict[int, Action] = {}
        self.incident_s = 0.0
        self.epochs = 0

    def lines(self, event: LogEvent) -> Iterator[str]:  # noqa: C901  one case a kind of event
        """What there is to say about this event, ready to print (no markup, control characters visible)."""
        stamp = utc(event.at_s, day=False)
        match event.body:
            case EpochTaken(epoch=epoch, why=why) if epoch > 1:
                yield f"{stamp} supervisor of epoch {epoch}: {why}"
            case Seen(signal=signal) if _worth_a_line(signal):
                yield f"{stamp} {tell_signal(signal)}"
            case Judged() as judged:
                self.incident_s = event.at_s
                yield from (visible(line) for line in _incident(stamp, judged))
            case Intent(act=act, action=action):
                self.actions[act] = action
                if not isinstance(action, Wait):
                    yield f"{_INDENT}action:  {tell_action(action)}"
            case Outcome(act=act, ok=False, detail=detail) if act in self.actions and "takes its place" not in detail:
                yield f"{_INDENT}failed:  {tell_action(self.actions[act])}: {one_line(detail)}"
            case AttemptPlanned(plan=plan):
                self.plan = plan
                restore = f"restore {plan.restore_step} (verified)" if plan.restore_step else "from the beginning"
                yield f"{stamp} attempt {plan.attempt} on {' '.join(plan.nodes)} ({plan.layout}), {restore}"
                if plan.save_every:
                    yield f"{_INDENT}saves:   every {plan.save_every} train_steps: {visible(plan.save_because)}"
            case AttemptMoved(event=Event.STEP_DONE, state=State.TRAINING, attempt=attempt) if self.incident_s:
                yield f"{stamp} attempt {attempt} trains again, {event.at_s - self.incident_s:.1f} s after the incident"
                self.incident_s = 0.0
            case StepsDone(steps=steps):
                yield from (self._step(stamp, s) for s in steps if s.train_step % self.every == 0)
            case Noted(text=text):
                yield f"{stamp} note: {visible(text)}"
            case RunEnded(outcome=outcome, why=why):
                yield f"{stamp} {outcome}: {visible(why)}"

    def _step(self, stamp: str, step: m.StepSeen) -> str:
        loss = f"loss {step.loss:.4f}" if step.loss is not None else ""
        nodes = " ".join(self.plan.nodes) if self.plan else ""
        return f"{stamp} step {step.train_step:>4}/{self.target} | {loss} | {step.step_s * 1000:.0f} ms | nodes {nodes}"


def _worth_a_line(signal: m.Signal) -> bool:
    match signal:
        case m.RankExited(asked=asked) as gone:
            return not asked and bool(gone.exit_code or gone.posix_signal)
        case m.GateSeen(outcome=outcome):
            return outcome is not m.GateOutcome.WELL
        case m.RankPlaced() | m.AgentJoined() | m.JobState():
            return False
        case _:
            return True


def _incident(stamp: str, judged: Judged) -> Iterator[str]:
    v = judged.verdict
    whom = f"node {v.node}" if v.node else f"rank {v.rank}" if v.rank is not None else "nobody is blamed"
    yield f"{stamp} INCIDENT {judged.incident}: {v.kind} ({v.confidence} confidence), {whom}"
    yield f"{_INDENT}because: {v.because}"
    for lost in v.rejected:
        yield f"{_INDENT}not:     {lost.alternative} -- {lost.why}"
