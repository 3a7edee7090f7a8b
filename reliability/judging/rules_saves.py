"""Rules on checkpoints and the storage under them: complete or not, readable or not, full or shared. Pure.

What is complete is told by comparison and by what is missing, never by the newest number, a pointer, or a line in a
log. A write that fails on many nodes is what they share; on one node it is that node's mount or disk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from outlast.reliability.judging.facts import RankSaid
from outlast.reliability.judging.facts_run import LoadFailed, PointerSeen, Resumed, SavesCompared, SaveSeen, WriteFailed
from outlast.reliability.judging.scene import MANY_NODES, Scene, ids, nodes_of
from outlast.reliability.judging.words import Act, Finding, lost
from outlast.reliability.verdict import Kind

SMALL_SHARE: Final = 0.9
"""Shards that add up to less than this share of an older save's are cut short."""
_MARKERS: Final = frozenset({".metadata", "COMMITTED"})
"""Written last of all; a save in another layout has other numbers of shards, and one of these."""
_PARTS: Final = re.compile(r"[0-9]+")


def incomplete(scene: Scene) -> Iterator[Finding]:
    """The newest save that holds all that its elders hold is the one to load."""
    saves = sorted(scene.seen(SaveSeen), key=lambda s: s.step)
    failed = [f for f in scene.seen(LoadFailed) if f.why in ("missing_file", "unreadable", "nan")]
    tracker = scene.seen(PointerSeen)
    bad = [s for s in saves if _lacks(s, saves) or any(f.name == s.name for f in failed)]
    good = [s for s in saves if s not in bad]
    astray = _astray(tracker, saves)
    if astray and not bad and not failed:
        yield _pointer_astray(astray, good)
        return
    if not bad and not failed:
        if good and any(p.to == "" for p in tracker):
            yield _no_tracker(scene, good)
        return
    if not bad and failed and saves and failed[0].why == "missing_file" and not failed[0].name:
        bad, good = saves[-1:], saves[:-1]
    name = bad[-1].name if bad else failed[-1].name or "the checkpoint that was loaded"
    chosen = good[-1].name if good else None
    why = _lacks(bad[-1], saves) if bad else ""
    yield Finding(
        verdict=Kind.CHECKPOINT_UNUSABLE,
        action=Act.ROLLBACK,
        rule="incomplete_checkpoint",
        why=f"{name}: {why or 'it cannot be loaded'}; go back to " + (chosen or "the one before"),
        culprit=name,
        evidence=ids([*bad, *failed, *good]),
        rejected=(
            lost("the highest number or the pointer", "neither says that it is complete"),
            lost("weights of one and the rest of another", "a state is whole or none"),
        ),
        checks={"chosen": chosen} if chosen else {},
    )


def _astray(pointers: Sequence[PointerSeen], saves: Sequence[SaveSeen]) -> str:
    """The name or step that a pointer gives and no save bears."""
    known = {s.name for s in saves} | {str(s.step) for s in saves}
    told = [p.to for p in pointers if p.to]
    return next((t for t in told if saves and t not in known and t.lstrip("0") not in known), "")


def _pointer_astray(to: str, good: Sequence[SaveSeen]) -> Finding:
    return Finding(
        verdict=Kind.CHECKPOINT_UNUSABLE,
        action=Act.ROLLBACK,
        rule="pointer_astray",
        why=f"the pointer leads to {to}, and there is no such checkpoint; the newest complete one is {good[-1].name}",
        culprit=to,
        evidence=ids(good),
        rejected=(lost("the pointer", "it is written by itself and proves nothing"),),
        checks={"chosen": good[-1].name},
    )


def _lacks(save: SaveSeen, saves: Sequence[SaveSeen]) -> str:
    """What an unfinished save lacks; '' for one that seems whole."""
    if save.complete is not None:
        return "" if save.complete else "unfinished"
    if save.missing:
        return f"{save.missing[0]} is missing"
    if save.empty:
        return f"{save.empty[0]} is empty"
    elders = [s for s in saves if s.step < save.step and s.files and not s.missing and not s.empty]
    for elder in elders:
        gone = {_kind(f) for f in elder.files} - {_kind(f) for f in save.files}
        if gone and save.files:
            return f"{sorted(gone)[0]} is missing, which {elder.name} has"
        fewer = next((k for k, n in _counted(elder.files).items() if _counted(save.files).get(k, n) < n), "")
        if fewer and not _MARKERS & set(save.files):
            return f"it has fewer files like {fewer} than {elder.name}"
        if save.sizes and elder.sizes and sum(save.sizes) < SMALL_SHARE * sum(elder.sizes):
            return f"its files hold {sum(save.sizes)} bytes, those of {elder.name} {sum(elder.sizes)}"
    return ""


def _counted(files: Sequence[str]) -> Counter[str]:
    return Counter(_kind(f) for f in files)


def _kind(name: str) -> str:
    """A file's name without its numbers: shards of other ranks and steps are of one kind."""
    return _PARTS.sub("#", name)


def _no_tracker(scene: Scene, good: Sequence[SaveSeen]) -> Finding:
    return Finding(
        verdict=Kind.SOFTWARE_FAULT,
        action=Act.REFUSE,
        rule="no_tracker",
        why=f"complete checkpoints up to {good[-1].name} and no tracker: a start from zero would write over them",
        culprit="the tracker's writing",
        evidence=ids([*good, *scene.seen(PointerSeen)]),
        rejected=(lost("a new run", "complete checkpoints say that it has been further"),),
        checks={"expected_step": good[-1].step},
    )


def loads(scene: Scene) -> Iterator[Finding]:
    """A load into another layout is a program's or a plan's mistake; it says nothing against the checkpoint."""
    shapes = [f for f in scene.seen(LoadFailed) if f.why in ("layout", "other_size")]
    if shapes:
        other = shapes[0].why == "other_size"
        yield Finding(
            verdict=Kind.CHECKPOINT_UNUSABLE if other else Kind.SOFTWARE_FAULT,
            action=Act.REFUSE,
            rule="wrong_layout",
            why="the checkpoint does not fit what loads it: " + (shapes[0].text[:120] or "state of another size"),
            culprit="loader state for another size" if other else "the layout asked for",
            evidence=ids(shapes),
            rejected=(lost("a damaged checkpoint", "it is read, and does not fit"),),
        )


def resumes(scene: Scene) -> Iterator[Finding]:
    """A resume that was not exact, or that trained nothing."""
    table = {
        "from_zero": (Act.REFUSE, "it would begin at 0 again, and the run has been further"),
        "exhausted": (Act.STOP, "exit 0 with nothing trained: complete is the target reached"),
        "learning_rate": (Act.STOP, "the learning rate jumps over the restart"),
        "rng": (Act.PAGE, "ranks without their random state: the resume is not exact, and says so"),
        "swings": (Act.PAGE, "the loss swings after each resume: it is not exact"),
        "loader": (Act.REFUSE, "loader state of another size would skip or repeat samples"),
    }
    for seen in scene.seen(Resumed):
        action, why = table.get(seen.wrong, (Act.PAGE, seen.wrong))
        checks: dict[str, object] = {"complete": False} if seen.wrong == "exhausted" else {}
        checks |= {"exact_resume": False} if seen.wrong == "rng" else {}
        checks |= {"expected_step": seen.known_step} if seen.known_step >= 0 else {}
        yield Finding(
            verdict=Kind.CHECKPOINT_UNUSABLE if seen.wrong == "loader" else Kind.SOFTWARE_FAULT,
            action=action,
            rule=f"resume_{seen.wrong}",
            why=why,
            culprit="the resume path",
            evidence=ids([seen]),
            rejected=(lost("nodes that joined", "it is tied to the resume, not to a place"),),
            checks=checks,
        )


def compared(scene: Scene) -> Iterator[Finding]:
    """Saves that all succeeded and hold the same, or none that became durable."""
    seen = scene.seen(SavesCompared)
    same = [s for s in seen if s.identical > 1]
    none = [s for s in seen if s.none_durable]
    if same:
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.STOP,
            rule="identical_saves",
            why=f"{same[0].identical} checkpoints of different train_steps are equal: saves write old tensors",
            culprit="the save path",
            evidence=ids(same),
            rejected=(lost("saved", "training that moves changes the weights"),),
        )
    elif none:
        yield Finding(
            verdict=Kind.SOFTWARE_FAULT,
            action=Act.PAGE,
            rule="nothing_durable",
            why="saves are asked for and none becomes durable: the loss budget grows while training goes on",
            culprit="the checkpoint writer",
            evidence=ids(none),
            rejected=(lost("saved", "requested is not durable"),),
            checks={"alert": "last_durable_checkpoint_age"},
        )


def writes(scene: Scene) -> Iterator[Finding]:
    """Writes that failed: full, shared trouble, or one node's mount."""
    failed = scene.seen(WriteFailed)
    if not failed:
        return
    whys = {f.why for f in failed}
    said = max((f.nodes for f in failed), default=0)
    reach = max(said, scene.reach, len(nodes_of(failed)))
    ranks = [s for s in scene.seen(RankSaid) if s.key.startswith("filesystem")]
    evidence = ids([*failed, *ranks])
    rejected = (lost("the rank that raised", "it only met what it writes to"),)
    if "full" in whys or whys == {"short"}:
        yield Finding(
            verdict=Kind.INFRA_EVENT,
            action=Act.STOP,
            rule="storage_full",
            why="the file system is full or a write came short: each try fails at the next save; make space first",
            culprit="the file system (full)" if "full" in whys else "the file system",
            evidence=evidence,
            rejected=(*rejected, lost("delete checkpoints", "what may go is for a person to say")),
        )
    elif reach >= MANY_NODES or scene.everywhere:
        both = scene.others_fine
        yield Finding(
            verdict=Kind.AMBIGUOUS if both else Kind.INFRA_EVENT,
            action=Act.WAIT,
            rule="storage_shared",
            why=f"writes or reads fail on {reach or 'all'} nodes: the storage that they share; wait for it",
            culprit="storage",
            evidence=evidence,
            rejected=(*rejected, lost(f"{reach} nodes", "many nodes at once is the shared thing")),
        )
    else:
        yield _one_mount(failed, whys, evidence)


def _one_mount(failed: Sequence[WriteFailed], whys: set[str], evidence: tuple[int, ...]) -> Finding:
    node = next((f.node for f in failed if f.node), None)
    known = node is not None
    return Finding(
        verdict=Kind.HARDWARE_SUSPECT if known and "io" in whys else Kind.AMBIGUOUS,
        action=(Act.REBOOT if "stale" in whys else Act.SPARE) if known else Act.RESTART,
        rule="one_nodes_mount",
        why=f"{node or 'one rank'} alone cannot use the storage: its mount or disk"
        if known
        else "a write failed; whether other nodes see it too is not known",
        culprit=f"{node}'s mount or disk" if known else None,
        evidence=evidence,
        rejected=(lost("storage", "no other node complains"),) if known else (),
    )
