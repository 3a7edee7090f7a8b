"""Facts of ranks and of a training job: errors, collective time-outs, network completions, exits, steps. Pure.

All of it is a program's word. A rank's number is taken from its own text first, then from the item's source; the node
from a prefix, from the words beside the rank, or from the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from outlast.reliability.classify import Reading
from outlast.reliability.judging.case import Line
from outlast.reliability.judging.facts import (
    Disagreed,
    Ended,
    Fact,
    Measured,
    Missing,
    NetError,
    RankSaid,
    Step,
    Waited,
)
from outlast.reliability.judging.read_gpu import where
from outlast.reliability.judging.tools import Tools

_RANK: Final = re.compile(r"\[?\b[Rr]ank[ :=_]{0,2}([0-9]{1,7})\b")
_DEVICE: Final = re.compile(r"\b[Dd]evice[:= ] ?([0-9]{1,3})\b")
_ITERATION: Final = re.compile(r"\b(?:iter(?:ation)?|step)[ =:]{1,2}([0-9]{1,9})\b")
_NODE_PREFIX: Final = re.compile(r"^([A-Za-z][A-Za-z0-9_.-]{0,62}) \[?rank[0-9]")
_NODE_NEAR: Final = re.compile(r"\b[Rr]ank [0-9]{1,7} (?:on |\()([A-Za-z][A-Za-z0-9_.-]{0,62})")

_SEQ: Final = re.compile(r"(?:SeqNum[=:] ?|watchdog at work(?: sequence id)?: ?)([0-9]{1,12})")
_ENQUEUED: Final = re.compile(r"[Ll]ast enqueued (?:NCCL )?work: ?(-?[0-9]{1,12})")
_COMPLETED: Final = re.compile(r"[Ll]ast completed (?:NCCL )?work: ?(-?[0-9]{1,12})")
_TOLD_BY: Final = re.compile(r"due to a collective timeout from {1,4}rank ([0-9]{1,7})")
_HEARTBEAT: Final = re.compile(
    r"watchdog got stuck for|[Hh]eartbeat monitor timed out|without making progress in monit"
)
_DUMP: Final = re.compile(r"dump signal|signal dumping|Observed flight recorder")
_BARRIER: Final = re.compile(
    r"[Rr]ank ([0-9]{1,7}) failed to pass monitoredBarrier"
    r"|[Mm]issing ranks?:? ?[\[{(]?([0-9]{1,7}(?:, ?[0-9]{1,7}){0,64})"
)
_BEHIND: Final = re.compile(r"\brank ([0-9]{1,7})\b.{0,80}\bbehind\b")
_MISMATCH: Final = re.compile(
    r"(?:SIZE_OR_SYNTAX|COLLECTIVE_TYPE|COLLECTIVE_DTYPE|COLLECTIVE_STATE|FULLY_)\w{0,20}(?:MISMATCH|MATCH)?"
    r"|Detected mismatch between collectives|does not match found (?:input|output) sizes"
)
_NET: Final = re.compile(
    r"(?:^|\s)([A-Za-z0-9][A-Za-z0-9_.-]{0,62}):[0-9]{1,10}:[0-9]{1,10} \[([0-9]{1,2})\].{0,200}?"
    r"Got completion (?:from|with)(?: peer)? ?([0-9A-Za-z.:_-]{2,64}?)?(?:<[0-9]{1,5}>)?[ ,].{0,80}?status=([0-9]{1,3})"
)
_NET_BARE: Final = re.compile(r"Got completion (?:from|with).{0,160}?status=([0-9]{1,3})")

_EXIT: Final = re.compile(r"\b[Ee]xit(?:ed with exit)?[ _]?code:? ?(-?[0-9]{1,3})\b|\bexitcode {0,3}: (-?[0-9]{1,3})\b")
_WTERMSIG: Final = re.compile(
    r"\bWTERMSIG ([0-9]{1,2})\b|\bkilled by signal ([0-9]{1,2})\b|\bSignal ([0-9]{1,2}) \(SIG"
)
_JOB: Final = re.compile(r"\bJob(?:Id)?[=: ]([0-9]{1,12}(?:_[0-9]{1,9})?)\b")
_TIME_BOXED: Final = re.compile(r"\[?exiting program (?:after|at) ([0-9.]{1,24} minutes|iteration [0-9]{1,12})")
_SAVED_EXIT: Final = re.compile(r"exiting program after receiving SIG\w{2,6}|\bexited? on SIGTERM after saving")

_STEP_LINE: Final = re.compile(r"\biteration {0,12}([0-9]{1,12}) ?/ {0,12}([0-9]{1,12}) \|(.{0,4000})")
_STEP_OF: Final = re.compile(r"\biteration ([0-9]{1,12}) of ([0-9]{1,12})\b")
_CELL: Final = re.compile(
    r"([A-Za-z][A-Za-z ()/]{1,60}): {0,12}([-+]?(?:[0-9]{1,20}(?:\.[0-9]{0,20})?(?:[eE][-+]?[0-9]{1,4})?"
    r"|nan|inf|NaN|Inf))(?= ?\||$)"
)
_MEASURED: Final = re.compile(
    r"\b(communication|comm|compute|computation|forward|step|data)(?: time)? ([+-][0-9]{1,4}(?:\.[0-9]{1,3})?) ?%"
)
_RANKS_SLOWER: Final = re.compile(
    r"\branks? ([0-9]{1,7})(?:-([0-9]{1,7}))?(?: on ([A-Za-z][A-Za-z0-9_.-]{0,62}))? "
    r"([+-][0-9]{1,4}(?:\.[0-9]{1,3})?) ?%"
)
_FLAT: Final = re.compile(r"\bothers? (?:flat|unchanged|equal|even|normal|the same)\b|\bthe rest (?:flat|unchanged)\b")


def read_rank_line(line: Line, reading: Reading | None, tools: Tools) -> Iterator[Fact]:
    """What one line of a rank or job says."""
    text = line.text
    if _MISMATCH.search(text):
        yield Disagreed(**where(line), what=text[:200])
        return
    if reading is not None and reading.table == "rank_log":
        yield from _said(line, reading, tools)
    yield from _net(line)
    yield from read_missing(line)


def rank_of(line: Line) -> int | None:
    m = _RANK.search(line.text)
    if m:
        return int(m[1])
    return line.label.first_rank if line.label.last_rank is None else None


def node_of(line: Line, reading: Reading | None) -> str | None:
    m = _NODE_PREFIX.search(line.text) or _NODE_NEAR.search(line.text)
    return m[1] if m else (reading.node if reading else None)


def _said(line: Line, reading: Reading, tools: Tools) -> Iterator[Fact]:
    row = tools.catalogue.rank_log(reading.key)
    if row is None or (
        row.class_ in ("benign", "progress", "loss_anomaly", "straggler") and reading.kind == "megatron"
    ):
        return
    text, node = line.text, node_of(line, reading)
    if reading.key in ("collective_timeout", "collective_dump", "collective_culprit"):
        yield _waited(line, node)
        return
    step, device = _ITERATION.search(text), _DEVICE.search(text)
    yield RankSaid(
        **where(line, node),
        key=reading.key,
        class_=row.class_,
        action="ignore" if reading.companion else row.action,
        echo=row.echo,
        rank=rank_of(line),
        device=int(device[1]) if device else None,
        run=line.label.run,
        train_step=int(step[1]) if step else None,
        text=text[:400],
        domain=line.label.domain,
        nodes=line.label.nodes,
        same_nodes=line.label.same_nodes,
    )


def _waited(line: Line, node: str | None) -> Waited:
    text = line.text
    how = "heartbeat" if _HEARTBEAT.search(text) else "dump" if _DUMP.search(text) else "timeout"
    seq, enqueued, completed, told = (p.search(text) for p in (_SEQ, _ENQUEUED, _COMPLETED, _TOLD_BY))
    return Waited(
        **where(line, node),
        how=how,
        rank=rank_of(line),
        seq=int(seq[1]) if seq else None,
        enqueued=int(enqueued[1]) if enqueued else None,
        completed=int(completed[1]) if completed else None,
        first_reporter=int(told[1]) if told else None,
    )


def read_missing(line: Line) -> Iterator[Fact]:
    """A rank that is named as missing or behind by a tool that asked all of them."""
    barrier, behind = _BARRIER.search(line.text), _BEHIND.search(line.text)
    told = (barrier[1] or barrier[2]) if barrier else behind[1] if behind else ""
    how = "barrier" if barrier else "behind"
    for rank in re.findall(r"[0-9]{1,7}", told):
        yield Missing(**where(line, node_of(line, None)), rank=int(rank), run=line.label.run, how=how)


def _net(line: Line) -> Iterator[Fact]:
    m, bare = _NET.search(line.text), _NET_BARE.search(line.text)
    if m:
        yield NetError(**where(line, m[1]), status=int(m[4]), local=m[1], gpu=m[2], peer=m[3] or "", run=line.label.run)
    elif bare:
        yield NetError(**where(line), status=int(bare[1]), local=line.label.node or "", run=line.label.run)


def read_ends(line: Line) -> Iterator[Fact]:
    """How a process or job ended, by its exit code or POSIX signal, or by the program's own word."""
    text = line.text
    code, killed, job = _EXIT.search(text), _WTERMSIG.search(text), _JOB.search(text)
    common: dict[str, Any] = {"rank": rank_of(line), "run": line.label.run, "job": job[1] if job else ""}
    if _TIME_BOXED.search(text):
        yield Ended(**where(line), how="time_boxed", **common)
    elif _SAVED_EXIT.search(text):
        yield Ended(**where(line), how="preempted", **common)
    elif killed:
        number = int(killed[1] or killed[2] or killed[3])
        yield Ended(**where(line), how="signal", posix_signal=number, **common)
    elif code:
        yield Ended(**where(line), how="exit", exit_code=int(code[1] or code[2]), **common)


def read_step(line: Line) -> Iterator[Fact]:
    """An iteration line of Megatron's log in any of its spellings, or a plain `iteration N of M`."""
    m = _STEP_LINE.search(line.text)
    if not m:
        plain = _STEP_OF.search(line.text)
        if plain:
            yield Step(**where(line), iteration=int(plain[1]), total=int(plain[2]))
        return
    cells = {name.strip().lower(): float(value) for name, value in _CELL.findall(m[3])}
    loss = next((v for k, v in cells.items() if k.endswith("loss")), None)
    ms, seconds = cells.get("elapsed time per iteration (ms)"), cells.get("elapsed time per iteration (s)")
    batch = cells.get("global batch size")
    yield Step(
        **where(line),
        iteration=int(m[1]),
        total=int(m[2]),
        loss=loss,
        grad_norm=cells.get("grad norm"),
        step_s=ms / 1000 if ms is not None else seconds,
        batch=int(batch) if batch is not None and batch == batch and abs(batch) < 1e12 else None,
    )


def read_measured(line: Line) -> Iterator[Fact]:
    """Figures that somebody measured: a share of time that changed, or ranks slower than the others."""
    flat = bool(_FLAT.search(line.text))
    for first, last, node, change in _RANKS_SLOWER.findall(line.text):
        yield Measured(
            **where(line, node or None),
            what="compute",
            change=float(change) / 100,
            first_rank=int(first),
            last_rank=int(last or first),
            others_flat=flat,
        )
    for what, change in _MEASURED.findall(line.text):
        kind = {"comm": "communication", "computation": "compute", "forward": "compute"}.get(what, what)
        yield Measured(**where(line), what=kind, change=float(change) / 100, first_rank=line.label.first_rank)
