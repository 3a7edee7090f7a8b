"""`outlast status`: rows from logs as they are found, and the live view that follows them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from outlast.reliability.events import LogEvent
from outlast.reliability.status import (
    HEADER,
    Row,
    Watched,
    directory_problem,
    read_rows,
    space_problem,
    status_text,
    watch,
)

NOON_S = 1_770_000_000.0
New = Callable[[], Any]


def test_the_table_has_a_line_a_run(demo_run: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "empty").mkdir()
    rows = read_rows([demo_run, tmp_path / "runs" / "empty", tmp_path / "runs" / "gone"])
    assert [row.state for row in rows] == ["finished", "new", "unreadable"]
    text = status_text(rows, NOON_S + 7200)
    header, demo, *_ = text.splitlines()
    assert header.split() == " ".join(HEADER).split()
    assert "60/60" in demo and "54.9%" in demo and "450 ms" not in demo
    assert "2 h ago: feeder job for 1 node without a c" in demo
    assert "gone: " in text and "No such file or directory" in text


def test_rows_as_data_are_complete(demo_run: Path) -> None:
    row = msgspec.json.decode(msgspec.json.encode(read_rows([demo_run])[0]))
    assert set(row) == set(Row.__struct_fields__)
    assert row["last_incident"]["because"].startswith("node c is silent")


def test_a_log_that_stands_still_is_said(demo_run: Path, demo_events: tuple[LogEvent, ...], new_story: New) -> None:
    story = new_story()
    story.events = list(demo_events[:60])
    story.write(demo_run)
    run = Watched(demo_run)
    assert run.row(NOON_S + 30).problem == ""
    assert "nothing logged for" in run.row(NOON_S + 4000).problem
    assert "is its supervisor alive (epoch 1, a)?" in run.row(NOON_S + 4000).problem


def test_a_watched_run_reads_only_what_is_new(
    tmp_path: Path, demo_events: tuple[LogEvent, ...], new_story: New
) -> None:
    story = new_story()
    run_dir = tmp_path / "r"
    story.write(run_dir)
    run = Watched(run_dir)
    states = []
    for first in range(0, len(demo_events), 10):
        with (run_dir / "events.jsonl").open("ab") as log:
            log.write(b"".join(msgspec.json.encode(e) + b"\n" for e in demo_events[first : first + 10]))
        states.append(run.row(NOON_S).state)
    assert states[0] == "first_step" and "training" in states
    story.events = list(demo_events)
    assert run.row(NOON_S) == Watched(story.write(tmp_path / "whole" / "r")).row(NOON_S)


def test_a_log_that_begins_again_is_read_again(
    tmp_path: Path, demo_events: tuple[LogEvent, ...], new_story: New
) -> None:
    story = new_story()
    story.events = list(demo_events)
    run = Watched(story.write(tmp_path / "r"))
    assert run.row(NOON_S).step == 60
    story.events = list(demo_events[:40])
    story.write(tmp_path / "r")
    assert run.row(NOON_S).step < 60


def test_garbage_in_the_log_does_not_stop_it(demo_run: Path) -> None:
    with (demo_run / "events.jsonl").open("ab") as log:
        log.write(b'\xff\xfe not json\n{"seq":1}\n{"half a li')
    run = Watched(demo_run)
    assert run.row(NOON_S).state == "finished"
    assert "2 lines cannot be read" in run.problems()[0]


def test_the_live_view_ends_when_all_runs_are_over(demo_run: Path) -> None:
    screen = io.StringIO()
    rows = watch([demo_run], console=Console(file=screen, width=200, force_terminal=False), pause=_never)
    assert rows[0].state == "finished"
    assert "RUN" in screen.getvalue() and "60/60" in screen.getvalue()
    assert "LAST INCIDENT" in screen.getvalue() and screen.getvalue().endswith("\n")


def test_a_narrow_terminal_keeps_whole_columns(demo_run: Path) -> None:
    screen = io.StringIO()
    watch([demo_run], console=Console(file=screen, width=84, force_terminal=False), pause=_never)
    assert "EFFECTIVE" in screen.getvalue() and "54.9%" in screen.getvalue()
    assert "LAST INCIDENT" not in screen.getvalue()


def test_the_live_view_shows_hostile_text_as_text(
    tmp_path: Path, demo_events: tuple[LogEvent, ...], new_story: New
) -> None:
    story = new_story()
    story.events = [e for e in demo_events if e.seq <= 75]  # the exception with markup and terminal codes
    screen = io.StringIO()
    paused: list[float] = []
    console = Console(file=screen, width=200, force_terminal=True)
    watch([story.write(tmp_path / "[bold]r")], console=console, pause=paused.append, looks=3)
    assert len(paused) == 3
    assert "[bold]r" in screen.getvalue()
    assert "\\x1b[31mdocument" in screen.getvalue()
    assert "\x1b[31mdocument" not in screen.getvalue()


def _never(_s: float) -> None:
    raise AssertionError("a finished run needs no second look")


def test_a_full_or_read_only_device_is_named(tmp_path: Path) -> None:
    assert directory_problem(tmp_path) == ""
    assert "No such file" in directory_problem(tmp_path / "gone")
    # /proc is a real file system without blocks: it is not taken for a full one
    assert directory_problem(Path("/proc")) == ""
    well = dict(
        zip(
            ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "flag", "namemax"),
            (4096, 4096, 100, 50, 50, 100, 50, 50, 0, 255),
            strict=True,
        )
    )
    assert space_problem(tmp_path, os.statvfs_result(tuple(well.values()))) == ""
    for change, words in (({"bavail": 0}, "no space"), ({"favail": 0}, "no inodes"), ({"flag": 1}, "read-only")):
        said = space_problem(tmp_path, os.statvfs_result(tuple((well | change).values())))
        assert words in said and "ranks train on" in said
