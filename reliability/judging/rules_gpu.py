"""Rules on GPUs: what the kernel says of them, weighed by class, scope, repetition and history. Pure.

    drill? -> old? -> on many nodes? -> hardware by class -> firmware, hang -> contained -> program -> harmless

The kernel's word convicts where its class is a hardware one; a class that programs cause convicts nobody, unless the
same unit of the same GPU shows it in one job after the other. The words of a line outrank the table (catalogue.py).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from outlast.reliability.judging.facts import Fact, GpuFault, GpuLooked
from outlast.reliability.judging.facts_run import Stamped, Will
from outlast.reliability.judging.scene import (
    MANY_NODES,
    QUIET_S,
    Burst,
    Scene,
    bursts,
    ids,
    near,
    nodes_of,
    pause,
    place,
    returns_between,
)
from outlast.reliability.judging.words import Act, Finding, lost
from outlast.reliability.verdict import Kind

HARDWARE: Final = frozenset(
    {"gpu_memory_ue", "gpu_memory_remap_fail", "gpu_bus_loss", "nvlink_fatal", "nvswitch_fatal", "pcie_fatal"}
)
PROGRAM: Final = frozenset({"gpu_app_fault"})
CONTAINED: Final = 94
"""The driver stopped the one process that held bad data: the GPU itself goes on."""
CHANNEL_RESET: Final = 43
"""Cleaned up by the driver already; the vendor's own advice is to do nothing."""
NVLINK: Final = 74
_REPEATED_BITS: Final = 1 << 4 | 1 << 5
"""XID 74, first register: bits 4 and 5 are a link's fault only when they come back."""
_ECHO_BITS: Final = 1 << 0 | 1 << 1 | 1 << 20 | 1 << 23 | 1 << 30
"""Bits that are ignorable, or the echo of the other end of the link."""
LINK_REPEATS: Final = 3
REBOOTS: Final = 2
"""After so many resets or reboots the same trouble is not the driver's any more (gpud's rule)."""

_GSP_INDEX: Final = re.compile(r"\bfrom GPU([0-9]{1,2}) GSP")
_PROGRAM_LOST = lost("the program", "the kernel's own word, and no program can cause it")


def drills(scene: Scene) -> Iterator[Finding]:
    """Faults that somebody injected on purpose: said in the line, or announced by a person."""
    own = [f for f in scene.faults if not f.past]
    loud = [f for f in own if f.class_ in HARDWARE or f.injected]
    asked = [w for w in scene.seen(Will) if w.what == "inject"]
    if loud and (all(f.injected for f in loud) or asked):
        yield Finding(
            verdict=Kind.OPERATOR_ACTION,
            action=Act.PAGE,
            rule="drill",
            why="the fault was injected on purpose; it does not count in the GPU's history",
            culprit="someone injected a fault",
            evidence=ids([*loud, *asked]),
            rejected=(lost("hardware", "the line carries the driver's mark of an injected fault"),),
            checks=facts_of(loud),
        )


def old_lines(scene: Scene) -> Iterator[Finding]:
    """Records stamped before the present job, or before a reset: old news that is read late."""
    boot = next((s.wall_s for s in scene.of(Stamped) if s.what == "boot"), None)
    later = [s.wall_s for s in scene.of(Stamped) if s.what in ("job", "reset")]
    stamped = [f for f in scene.faults if f.uptime_s is not None]
    if boot is None or not later or not stamped or len(stamped) != len(scene.faults):
        return
    events = [boot + (f.uptime_s or 0.0) for f in stamped]
    if max(events) < max(later):
        at = datetime.fromtimestamp(events[0], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        yield Finding(
            verdict=Kind.NO_FAULT,
            action=Act.LOG,
            rule="old_record",
            why=f"the record is of {at}, before the present job began or the GPU was reset: read late, no news",
            evidence=ids(stamped),
            rejected=(lost("a fault now", "the stamp counts from boot, not from when it was read"),),
            checks={"event_time": at},
        )


def many_nodes(scene: Scene) -> Iterator[Finding]:
    """One hardware class on many nodes at once is their common cause; no node is taken out for it."""
    for class_ in sorted(HARDWARE | {"gsp_fault", "gpu_hang"}):
        own = [f for f in scene.faults if f.class_ == class_ and f.action.startswith("drain")]
        group = near([f for f in own if not f.injected and not f.past])
        reached = nodes_of(group)
        if len(reached) >= MANY_NODES:
            domain = _one_domain(scene, reached)
            yield Finding(
                verdict=Kind.INFRA_EVENT,
                action=Act.PAGE,
                rule="many_nodes_at_once",
                why=f"the same ({class_}) on {len(reached)} nodes at once: power, cooling, fabric or a driver roll-out",
                culprit=f"domain {domain}" if domain else None,
                evidence=ids(group),
                rejected=(lost("each node's hardware", "nodes do not break in the same way together"),),
                checks={"nodes": len(reached)},
            )


def _one_domain(scene: Scene, nodes: Sequence[str]) -> str | None:
    return next((name for name, inside in scene.case.context.domains.items() if set(nodes) <= set(inside)), None)


def hardware(scene: Scene) -> Iterator[Finding]:
    """A GPU, link or switch that the kernel or a tool on the node gives up."""
    loud = [f for f in scene.faults if f.class_ in HARDWARE and not f.injected and not f.past and not _quiet(scene, f)]
    looked = [g for g in scene.seen(GpuLooked) if g.what in ("lost", "remap_failed")]
    if not loud and not looked:
        return
    switch = next((f for f in loud if f.switch is not None), None)
    # the earliest of the strongest: later ones on the node are usually its consequences
    chief: Fact = switch or (loud[0] if loud else looked[0])
    yield Finding(
        verdict=Kind.HARDWARE_FAULT,
        action=Act.SPARE,
        rule=chief.class_ if isinstance(chief, GpuFault) else "tool_lost_gpu",
        why=_why(scene, chief),
        culprit=_culprit(chief),
        evidence=ids([chief, *loud, *looked]),
        rejected=(
            _PROGRAM_LOST,
            lost("fabric or roll-out", f"seen on {max(1, len(nodes_of(loud)))} node, not on many"),
        ),
        checks=facts_of(loud),
    )


def _quiet(scene: Scene, fault: GpuFault) -> bool:
    """Of a hardware class, and yet not enough: by the catalogue, or link bits that count only when repeated."""
    if not fault.action.startswith("drain"):
        return True
    if fault.code != NVLINK or not fault.bits:
        return False
    if not fault.bits & ~_ECHO_BITS:
        return True
    if fault.bits & ~(_REPEATED_BITS | _ECHO_BITS):
        return False
    same = [f for f in scene.faults if (f.code, f.node, f.gpu, f.link) == (NVLINK, fault.node, fault.gpu, fault.link)]
    return len([f for f in same if f.bits & _REPEATED_BITS]) < LINK_REPEATS


def _why(scene: Scene, chief: Fact) -> str:
    if not isinstance(chief, GpuFault):
        return "a tool on the node finds the GPU lost or its memory beyond repair"
    what = f"SXid {chief.code}, fatal" if chief.switch is not None else f"XID {chief.code} ({chief.name})"
    again = _came_back(scene, chief)
    return f"{what} on {place(chief, chief.gpu)}" + (
        "; it came back after the reset that should have cured it" if again else "; one node, no second witness needed"
    )


def _culprit(chief: Fact) -> str:
    if not isinstance(chief, GpuFault):
        return place(chief, chief.gpu if isinstance(chief, GpuLooked) else None)
    if chief.switch is not None:
        link = f", link {chief.link}" if chief.link is not None else ""
        return f"{place(chief, None, f'NVSwitch {chief.switch}')}{link}"
    link = f" link {chief.link}" if chief.link is not None else ""
    return f"{place(chief, chief.gpu)}{link}"


def _came_back(scene: Scene, fault: GpuFault) -> int:
    """Resets or reboots between the first and the last of this class on this GPU."""
    same = [f for f in scene.faults if (f.class_, f.node, f.gpu) == (fault.class_, fault.node, fault.gpu)]
    return returns_between(scene, same[0], same[-1]) if len(same) > 1 else 0


def damaged_driver(scene: Scene) -> Iterator[Finding]:
    """A fault whose client the driver cannot name: its own state is damaged, and only a reboot mends that."""
    bad = [f for f in scene.faults if f.unrecognised and not f.past]
    if not bad:
        return
    spread = nodes_of(bad)
    first = next((f for f in scene.faults if f.class_ in PROGRAM and not f.past), bad[0])
    yield Finding(
        verdict=Kind.SOFTWARE_FAULT,
        action=Act.STOP if len(spread) > 1 else Act.REBOOT,
        rule="driver_state_damaged",
        why="memory faults of clients that the driver cannot name: a program damaged the driver's state, the node "
        "needs a reboot and no repair" + ("; it takes one node after the other" if len(spread) > 1 else ""),
        culprit=f"the program (first sign: {place(first, first.gpu)}); the node needs a reboot",
        evidence=ids([first, *bad]),
        rejected=(
            lost("broken GPUs", "they fail together, after one program's fault"),
            lost("restart in place", "the driver does not recover from it"),
        ),
        checks=facts_of(scene.faults),
    )


def firmware_and_hangs(scene: Scene) -> Iterator[Finding]:
    """The GPU's own processor or an engine stopped: a reset or reboot, and history decides about more."""
    own = [f for f in scene.faults if not f.past]
    gsp = [f for f in own if f.class_ == "gsp_fault"]
    hangs = [f for f in own if f.class_ == "gpu_hang" and f.action.startswith("drain")]
    if not gsp and not hangs:
        return
    chief = (gsp or hangs)[0]
    back = _came_back(scene, chief)
    hard = back >= REBOOTS or (bool(hangs) and not gsp and back >= 1)
    verdict: str = Kind.SOFTWARE_FAULT if gsp else Kind.HARDWARE_SUSPECT if chief.blames == "gpu" else Kind.AMBIGUOUS
    if any(f.class_ in PROGRAM for f in own) and not gsp:
        verdict = Kind.AMBIGUOUS
    # a caller is named in the line: it only waited for an answer
    callers = sorted({f.process for f in gsp if f.process})
    index = {"gpu_index": _index(scene, chief)} if _index(scene, chief) is not None else {}
    yield Finding(
        verdict=Kind.HARDWARE_FAULT if hard else verdict,
        action=Act.SPARE if hard else Act.REBOOT,
        rule="came_back_after_reset" if hard else chief.class_,
        why=f"XID {chief.code} ({chief.name}) on {place(chief, chief.gpu)}: "
        + ("it came back after resets, so it is the part" if hard else "out for a reset or reboot, then back"),
        culprit=place(chief, chief.gpu) + (" (firmware or driver)" if gsp and not hard else ""),
        evidence=ids([*gsp, *hangs]),
        rejected=(
            *([lost(", ".join(callers), "named in the line as callers, they only waited")] if callers else []),
            *([] if hard else [lost("replace the part", "first sight; a reset or reboot has not been tried")]),
            lost("restart in place", "the GPU does not answer until it is reset"),
        ),
        checks={**facts_of([*gsp, *hangs]), **index},
    )


def _index(scene: Scene, fault: GpuFault) -> int | None:
    """The index that the driver prints beside a GSP time-out: `response from GPU4 GSP`."""
    text = next((line.text for line in scene.case.lines if line.id == fault.id), "")
    m = _GSP_INDEX.search(text)
    return int(m[1]) if m else None


def asked_recovery(scene: Scene) -> Iterator[Finding]:
    """XID 154 alone: the driver itself says what the GPU needs."""
    asks = [f for f in scene.faults if f.class_ == "recovery_hint" and f.action.startswith("drain") and not f.past]
    if asks:
        program = any(f.class_ in PROGRAM for f in scene.faults)
        contained = any(f.code == CONTAINED for f in scene.faults)
        yield Finding(
            verdict=Kind.AMBIGUOUS if program else Kind.HARDWARE_SUSPECT,
            action=Act.REBOOT,
            rule="recovery_asked",
            why=f"the driver asks for a recovery of {place(asks[0], asks[0].gpu)}, and its word outranks the table"
            + ("; the memory error itself was contained" if contained else ""),
            culprit=place(asks[0], asks[0].gpu),
            evidence=ids(asks),
            rejected=(lost("go on as it is", "the driver says that the GPU needs a reset or reboot"),),
            checks=facts_of(scene.faults),
        )


def contained(scene: Scene) -> Iterator[Finding]:
    """One contained memory error is one program's loss; a second on the same GPU is the GPU's."""
    own = [f for f in scene.faults if f.code == CONTAINED and f.switch is None]
    if not any(not f.past for f in own):
        return
    latest = own[-1]
    times = len({i for i, b in enumerate(scene.bursts) for f in b if (f.code, f.gpu) == (CONTAINED, latest.gpu)})
    again = times > 1
    yield Finding(
        verdict=Kind.HARDWARE_SUSPECT if again else Kind.TRANSIENT,
        action=Act.SPARE if again else Act.RESTART,
        rule="contained_again" if again else "contained_once",
        why=f"a contained memory error on {place(latest, latest.gpu)}"
        + (f", {times} times" if again else ": only its program was hit; a second one on this GPU takes it out"),
        culprit=place(latest, latest.gpu) + ("" if again else ", for one event"),
        evidence=ids(own),
        rejected=(() if again else (lost("out of service", "contained means one program; count repeats on this GPU"),)),
        checks=facts_of(own),
    )


def remapped(scene: Scene) -> Iterator[Finding]:
    """Rows were remapped or wait for it: a reset when the node is free."""
    rows = [f for f in scene.faults if f.class_ == "gpu_memory_remap" and not f.past and f.switch is None]
    pending = [g for g in scene.seen(GpuLooked) if g.what in ("remap_pending", "errors")]
    if rows or pending:
        waits = bool(pending) or any(f.action.startswith(("watch_reset", "drain")) for f in rows)
        chief: Fact = (rows or pending)[0]
        gpu = chief.gpu if isinstance(chief, GpuFault | GpuLooked) else None
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT if waits else Kind.NO_FAULT,
            action=Act.JOB_END if waits else Act.LOG,
            rule="row_remap",
            why=f"memory of {place(chief, gpu)} was or is to be remapped: "
            + ("let the job run, reset the GPU when it ends" if waits else "counted, nothing to do"),
            culprit=place(chief, gpu) if waits else None,
            evidence=ids([*rows, *pending]),
            rejected=(lost("kill the job", "the remap takes effect at the next reset; the job is not hit"),),
            checks=facts_of(rows),
        )


def harmless(scene: Scene) -> Iterator[Finding]:
    """What is left: unknown codes for a person, and lines that need nothing."""
    own = [f for f in scene.faults if not f.past]
    unknown = [f for f in own if f.class_ in ("unknown_xid", "unparsed") or f.action == "contact_support"]
    reset = [f for f in own if f.class_ == "nvswitch_nonfatal" and f.action.startswith("drain")]
    if unknown:
        yield Finding(
            verdict=Kind.AMBIGUOUS,
            action=Act.PAGE,
            rule="unknown_code",
            why=f"XID {unknown[0].code}: no catalogue knows what it asks for; a person should look",
            evidence=ids(unknown),
            rejected=(lost("take the node out", "nothing is taken out for what is not understood"),),
            checks=facts_of(unknown),
        )
    elif reset:
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.REBOOT,
            rule="fabric_needs_reset",
            why=f"SXid {reset[0].code}: called non-fatal, yet the fabric works again only after a reset",
            culprit=_culprit(reset[0]),
            evidence=ids(reset),
            rejected=(lost("replace the part", "the line's own word is non-fatal"),),
            checks=facts_of(reset),
        )
    elif own:
        yield Finding(
            verdict=Kind.NO_FAULT,
            action=Act.LOG,
            rule="nothing_to_do",
            why="the lines themselves say that nothing is to be done: not fatal, a consequence, or information",
            evidence=ids(own),
            rejected=(lost("hardware", "severity is in the line's own word, not in the number alone"),),
            checks=facts_of(own),
        )


def _incidents(faults: Sequence[GpuFault]) -> int:
    """Bursts, those of one class at one time on several nodes taken as one: they have one cause."""
    count = 0
    recent: deque[Burst] = deque()
    for burst in bursts(sorted(faults, key=lambda f: (f.at_s or 0.0, f.id))):
        while recent and pause(recent[0].first, burst.first) > QUIET_S:
            recent.popleft()
        if not any(_one_cause(burst, other) for other in recent):
            count += 1
            recent.append(burst)
    return count


def _one_cause(burst: Burst, other: Burst) -> bool:
    if burst.first.node == other.first.node or not {f.class_ for f in burst} & {f.class_ for f in other}:
        return False
    return pause(burst.first, other.first) <= QUIET_S


def facts_of(faults: Sequence[GpuFault]) -> dict[str, object]:
    """What a program can compare of these faults."""
    checks: dict[str, object] = {"incidents": _incidents(faults)}
    codes = sorted({f.code for f in faults})
    gpus = {f.gpu for f in faults if f.gpu}
    checks["xid" if len(codes) == 1 else "xids"] = codes[0] if len(codes) == 1 else codes
    if len(gpus) == 1:
        checks["pci"] = next(iter(gpus))
    for key, values in (
        ("pid", {f.pid for f in faults if f.pid is not None}),
        ("process", {f.process for f in faults if f.process}),
        ("link", {f.link for f in faults if f.link is not None}),
        ("fatal", {f.fatal for f in faults if f.fatal is not None}),
    ):
        if len(values) == 1:
            checks[key] = next(iter(values))
    if any(f.switch is not None for f in faults):
        checks["component"] = "nvswitch"
    return checks
