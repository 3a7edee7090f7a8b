"""Draws docs/attempt.svg, the life of an attempt, from the transition table: `python -m outlast.reliability.diagram`.

Where a state stands is laid out by hand, which arrows there are comes from the table alone. A transition for which
the picture has no place is an error here, so the picture cannot quietly miss one; a test compares the file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from outlast.reliability.attempt import TRANSITIONS, Event, State

Table = Mapping[tuple[State, Event], State]

_ROW: Final = (State.PLANNED, State.GATING, State.STARTING, State.LOADING, State.FIRST_STEP, State.TRAINING)
"""The way up, left to right."""
_LIFT: Final = {
    (State.STARTING, State.FIRST_STEP): (38, 20, 0),
    (State.LOADING, State.TRAINING): (64, 0, -18),
    (State.STARTING, State.TRAINING): (92, -14, 14),
}
"""Arrows that skip states: how high they rise over the row, where they begin and end beside the boxes' middles."""
_BUS: Final = {Event.STOP_ASKED: (208, -18), Event.RANKS_FINISHED: (240, 18)}
"""Arrows from many states into STOPPING share a line: its height, and how far from the middle of each box it begins."""

_W, _H, _PITCH, _LEFT, _TOP, _LOW = 104, 44, 194, 20, 116, 286
_WIDTH, _HEIGHT = 2 * _LEFT + 5 * _PITCH + _W + 40, 350

_STYLE: Final = """
text{font:13px system-ui,-apple-system,"DejaVu Sans",sans-serif;fill:#1c2126;text-anchor:middle}
.name{font-weight:600;font-size:14px}.event{font-size:12px;fill:#55606a}
rect{fill:#eef4fb;stroke:#3f7fd1;stroke-width:1.5}.train{fill:#e6f5ee;stroke:#2f9e6e}.end{fill:#f3f0ec;stroke:#a9795a}
path{fill:none;stroke:#6b7681;stroke-width:1.4}.head{fill:#6b7681;stroke:none}
@media (prefers-color-scheme:dark){text{fill:#e6e9ec}.event{fill:#a3adb6}rect{fill:#1d2733}.train{fill:#17291f}
.end{fill:#2a2420}path{stroke:#8b96a0}.head{fill:#8b96a0}}
"""


class DiagramError(ValueError):
    """The table has a transition that the picture has no place for."""


def _place(state: State) -> tuple[float, float]:
    """Upper left corner of a state's box."""
    if state in _ROW:
        return _LEFT + _ROW.index(state) * _PITCH, _TOP
    if state is State.STOPPING:
        return _LEFT + 2.5 * _PITCH, _LOW
    if state is State.ENDED:
        return _LEFT + 4 * _PITCH, _LOW
    raise DiagramError(f"state {state} has no place in the picture: lay it out in {__name__}")


def draw(table: Table = TRANSITIONS) -> str:
    """The SVG of a transition table."""
    parts = [_box(state) for state in State]
    buses: dict[Event, list[State]] = {}
    for (state, event), target in table.items():
        if target is State.STOPPING and event in _BUS:
            buses.setdefault(event, []).append(state)
        else:
            parts.append(_arrow(state, target, event))
    parts += [_bus(event, states) for event, states in buses.items()]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="states of an attempt">\n<style>{_STYLE}</style>\n{body}\n</svg>\n'
    )


def _box(state: State) -> str:
    x, y = _place(state)
    style = {State.TRAINING: "train", State.STOPPING: "end", State.ENDED: "end"}.get(state, "way")
    return (
        f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{_W}" height="{_H}" rx="9"/>'
        f'<text class="name" x="{x + _W / 2:g}" y="{y + 27:g}">{state}</text>'
    )


def _arrow(state: State, target: State, event: Event) -> str:
    (x, y), (to_x, to_y) = _place(state), _place(target)
    if state is target:
        return _loop(x, y, event)
    if y == to_y and (to_x - x == _PITCH or y == _LOW) and to_x > x:
        middle = (x + _W + to_x) / 2
        path = f"M{x + _W:g} {y + _H / 2:g} H{to_x - 8:g}"
        return _path(path) + _head(to_x, y + _H / 2, "right") + _label(middle - 3, y + _H / 2 - 8, event)
    if (state, target) in _LIFT:
        lift, leave, arrive = _LIFT[state, target]
        top, begin, end = y - lift, x + _W / 2 + leave, to_x + _W / 2 + arrive
        path = f"M{begin:g} {y:g} V{top + 12:g} q0 -12 12 -12 H{end - 12:g} q12 0 12 12 V{y - 8:g}"
        return _path(path) + _head(end, y, "down") + _label(begin + (end - begin) * 0.3, top - 5, event)
    raise DiagramError(f"{state} -> {target} ({event}) has no place in the picture: lay it out in {__name__}")


def _loop(x: float, y: float, event: Event) -> str:
    """An arrow back into the same box, on its right side, or its left in the lower row where the right is taken."""
    if y == _TOP:
        right = x + _W
        path = f"M{right:g} {y + 10:g} h12 q10 0 10 12 q0 12 -10 12 h-4"
        return _path(path) + _head(right, y + 34, "left") + _label(right + 2, y - 4, event)
    path = f"M{x:g} {y + 10:g} h-12 q-10 0 -10 12 q0 12 10 12 h4"
    return _path(path) + _head(x, y + 34, "right") + _label(x - 58, y + 26, event)


def _bus(event: Event, states: list[State]) -> str:
    """One line that the states drop onto, and one arrow from it into STOPPING."""
    height, shift = _BUS[event]
    drops = [_place(state)[0] + _W / 2 + shift for state in states]
    end = _place(State.STOPPING)[0] + _W / 2 + shift
    path = "".join(f"M{x:g} {_TOP + _H:g} V{height}" for x in drops)
    path += f"M{min(*drops, end):g} {height} H{max(*drops, end):g}M{end:g} {height} V{_LOW - 8}"
    label_x = min(drops) + 50 if event is Event.STOP_ASKED else max(drops) - 60
    return _path(path) + _head(end, _LOW, "down") + _label(label_x, height + 16, event)


def _path(commands: str) -> str:
    return f'<path d="{commands}"/>'


def _head(x: float, y: float, towards: str) -> str:
    """An arrow head with its tip at (x, y)."""
    sides = {"right": "l-9 -4.5 v9 z", "left": "l9 -4.5 v9 z", "down": "l-4.5 -9 h9 z"}
    return f'<path class="head" d="M{x:g} {y:g} {sides[towards]}"/>'


def _label(x: float, y: float, event: Event) -> str:
    return f'<text class="event" x="{x:g}" y="{y:g}">{event}</text>'


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/attempt.svg")
    target.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
