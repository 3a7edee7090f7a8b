"""What saves cost, in the report: the hold and what came after it, the time to durable, how often, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from outlast.reliability.events import AttemptPlanned, LogEvent
from outlast.reliability.history import fold
from outlast.reliability.report_html import render_page
from outlast.reliability.report_text import report_json, report_text
from outlast.reliability.status import Row, remarks

New = Callable[[], Any]


def test_the_report_tells_lost_time_and_time_to_durable_of_each_save(demo_events: tuple[LogEvent, ...]) -> None:
    view = fold(demo_events)
    saving = view.saving
    assert [s.train_step for s in saving.saves] == [10, 20, 30, 40, 50, 60]
    assert all(s.hold_s == 0.04 and s.durable_s == 0.3 for s in saving.saves)
    assert saving.lost_median_s == pytest.approx(0.04) and saving.durable_p95_s == 0.3
    line = "saves: 6 durable, lost 40 ms each (p95 40 ms), 0.24 s in all, durable in 0.30 s (p95 0.30 s)"
    assert line in report_text(view)
    page = render_page(view)
    assert "Saves (6)" in page and "time to durable" in page and "0.040 s" in page and "0.30 s" in page
    data = msgspec.json.decode(msgspec.json.encode(report_json(view)))
    assert [s["train_step"] for s in data["saving"]["saves"]] == [10, 20, 30, 40, 50, 60]


def test_slow_steps_after_a_short_hold_are_lost_time_too(new_story: New) -> None:
    """As of a save that forks: it holds for a moment, and the next steps pay."""
    story = new_story()
    story.open(train_steps=60)
    story.begin(1, ("a", "b"))
    story.train(1, 1, 20, step_s=0.2)
    story.train(1, 21, 21, step_s=0.9, save_every=0)
    story.train(1, 22, 29, step_s=0.2, save_every=0)
    first, second = fold(story.events).saving.saves
    assert first.lost_s == pytest.approx(0.04)
    assert second.lost_s == pytest.approx(0.04 + 0.7)


def test_how_often_and_why_stands_in_report_and_status(new_story: New) -> None:
    story = new_story()
    story.open(train_steps=60)
    story.begin(1, ("a", "b"))
    plans = [i for i, e in enumerate(story.events) if isinstance(e.body, AttemptPlanned)]
    event = story.events[plans[-1]]
    plan = msgspec.structs.replace(event.body.plan, save_every=700, save_because="a save costs 2.00 s <b>")
    story.events[plans[-1]] = msgspec.structs.replace(event, body=AttemptPlanned(plan=plan))
    view = fold(story.events)
    assert (
        "saves: none durable; the newest attempt began with one every 700 train_steps: a save costs 2.00 s <b>"
        in report_text(view)
    )
    assert "a save costs 2.00 s &lt;b&gt;" in render_page(view)
    row = Row(run="r", state="training", save_every=700, save_because="a save costs 2.00 s")
    assert remarks([row]) == ["r began to save every 700 train_steps: a save costs 2.00 s"]
    assert remarks([msgspec.structs.replace(row, state="finished")]) == []
