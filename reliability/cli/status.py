"""`outlast status`: which runs to show, and the exit code of what is seen; the table is reliability/status.py's."""

from __future__ import annotations

import time
from pathlib import Path

import click

from outlast.reliability.cli.common import RunName, as_json, find
from outlast.reliability.cli.show import print_json
from outlast.reliability.config import run_root_default


@click.command()
@click.argument("run", type=RunName(), required=False)
@click.option("--watch", is_flag=True, help="Show it live until every run shown has ended, or Ctrl-C.")
@as_json
def status(run: str | None, watch: bool, as_json: bool) -> int:
    """Where runs stand: one RUN, or all below the run root.

    Read from the event logs alone: nobody is asked and nothing is changed.

    \b
    NODES      nodes in use + spares at hand
    EFFECTIVE  seconds of train_steps that count, of all seconds

    Exit codes, with RUN: 0 it goes on or has finished, 1 it failed or was cancelled, 2 no such run, 3 it is held,
    75 its log cannot be read.
    """
    from outlast.reliability import status as table
    from outlast.reliability.freeze import list_runs

    if watch and as_json:
        raise click.UsageError("--watch shows a table; expected --watch or --json")
    root = Path(run_root_default()[0])
    places = [run_dir.root for run_dir in ([find(run)] if run else list_runs(root))]
    if not places and not as_json:
        click.echo(f"no runs below {root}; name one, or set OUTLAST_RUN_ROOT")
        return 0
    if watch:
        rows = table.watch(places)
    else:
        rows = table.read_rows(places)
        if as_json:
            print_json(rows[0] if run else rows)
        else:
            click.echo(table.status_text(rows, time.time()))
            for row in rows:
                if row.state == "held":
                    click.echo(f"{row.run} goes on with: outlast continue {row.run}")
    return exit_code(rows[0].state) if run and rows else 0


def exit_code(state: str) -> int:
    """The documented code of a run's state."""
    return {"failed": 1, "cancelled": 1, "held": 3, "unreadable": 75}.get(state, 0)
