"""When this run is to save: interval.py's arithmetic over what its log has shown. Pure.

    every attempt's start   auto: every N train_steps, with the reason          -> Plan.save_every, save_because
    the allocation ends     deadline - p95(time to durable) - margin            -> a last call: save, then stop
    nodes are to change     and no checkpoint comes within HINT_WAIT_S          -> a last call as well

A last call is a stop that begins with a save (wire.StopRanks.save_first); the reason bears SAVE_FIRST, so that a
supervisor that takes over sends the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outlast.reliability.attempt import State
from outlast.reliability.evidence import Evidence
from outlast.reliability.interval import Bounds, Interval, Moment, Seen, judge_save, latest_start_s, p95, plan_interval
from outlast.reliability.model import Node
from outlast.reliability.ports import Allocation
from outlast.reliability.runfile import RunFile
from outlast.reliability.runstate import RunState
from outlast.reliability.saves_seen import SAVE_FIRST, SavesSeen, with_end

NODE_FAILURE_EACH_S: Final = 86400 * 1000 / 6.5
"""A guess of the time between two failures of one node: 6.5 a thousand node-days, as published for a large cluster."""
GUESS_STALL_S: Final = 1.0
GUESS_DURABLE_S: Final = 60.0
HINT_WAIT_S: Final = 30.0
_NEVER: Final = Interval(every_s=float("inf"), because="")
BY_STEPS: Final = ("reference", "megatron_lm")
"""Kinds of program that save by train_steps, and on request."""


def seen_so_far(saving: SavesSeen) -> Seen:
    return Seen(
        stalls_s=tuple(s.hold_s for s in saving.saves if s.hold_s > 0),
        durable_s=tuple(s.durable_s for s in saving.saves if s.durable_s > 0),
        failures=saving.failures,
        watched_s=saving.trained_s,
    )


def next_interval(evidence: Evidence, run: RunFile) -> tuple[int, str]:
    """(train_steps, why) for the next attempt; (0, '') where the run file's own number stands."""
    asked, now = run.checkpoint, evidence.current
    if not asked.auto or run.task.kind not in BY_STEPS or now is None or not now.step_times_s:
        return 0, ""
    times = sorted(now.step_times_s)
    step_s = times[len(times) // 2]
    if step_s <= 0:
        return 0, ""
    saving = evidence.saving
    if now.state is State.ENDED:  # the attempt that has just ended is not counted yet
        finished = bool(now.exits) and all(f.exit.exit_code == 0 for f in now.exits)
        saving = with_end(saving, finished=finished, stopped=now.why_stopped)
    interval = plan_interval(
        seen_so_far(saving),
        Bounds(least_s=asked.every_min_s, most_s=asked.every_max_s or float("inf")),
        guess_between_s=NODE_FAILURE_EACH_S / max(run.cluster.nodes, 1),
        guess_stall_s=GUESS_STALL_S,
    )
    steps = max(1, round(interval.every_s / step_s))
    return steps, f"{interval.because}; a train_step takes {step_s:.3g} s"


def ends_at_s(allocations: Sequence[Allocation], nodes: Sequence[Node]) -> float | None:
    """When the first of the running allocations that hold these nodes ends; None where nobody knows."""
    ours = [a for a in allocations if a.state == "RUNNING" and not set(a.nodes).isdisjoint(nodes)]
    return min((a.ends_at_s for a in ours if a.ends_at_s > 0), default=None)


def last_call(state: RunState, run: RunFile, allocations: Sequence[Allocation], now_s: float) -> str:
    """Why the ranks are to save now and then to end; '' where they are to train on."""
    now = state.evidence.current
    if now is None or now.state is not State.TRAINING or run.task.kind not in BY_STEPS:
        return ""
    moment = Moment(
        now_s=now_s,
        saved_s=now_s,
        unsaved_steps=max(0, now.last_step - state.evidence.durable_step),
        step_s=p95(now.step_times_s) if now.step_times_s else 0.0,
        deadline_s=ends_at_s(allocations, now.plan.nodes) if run.checkpoint.end_margin_s else None,
        hint=_hint(state, now_s),
    )
    due = judge_save(
        moment,
        seen_so_far(state.evidence.saving),
        _NEVER,
        margin_s=run.checkpoint.end_margin_s,
        guess_durable_s=GUESS_DURABLE_S,
    )
    if due is None:
        return ""
    return f"{SAVE_FIRST}: the allocation ends: {due.because}" if due.last else f"{SAVE_FIRST}: {due.because}"


def _hint(state: RunState, now_s: float) -> str:
    """A change of nodes that has waited for a checkpoint for long enough."""
    since, at_s = state.at_checkpoint_from, state.at_checkpoint_s
    if since is None or at_s is None or state.evidence.durable_step > since or now_s < at_s + HINT_WAIT_S:
        return ""
    leaving = [n for n in (state.evidence.current.plan.nodes if state.evidence.current else ()) if n in state.excluded]
    what = f"{', '.join(leaving)} will be taken out" if leaving else "nodes are to change"
    return f"{what}, and no checkpoint came within {HINT_WAIT_S:.0f} s"


def too_late_s(state: RunState, run: RunFile, allocations: Sequence[Allocation], now_s: float) -> float | None:
    """Seconds to the allocation's end where an attempt that began now could not save any more; None else."""
    if state.evidence.current is None or not run.checkpoint.end_margin_s or run.task.kind not in BY_STEPS:
        return None
    end_s = ends_at_s(allocations, state.evidence.present)
    durable = seen_so_far(state.evidence.saving).durable_s
    durable_s = p95(durable) if durable else GUESS_DURABLE_S
    if end_s is None or now_s < latest_start_s(end_s, durable_s, run.checkpoint.end_margin_s):
        return None
    return max(0.0, end_s - now_s)


def grace_s(state: RunState, run: RunFile) -> float:
    """How long ranks that were asked to save first may take before they are ended."""
    durable = seen_so_far(state.evidence.saving).durable_s
    now = state.evidence.current
    step_s = max(now.step_times_s, default=0.0) if now else 0.0
    return max(run.limits.term_grace_s, 2 * (p95(durable) if durable else 0.0) + 2 * step_s)
