"""Rules on GPU faults that programs cause: they convict nobody, within the time of a job's death least of all. Pure.

The exception is one unit, an SM or a GPU, that stops one program after the other while no other unit does: that follows
the part through jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from outlast.reliability.judging.facts import Ended, Fact, GpuFault
from outlast.reliability.judging.facts_run import Will
from outlast.reliability.judging.rules_gpu import CHANNEL_RESET, PROGRAM, facts_of
from outlast.reliability.judging.scene import Scene, ids, nodes_of, place
from outlast.reliability.judging.words import Act, Finding, lost
from outlast.reliability.verdict import Kind

SAME_SM: Final = 2
SAME_GPU: Final = 3
"""So many separate incidents, each of another process, on one SM or one GPU."""


def program_faults(scene: Scene) -> Iterator[Finding]:
    """Faults that programs cause. They convict nobody, but one unit that stops job after job does."""
    own = [f for f in scene.faults if f.class_ in PROGRAM or (f.class_ == "gpu_hang" and not f.alone)]
    present = [f for f in own if not f.past]
    if not present:
        return
    if (after := _after_death(scene, present)) is not None:
        yield _aftermath(present, after)
        return
    if (unit := _same_unit(scene, own)) is not None:
        yield _worn_unit(unit)
        return
    quiet = all(f.code == CHANNEL_RESET for f in present)
    names = sorted({f.process for f in present if f.process})
    spread = nodes_of(present)
    gpus = {(f.node, f.gpu) for f in present}
    yield Finding(
        verdict=Kind.APP_FAULT,
        action=Act.LOG if quiet else Act.RESTART,
        rule="program_fault",
        why=f"XID {', '.join(str(c) for c in sorted({f.code for f in present}))}: the program asked for what it may "
        f"not have, on {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} in one burst; the GPUs are usable",
        culprit=None
        if len(spread) > 1
        else "the program" + (f" {names[0]}" if len(names) == 1 else "") + ", no hardware",
        evidence=ids(present),
        rejected=(lost("hardware", "a class that programs cause, and no unit shows it again and again"),),
        checks=facts_of(present),
    )


def _after_death(scene: Scene, faults: Sequence[GpuFault]) -> Fact | None:
    """What ended the job before the first of these faults, if it was told."""
    hows = ("signal", "cancelled", "time_limit", "preempted", "oom")
    told: list[Fact] = [e for e in scene.seen(Ended) if e.how in hows]
    told += [w for w in scene.seen(Will) if w.what == "cancel"]
    first = faults[0]
    for end in told:
        known = end.at_s is not None and first.at_s is not None
        if end.at_s <= first.at_s if known else end.id < first.id:  # type: ignore[operator]
            return end
    return None


def _aftermath(faults: Sequence[GpuFault], end: Fact) -> Finding:
    return Finding(
        verdict=Kind.NO_FAULT,
        action=Act.NONE,
        rule="after_the_jobs_death",
        why="the job was ended first; what programs leave behind on GPUs when they are killed convicts nobody",
        evidence=ids([end, *faults]),
        rejected=(lost("program or hardware", "the end of the job comes first in time"),),
        checks=facts_of(faults),
    )


def _same_unit(scene: Scene, own: Sequence[GpuFault]) -> list[GpuFault] | None:
    """Faults of separate incidents and processes on one SM, or on one GPU."""
    for key, needed in (
        (lambda f: f.sm and (f.node, f.gpu, f.sm), SAME_SM),
        (lambda f: f.gpu and (f.node, f.gpu), SAME_GPU),
    ):
        units: dict[object, list[GpuFault]] = {}
        for burst in scene.bursts:
            for unit in {key(f) for f in burst if f in own and key(f)}:
                units.setdefault(unit, []).append(next(f for f in burst if key(f) == unit))
        for faults in units.values():
            others = {f.gpu for f in own} - {faults[0].gpu}
            processes = {f.pid for f in faults if f.pid is not None}
            # the same process again is one program; other GPUs with the same speak for the program too
            if len(faults) >= needed and not others and len(processes) != 1:
                return faults
    return None


def _worn_unit(faults: Sequence[GpuFault]) -> Finding:
    last = faults[-1]
    unit = f" SM {last.sm}" if last.sm and len({f.sm for f in faults}) == 1 else ""
    return Finding(
        verdict=Kind.HARDWARE_SUSPECT,
        action=Act.SPARE,
        rule="same_unit_across_jobs",
        why=f"{place(last, last.gpu)}{unit}: the same fault in {len(faults)} separate incidents of different processes",
        culprit=f"{place(last, last.gpu)}{unit}",
        evidence=ids(faults),
        rejected=(lost("the program", "other programs, the same unit"),),
        checks=facts_of(faults),
    )
