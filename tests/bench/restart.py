"""From a killed rank to the next finished train_step: outlast beside torchrun and ft_launcher.

    each round, one after the other:  start -> train past a durable checkpoint -> SIGKILL a rank -> trains again -> end

Each contestant is started anew in each round, so that they are interleaved over the whole time of the bench and no
two ever run at once. Four ranks, tp 2 x dp 2, of the same program (bench_rank.py); its own marks are the measure for
all: from the kill until every rank has finished a train_step again. The figure is the median over the rounds.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from outlast.reliability.eventlog import read_events
from outlast.reliability.goodput import STATES, spans
from outlast.reliability.timeline import trace
from tests.bench import nvrx
from tests.bench.contestants import RANKS, SAVE_EVERY, Contestant, FtLauncher, Outlast, Running, Torchrun
from tests.bench.marks import Recovery, read_marks, ready_to_kill, recovery, trains_again
from tests.bench.rows import Row, beside, unmeasured, write

ROUNDS = 5
_START_S = 180.0
_RECOVER_S = 180.0
_POLL_S = 0.02
_SMALL_INTERVAL_S = 0.1
FIGURE = "rank killed -> next train_step done"


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured, for whoever wants to know where the time goes."""

    kills: dict[str, list[Recovery]]
    ledger: list[dict[str, float]]
    """outlast's own account of each restart: seconds by state from the kill to the next finished train_step."""


def measure(out: Path, rounds: int, say: Callable[[str], None]) -> tuple[Row, ...]:
    """All rounds; writes restart-detail.json beside the rows."""
    place, data = out / "restart", out / "data"
    shutil.rmtree(place, ignore_errors=True)
    why_not = nvrx.install(out / "nvrx")
    contestants = _contestants(out, has_ft=not why_not)
    say(f"restart: {', '.join(c.name for c in contestants)}; {rounds} rounds{'; ' + why_not if why_not else ''}")
    kills: dict[str, list[Recovery]] = {c.name: [] for c in contestants}
    ledger: list[dict[str, float]] = []
    for number in range(1, rounds + 1):
        for who in [c for c in contestants if c.name in kills]:
            here = place / f"{number}-{who.name}"
            try:
                found, killed_mono_s = one_kill(who, here, data, victim=number % RANKS)
            except (RuntimeError, ValueError) as error:
                if not isinstance(who, FtLauncher):
                    raise
                why_not = f"it installs, but does not work here: {error}"
                say(f"  round {number} {who.name}: {why_not}")
                del kills[who.name]
                continue
            kills[who.name].append(found)
            if isinstance(who, Outlast):
                ledger.append(account(here, killed_mono_s, found.done_s))
            say(
                f"  round {number} {who.name}: {found.done_s:.2f} s{_tell(ledger[-1]) if who.name == 'outlast' else ''}"
            )
    detail = msgspec.json.encode(Detail(kills=kills, ledger=ledger))
    (out / "restart-detail.json").write_bytes(msgspec.json.format(detail, indent=1) + b"\n")
    rows = judge({name: [k.done_s for k in found] for name, found in kills.items()}, why_not)
    write(out / "restart.json", rows)
    return rows


def _contestants(out: Path, *, has_ft: bool) -> tuple[Contestant, ...]:
    from torch.distributed.run import get_args_parser

    interval_s = float(get_args_parser().get_default("monitor_interval"))
    found: list[Contestant] = [Outlast(), Torchrun()]
    if interval_s > _SMALL_INTERVAL_S:  # an older torch: nobody shall say that its default crippled it
        found.append(Torchrun("torchrun, 0.1 s", monitor_s=_SMALL_INTERVAL_S))
    return (*found, FtLauncher(out / "nvrx")) if has_ft else tuple(found)


def judge(times_s: Mapping[str, Sequence[float]], ft_why_not: str) -> tuple[Row, ...]:
    """The rows for these times by contestant. Pure."""
    medians = {name: statistics.median(times) for name, times in times_s.items()}
    ours = medians.pop("outlast")
    torch = {name: median for name, median in medians.items() if name.startswith("torchrun")}
    quarter = beside(f"{FIGURE}, beside torchrun", "s", ours, torch, at_most=0.25, target="<= 0.25 x torchrun")
    below = f"{FIGURE}, beside ft_launcher"
    target = "below ft_launcher"
    if "ft_launcher" not in medians:
        return quarter, unmeasured(below, "s", ours, target=target, why=ft_why_not)
    return quarter, beside(below, "s", ours, {"ft_launcher": medians["ft_launcher"]}, at_most=1.0, target=target)


def one_kill(who: Contestant, place: Path, data: Path, *, victim: int) -> tuple[Recovery, float]:
    """Start, kill, wait until it trains again, end; and when the rank was killed."""
    shutil.rmtree(place, ignore_errors=True)
    running = Running(who, place, data)
    try:
        marks_dir = place / "marks"
        _until(
            lambda: ready_to_kill(read_marks(marks_dir), ranks=RANKS, save_every=SAVE_EVERY), running, _START_S, "start"
        )
        last = read_marks(marks_dir)[victim][-1]
        killed_mono_s = time.monotonic()
        os.kill(last.pid, signal.SIGKILL)
        _until(
            lambda: trains_again(read_marks(marks_dir), after=last.attempt, ranks=RANKS),
            running,
            _RECOVER_S,
            "recovery",
        )
        if isinstance(who, Outlast):
            _until(lambda: _logged(place, last.attempt + 1), running, _RECOVER_S, "event log")
        return recovery(read_marks(marks_dir), killed_mono_s=killed_mono_s, after=last.attempt), killed_mono_s
    finally:
        running.end()


def _until(condition: Callable[[], bool], running: Running, limit_s: float, what: str) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        if not running.alive or time.monotonic() > until:
            ended = "it ended" if not running.alive else f"not within {limit_s:.0f} s"
            raise RuntimeError(f"{running.place.name}: {what}: {ended}; see {running.place}/output")
        time.sleep(_POLL_S)


def _logged(place: Path, attempt: int) -> bool:
    """The event log holds a train_step of this attempt: its ledger is complete up to there."""
    events = read_events(_events(place)).events
    return any(getattr(e.body, "steps", ()) and getattr(e.body, "attempt", 0) == attempt for e in events)


def _events(place: Path) -> Path:
    (path,) = (place / "runs").glob("*/events.jsonl")
    return path


def account(place: Path, killed_mono_s: float, done_s: float) -> dict[str, float]:
    """outlast's own ledger between the kill and the next finished train_step: seconds by state."""
    events = read_events(_events(place)).events
    run = trace(events)
    begin_s = killed_mono_s - events[0].mono_s
    found = dict.fromkeys(STATES, 0.0)
    for span in spans(run):
        inside = min(span.to_s, begin_s + done_s) - max(span.from_s, begin_s)
        found[span.state] += max(0.0, inside)
    return {state: round(seconds, 3) for state, seconds in found.items() if seconds >= 0.0005}


def _tell(ledger: Mapping[str, float]) -> str:
    return " (" + ", ".join(f"{state} {seconds:.2f}" for state, seconds in ledger.items()) + ")"
