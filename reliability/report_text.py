"""`outlast report` and `outlast explain` as plain text and as data. Pure: a RunView in, lines or structs out.

No colour and no width of the terminal: this text is pasted into tickets. Words from outside are made visible here.
"""

from __future__ import annotations

import msgspec

from outlast.reliability.goodput import STATES, Ledger
from outlast.reliability.history import ActView, AttemptView, IncidentView, RunView, Samples
from outlast.reliability.model import Noun
from outlast.reliability.saves_view import SavesView
from outlast.reliability.verdict import Scope, Verdict
from outlast.reliability.wording import count, duration, many, one_line, percent, undo_of, utc

# ---------------------------------------------------------------- data


class IncidentData(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """One incident in `--json`."""

    number: int
    at_s: float
    kind: str
    scope: str
    rule: str
    confidence: str
    culprit: str
    because: str
    evidence: tuple[str, ...]
    rejected: tuple[str, ...]
    actions: tuple[str, ...]
    outcomes: tuple[str, ...]
    attempt: int
    next_attempt: int
    restored_step: int
    lost_steps: int
    lost_s: float
    recovery_s: float | None
    rank_s: float


class AttemptData(Noun, frozen=True, kw_only=True, omit_defaults=False):
    attempt: int
    state: str
    nodes: tuple[str, ...]
    layout: str
    restore_step: int
    first_step: int
    last_step: int
    from_s: float
    to_s: float
    why_ended: str


class ReportData(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """`outlast report --json`."""

    run: str
    state: str
    why: str
    step: int
    train_steps: int
    effective: float
    ledger: dict[str, float]
    """Seconds by name, and wall_s, to which the others sum."""
    incidents: tuple[IncidentData, ...]
    attempts: tuple[AttemptData, ...]
    losses: tuple[tuple[int, float], ...]
    """(train_step, loss) of the final lineage."""
    samples_once: bool | None
    """None where the program does not say which samples it consumed."""
    samples: int | None
    samples_problem: str
    saving: SavesView


def report_json(view: RunView) -> ReportData:
    samples = view.samples
    return ReportData(
        run=view.run,
        state=view.state,
        why=view.why,
        step=view.step,
        train_steps=view.target,
        effective=view.ledger.effective,
        ledger=view.ledger.flat(),
        incidents=tuple(map(_incident_data, view.incidents)),
        attempts=tuple(map(_attempt_data, view.attempts)),
        losses=tuple((step.train_step, step.loss) for step in view.steps if step.loss is not None),
        samples_once=samples.once if samples else None,
        samples=samples.total if samples else None,
        samples_problem=samples.problem if samples else "",
        saving=view.saving,
    )


def _incident_data(incident: IncidentView) -> IncidentData:
    verdict, cost = incident.verdict, incident.cost
    return IncidentData(
        number=incident.number,
        at_s=incident.at_s,
        kind=str(verdict.kind),
        scope=str(verdict.scope),
        rule=verdict.rule,
        confidence=str(verdict.confidence),
        culprit=culprit(verdict),
        because=verdict.because,
        evidence=tuple(line.text for line in incident.evidence),
        rejected=tuple(f"{other.alternative}: {other.why}" for other in verdict.rejected),
        actions=tuple(act.text for act in incident.acts),
        outcomes=tuple(outcome(act) for act in incident.acts),
        attempt=incident.attempt,
        next_attempt=incident.next_attempt,
        restored_step=incident.restored_step,
        lost_steps=cost.lost_steps,
        lost_s=cost.lost_s,
        recovery_s=cost.recovery_s,
        rank_s=cost.rank_s,
    )


def _attempt_data(attempt: AttemptView) -> AttemptData:
    plan = attempt.plan
    return AttemptData(
        attempt=plan.attempt,
        state=attempt.state,
        nodes=plan.nodes,
        layout=str(plan.layout),
        restore_step=plan.restore_step,
        first_step=attempt.first_step,
        last_step=attempt.last_step,
        from_s=attempt.from_s,
        to_s=attempt.to_s,
        why_ended=attempt.why_ended,
    )


# ---------------------------------------------------------------- words


def culprit(verdict: Verdict) -> str:
    """Who is blamed, as narrow as it is known: `node a, GPU 0000:3b:00`; 'nobody' where nobody is."""
    parts = [f"node {verdict.node}"] if verdict.node else []
    parts += [f"GPU {verdict.gpu}"] if verdict.gpu else []
    parts += [f"rank {verdict.rank}"] if verdict.rank is not None else []
    if not parts and verdict.scope in (Scope.CHECKPOINT, Scope.TRAIN_STEP, Scope.ALLOCATION):
        parts = [f"checkpoint {verdict.quarantine}" if verdict.quarantine >= 0 else str(verdict.scope)]
    return one_line(", ".join(parts) or "nobody")


def outcome(act: ActView) -> str:
    if act.ok is None:
        return "under way"
    said = one_line(act.detail)
    return (said or "done") if act.ok else f"not done: {said or 'no reason was given'}"


def ledger_line(ledger: Ledger) -> str:
    """`train 84.1%  lost_work 6.0%  ...`: all names, in their order."""
    whole_s = ledger.wall_s or 1.0
    return "  ".join(f"{state} {percent(ledger.seconds(state) / whole_s)}" for state in STATES)


def samples_line(samples: Samples | None) -> str:
    if samples is None:
        return "the program does not say which samples a train_step consumed"
    if samples.once:
        return f"{count(samples.total)}, each once, in order"
    return f"NOT each once: {samples.problem}"


def saves_line(saving: SavesView) -> str:
    """Lost time and time to durable, over all saves, and how often the run saves now where that was computed."""
    begun = f"; the newest attempt began with one every {many(saving.every, 'train_step')}"
    often = f"{begun}: {one_line(saving.because)}" if saving.every else ""
    if not saving.saves:
        return f"none durable{often}"
    lost = f"lost {duration(saving.lost_median_s)} each (p95 {duration(saving.lost_p95_s)})"
    lost += f", {duration(saving.lost_s)} in all"
    durable = f"durable in {duration(saving.durable_median_s)} (p95 {duration(saving.durable_p95_s)})"
    return f"{count(len(saving.saves))} durable, {lost}, {durable}{often}"


def report_text(view: RunView) -> str:
    """The summary, each incident in three lines, and the ledger."""
    steps = f"train_step {count(view.step)}" + (f" of {count(view.target)}" if view.target else "")
    steps = steps if view.steps or view.target else "no train_step reported"
    loss = "" if view.loss is None else f", loss {view.loss:.4g}"
    why = f" ({one_line(view.why)})" if view.why else ""
    lines = [
        one_line(f"run {view.run}: {view.state}") + why,
        f"{steps}{loss}, {many(len(view.incidents), 'incident')}, {many(len(view.attempts), 'attempt')}, "
        f"{duration(view.ledger.wall_s)}, effective {percent(view.ledger.effective)}",
    ]
    lines += [_attempt_line(attempt) for attempt in view.attempts]
    for incident in view.incidents:
        lines += ["", *incident_lines(incident)]
    lines += ["", f"samples: {samples_line(view.samples)}", f"saves: {saves_line(view.saving)}"]
    lines += [f"where the time went ({duration(view.ledger.wall_s)})   {ledger_line(view.ledger)}"]
    return "\n".join(lines)


def _attempt_line(attempt: AttemptView) -> str:
    plan = attempt.plan
    nodes = one_line(" ".join(plan.nodes[:12])) + (f" and {len(plan.nodes) - 12} more" if len(plan.nodes) > 12 else "")
    begun = f"from step {plan.restore_step}" if plan.restore_step else "from the beginning"
    done = f"train_steps {attempt.first_step}..{attempt.last_step}" if attempt.last_step else "no train_step finished"
    ended = f"; {one_line(attempt.why_ended)}" if attempt.why_ended else ""
    return f"  attempt {plan.attempt}  {nodes}  {plan.layout}  {begun}: {done}{ended}"


def incident_lines(incident: IncidentView) -> list[str]:
    """An incident as a log tells it: head, because, action."""
    verdict = incident.verdict
    action = "; ".join(act.text for act in incident.acts) or "none yet"
    if incident.next_attempt:
        action += f"; {restored(incident)}"
    lines = [
        f"{utc(incident.at_s, day=False)} INCIDENT {incident.number}: {culprit(verdict)}, {verdict.kind}",
        f"         because: {one_line(verdict.because, limit=600)}",
        f"         action:  {action}",
    ]
    if costs_something(incident):
        lines.append(f"         lost:    {cost_line(incident)}")
    return lines


def costs_something(incident: IncidentView) -> bool:
    """Whether it cost the run anything: it stopped an attempt, and not because a person wanted the end."""
    return incident.verdict.stops and not incident.verdict.ends


def restored(incident: IncidentView) -> str:
    step = incident.restored_step
    return f"restored step {count(step)}" if step > 0 else "began from the beginning"


def cost_line(incident: IncidentView) -> str:
    cost = incident.cost
    back = (
        "no train_step finished since" if cost.recovery_s is None else f"{duration(cost.recovery_s)} to training again"
    )
    lost = f"{many(cost.lost_steps, 'train_step')} ({duration(cost.lost_s)})"
    return f"{lost}, {back}, {cost.rank_s / 3600:.3g} rank-hours in all"


def explain_text(view: RunView, number: int) -> str | None:
    """Everything about one incident; None where the run has no such incident."""
    incident = view.incident(number)
    if incident is None:
        return None
    verdict = incident.verdict
    rows: list[tuple[str, list[str]]] = [
        ("evidence", _evidence_lines(incident)),
        ("because", [one_line(verdict.because, limit=1000)]),
        ("rule", [one_line(verdict.rule)]),
        ("rejected", [one_line(f"{other.alternative}: {other.why}") for other in verdict.rejected]),
        ("action", _action_lines(incident)),
        ("cost", [cost_line(incident)] if costs_something(incident) else ["nothing"]),
        ("undo", list(filter(None, (undo_of(act.action) for act in incident.acts if act.ok)))),
    ]
    head = f"incident {number}   {utc(incident.at_s)}   {culprit(verdict)}   {verdict.kind}   {verdict.confidence}"
    lines = [f"{head} confidence"]
    for name, said in rows:
        for index, text in enumerate(said or ["-"]):
            lines.append(f"{name if index == 0 else '':<12} {text}")
    return "\n".join(lines)


def _evidence_lines(incident: IncidentView) -> list[str]:
    lines = [f"{utc(line.at_s, day=False)} {line.text}   [e-{line.seq}]" for line in incident.evidence]
    return lines + ([f"and {incident.evidence_left_out} more"] if incident.evidence_left_out else [])


def _action_lines(incident: IncidentView) -> list[str]:
    lines = [f"{act.text}: {outcome(act)}" for act in incident.acts]
    if incident.next_attempt:
        lines.append(f"attempt {incident.next_attempt} {restored(incident)}")
    return lines


def encode(data: ReportData) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(data), indent=2)
