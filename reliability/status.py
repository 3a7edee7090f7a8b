"""`outlast status`: one row a run, read from its event log; once, or live and following the log.

It writes nothing and asks nobody: a run whose supervisor is dead still has a status. What it cannot read it says in
the row, and where the log has been silent for longer than the run's own pace it says so, since a log that stands
still looks exactly like a run that is well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from outlast.reliability.eventlog import EventLogError, Follower
from outlast.reliability.history import IncidentView, RunView, look
from outlast.reliability.model import Noun
from outlast.reliability.rundir import RunDir
from outlast.reliability.timeline import Trace
from outlast.reliability.wording import ago, count, duration, one_line, percent

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

HEADER: Final = (
    "RUN",
    "STATE",
    "STEP",
    "LOSS",
    "STEP TIME",
    "NODES",
    "ATTEMPT",
    "EFFECTIVE",
    "LAST INCIDENT",
)
RIGHT: Final = (2, 3, 4, 5, 6, 7)
"""Columns of numbers."""
OVER: Final = ("finished", "stopped", "cancelled", "failed")
_SILENT_FLOOR_S: Final = 60.0


class LastIncident(Noun, frozen=True, kw_only=True, omit_defaults=False):
    number: int
    at_s: float
    kind: str
    because: str
    action: str


class Row(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """One run, as `--json` gives it."""

    run: str
    state: str
    """As RunView.state; `unreadable` where the log cannot be read, `new` where it has no line yet."""
    why: str = ""
    problem: str = ""
    """What is wrong with the run directory or its log, or how long it has been silent; '' where nothing is."""
    step: int = 0
    train_steps: int = 0
    loss: float | None = None
    step_time_s: float | None = None
    nodes: int = 0
    spares: int = 0
    attempt: int = 0
    effective: float | None = None
    incidents: int = 0
    last_incident: LastIncident | None = None
    last_line_at_s: float = 0.0
    saves: int = 0
    """Checkpoints that became durable."""
    save_every: int = 0
    """Train_steps between saves where that was computed for this attempt; 0: as the run file says."""
    save_because: str = ""


class Watched:
    """One run directory, followed: each `row()` reads only what is new."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = RunDir(root=run_dir)
        self._follower = Follower(self.run_dir.events)
        self._trace = Trace()
        self._view: RunView | None = None

    def row(self, now_s: float) -> Row:
        problem = directory_problem(self.run_dir.root)
        try:
            self._read()
        except EventLogError as error:
            problem = one_line(str(error))
        view = self._view
        if view is None:
            return Row(run=self.run_dir.name, state="unreadable" if problem else "new", problem=problem)
        return _row(self.run_dir.name, view, problem or _silence(view, now_s))

    def _read(self) -> None:
        new = self._follower.read()
        if new.afresh:
            self._trace, self._view = Trace(), None
        for event in new.events:
            self._trace.add(event)
        if new.events:
            self._view = look(self._trace)

    def problems(self) -> list[str]:
        """What in the log could not be believed."""
        return self._follower.problems()


def read_rows(run_dirs: Sequence[Path]) -> list[Row]:
    """The rows, once, in the order given."""
    now_s = time.time()
    return [Watched(run_dir).row(now_s) for run_dir in run_dirs]


def directory_problem(run_dir: Path) -> str:
    """Why the run's supervisor cannot write here: it then does nothing, while the ranks train on. '' where it can."""
    try:
        space = os.statvfs(run_dir)
    except OSError as error:
        return f"{run_dir}: {error.strerror}"
    return space_problem(run_dir, space)


def space_problem(run_dir: Path, space: os.statvfs_result) -> str:
    if space.f_blocks and space.f_bavail == 0:
        return f"{run_dir}: no space left; ranks train on, nothing is recorded or done until there is"
    if space.f_files and space.f_favail == 0:
        return f"{run_dir}: no inodes left; ranks train on, nothing is recorded or done until there are"
    if space.f_flag & os.ST_RDONLY:
        return f"{run_dir}: mounted read-only; ranks train on, nothing is recorded or done until it is not"
    return ""


def _silence(view: RunView, now_s: float) -> str:
    """How long the log has been silent, where a training run should have written by now."""
    silent_s = now_s - view.last_at_s
    patience_s = max(_SILENT_FLOOR_S, 5 * (view.step_time_s or 0.0))
    if view.state in (*OVER, "held", "waiting") or silent_s < patience_s:
        return ""
    who = f"epoch {view.epoch}" + (f", {view.supervisor}" if view.supervisor else "")
    return f"nothing logged for {duration(silent_s)}: is its supervisor alive ({who})?"


def _row(run: str, view: RunView, problem: str) -> Row:
    return Row(
        run=run,
        state=view.state,
        why=one_line(view.why),
        problem=problem,
        step=view.step,
        train_steps=view.target,
        loss=view.loss,
        step_time_s=view.step_time_s,
        nodes=view.in_use,
        spares=view.spare_now,
        attempt=view.attempt,
        effective=view.ledger.effective if view.steps else None,
        incidents=len(view.incidents),
        last_incident=_last(view.incidents[-1]) if view.incidents else None,
        last_line_at_s=view.last_at_s,
        saves=len(view.saving.saves),
        save_every=view.saving.every,
        save_because=view.saving.because,
    )


def _last(incident: IncidentView) -> LastIncident:
    return LastIncident(
        number=incident.number,
        at_s=incident.at_s,
        kind=str(incident.verdict.kind),
        because=one_line(incident.verdict.because),
        action=incident.acts[-1].text if incident.acts else "",
    )


# ---------------------------------------------------------------- text


def cells(row: Row, now_s: float) -> tuple[str, ...]:
    """The row in words, one a column of HEADER."""
    last = row.last_incident
    return (
        row.run,
        row.state,
        f"{count(row.step)}/{count(row.train_steps)}" if row.train_steps else count(row.step),
        "-" if row.loss is None else f"{row.loss:.4g}",
        duration(row.step_time_s),
        f"{row.nodes}+{row.spares}",
        str(row.attempt or "-"),
        "-" if row.effective is None else percent(row.effective),
        "-" if last is None else one_line(f"{ago(now_s - last.at_s)}: {last.action or last.kind}", limit=60),
    )


def remarks(rows: Sequence[Row]) -> list[str]:
    """What stands below the table: problems, and why a run is held or ended."""
    said = [f"{row.run}: {row.problem}" for row in rows if row.problem]
    said += [f"{row.run} {row.state}: {row.why}" for row in rows if row.why and row.state != "finished"]
    often = [row for row in rows if row.save_every and row.state not in OVER]
    return said + [one_line(f"{r.run} began to save every {r.save_every} train_steps: {r.save_because}") for r in often]


def status_text(rows: Sequence[Row], now_s: float) -> str:
    """The table and its remarks, plain."""
    table = [HEADER, *(cells(row, now_s) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for line in table:
        padded = (c.rjust(w) if i in RIGHT else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        lines.append("  ".join(padded).rstrip())
    return "\n".join([*lines, *remarks(rows)])


# ---------------------------------------------------------------- live


def watch(
    run_dirs: Sequence[Path],
    *,
    console: Console | None = None,
    pause: Callable[[float], None] = time.sleep,
    interval_s: float = 1.0,
    looks: int | None = None,
) -> list[Row]:
    """The table, live, until every run is over (or after `looks` looks). Returns the last rows; Ctrl-C ends it too."""
    from rich.live import Live

    runs = [Watched(run_dir) for run_dir in run_dirs]
    rows: list[Row] = []
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while looks is None or looks > 0:
            begun_s = time.monotonic()
            rows = [run.row(time.time()) for run in runs]
            problems = [p for run in runs for p in run.problems()]
            live.update(_render(rows, problems, live.console.width), refresh=True)
            if all(row.state in OVER for row in rows):
                break
            looks = None if looks is None else looks - 1
            # a huge log takes long to lay out: never use more than about a fifth of a core
            pause(max(interval_s, 4 * (time.monotonic() - begun_s)))
    if not live.console.is_terminal:
        live.console.print()  # rich leaves the last line open where it cannot redraw
    return rows


def _render(rows: Sequence[Row], problems: Sequence[str], width: int) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    now_s = time.time()
    lines = [cells(row, now_s) for row in rows]
    widths = [max(map(len, column)) for column in zip(HEADER, *lines, strict=True)]
    # a narrow terminal loses the last column, not half of each: incidents stand below the table, too
    shown = len(HEADER) if sum(widths[:-1]) + 2 * len(HEADER) + 20 <= width else len(HEADER) - 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(HEADER[:shown]):
        width_min = widths[index] if index < len(HEADER) - 1 else None
        side: Literal["left", "right"] = "right" if index in RIGHT else "left"
        table.add_column(name, justify=side, no_wrap=True, min_width=width_min)
    for row, line in zip(rows, lines, strict=True):
        # Text, not str: names and reasons come from outside and may look like markup
        table.add_row(*(Text(cell, style=_style(row) if i == 1 else "") for i, cell in enumerate(line[:shown])))
    below = [Text(one_line(line), style="yellow") for line in (*remarks(rows), *problems)]
    incidents = [
        Text(f"{row.run} incident {last.number}: {last.because}", style="dim")
        for row in rows
        if (last := row.last_incident) and row.state not in OVER
    ]
    return Group(table, *below, *incidents)


def _style(row: Row) -> str:
    if row.problem or row.state in ("held", "failed", "unreadable"):
        return "bold red"
    return "green" if row.state in ("training", "finished") else "yellow"
