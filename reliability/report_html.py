"""The report as one self-contained page. Pure: a RunView in, HTML out.

No script, no font, no picture from elsewhere (the page's own policy forbids them), so it can be mailed, archived and
opened on a machine without a network. All text from logs is escaped and its control characters are written out.
Details are bounded: a run with thousands of incidents still gives a page that a browser opens at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from outlast.reliability.goodput import STATES
from outlast.reliability.history import AttemptView, IncidentView, RunView
from outlast.reliability.report_style import STYLE
from outlast.reliability.report_svg import ledger_bar, loss_curve, text, timeline
from outlast.reliability.report_text import (
    cost_line,
    costs_something,
    culprit,
    outcome,
    restored,
    samples_line,
    saves_line,
)
from outlast.reliability.saves_view import SavesView
from outlast.reliability.wording import count, duration, percent, undo_of, utc

Item = TypeVar("Item")

_MAX_INCIDENTS: Final = 200
_MAX_ATTEMPTS: Final = 200
_MAX_SAVES: Final = 100
_OPEN_INCIDENTS: Final = 8

_MEANING: Final = {
    "train": "train_steps that count",
    "lost_work": "train_steps that were done again, or given up half-way",
    "detect": "from the last good train_step until the stop was asked",
    "stop": "until every node was proven empty",
    "gate": "testing the nodes before ranks start",
    "start": "starting ranks and their process groups",
    "load": "choosing, verifying and loading a checkpoint",
    "first_step": "the first train_step of an attempt",
    "save": "the train loop stood still for a checkpoint",
    "wait": "for agents, spares, the scheduler or a person",
    "other": "explained by none of these",
}


def render_page(view: RunView) -> str:
    title = text(view.run or "run")
    sections = [
        _head(view),
        _section("Attempts and incidents", timeline(view) + _legend(view)),
        _section("Loss", loss_curve(view)),
        _section("Where the time went", ledger_bar(view.ledger) + _ledger_table(view)),
        _section(f"Saves ({len(view.saving.saves)})", _saves(view.saving)),
        _section(f"Incidents ({len(view.incidents)})", _incidents(view)),
        _section(f"Attempts ({len(view.attempts)})", _attempts(view.attempts)),
        _foot(view),
    ]
    body = "\n".join(sections)
    return _PAGE.replace("{{title}}", title, 1).replace("{{style}}", STYLE, 1).replace("{{body}}", body, 1)


_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{title}} - outlast report</title>
<style>{{style}}</style>
</head>
<body>
<main>
{{body}}
</main>
</body>
</html>
"""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{text(title)}</h2>\n{body}\n</section>"


def _head(view: RunView) -> str:
    step = count(view.step) + (f" <small>/ {count(view.target)}</small>" if view.target else "")
    loss = "-" if view.loss is None else f"{view.loss:.4g}"
    numbers = [
        ("train_step", step),
        ("loss", loss),
        ("effective", percent(view.ledger.effective)),
        ("wall time", text(duration(view.ledger.wall_s))),
        ("step time", text(duration(view.step_time_s))),
        ("incidents", count(len(view.incidents))),
        ("attempts", count(len(view.attempts))),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in numbers)
    mood = {"finished": "good", "training": "good", "held": "bad", "failed": "bad"}.get(view.state, "plain")
    why = f'<p class="quiet">{text(view.why)}</p>' if view.why else ""
    samples = view.samples
    shown = "plain" if samples is None else ("good" if samples.once else "bad")
    return (
        f'<header><h1>{text(view.run or "run")} <span class="pill {mood}">{text(view.state)}</span></h1>{why}'
        f'<dl class="numbers">{cells}</dl>'
        f'<p>Samples consumed: <span class="{shown}-text">{text(samples_line(samples))}</span>.</p></header>'
    )


def _legend(view: RunView) -> str:
    used = {span.state for span in view.spans}
    keys = "".join(f'<span class="key"><i class="b-{state}"></i>{state}</span>' for state in STATES if state in used)
    return f'<p class="legend">{keys}</p>'


def _ledger_table(view: RunView) -> str:
    ledger = view.ledger
    whole_s = ledger.wall_s or 1.0
    rows = []
    for state in STATES:
        seconds_s = ledger.seconds(state)
        rows.append(
            f'<tr><td><i class="b-{state}"></i> {state}</td><td class="n">{seconds_s:,.2f} s</td>'
            f'<td class="n">{percent(seconds_s / whole_s)}</td><td class="quiet">{_MEANING[state]}</td></tr>'
        )
    rows.append(
        f'<tr class="sum"><td>wall time</td><td class="n">{ledger.wall_s:,.2f} s</td><td class="n">100%</td>'
        f'<td class="quiet">{text(duration(ledger.wall_s))}</td></tr>'
    )
    unsure = ""
    if ledger.unsure_s:
        unsure = (
            f'<p class="quiet">{text(duration(ledger.unsure_s))} of it lie between two machines and are known by their '
            "wall clocks only.</p>"
        )
    return f"<table>{''.join(rows)}</table>{unsure}"


def _saves(saving: SavesView) -> str:
    line = f"<p>{text(saves_line(saving))}.</p>"
    if not saving.saves:
        return line
    shown, left_out = _ends(saving.saves, _MAX_SAVES)
    rows = [
        f"<tr><td>{count(save.train_step)}</td><td>{save.attempt}</td><td>{utc(save.at_s)}</td>"
        f'<td class="n">{save.hold_s:,.3f} s</td><td class="n">{save.lost_s:,.3f} s</td>'
        f'<td class="n">{save.durable_s:,.2f} s</td></tr>'
        for save in shown
    ]
    if left_out:
        rows.insert(_MAX_SAVES // 2, f'<tr><td colspan="6" class="quiet">{count(left_out)} more</td></tr>')
    names = ("train_step", "attempt", "durable at", "hold", "lost time", "time to durable")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'{line}<table class="wide"><tr>{head}</tr>{"".join(rows)}</table>'


# ---------------------------------------------------------------- incidents and attempts


def _incidents(view: RunView) -> str:
    incidents = view.incidents
    if not incidents:
        return '<p class="quiet">None.</p>'
    shown, left_out = _ends(incidents, _MAX_INCIDENTS)
    cards = [_incident(incident, index < _OPEN_INCIDENTS) for index, incident in enumerate(shown)]
    if left_out:
        note = (
            f"{count(left_out)} incidents in between are left out here: outlast explain {view.run}/NUMBER tells each."
        )
        cards.insert(_MAX_INCIDENTS // 2, f'<p class="quiet">{text(note)}</p>')
    return "\n".join(cards)


def _ends(items: Sequence[Item], limit: int) -> tuple[list[Item], int]:
    """The first and the last of them, and how many are left out in between."""
    if len(items) <= limit:
        return list(items), 0
    half = limit // 2
    return [*items[:half], *items[-half:]], len(items) - 2 * half


def _incident(incident: IncidentView, unfolded: bool) -> str:
    verdict = incident.verdict
    evidence = [
        f"<code>{utc(line.at_s, day=False)}</code> {text(line.text)} <small>[e-{line.seq}]</small>"
        for line in incident.evidence
    ]
    evidence += [f"and {incident.evidence_left_out} more"] if incident.evidence_left_out else []
    actions = [f"{text(act.text)} <small>{text(outcome(act))}</small>" for act in incident.acts]
    if incident.next_attempt:
        actions.append(f"attempt {incident.next_attempt} {restored(incident)}")
    rows = [
        ("because", [f"<strong>{text(verdict.because)}</strong>"]),
        ("evidence", evidence),
        ("rule", [f"<code>{text(verdict.rule)}</code>"]),
        ("rejected", [f"{text(other.alternative)}: {text(other.why)}" for other in verdict.rejected]),
        ("action", actions),
        ("cost", [text(cost_line(incident))] if costs_something(incident) else []),
        ("undo", [f"<code>{text(u)}</code>" for act in incident.acts if act.ok and (u := undo_of(act.action))]),
    ]
    body = "".join(f"<dt>{name}</dt>{''.join(f'<dd>{line}</dd>' for line in said)}" for name, said in rows if said)
    mood = "bad" if verdict.stops else "plain"
    return (
        f'<details id="incident-{incident.number}"{" open" if unfolded else ""}><summary>'
        f'<span class="number {mood}">{incident.number}</span> {utc(incident.at_s)} '
        f"<strong>{text(culprit(verdict))}</strong> {text(verdict.kind)} "
        f"<small>{text(verdict.confidence)} confidence, attempt {incident.attempt}</small></summary>"
        f'<dl class="facts">{body}</dl></details>'
    )


def _attempts(attempts: Sequence[AttemptView]) -> str:
    if not attempts:
        return '<p class="quiet">None yet.</p>'
    shown, left_out = _ends(attempts, _MAX_ATTEMPTS)
    rows = list(map(_attempt_row, shown))
    if left_out:
        rows.insert(_MAX_ATTEMPTS // 2, f'<tr><td colspan="7" class="quiet">{count(left_out)} more</td></tr>')
    head = "".join(f"<th>{name}</th>" for name in ("", "nodes", "layout", "from", "train_steps", "time", "ended"))
    return f'<table class="wide"><tr>{head}</tr>{"".join(rows)}</table>'


def _attempt_row(attempt: AttemptView) -> str:
    plan = attempt.plan
    nodes = " ".join(plan.nodes[:16]) + (f" and {len(plan.nodes) - 16} more" if len(plan.nodes) > 16 else "")
    steps = f"{count(attempt.first_step)} .. {count(attempt.last_step)}" if attempt.last_step else "none"
    cells: Iterable[str] = (
        str(plan.attempt),
        text(nodes),
        text(str(plan.layout)),
        f"step {count(plan.restore_step)}" if plan.restore_step else "the beginning",
        steps,
        text(duration(attempt.to_s - attempt.from_s)),
        text(attempt.why_ended or attempt.state),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _foot(view: RunView) -> str:
    convicted = f" Not used any more: {text(' '.join(view.convicted[:64]))}." if view.convicted else ""
    begun, last = utc(view.begun_at_s), utc(view.last_at_s)
    return f'<footer class="quiet">From {begun} to {last} UTC, read from events.jsonl.{convicted}</footer>'
