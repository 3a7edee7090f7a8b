"""`outlast stop` and `outlast continue`: a person's will, put into the run directory for the supervisor to read."""

from __future__ import annotations

import getpass
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from outlast.reliability.cli.common import RunName, find

if TYPE_CHECKING:
    from outlast.reliability.rundir import RunDir
    from outlast.reliability.runstate import RunState

_LOOK_S: Final = 0.5


@click.command()
@click.argument("run", type=RunName())
@click.option("--note", default="", help="Why, for the log and the report.")
@click.option("--wait/--no-wait", default=True, help="Wait until the run has ended (default).")
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, help="Seconds to wait.")
def stop(run: str, note: str, wait: bool, timeout_s: float) -> int:
    """Save and end a run. It is not queued again.

    The supervisor asks the program to save, ends its ranks and gives the allocation back. `outlast continue` starts
    nothing after this: submit it again to go on from its checkpoint.

    Exit codes: 0 it has ended (or, with --no-wait, was asked), 2 no such run, 75 it has not ended in time.
    """
    run_dir = find(run)
    state = _read_state(run_dir)
    if state.ended:
        click.echo(f"{run_dir.name} has already ended: {state.ended.outcome} ({state.ended.why})")
        return 0
    path = write_request(run_dir, "stop", note)
    click.echo(f"{run_dir.name}: asked to save and end; it will not be queued again")
    return _wait_for_end(run_dir, path, timeout_s) if wait else 0


@click.command(name="continue")
@click.argument("run", type=RunName())
@click.option("--note", default="", help="What was mended, for the log and the report.")
def go_on(run: str, note: str) -> int:
    """Let a held run go on.

    A run is held when restarting cannot help: the same failure three times, a budget spent, an ambiguous picture.
    `outlast status RUN` tells why. Mend the cause first; the attempts without progress are counted from 0 again.

    Exit codes: 0 it was asked, 1 the run is not held, 2 no such run.
    """
    run_dir = find(run)
    state = _read_state(run_dir)
    if state.ended:
        click.echo(f"{run_dir.name} has ended: {state.ended.outcome} ({state.ended.why}); nothing can go on", err=True)
        return 1
    if not state.held:
        click.echo(f"{run_dir.name} is not held; nothing was asked. See: outlast status {run_dir.name}", err=True)
        return 1
    write_request(run_dir, "continue", note)
    click.echo(f"{run_dir.name} was held: {state.held}\nasked to go on; see: outlast status {run_dir.name}")
    return 0


def write_request(run_dir: RunDir, what: str, note: str) -> Path:
    """One OperatorAsked in requests/, whole or not at all."""
    import msgspec

    from outlast.reliability.freeze import write_durably
    from outlast.reliability.model import OperatorAsked

    asked = OperatorAsked(at_s=time.time(), what=what, who=_who(), note=note)
    run_dir.requests.mkdir(mode=0o700, exist_ok=True)
    path = run_dir.requests / f"{time.time_ns()}-{os.getpid()}-{what}.json"
    write_durably(path, msgspec.json.encode(asked))
    return path


def _who() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"uid {os.getuid()}"  # a container without passwd


def _read_state(run_dir: RunDir) -> RunState:
    from outlast.reliability.eventlog import read_events
    from outlast.reliability.runstate import RunState, replay

    return replay(read_events(run_dir.events).events) if run_dir.events.exists() else RunState()


def _wait_for_end(run_dir: RunDir, request: Path, timeout_s: float) -> int:
    """Until the log holds the end; what is seen meanwhile is told."""
    deadline_s, told = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline_s:
        state = _read_state(run_dir)
        if state.ended:
            click.echo(f"{run_dir.name} has ended: {state.ended.outcome} ({state.ended.why})")
            return 0
        attempt = state.evidence.current
        now = (
            "waiting for the supervisor to read it"
            if request.exists()
            else f"attempt {attempt.state}"
            if attempt
            else ""
        )
        if now and now != told:
            click.echo(f"  {now}")
            told = now
        time.sleep(_LOOK_S)
    click.echo(
        f"{run_dir.name} has not ended after {timeout_s:g} s; the request stands. "
        f"Look again with: outlast status {run_dir.name}. Where nobody supervises it any more: scancel its job.",
        err=True,
    )
    return 75
