"""report.html and the report's words: hostile text stays text, size stays bounded, numbers are those of the log."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.reliability.events import LogEvent
from outlast.reliability.history import fold
from outlast.reliability.model import StepSeen
from outlast.reliability.report import read_view, write_report
from outlast.reliability.report_html import render_page
from outlast.reliability.report_svg import ledger_bar, loss_curve, thinned, timeline
from outlast.reliability.report_text import explain_text, report_json, report_text
from outlast.reliability.rundir import RunDir
from outlast.reliability.verdict import Kind, Scope, Verdict

New = Callable[[], Any]
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Tags(HTMLParser):
    """Which elements a page has, and whether they close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [v or "" for n, v in attrs if n in ("href", "src")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> out of order"


def check_page(page: str) -> None:
    tags = Tags(page)
    assert not tags.seen & {"script", "b", "img", "iframe", "link", "base", "form"}
    assert all(link.startswith("#incident-") for link in tags.links)
    assert not any(ord(c) < 32 and c not in "\n\t" for c in page)


def test_the_demo_page_is_whole_and_shows_log_text_as_text(demo_run: Path) -> None:
    path = write_report(RunDir(root=demo_run))
    assert path == demo_run / "report.html"
    page = path.read_text(encoding="utf-8")
    check_page(page)
    assert "&lt;b&gt;bad&lt;/b&gt; \\x1b[31mdocument" in page
    assert "480, each once, in order" in page
    assert "17.80 s" in page and "54.9%" in page
    assert page.count("<details") == 3 and "attempt 4 restored step 40" in page
    assert [p.name for p in demo_run.iterdir()] == ["events.jsonl", "report.html"] or len(list(demo_run.iterdir())) == 2


def test_every_prefix_of_a_run_gives_a_page(demo_events: tuple[LogEvent, ...]) -> None:
    for length in range(0, len(demo_events), 17):
        check_page(render_page(fold(demo_events[:length])))


def test_the_pictures_are_well_formed(demo_events: tuple[LogEvent, ...]) -> None:
    view = fold(demo_events)
    for picture in (timeline(view), loss_curve(view), ledger_bar(view.ledger)):
        ET.fromstring(picture)
    names = {r.get("class") for r in ET.fromstring(timeline(view)).iter("rect")}
    assert {"s-train", "s-lost_work", "s-detect", "s-stop", "s-start"} <= names
    assert loss_curve(view).count('class="restart"') == 3
    widths = [float(r.get("width", "0")) for r in ET.fromstring(ledger_bar(view.ledger)).iter("rect")]
    assert sum(widths) == pytest.approx(980, abs=0.2)


def test_the_log_is_the_only_input_and_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    assert read_view(tmp_path / "r").run == "r"
    check_page(write_report(tmp_path / "r").read_text(encoding="utf-8"))


def test_hostile_names_everywhere(demo_events: tuple[LogEvent, ...]) -> None:
    evil = '"><script>alert(1)</script>\x1b[2J&\u202e'
    raw = b"[" + b",".join(msgspec.json.encode(e) for e in demo_events) + b"]"
    data = msgspec.json.decode(raw)

    def poison(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: poison(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [poison(v, key) for v in value]
        free = {"run", "node", "nodes", "why", "because", "rule", "text", "gpu", "detail", "alternative", "exception"}
        return value + evil if isinstance(value, str) and key in free else value

    events = msgspec.convert(poison(data), tuple[LogEvent, ...])
    check_page(render_page(fold(events)))
    for said in (report_text(fold(events)), explain_text(fold(events), 1) or ""):
        assert "\x1b" not in said and "\u202e" not in said


@pytest.mark.slow
def test_a_long_run_with_many_incidents_gives_a_small_page(new_story: New) -> None:
    story = new_story()
    story.open(train_steps=95_000)
    done = 0
    for number in range(1, 1501):
        story.begin(number, ("a", "b"), restore_step=done)
        story.train(number, done + 1, done + 64, step_s=3.4)
        done += 60
        verdict = Verdict(
            key=f"k{number}", kind=Kind.APP_FAULT, scope=Scope.RANK, rule="r", because="b" * 500, stops=True
        )
        story.judge(number, verdict, after_s=1)
        story.judge(2000 + number, verdict)
        story.stop(number)
    view = fold(story.events)
    assert view.step == 1499 * 60 + 64 and len(view.incidents) == 3000
    page = render_page(view)
    check_page(page)
    assert len(page) < 1_500_000


def test_thinning_keeps_every_spike() -> None:
    points = [(n, math.sin(n / 1000)) for n in range(95_000)]
    points[40_001] = (40_001, 99.0)
    points[70_003] = (70_003, -99.0)
    kept = thinned(points, 1600)
    assert len(kept) <= 1700
    assert (40_001, 99.0) in kept and (70_003, -99.0) in kept
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert [n for n, _ in kept] == sorted(n for n, _ in kept)


@pytest.mark.parametrize("losses", [[], [1.0], [0.0, 0.0], [1e-3, 1e6], [-1.0, 2.0], [float("inf"), float("nan"), 1.0]])
def test_any_losses_give_a_curve(losses: list[float], demo_events: tuple[LogEvent, ...]) -> None:
    view = fold(demo_events)
    steps = tuple(StepSeen(train_step=n + 1, step_s=1.0, loss=loss) for n, loss in enumerate(losses))
    picture = loss_curve(msgspec.structs.replace(view, steps=steps, attempts=view.attempts[:1]))
    assert "nan" not in picture and "inf" not in picture
    assert "logarithmic" in picture if losses == [1e-3, 1e6] else True


# ---------------------------------------------------------------- words and data


def test_the_report_in_words(demo_events: tuple[LogEvent, ...]) -> None:
    said = report_text(fold(demo_events))
    assert "because: XID 79 (GPU lost) on one GPU of one node; no other node shows it" in said
    assert "swap a -> c; restored step 20" in said
    assert "samples: 480, each once, in order" in said
    assert "train 54.9%  lost_work 10.8%" in said


def test_explain_tells_one_incident_in_full(demo_events: tuple[LogEvent, ...]) -> None:
    view = fold(demo_events)
    said = explain_text(view, 1) or ""
    assert said.startswith(
        "incident 1   2026-02-02 02:40:07   node a, GPU 0000:3b:00   hardware_fault   high confidence"
    )
    for words in ("[e-36]", "program fault: no exception in any rank", "attempt 2 restored step 20", "2 train_steps"):
        assert words in said
    assert explain_text(view, 9) is None


def test_the_data_sums_and_is_complete(demo_events: tuple[LogEvent, ...]) -> None:
    data = msgspec.json.decode(msgspec.json.encode(report_json(fold(demo_events))))
    ledger = data["ledger"]
    assert sum(s for name, s in ledger.items() if name != "wall_s") == pytest.approx(ledger["wall_s"], rel=1e-9)
    assert all(incident["because"] for incident in data["incidents"]) and len(data["incidents"]) == 3
    assert data["samples_once"] is True and data["losses"][-1][0] == 60
    assert [a["layout"] for a in data["attempts"]][-1] == "tp 2 pp 1 dp 1"
