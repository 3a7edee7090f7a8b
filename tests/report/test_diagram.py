"""The picture of the attempt's states is the transition table's, and the committed file is that picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from outlast.reliability.attempt import TRANSITIONS, Event, State
from outlast.reliability.diagram import DiagramError, draw

SVG = "{http://www.w3.org/2000/svg}"
PICTURE = Path(__file__).parents[2] / "docs" / "attempt.svg"


def words(svg: str, style: str) -> list[str]:
    return sorted(t.text or "" for t in ET.fromstring(svg).iter(f"{SVG}text") if t.get("class") == style)


def test_the_committed_picture_is_drawn_from_the_table() -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(), "draw it again: python -m outlast.reliability.diagram"


def test_every_state_and_every_arrow_is_in_it() -> None:
    assert words(draw(), "name") == sorted(State)
    shared = [Event.STOP_ASKED, Event.RANKS_FINISHED]
    arrows = [event for _, event in TRANSITIONS if event not in shared]
    assert words(draw(), "event") == sorted([*arrows, *shared])


def test_a_transition_fewer_is_an_arrow_fewer() -> None:
    for pair in TRANSITIONS:
        assert draw({k: v for k, v in TRANSITIONS.items() if k != pair}) != draw()


def test_a_transition_without_a_place_is_an_error() -> None:
    with pytest.raises(DiagramError, match=r"ended -> planned \(gate_asked\) has no place"):
        draw({**TRANSITIONS, (State.ENDED, Event.GATE_ASKED): State.PLANNED})
