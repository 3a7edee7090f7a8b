"""Facts of Slurm: daemons' lines, reasons, transcripts of its commands, host lists, health checkers, submitit. Pure.

A transcript is `$ command` and what it printed. The queue is live, accounting is not: it lags, and job numbers come
round again. A reason is somebody's: ours, Slurm's, a health checker's, or a person's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from outlast.reliability.classify import Reading
from outlast.reliability.judging.case import Line
from outlast.reliability.judging.facts import Ended, Fact
from outlast.reliability.judging.facts_run import (
    CheckFailed,
    GpusShort,
    JobListed,
    LaunchFailed,
    MemoryShort,
    NamesListed,
    NodeGone,
    NodeListed,
    NothingQueued,
    Refused,
    Will,
)
from outlast.reliability.judging.read_gpu import where
from outlast.reliability.judging.tools import Tools

_SLURM_REASONS: Final = re.compile(
    r"^(?:Kill task failed|Prolog error|Epilog error|Not responding|Node unexpectedly rebooted|Duplicate jobid"
    r"|batch job complete failure|Low (?:RealMemory|TmpDisk|CPUs|socket)|gres/\S+ count|reboot (?:timed out|issued)"
    r"|Reboot ASAP|ResumeTimeout reached|NO NETWORK ADDRESS|Invalid (?:registration|reg)|undraining|powered down"
    r"|node registration|slurmd|health check failed|NHC)\b",
    re.IGNORECASE,
)
_CHECKERS: Final = re.compile(r"^(?:NHC|nhc|HealthCheck|health.?check|check_\w{2,40}|dcgm|gpud|node-?problem)\b", re.I)
_NOBODY: Final = frozenset({"", "none", "n/a", "(null)", "unknown"})

_SINFO_R: Final = re.compile(
    r"^(\S.{0,120}?) {1,}(\S{1,40}) {1,}([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}|Unknown) {1,}"
    r"([A-Za-z][A-Za-z0-9_.,\[\]-]{0,4000})$"
)
"""A reason that fills its column is followed by one blank alone."""
_ON_NODES: Final = re.compile(r"^(\S.{2,80}?) on ((?:\S{1,255}, ){0,200}\S{1,255})(?: \.\.\.)?(?: |$)")
_SET_DRAIN: Final = re.compile(
    r"[Ss]etting node (\S{1,255}) state to DRAIN|drain\S{0,6}:? .{0,20}node (\S{1,255}).{0,40}reason", re.IGNORECASE
)
_MEMORY: Final = re.compile(r"[Nn]ode (\S{1,255}) has low real_memory size \(([0-9]{1,12}) < ([0-9]{1,12})\)")
_GRES: Final = re.compile(
    r"gres/gpu count (?:reported lower than configured|too low) \(([0-9]{1,4}) ?< ?([0-9]{1,4})\)"
)
_NODE_OF: Final = re.compile(r"\b[Nn]odes? ([A-Za-z][A-Za-z0-9_.,\[\]-]{0,255})")
_REBOOTED: Final = re.compile(r"\b[Nn]ode (\S{1,255}) unexpectedly rebooted|^Node unexpectedly rebooted")
_SINFO_ROW: Final = re.compile(
    r"^(\S{1,64}) +(up|down|drain|inact) +(\S{1,20}) +([0-9]{1,6}) +(\S{1,24}) +(\S{1,4000})$"
)
_PIPED: Final = re.compile(
    r"^([A-Za-z][A-Za-z0-9_.\[\],-]{0,255})\|([a-z_]{2,24}[*~#!%$@^+a-z_-]{0,40})\|(?:([^|]{0,60})\|)?(.{0,400})$"
)
_PLAIN_ROW: Final = re.compile(
    r"^([A-Za-z][A-Za-z0-9_.-]{0,62}) +((?:idle|mix|mixed|alloc|allocated|down|drain|drained|draining|drng|comp|maint"
    r"|resv|reserved|plnd|planned|fail|failing|boot|unk|inval)[*~#!%$@^-]{0,3})$"
)
_CHECK_TIMED_OUT: Final = re.compile(r"timed out|timeout|[Ww]atchdog timer", re.IGNORECASE)
_PROLOG: Final = re.compile(
    r"error: (?:prolog|epilog)\b|[Pp]rolog (?:error|failure|failed|timed out|hung)|_run_prolog.{0,80}(?:fail|stat)"
)
_HELD: Final = re.compile(r"launch failed requeued held|launch_failed_requeued_held|JobHoldMaxRequeue", re.IGNORECASE)
_JOB_ON: Final = re.compile(r"\b(?:BatchHost|NodeList)=(?!\(null\))([A-Za-z][A-Za-z0-9_.,\[\]-]{0,255})")
_JOB_STATE: Final = re.compile(r"\bJobState=([A-Z_]{2,24})\b(?:.{0,200}?\bReason=(\S{1,80}))?")
_JOB_ID: Final = re.compile(r"\bJob(?:Id)?=([0-9]{1,12}(?:_[0-9]{1,9})?)")
_NODE_STATE: Final = re.compile(r"\bNodeName=(\S{1,255}) .{0,400}?\bState=(\S{1,120})|^State=(\S{1,120})")
_COUNTED: Final = re.compile(r"^([0-9]{1,6}),([a-z_]{2,24}[*~#!%$@^-]?),(.{0,400})$")
_REASON: Final = re.compile(r"\bReason=(.{1,200}?)(?: \[[^\]]{1,80}\])?$")
_MISSING_TOOL: Final = re.compile(r"\b(scontrol|sbatch|squeue|srun|sacct|scancel): (?:command )?not found")
_UNREACHABLE: Final = re.compile(
    r"Unable to contact slurm controller|Socket timed out on send/recv|Zero Bytes were transmitted|"
    r"slurm_load_\w{2,20} error: .{0,80}(?:[Cc]onnect|timed out)|slurmdbd.{0,60}(?:Connection refused|not responding)"
)
_IMPOSSIBLE: Final = re.compile(
    r"Requested node configuration is not available|Invalid node name specified|Batch job submission failed: "
    r"(?!Socket|Unable)|Invalid (?:partition|account|qos|generic resource)|Required node not available"
)
_SUBMITTED: Final = re.compile(r"\bSubmitted batch job [0-9]{1,12}")
_MAINTENANCE: Final = re.compile(r"\bReservationName=\S{1,100}.{0,400}\bFlags=\S{0,200}MAINT")
_NOT_QUEUED: Final = re.compile(
    r"\bnot (?:RUNNING|PENDING|queued|running)(?: or| nor|,)? ?(?:SCHEDULED|PENDING|RUNNING|queued|running)?\b"
    r"|\bno (?:successor|job) (?:is )?(?:queued|pending|submitted)",
    re.IGNORECASE,
)
_KILLED_BY: Final = re.compile(r"REQUEST_KILL_JOB JobId=([0-9]{1,12})\S{0,20}(?: uid (\d{1,10}))?")

_SUBMITIT_PREEMPTED: Final = re.compile(r"\bjob is preempted\b|has not timed out\. Ran")
_SUBMITIT_TIMEOUT: Final = re.compile(r"\bjob (?:is|has) timed.?out\b|Job has timed out\. Ran")
_NHC_HANDS_OFF: Final = re.compile(r"Not onlining .{1,255}: .{0,40}non-NHC reason \((.{1,200}?)\)")
_NHC_MARKING: Final = re.compile(r"node-mark-offline: {1,3}Marking drain (\S{1,255}) offline: {1,3}(.{1,200})")
_NHC_FAILED: Final = re.compile(r"nhc: {1,3}Health check failed: {1,3}(.{1,300})", re.IGNORECASE)

_NO_NAMES: Final = ("(null)", "None assigned")
_BARE_LIST: Final = re.compile(r"^[A-Za-z0-9_.\[\],-]{1,4000}$")
_LISTISH: Final = re.compile(r"[\[\]]|^[A-Za-z][A-Za-z0-9_.-]{0,62}(?:,[A-Za-z][A-Za-z0-9_.-]{0,62})+$")
_STATE_WORDS: Final = """
PENDING RUNNING SUSPENDED COMPLETING COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE
OUT_OF_MEMORY REQUEUED REQUEUE_HOLD SPECIAL_EXIT STOPPED CONFIGURING RESIZING REVOKED STAGE_OUT
"""
_STATES: Final = frozenset(_STATE_WORDS.split())
_ACCT_ROW: Final = re.compile(
    r"^([0-9]{1,12}(?:[_.][\w+]{1,16})?) {1,}([A-Z_]{3,20}\+?)(?: {1,}([0-9]{1,3}:[0-9]{1,3}))?$"
)
_EXIT: Final = re.compile(r"[0-9]{1,3}:[0-9]{1,3}")
_QUEUE_ROW: Final = re.compile(
    r"^([0-9]{1,12}(?:_[0-9]{1,9})?) .{0,120}?\b([A-Z_]{5,16})\b(?: .{0,80}?\(([^()]{1,80})\))?"
)


def owner_of(reason: str, ours: str) -> str:
    """Whose reason this is. What is not known as Slurm's or a checker's is a person's, and theirs is left alone."""
    text = reason.strip()
    if text.lower() in _NOBODY:
        return "none"
    if text.startswith(ours):
        return "ours"
    if _CHECKERS.match(text):
        return "checker"
    return "slurm" if _SLURM_REASONS.match(text) else "person"


def read_slurm_line(line: Line, reading: Reading | None, tools: Tools) -> Iterator[Fact]:
    """What one line of Slurm, or of a tool around it, says."""
    text = line.text
    yield from _launches(line, tools)
    yield from _nodes(line, tools)
    if line.label.kind in ("slurm", "text"):
        yield from _tables(line, tools)
    yield from _refusals(line)
    yield from _wills(line)
    if reading is not None and reading.key == "slurm_not_responding":
        yield NodeGone(**where(line, reading.node), how="silent")
    if reading is not None and reading.kind == "slurm" and not _ACCT_ROW.match(text.strip()):
        how = _HOW.get(reading.key)
        if how:
            job = re.search(r"\*\*\* (?:JOB|STEP) ([0-9]{1,12})", text)
            yield Ended(**where(line, reading.node), how=how, job=job[1] if job else "", run=line.label.run)
    if _SUBMITIT_PREEMPTED.search(text):
        yield Ended(**where(line), how="preempted")
    elif _SUBMITIT_TIMEOUT.search(text):
        yield Ended(**where(line), how="time_limit")
    if _NOT_QUEUED.search(text):
        yield NothingQueued(**where(line))


_HOW: Final = {
    "slurm_node_fail": "node_fail",
    "slurm_time_limit": "time_limit",
    "slurm_preempted": "preempted",
    "slurm_kill_failed": "kill_failed",
    "slurm_oom": "oom",
    "slurm_cancelled": "cancelled",
}


def _names(text: str, tools: Tools) -> tuple[str, ...]:
    try:
        return tools.names(text)
    except ValueError:
        return ()


def _launches(line: Line, tools: Tools) -> Iterator[Fact]:
    text = line.text
    held = bool(_HELD.search(text))
    on = _JOB_ON.search(text)
    if held or (on and not _JOB_STATE.search(text) and line.label.kind == "slurm" and "held" in text):
        yield LaunchFailed(**where(line), why="launch", held=True, nodes=_names(on[1], tools) if on else ())
    elif _PROLOG.search(text):
        named = _SINFO_R.match(text) or _ON_NODES.match(text)
        listed = (named[4] if named.re is _SINFO_R else named[2]) if named else line.label.node or ""
        why = "epilog" if "pilog" in text and "rolog" not in text else "prolog"
        yield LaunchFailed(**where(line), why=why, nodes=_names(listed.replace(", ", ",").rstrip(","), tools))


def _nodes(line: Line, tools: Tools) -> Iterator[Fact]:
    text = line.text
    memory, counted, row, state = (p.search(text) for p in (_MEMORY, _COUNTED, _SINFO_R, _NODE_STATE))
    gres, rebooted = _GRES.search(text), _REBOOTED.search(text)
    if gres:
        on = _NODE_OF.search(text)
        yield GpusShort(**where(line, on[1] if on else None), have=int(gres[1]), want=int(gres[2]))
    elif rebooted:
        yield NodeGone(**where(line, rebooted[1]), how="rebooted")
    elif memory:
        yield MemoryShort(**where(line, memory[1]), have_mb=int(memory[2]), want_mb=int(memory[3]))
    elif counted:
        base, flags = tools.node_state(counted[2])
        owner = owner_of(counted[3], tools.owner)
        yield NodeListed(
            **where(line), state=base, flags=flags, reason=counted[3].strip(), owner=owner, count=int(counted[1])
        )
    elif row:
        owner = owner_of(row[1], tools.owner)
        nodes = _names(row[4], tools)
        yield NodeListed(
            **where(line), state="", flags=("drain",), reason=row[1], owner=owner, nodes=nodes, count=len(nodes) or 1
        )
    elif state:
        base, flags = tools.node_state(state[2] or state[3])
        reason = _REASON.search(text)
        said = reason[1] if reason else ""
        name = state[1] or line.label.node
        yield NodeListed(
            **where(line, name),
            state=base,
            flags=flags,
            reason=said,
            owner=owner_of(said, tools.owner),
            nodes=(name,) if name else (),
        )


def _tables(line: Line, tools: Tools) -> Iterator[Fact]:
    """Rows of sinfo in the forms that sites use."""
    text = line.text.strip()
    table, piped, plain = (p.match(text) for p in (_SINFO_ROW, _PIPED, _PLAIN_ROW))
    if table:
        name, state, reason = table[6], table[5], ""
    elif piped:
        name, state, reason = piped[1], piped[2], piped[4]
    elif plain:
        name, state, reason = plain[1], plain[2], ""
    else:
        return
    base, flags = tools.node_state(state)
    if base == "unknown" and not flags:
        return
    nodes = _names(name, tools)
    yield NodeListed(
        **where(line, nodes[0] if len(nodes) == 1 else None),
        state=base,
        flags=flags,
        reason=reason,
        owner=owner_of(reason, tools.owner),
        nodes=nodes,
        count=len(nodes) or 1,
    )


def _refusals(line: Line) -> Iterator[Fact]:
    missing = _MISSING_TOOL.search(line.text)
    if missing:
        yield Refused(**where(line), why="missing", tool=missing[1])
    elif _UNREACHABLE.search(line.text):
        yield Refused(**where(line), why="unreachable")
    elif _IMPOSSIBLE.search(line.text):
        yield Refused(**where(line), why="impossible")
    elif "Invalid job id specified" in line.text:
        yield Refused(**where(line), why="unknown_job")
    elif _SUBMITTED.search(line.text):
        yield Refused(**where(line), why="submitted")


def _wills(line: Line) -> Iterator[Fact]:
    text = line.text
    hands_off, marking, failed = (p.search(text) for p in (_NHC_HANDS_OFF, _NHC_MARKING, _NHC_FAILED))
    if hands_off:
        yield Will(**where(line), what="drain", note=hands_off[1])
    elif marking and owner_of(marking[2], "\0") == "person" and not marking[2].lower().startswith("check_"):
        yield Will(**where(line, marking[1]), what="drain", note=marking[2])
    elif failed or text.startswith(("NHC:", "nhc:")):
        said = failed[1] if failed else text
        yield CheckFailed(**where(line), check=said[:200], timed_out=bool(_CHECK_TIMED_OUT.search(said)))
    if _MAINTENANCE.search(text):
        yield Will(**where(line), what="maintenance", note=text[:200])
    killed = _KILLED_BY.search(text)
    if killed:
        yield Will(**where(line), what="cancel", note=killed[1])


# ---------------------------------------------------------------- host lists and transcripts


def read_names(lines: Sequence[Line], tools: Tools) -> Iterator[Fact]:
    """Lines that are nothing but host lists; only where all of a text is such lines."""
    rows = [line for line in lines if line.text.strip()]
    if not rows or not all(_BARE_LIST.match(row.text.strip()) or row.text.strip() in _NO_NAMES for row in rows):
        return
    if not any(_LISTISH.search(row.text.strip()) or row.text.strip() in _NO_NAMES for row in rows):
        return
    for row in rows:
        text = row.text.strip()
        try:
            yield NamesListed(id=row.id, text=text, names=tools.names(text))
        except ValueError as error:
            yield NamesListed(id=row.id, text=text, error=str(error))


def read_transcript(lines: Sequence[Line], tools: Tools) -> Iterator[Fact]:
    """`$ squeue ...` and the rows below it; tables of squeue, sacct and scontrol, also without the command."""
    command = ""
    for line in lines:
        text = line.text.strip()
        if text.startswith("$ "):
            command = text[2:].split()[0] if text[2:].split() else ""
            continue
        if not text or text.startswith(("CLUSTER:", "JobID", "JOBID")):
            continue
        source = command or line.label.raw.split(" ")[0]
        yield from _job_row(line, text, source)


def _job_row(line: Line, text: str, source: str) -> Iterator[Fact]:
    if source == "sinfo":
        return
    live = source != "sacct"
    state = _JOB_STATE.search(text)
    if state:
        job, on = _JOB_ID.search(text), _JOB_ON.search(text)
        yield JobListed(
            **where(line),
            job=job[1] if job else "",
            state=state[1],
            reason=state[2] or "",
            nodes=(on[1],) if on else (),
        )
        return
    acct, queued = _ACCT_ROW.match(text), _QUEUE_ROW.match(text)
    if acct and (acct[2].rstrip("+") in _STATES or acct[2].endswith("+")):
        full = _completed_state(acct[2])
        yield JobListed(
            **where(line), job=acct[1], state=full, live=False, truncated=acct[2].endswith("+"), exit=acct[3] or ""
        )
    elif "|" in text and (parts := [p.strip() for p in text.split("|")]) and any(_first(p) in _STATES for p in parts):
        word = next(_first(p) for p in parts if _first(p) in _STATES)
        code = next((p for p in parts if _EXIT.fullmatch(p)), "")
        yield JobListed(**where(line), job=parts[0], state=word, live=live, exit=code)
    elif queued and queued[2] in _STATES:
        yield JobListed(**where(line), job=queued[1], state=queued[2], live=live, reason=queued[3] or "")
    elif source in ("squeue", "sacct") and _first(text) in _STATES:
        host = text.split()[1:2]
        yield JobListed(**where(line), job="", state=_first(text), live=live, nodes=tuple(host))


def _first(text: str) -> str:
    return text.split()[0].rstrip("+") if text.split() else ""


def _completed_state(word: str) -> str:
    """The state of which `OUT_OF_ME+` is the beginning; unknown text stays as it is."""
    if not word.endswith("+"):
        return word
    fits = sorted(s for s in _STATES if s.startswith(word[:-1]))
    return fits[0] if fits else word
