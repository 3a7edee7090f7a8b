"""Rules on exporter pages, diagnostics and monitors: what a last-value gauge says, and what silence says. Pure.

The XID gauge holds the last code until the exporter or driver starts again: only a change of it is news, and the
kernel's log, which has times, outranks it. Missing samples prove nothing unless something else agrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from outlast.reliability.judging.facts import DiagRow, GpuFault, GpuLooked, PowerLooked, Sample, SeriesGone, Unanswered
from outlast.reliability.judging.facts_run import Restarted, Will
from outlast.reliability.judging.read_exporter import XID_GAUGE
from outlast.reliability.judging.read_gpu import HARD_MASK, decode_mask
from outlast.reliability.judging.rules_gpu import CHANNEL_RESET, HARDWARE
from outlast.reliability.judging.scene import MANY_NODES, Scene, ids, nodes_of, place
from outlast.reliability.judging.words import PARSE_ONLY, Act, Finding, lost
from outlast.reliability.verdict import Kind

POWER_BRAKE: Final = 0x80
HALF_POWER: Final = 0.7
"""Draw under load as a share of the limit: a healthy GPU under full load reaches its limit."""


def _gauges(scene: Scene) -> dict[tuple[str, str], list[Sample]]:
    """The XID gauge of each GPU, in order. A page that leaves the host out belongs to the only one that is known."""
    hosts = {s.node for s in scene.of(Sample) if s.node}
    found: dict[tuple[str, str], list[Sample]] = {}
    for s in scene.of(Sample):
        if s.metric.endswith(XID_GAUGE) and s.kept:
            found.setdefault((s.node or (next(iter(hosts)) if len(hosts) == 1 else ""), s.gpu), []).append(s)
    return found


def stale_gauge(scene: Scene) -> Iterator[Finding]:
    """A gauge that still shows what was dealt with, or shows what the kernel's log does not bear out."""
    raised = {at: rows for at, rows in _gauges(scene).items() if any(r.value for r in rows)}
    if not raised:
        return
    rows = [r for group in raised.values() for r in group]
    codes = {int(r.value or 0) for r in rows}
    kernel = [f for f in scene.faults if f.code in codes]
    handled = [r for r in scene.of(Restarted) if any(g[0].id < r.id < g[-1].id for g in raised.values())]
    unchanged = all(len({r.value for r in group}) == 1 and len({r.id for r in group}) > 1 for group in raised.values())
    if handled and unchanged:
        yield Finding(
            verdict=Kind.NO_FAULT,
            action=Act.NONE,
            rule="last_value_gauge",
            why="the gauge holds the last code; it has not changed since that was dealt with, so it is one event",
            evidence=ids([*rows, *handled]),
            rejected=(lost("a new incident", "no edge since the restart, and no line of the kernel"),),
            checks={"incidents": 0},
        )
    elif kernel and not _agrees(rows, kernel):
        yield Finding(
            verdict=Kind.MONITORING_FAULT,
            action=Act.PAGE,
            rule="gauge_against_kernel",
            why="the gauge shows an old code as if it were new; the kernel's log has its time and nothing since",
            evidence=ids([*rows, *kernel]),
            rejected=(lost("drain on the gauge", "of two sources that disagree the one with times counts"),),
        )


def _agrees(rows: Sequence[Sample], kernel: Sequence[GpuFault]) -> bool:
    """The kernel's line is about as young as the sample, or no times are known."""
    newest = max((f.at_s for f in kernel if f.at_s is not None), default=None)
    first = min((r.at_s for r in rows if r.at_s is not None), default=None)
    return newest is None or first is None or first - newest < 3600


def raised_gauge(scene: Scene) -> Iterator[Finding]:
    """A code on the gauge without the kernel's line: an event at most, and weaker than the line would be."""
    raised = {at: rows for at, rows in _gauges(scene).items() if rows[-1].value}
    if not raised or scene.faults:
        return
    edges = {at: any(not r.value for r in rows) for at, rows in raised.items()}
    (node, gpu), rows = next(iter(raised.items()))
    code = int(rows[-1].value or 0)
    meaning = scene.meaning(code)
    program = meaning.class_ in ("gpu_app_fault", "gpu_secondary")
    hard = meaning.class_ in HARDWARE or meaning.action.startswith("drain")
    verdict: str = Kind.APP_FAULT if program else Kind.HARDWARE_SUSPECT if hard else Kind.NO_FAULT
    action = (
        (Act.LOG if code == CHANNEL_RESET or not edges[(node, gpu)] else Act.RESTART)
        if program
        else (Act.PAGE if hard else Act.LOG)
    )
    yield Finding(
        verdict=verdict,
        action=action,
        rule="gauge_alone",
        why=f"the exporter shows XID {code} ({meaning.name}) on GPU {gpu}; it is the parent GPU's last code, "
        "without time or instance",
        culprit=f"GPU {gpu}" + (f" of {node}" if node else "") + ("" if hard else " (software), instance unknown"),
        evidence=ids([r for group in raised.values() for r in group]),
        rejected=(lost("one incident a row", "instances of one GPU repeat its code"),),
        checks={"incidents": len(raised)},
    )


def hot_gpus(scene: Scene) -> Iterator[Finding]:
    """A tool finds the hardware slowing a GPU down."""
    hot = [g for g in scene.seen(GpuLooked) if g.what == "hot"]
    if hot:
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.JOB_END,
            rule="slowed_down",
            why="the GPU is slowed down by its hardware, for heat or power: look at its cooling when the job is over",
            culprit=place(hot[0], hot[0].gpu),
            evidence=ids(hot),
        )


def clocks(scene: Scene) -> Iterator[Finding]:
    """Throttle reasons by their bits: hardware slowdown, heat and the power brake count, a power cap does not."""
    hard = [p for p in scene.seen(PowerLooked) if p.mask & HARD_MASK]
    brake = [p for p in hard if p.mask & POWER_BRAKE]
    if len(nodes_of(brake)) >= MANY_NODES:
        yield Finding(
            verdict=Kind.INFRA_EVENT,
            action=Act.PAGE,
            rule="power_brake",
            why=f"the power brake line is pulled on {len(nodes_of(brake))} nodes: the feed, not the GPUs",
            culprit=f"power feed of {len(nodes_of(brake))} nodes",
            evidence=ids(brake),
            rejected=(lost("GPU by GPU", "one cause, one time"),),
            checks={"brake_nodes": len(nodes_of(brake)), "ignore_bits": ["0x01", "0x04"]},
        )
    elif hard:
        names = {p.node or p.gpu: list(decode_mask(p.mask & HARD_MASK)) for p in hard}
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.LOG,
            rule="slowdown",
            why="clocks are held back for heat or by the hardware: watch it",
            culprit=", ".join(dict.fromkeys(p.node or f"GPU {p.gpu}" for p in hard)),
            evidence=ids(hard),
            checks={"decoded": names},
        )


def starved_gpu(scene: Scene) -> Iterator[Finding]:
    """One GPU that draws far less than its siblings under the same load."""
    drawn = [p for p in scene.seen(PowerLooked) if p.share_of_limit is not None]
    starved = [p for p in drawn if (p.share_of_limit or 0.0) < HALF_POWER]
    if starved and len(starved) < len(drawn):
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.JOB_END,
            rule="starved_gpu",
            why="one GPU draws far less than its limit under the load that takes its siblings to theirs",
            culprit=" ".join(w for w in (starved[0].node, f"GPU {starved[0].gpu}") if w),
            evidence=ids(drawn),
            rejected=(lost("normal power cap", "a cap is normal at the limit, not far below it"),),
        )


def tools_hung(scene: Scene) -> Iterator[Finding]:
    """A health agent that stalls on one node alone is a sign of its GPU, not of the agent."""
    silent = scene.seen(Unanswered)
    fine = max((u.fine for u in silent), default=0)
    rising = any(u.counters_rise for u in silent)
    if not silent or not (fine or rising or any(u.what for u in silent)):
        return
    alone = fine >= MANY_NODES or rising
    chief = next((u for u in silent if u.gpu), silent[0])
    yield Finding(
        verdict=Kind.HARDWARE_SUSPECT if alone else Kind.MONITORING_FAULT,
        action=Act.JOB_END if alone else Act.PAGE,
        rule="monitor_stalled",
        why="the monitor stalls where its GPU is ill: one node of many, with errors rising"
        if alone
        else "a monitor does not come back; whether the GPU or the tool is ill is not known",
        culprit=" ".join(w for w in (chief.node, f"GPU {chief.gpu}" if chief.gpu else "") if w) or None,
        evidence=ids(silent),
        rejected=(lost("restart the agent", "it does not heal what stalls it"),) if alone else (),
    )


def mismatched(scene: Scene) -> Iterator[Finding]:
    """Driver and library of different versions: programs that run go on, new ones fail, the monitor among them."""
    looked = [g for g in scene.seen(GpuLooked) if g.what == "mismatch"]
    if looked:
        upgrade = [w for w in scene.seen(Will) if w.what == "upgrade"]
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.PAGE,
            rule="driver_mismatch",
            why="the driver in the kernel and its library differ: load the driver again when the job is over",
            culprit="an upgrade under the loaded driver" if upgrade else "driver and library versions",
            evidence=ids([*looked, *upgrade]),
            rejected=(lost("GPUs lost", "running programs still use them"),),
        )


def series_lost(scene: Scene) -> Iterator[Finding]:
    """Series that vanished: an input that is lost, unless another source says that the GPU is."""
    gone = scene.seen(SeriesGone)
    if gone and not scene.faults:
        everywhere = any(g.everywhere for g in gone) or any(g.metrics for g in gone)
        yield Finding(
            verdict=Kind.MONITORING_FAULT if everywhere else Kind.AMBIGUOUS,
            action=Act.PAGE,
            rule="series_missing",
            why="series are missing and nothing else agrees with a loss: the monitor lost an input",
            evidence=ids(gone),
            rejected=(
                lost("GPU lost", "absence is a sign only where something else agrees"),
                lost("no errors", "missing is not zero"),
            ),
        )


def diagnosed(scene: Scene) -> Iterator[Finding]:
    """A diagnostic's table is judged by its rows; its exit status and its first row are not the result."""
    rows = scene.seen(DiagRow)
    failed = [r for r in rows if r.failed]
    if failed:
        named = {r.test: [g for g in r.failed if g >= 0] for r in failed}
        gpus = sorted({g for r in failed for g in r.failed if g >= 0})
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.REFUSE,
            rule="diagnostic_failed",
            why=f"failed: {', '.join(named)}; the node does not pass its gate, whatever the exit status says",
            culprit=f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(str, gpus))}" if gpus else "the node",
            evidence=ids(failed),
            rejected=(lost("healthy", "an exit status of 0 is not the table"),),
            checks={"failed": named},
        )
    elif rows:
        yield Finding(
            verdict=Kind.NO_FAULT,
            action=Act.NONE,
            rule="diagnostic_passed",
            why="every test passed",
            evidence=ids(rows),
        )


def pages(scene: Scene) -> Iterator[Finding]:
    """What is left of a page: how many samples are good. Blank is blank, and a bad line costs itself alone."""
    samples = scene.seen(Sample)
    if not samples:
        return
    kept = [s for s in samples if s.kept]
    rejected = [s for s in samples if s.value is None]
    blank = [s for s in samples if s.blank]
    checks: dict[str, object] = {"samples_kept": len(kept)}
    if rejected:
        checks["lines_rejected"] = len(rejected)
    parse = bool(rejected) or any(s.lower for s in samples)
    yield Finding(
        verdict=PARSE_ONLY if parse else Kind.NO_FAULT,
        action=Act.NONE,
        rule="exporter_page",
        why=f"{len(kept)} samples are good, {len(blank)} blank, {len(rejected)} unreadable; none tells of a fault",
        evidence=ids(samples),
        rejected=(lost("errors or heat by the number", "the number is the exporter's mark for no value"),)
        if blank
        else (),
        checks=checks,
    )
