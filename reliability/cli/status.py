"""`outlast status`: where runs stand, read back from their event logs. It asks nobody and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from outlast.reliability.cli.common import RunName, as_json, find
from outlast.reliability.cli.show import ago, print_json, print_table
from outlast.reliability.config import run_root_default
from outlast.reliability.model import Noun

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outlast.reliability.history import RunView
    from outlast.reliability.rundir import RunDir

_EVERY_S: Final = 1.0
_SILENT_S: Final = 60.0
"""A log without a new line for this long, in a run that has not ended, is worth a word."""

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


class StatusRow(Noun, frozen=True, kw_only=True):
    """One run, as data."""

    run: str
    state: str
    why: str = ""
    train_step: int = 0
    target: int = 0
    loss: float | None = None
    step_time_s: float | None = None
    nodes: int = 0
    spares: int = 0
    attempt: int = 0
    effective: float = 0.0
    incidents: int = 0
    last_incident: str = ""
    last_incident_at_s: float | None = None
    silent_s: float = 0.0
    """Since the log's last line; 0 once the run has ended."""
    problem: str = ""
    """What is wrong with the log itself."""


@click.command()
@click.argument("run", type=RunName(), required=False)
@click.option("--watch", is_flag=True, help="Show it again each second until the run ends or Ctrl-C.")
@as_json
def status(run: str | None, watch: bool, as_json: bool) -> int:
    """Where runs stand: one RUN, or all below the run root.

    \b
    NODES      nodes in use + spares at hand
    EFFECTIVE  seconds of train_steps that count, of all seconds

    Exit codes, with RUN: 0 it goes on or finished, 1 it failed or was cancelled, 3 it is held, 2 no such run.
    """
    from outlast.reliability.freeze import list_runs

    def runs() -> Sequence[RunDir]:
        return (find(run),) if run else list_runs(Path(run_root_default()[0]))

    if as_json:
        rows = [summarise(run_dir, time.time()) for run_dir in runs()]
        print_json(rows[0] if run else rows)
    elif watch:
        rows = _watch(runs)
    else:
        rows = [summarise(run_dir, time.time()) for run_dir in runs()]
        _print(rows)
    return exit_code(rows[0].state) if run and rows else 0


def exit_code(state: str) -> int:
    """The documented code of a run's state."""
    return {"failed": 1, "cancelled": 1, "held": 3}.get(state, 0)


def summarise(run_dir: RunDir, now_s: float) -> StatusRow:
    """The row of one run; a log that cannot be read gives a row that says so."""
    from outlast.reliability.eventlog import EventLogError, read_events
    from outlast.reliability.history import fold

    try:
        replay = read_events(run_dir.events)
    except (OSError, EventLogError) as error:
        missing = not run_dir.events.exists()
        state = "submitted" if missing else "unreadable"
        return StatusRow(run=run_dir.name, state=state, problem="" if missing else str(error))
    return compose(run_dir.name, fold(replay.events), now_s, problem="; ".join(replay.problems))


def compose(name: str, view: RunView, now_s: float, *, problem: str = "") -> StatusRow:
    """A run's row from its view. Pure."""
    last = view.incidents[-1] if view.incidents else None
    over = view.state in ("finished", "stopped", "cancelled", "failed")
    return StatusRow(
        run=name,
        state=view.state,
        why=view.why,
        train_step=view.step,
        target=view.target,
        loss=view.loss,
        step_time_s=view.step_time_s,
        nodes=view.in_use,
        spares=view.spare_now,
        attempt=view.attempt,
        effective=view.ledger.effective,
        incidents=len(view.incidents),
        last_incident=_tell(last.verdict.node, last.verdict.kind, [act.text for act in last.acts]) if last else "",
        last_incident_at_s=last.at_s if last else None,
        silent_s=0.0 if over or not view.last_at_s else max(0.0, now_s - view.last_at_s),
        problem=problem,
    )


def _tell(node: str | None, kind: str, acts: Sequence[str]) -> str:
    return f"{node or 'no node'}: {kind}" + (f", {acts[-1]}" if acts else "")


def cells(row: StatusRow, now_s: float) -> tuple[str, ...]:
    """The row as the table shows it."""
    step = f"{row.train_step:,}" + (f"/{row.target:,}" if row.target else "")
    incident = f"{ago(now_s - row.last_incident_at_s)}: {row.last_incident}" if row.last_incident_at_s else ""
    return (
        row.run,
        row.state,
        step,
        f"{row.loss:.4g}" if row.loss is not None else "",
        f"{row.step_time_s:.3g} s" if row.step_time_s is not None else "",
        f"{row.nodes}+{row.spares}" if row.nodes or row.spares else "",
        str(row.attempt or ""),
        f"{row.effective:.1%}" if row.train_step else "",
        incident,
    )


def remarks(rows: Sequence[StatusRow]) -> list[str]:
    """What needs a person's eye, a line each."""
    lines = []
    for row in rows:
        if row.state == "held":
            lines.append(f"{row.run} is held: {row.why}\n  go on with: outlast continue {row.run}")
        elif row.why:
            lines.append(f"{row.run} {row.state}: {row.why}")
        if row.problem:
            lines.append(f"{row.run}: {row.problem}")
        if row.silent_s > _SILENT_S:
            lines.append(
                f"{row.run}: nothing in its log for {row.silent_s:.0f} s: is it supervised? (squeue, `outlast doctor`)"
            )
    return lines


def _print(rows: Sequence[StatusRow]) -> None:
    now_s = time.time()
    if not rows:
        click.echo(f"no runs below {run_root_default()[0]}; name one, or set OUTLAST_RUN_ROOT")
        return
    print_table(HEADER, [cells(row, now_s) for row in rows], right=(2, 3, 4))
    for line in remarks(rows):
        click.echo(line)


def _watch(runs: Callable[[], Sequence[RunDir]]) -> list[StatusRow]:
    """Until every shown run has ended, or Ctrl-C."""
    from rich.live import Live

    rows: list[StatusRow] = []
    with Live(auto_refresh=False) as live:
        try:
            while True:
                rows = [summarise(run_dir, time.time()) for run_dir in runs()]
                live.update(_render(rows), refresh=True)
                if all(row.state in ("finished", "stopped", "cancelled", "failed") for row in rows):
                    return rows
                time.sleep(_EVERY_S)
        except KeyboardInterrupt:
            return rows


def _render(rows: Sequence[StatusRow]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from outlast.reliability.cli.show import visible

    table = Table(box=None, pad_edge=False)
    for index, title in enumerate(HEADER):
        table.add_column(title, justify="right" if index in (2, 3, 4) else "left", no_wrap=index < 8)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in cells(row, time.time())))
    return Group(table, *(Text(visible(line)) for line in remarks(rows)))
