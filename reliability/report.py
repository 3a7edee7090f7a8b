"""`report.html` of a run: read the event log, render the page, put it in place. The edge around pure pages.

The log is the only input: a report can be made while the run trains, after it, or years later from the log alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from outlast.reliability.eventlog import read_events
from outlast.reliability.history import RunView, fold
from outlast.reliability.report_html import render_page
from outlast.reliability.rundir import RunDir


def read_view(run_dir: RunDir | Path) -> RunView:
    """What the run's log says. Raises EventLogError where the log is there and cannot be read."""
    run_dir = _known(run_dir)
    view = fold(read_events(run_dir.events).events)
    return view if view.run else msgspec.structs.replace(view, run=run_dir.name)


def write_report(run_dir: RunDir | Path, view: RunView | None = None) -> Path:
    """Write `report.html` whole or not at all; where it is. OSError where the directory cannot be written."""
    page = render_page(read_view(run_dir) if view is None else view)
    target = _known(run_dir).report
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_text(page, encoding="utf-8")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _known(run_dir: RunDir | Path) -> RunDir:
    return run_dir if isinstance(run_dir, RunDir) else RunDir(root=run_dir)
