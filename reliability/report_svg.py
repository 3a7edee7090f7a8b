"""The report's pictures: time line of attempts, loss curve, ledger bar. Pure: views in, SVG text out.

Hand-made SVG with CSS classes, so that a page needs no script and no network and follows the reader's dark or light
setting. Size is bounded whatever the run's length: what is finer than a pixel is merged, and a loss bucket keeps its
lowest and highest value, so that no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final, NamedTuple

from outlast.reliability.goodput import STATES, Ledger, Span
from outlast.reliability.history import AttemptView, IncidentView, RunView
from outlast.reliability.wording import count, duration, one_line, percent, visible

WIDTH: Final = 980
_LEFT: Final = 128
_RIGHT: Final = 16
_PLOT: Final = WIDTH - _LEFT - _RIGHT
_LANE: Final = 22
_MAX_LANES: Final = 24
_MAX_MARKS: Final = 400
_EXACT_SPANS: Final = 400


def text(said: str) -> str:
    """Text from anywhere, safe in HTML and SVG: escaped, control characters visible."""
    return escape(visible(said), quote=True)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {_number(height)}" role="img" aria-label="{text(label)}">\n{body}\n</svg>'


class Axis(NamedTuple):
    """A range of values laid on a range of pixels."""

    low: float
    high: float
    from_px: float
    to_px: float
    log: bool = False

    def px(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.0
        return self.from_px + share * (self.to_px - self.from_px)


# ---------------------------------------------------------------- time line


def timeline(view: RunView) -> str:
    """One lane an attempt, coloured by what the time went to; numbered incidents above; time below."""
    wall_s = max(view.ledger.wall_s, 1e-9)
    axis = Axis(0.0, wall_s, _LEFT, _LEFT + _PLOT)
    lanes = _lanes(view)
    top = 34
    bottom = top + len(lanes) * _LANE
    parts = list(_time_ticks(axis, top, bottom))
    for index, (name, hint, spans) in enumerate(lanes):
        y = top + index * _LANE
        parts.append(f'<text class="lane" x="{_LEFT - 8}" y="{y + 15}"><title>{text(hint)}</title>{text(name)}</text>')
        parts += [_span(span, axis, y) for span in _merged(spans, wall_s)]
    parts += _marks(view.incidents, axis, bottom)
    return _svg(bottom + 24, "time line of the attempts", parts)


def _lanes(view: RunView) -> list[tuple[str, str, list[Span]]]:
    """(label, hint, spans) a lane; all attempts share one lane where there are too many."""
    if len(view.attempts) > _MAX_LANES:
        return [(f"{len(view.attempts)} attempts", "too many for a lane each", list(view.spans))]
    by_attempt: dict[int, list[Span]] = {}
    for span in view.spans:
        by_attempt.setdefault(span.attempt, []).append(span)
    lanes = []
    for attempt in view.attempts:
        plan = attempt.plan
        nodes = " ".join(plan.nodes)
        hint = f"attempt {plan.attempt}: {nodes}; {plan.layout}; from step {plan.restore_step}"
        label = one_line(f"{plan.attempt}  {nodes}")
        label = label if len(label) <= 17 else label[:16] + "…"
        lanes.append((label, one_line(hint), by_attempt.get(plan.attempt, [])))
    if 0 in by_attempt:
        before = by_attempt[0]
        if lanes:
            lanes[0] = (lanes[0][0], lanes[0][1], before + lanes[0][2])
        else:
            lanes = [("no attempt yet", "", before)]
    return lanes


def _merged(spans: Sequence[Span], wall_s: float) -> list[Span]:
    """As they are where they are few; else the state that fills most of each pixel."""
    if len(spans) <= _EXACT_SPANS:
        return list(spans)
    pixel_s = wall_s / _PLOT
    shares: list[dict[str, float]] = [{} for _ in range(_PLOT)]
    for span in spans:
        first = min(_PLOT - 1, int(span.from_s / pixel_s))
        last = min(_PLOT - 1, int(span.to_s / pixel_s))
        for pixel in range(first, last + 1):
            inside_s = min(span.to_s, (pixel + 1) * pixel_s) - max(span.from_s, pixel * pixel_s)
            shares[pixel][span.state] = shares[pixel].get(span.state, 0.0) + max(0.0, inside_s)
    merged: list[Span] = []
    for pixel, share in enumerate(shares):
        if not share:
            continue
        state = max(STATES, key=lambda name: share.get(name, 0.0))
        from_s = pixel * pixel_s
        if merged and merged[-1].state == state and math.isclose(merged[-1].to_s, from_s):
            from_s = merged.pop().from_s
        merged.append(Span(from_s=from_s, to_s=(pixel + 1) * pixel_s, state=state, attempt=0))
    return merged


def _span(span: Span, axis: Axis, y: float) -> str:
    x = axis.px(span.from_s)
    width = max(0.4, axis.px(span.to_s) - x)
    hint = f"{span.state} {duration(span.to_s - span.from_s)}"
    return (
        f'<rect class="s-{span.state}" x="{_number(x)}" y="{_number(y + 3)}" width="{_number(width)}" '
        f'height="{_LANE - 6}"><title>{hint}</title></rect>'
    )


def _marks(incidents: Sequence[IncidentView], axis: Axis, bottom: float) -> list[str]:
    """A line an incident; its number where there is room for it."""
    stride = max(1, -(-len(incidents) // _MAX_MARKS))
    parts, free_px = [], -1.0
    for incident in incidents[::stride]:
        x = axis.px(min(incident.run_s, axis.high))
        hint = text(one_line(f"incident {incident.number}: {incident.verdict.kind}: {incident.verdict.because}"))
        parts.append(f'<line class="mark" x1="{_number(x)}" x2="{_number(x)}" y1="20" y2="{_number(bottom)}"/>')
        if x >= free_px:
            parts.append(
                f'<a href="#incident-{incident.number}"><circle class="mark-dot" cx="{_number(x)}" cy="13" r="9"/>'
                f'<text class="mark-number" x="{_number(x)}" y="17">{incident.number}<title>{hint}</title></text></a>'
            )
            free_px = x + 20
    return parts


_TICKS_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 43200, 86400)


def _time_ticks(axis: Axis, top: float, bottom: float) -> Iterable[str]:
    every_s = next((t for t in _TICKS_S if axis.high / t <= 10), 0)
    if not every_s:
        every_s = 86400 * max(1, math.ceil(axis.high / 86400 / 10))
    for index in range(int(axis.high / every_s) + 1):
        x = _number(axis.px(index * every_s))
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{_number(bottom)}"/>'
        label = duration(index * every_s) if index else "0"
        label = label.replace(".0 ", " ")
        yield f'<text class="tick middle" x="{x}" y="{_number(bottom + 15)}">{label}</text>'


# ---------------------------------------------------------------- loss

_LOSS_HEIGHT: Final = 260


def loss_curve(view: RunView) -> str:
    """Loss over train_step: what counts as a line, what was done again faint, restarts as dashed lines."""
    final = [(s.train_step, s.loss) for s in view.steps if s.loss is not None and math.isfinite(s.loss)]
    every = [(n, loss) for a in view.attempts for n, loss in a.losses if math.isfinite(loss)]
    if not final:
        return '<p class="quiet">No loss was reported.</p>'
    values = [loss for _, loss in every + final]
    low, high = min(values), max(values)
    log = low > 0 and high / low > 20
    margin = 0 if log else (high - low) * 0.05 or 0.5
    up = Axis(low - margin, high + margin, _LOSS_HEIGHT - 28, 12, log)
    last = max(view.target, final[-1][0])
    across = Axis(final[0][0] if final[0][0] > 1 else 0, max(last, 1), _LEFT, _LEFT + _PLOT)
    parts = [*_loss_ticks(up), *_step_ticks(across)]
    parts += _restarts(view.attempts, across)
    parts += [_path("loss-again", points, across, up) for points in _done_again(view.attempts)]
    parts.append(_path("loss", final, across, up))
    scale = "logarithmic" if log else "linear"
    parts.append(f'<text class="tick" x="12" y="20">loss</text><text class="tick" x="12" y="36">{scale}</text>')
    if any(_done_again(view.attempts)):
        parts.append('<line class="loss-again" x1="12" x2="34" y1="56" y2="56"/>')
        parts.append('<text class="tick" x="40" y="60">done again</text>')
    return _svg(_LOSS_HEIGHT, "loss over train_step", parts)


def _done_again(attempts: Sequence[AttemptView]) -> list[list[tuple[int, float]]]:
    """The losses of train_steps that a later attempt did again, an attempt each; the newest attempts only."""
    taken_back = math.inf
    lost: list[list[tuple[int, float]]] = []
    for attempt in reversed(attempts):
        points = [(n, loss) for n, loss in attempt.losses if n > taken_back and math.isfinite(loss)]
        lost += [points] if points else []
        taken_back = min(taken_back, attempt.plan.restore_step)
    return lost[:_MAX_LANES]


def _path(style: str, points: Sequence[tuple[int, float]], across: Axis, up: Axis) -> str:
    if len(points) == 1:
        x, y = across.px(points[0][0]), up.px(points[0][1])
        return f'<circle class="{style}-dot" cx="{_number(x)}" cy="{_number(y)}" r="2.5"/>'
    drawn = (f"{_number(across.px(n))} {_number(up.px(loss))}" for n, loss in thinned(points, 2 * _PLOT))
    return f'<path class="{style}" d="M{" L".join(drawn)}"/>' if points else ""


def thinned(points: Sequence[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    """At most about `limit` points in their order: of each bucket the lowest and the highest, first and last kept."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept = [points[0]]
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        extremes = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
        kept += sorted(extremes)
    kept.append(points[-1])
    return kept


def _restarts(attempts: Sequence[AttemptView], across: Axis) -> list[str]:
    stride = max(1, -(-len(attempts) // _MAX_MARKS))
    parts, free_px = [], -1.0
    for attempt in attempts[1::stride]:
        x = across.px(min(max(attempt.plan.restore_step, across.low), across.high))
        hint = f"attempt {attempt.plan.attempt} went on from step {attempt.plan.restore_step}"
        parts.append(
            f'<line class="restart" x1="{_number(x)}" x2="{_number(x)}" y1="12" y2="{_LOSS_HEIGHT - 28}">'
            f"<title>{hint}</title></line>"
        )
        if x >= free_px:
            parts.append(f'<text class="tick" x="{_number(x + 4)}" y="22">attempt {attempt.plan.attempt}</text>')
            free_px = x + 70
    return parts


def _nice(span: float, about: int) -> float:
    """1, 2 or 5 times a power of ten, so that `span` holds about that many."""
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)


def _loss_ticks(up: Axis) -> Iterable[str]:
    if up.log:
        low, high = math.floor(math.log10(up.low)), math.ceil(math.log10(up.high))
        values = [f * 10.0**p for p in range(low, high + 1) for f in ((1,) if high - low > 3 else (1, 2, 5))]
    else:
        every = _nice(up.high - up.low, 5)
        values = [every * k for k in range(math.ceil(up.low / every), math.floor(up.high / every) + 1)]
    for value in values:
        if up.low <= value <= up.high:
            y = _number(up.px(value))
            yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
            yield f'<text class="tick end" x="{_LEFT - 8}" y="{_number(up.px(value) + 4)}">{value:.4g}</text>'


def _step_ticks(across: Axis) -> Iterable[str]:
    every = max(1, int(_nice(max(across.high - across.low, 1), 10)))
    for step in range(math.ceil(across.low / every) * every, int(across.high) + 1, every):
        x = _number(across.px(step))
        yield f'<text class="tick middle" x="{x}" y="{_LOSS_HEIGHT - 10}">{count(step)}</text>'


# ---------------------------------------------------------------- ledger


def ledger_bar(ledger: Ledger) -> str:
    """All names as one bar, in their order."""
    whole_s = ledger.wall_s or 1.0
    axis = Axis(0.0, whole_s, 0, WIDTH)
    parts, at_s = [], 0.0
    for state in STATES:
        seconds_s = ledger.seconds(state)
        if seconds_s <= 0:
            continue
        x, width = axis.px(at_s), axis.px(at_s + seconds_s) - axis.px(at_s)
        hint = f"{state} {duration(seconds_s)}, {percent(seconds_s / whole_s)}"
        parts.append(
            f'<rect class="s-{state}" x="{_number(x)}" y="0" width="{_number(width)}" height="34">'
            f"<title>{hint}</title></rect>"
        )
        if width > 11 * len(state):
            parts.append(f'<text class="on-bar" x="{_number(x + 8)}" y="22">{state}</text>')
        at_s += seconds_s
    return _svg(34, "where the time went", parts)
