"""Signals and actions as one line for a person, and numbers as people read them. Pure.

Nothing is judged here. Text that came from outside (a rank's output, a kernel line, a reason in Slurm) may hold
terminal codes or markup: `visible` writes the characters out that would steer a terminal or hide something; HTML is
escaped where HTML is made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from outlast.reliability import model as m
from outlast.reliability.actions import (
    Action,
    Advise,
    Drain,
    EndRun,
    Feed,
    Grow,
    Hold,
    LeaveIt,
    Release,
    Requeue,
    RestartInPlace,
    RollBack,
    Shrink,
    Swap,
    Wait,
)
from outlast.reliability.model import Signal

# C0 but tab and newline, DEL, C1, and the Unicode characters that reorder, hide or break a line
_UNSEEN: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: str, *, limit: int = 4000) -> str:
    """The text with control characters written out as \\xNN or \\uNNNN, cut at `limit`."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return _UNSEEN.sub(lambda found: _written(ord(found[0])), cut)


def _written(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def one_line(text: str, *, limit: int = 300) -> str:
    return " ".join(visible(text, limit=limit).split())


# ---------------------------------------------------------------- numbers


def duration(seconds_s: float | None) -> str:
    """`0.31 s`, `71 s`, `12 min 5 s`, `2 h 4 min`, `3 d 1 h`; '-' for None."""
    if seconds_s is None:
        return "-"
    if seconds_s <= 0:
        return "0 s"
    if seconds_s < 1:
        return f"{seconds_s * 1000:.0f} ms" if seconds_s < 0.1 else f"{seconds_s:.2f} s"
    if seconds_s < 10:
        return f"{seconds_s:.1f} s"
    if round(seconds_s) < 120:
        return f"{seconds_s:.0f} s"
    for big, small, size_s in (("min", "s", 60), ("h", "min", 3600), ("d", "h", 86400)):
        inner_s = {60: 1, 3600: 60, 86400: 3600}[size_s]
        whole, rest = divmod(round(seconds_s / inner_s), size_s // inner_s)
        if size_s == 86400 or whole < {60: 60, 3600: 24}[size_s]:
            return f"{whole} {big} {rest} {small}" if rest else f"{whole} {big}"
    raise AssertionError("unreachable: days have no upper end")


def ago(seconds_s: float) -> str:
    """`2 h ago`: the largest unit alone."""
    if seconds_s < 120:
        return f"{max(0.0, seconds_s):.0f} s ago"
    return " ".join(duration(seconds_s).split(" ")[:2]) + " ago"


def utc(at_s: float, *, day: bool = True) -> str:
    """Wall time for people, UTC."""
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S" if day else "%H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "?"


def percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def count(number: int) -> str:
    return f"{number:,}"


def many(number: int, noun: str) -> str:
    """`1 incident`, `1,200 incidents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# ---------------------------------------------------------------- signals


def tell_signal(signal: Signal) -> str:
    """What was seen, on one line, control characters written out."""
    return one_line(_tell_signal(signal))


def _tell_signal(signal: Signal) -> str:  # noqa: C901 - one line a kind of a closed union
    match signal:
        case m.XidSeen(source=source, node=node, gpu=gpu, code=code, text=text, caused_by=cause):
            after = f" (caused by XID {cause})" if cause is not None else ""
            return f"{source} {node} {gpu or ''} XID {code}{after} {text}"
        case m.KernelSeen(source=source, node=node, device=device, key=key, text=text):
            return f"{source} {node} {device} {key} {text}"
        case m.GpuChanged(source=source, node=node, gpu=gpu, field=field, before=before, now=now):
            return f"{source} {node} {gpu} {field} {'' if before is None else f'{before} -> '}{now}"
        case m.SourceBlind(node=node, source=source, why=why, lost=lost):
            return f"{source} on {node} was blind: {why}" + (f"; {many(lost, 'record')} lost" if lost else "")
        case m.RankExited():
            return _tell_exit(signal)
        case m.RankPlaced(node=node, rank=rank, pid=pid):
            return f"rank {rank} runs on {node} (pid {pid})"
        case m.AgentJoined(node=node, job=job):
            return f"agent of {node} joined (job {job})"
        case m.AgentLost(node=node, silent_s=silent_s, why=why):
            return f"agent of {node} lost after {duration(silent_s)} of silence: {why}"
        case m.NoProgress():
            return _tell_hang(signal)
        case m.NodeState(node=node, state=state, flags=flags, reason=reason, reason_user=user):
            note = f': "{reason}" ({user or "unknown"})' if reason else ""
            return f"slurm: {node} {'+'.join((state, *flags))}{note}"
        case m.JobState(job=job, state=state, reason=reason):
            return f"slurm: job {job} {state}" + (f" ({reason})" if reason else "")
        case m.GateSeen(node=node, outcome=outcome, findings=findings):
            return f"gate of {node}: {outcome}" + (f": {'; '.join(findings)}" if findings else "")
        case m.NodeNotClear(node=node, why=why, pids=pids):
            left = f" (pids {', '.join(map(str, pids[:8]))})" if pids else ""
            return f"{node} is not clear after the stop: {why}{left}"
        case m.CheckpointSeen(train_step=step, verified=verified, why=why, durable_s=durable_s):
            return (
                f"checkpoint {step} durable ({duration(durable_s)})" if verified else f"checkpoint {step} is bad: {why}"
            )
        case m.OperatorAsked(what=what, who=who, node=node, note=note):
            return f"{who} asked: {what}{f' {node}' if node else ''}" + (f" ({note})" if note else "")


def _tell_exit(exited: m.RankExited) -> str:
    how = f"exit {exited.exit_code}" if exited.posix_signal is None else f"killed by signal {exited.posix_signal}"
    parts = [f"rank {exited.rank} on {exited.node} {how}{' (asked)' if exited.asked else ''}"]
    parts += [f"last phase {exited.phase}"] if exited.phase else []
    parts += [f"train_step {exited.train_step}"] if exited.train_step >= 0 else []
    text = ", ".join(parts)
    said = exited.exception or exited.error_class
    return f"{text}: {said}" if said else text


def _tell_hang(hang: m.NoProgress) -> str:
    text = f"no train_step for {duration(hang.stalled_s)} (limit {duration(hang.limit_s)})"
    if hang.suspect is not None:
        text += f"; rank {hang.suspect} on {hang.node or '?'} waits for nobody"
    return f"{text}: {hang.how}" if hang.how else text


# ---------------------------------------------------------------- actions


def tell_action(action: Action) -> str:
    """What is done, on one line, control characters written out."""
    return one_line(_tell_action(action))


def _tell_action(action: Action) -> str:  # noqa: C901 - one line a kind of a closed union
    match action:
        case LeaveIt(why=why):
            return f"left as it is: {why}"
        case RestartInPlace(why=why):
            return f"restart in place: {why}"
        case Swap(out=out, into=into, at_checkpoint=late):
            return f"swap {_nodes(out)} -> {_nodes(into)}" + (" at the next checkpoint" if late else "")
        case Shrink(out=out, layout=layout, feed=feed):
            return f"shrink without {_nodes(out)} to {layout}" + (f"; {many(feed, 'node')} asked for" if feed else "")
        case Grow(layout=layout, why=why):
            return f"grow back to {layout}: {why}"
        case Requeue(exclude=exclude, why=why):
            return f"requeue without {_nodes(exclude)}: {why}"
        case RollBack(quarantine=step, too=too, why=why):
            which = f"checkpoint {step} is" if not too else f"checkpoints {', '.join(map(str, (step, *too)))} are"
            return f"roll back: {which} set aside: {why}"
        case Hold(why=why):
            return f"hold and page: {why}"
        case Wait(until_s=until_s, why=why):
            return f"wait until {utc(until_s, day=False)}: {why}"
        case Drain(node=node, reason=reason):
            return f"drain {node}: {reason}"
        case Advise(node=node, command=command, why=why):
            return f"advice for the admin of {node}: {command} ({why})"
        case Feed(nodes=nodes, exclude=exclude):
            return f"feeder job for {many(nodes, 'node')}" + (f" without {_nodes(exclude)}" if exclude else "")
        case Release(node=node, job=job, why=why):
            return f"release {node} from job {job}: {why}"
        case EndRun(outcome=outcome, why=why):
            return f"end the run: {outcome}: {why}"


def _nodes(nodes: Sequence[str]) -> str:
    """Node names, at most eight of them."""
    shown = " ".join(nodes[:8]) or "nothing"
    return shown if len(nodes) <= 8 else f"{shown} and {len(nodes) - 8} more"


def undo_of(action: Action) -> str:
    """The command by which a person takes the action back; '' where there is nothing to take back."""
    match action:
        case Drain(node=node):
            return one_line(f"scontrol update nodename={node} state=resume (after: outlast check --node {node})")
        case _:
            return ""
