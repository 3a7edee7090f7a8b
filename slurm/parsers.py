"""Slurm's texts to rows: `scontrol -o`, `sinfo` and `squeue` in our own format, `sacct -P`. Pure; JSON is elsewhere.

Text is what all versions share, so the client asks for it. Whatever is not understood is a SlurmError that quotes it; a
row is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta

from outlast.reliability.model import JobId, Node, Noun
from outlast.slurm.errors import SlurmError
from outlast.slurm.hostlist import expand
from outlast.slurm.node_state import NodeRow, parse_state

SQUEUE_FORMAT = "%A|%T|%k"
"""Job id, state, comment: last, since it may hold anything."""
SINFO_FORMAT = "%N|%T|%u|%E"
"""Node, state, who gave the reason, the reason: last, since it may hold anything."""
SACCT_FIELDS = "JobIDRaw,State,ExitCode,NodeList,JobName,Comment"

_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9/:_]*)=")
_REASON = re.compile(r"(?:^|\s)Reason=(.*?) \[([^\s\[\]@]*)@([^\[\]]*)\](?=\s*$|\s+(?:Comment|Extra|InstanceId)=)")
_RUN_TIME = re.compile(r"(?:([0-9]{1,6})-)?([0-9]{1,3}):([0-9]{2}):([0-9]{2})")
_BY = re.compile(r"(\S+)(?: by (\d+))?\+?")


class JobRow(Noun, frozen=True, kw_only=True):
    """One allocation as slurmctld knows it."""

    job: JobId
    state: str
    """Upper case. COMPLETING hides what the job will be: CANCELLED, TIMEOUT, PENDING again."""
    reason: str = ""
    name: str = ""
    nodes: tuple[Node, ...] = ()
    batch_node: Node | None = None
    restarts: int = 0
    exclude: tuple[Node, ...] = ()
    comment: str = ""
    left_s: float | None = None
    """Until Slurm ends it: its time limit, or sooner where it is being preempted. None where it has no end."""


class QueueRow(Noun, frozen=True, kw_only=True):
    job: JobId
    state: str
    comment: str


class AcctRow(Noun, frozen=True, kw_only=True):
    """One line of accounting: a job's run, or one of its steps. A requeued job has one for each run."""

    job: JobId
    slurm_step: str = ""
    """'' for the job itself, else batch, extern, 0, 1 ..."""
    state: str
    by_uid: int | None = None
    """Who cancelled it."""
    exit_code: int = 0
    posix_signal: int = 0
    nodes: tuple[Node, ...] = ()
    name: str = ""
    comment: str = ""


def parse_jobs(text: str) -> tuple[JobRow, ...]:
    """`scontrol show job`, with or without -o."""
    return tuple(_parse_job(record) for record in _records(text))


def _parse_job(line: str) -> JobRow:
    fields = _fields(line)
    if "JobId" not in fields or "JobState" not in fields:
        raise _nonsense("scontrol show job", "a line with JobId= and JobState=", line)
    restarts = fields.get("Restarts", "0")
    batch = _value(fields, "BatchHost")
    return JobRow(
        job=JobId(fields["JobId"]),
        state=fields["JobState"].upper(),
        reason=_value(fields, "Reason"),
        name=_value(fields, "JobName"),
        nodes=expand(_value(fields, "NodeList")),
        batch_node=Node(batch) if batch else None,
        restarts=int(restarts) if _is_number(restarts) else 0,
        exclude=expand(_value(fields, "ExcNodeList")),
        comment=_value(fields, "Comment"),
        left_s=_left_s(fields),
    )


def _left_s(fields: dict[str, str]) -> float | None:
    """EndTime less StartTime less RunTime: stamps are in a time zone that is not told, their difference is not.

    A preemption with a grace time moves EndTime, and leaves TimeLimit as it was.
    """
    try:
        whole = datetime.fromisoformat(fields["EndTime"]) - datetime.fromisoformat(fields["StartTime"])
    except (KeyError, ValueError):
        return None  # Unknown, N/A, None: not started, or without a limit
    run = _RUN_TIME.fullmatch(fields.get("RunTime", ""))
    if run is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in run.groups())
    ran = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    return (whole - ran).total_seconds()


def parse_nodes(text: str) -> tuple[NodeRow, ...]:
    """`scontrol show node`, with or without -o."""
    return tuple(_parse_node(record) for record in _records(text))


def _parse_node(line: str) -> NodeRow:
    fields = _fields(line)
    if "NodeName" not in fields or "State" not in fields:
        raise _nonsense("scontrol show node", "a line with NodeName= and State=", line)
    base, flags = parse_state(fields["State"])
    given = _REASON.search(line)
    # a reason in a form that we cannot split is still somebody's reason
    reason, user = (given[1], given[2]) if given else (_value(fields, "Reason"), "")
    return NodeRow(
        node=Node(fields["NodeName"]),
        state=base,
        flags=flags,
        reason=reason,
        reason_user=user,
        address=_value(fields, "NodeAddr"),
    )


def parse_sinfo(text: str) -> tuple[NodeRow, ...]:
    """`sinfo -h -N -o SINFO_FORMAT`. A node in two partitions is listed twice and returned once."""
    rows: dict[Node, NodeRow] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        fields = line.split("|", 3)
        if len(fields) != 4:
            raise _nonsense("sinfo", "'node|state|user|reason'", line)
        name, state, user, reason = (f.strip() for f in fields)
        base, flags = parse_state(state)
        no_reason = reason.lower() in ("none", "")
        rows[Node(name)] = NodeRow(
            node=Node(name),
            state=base,
            flags=flags,
            reason="" if no_reason else reason,
            reason_user="" if no_reason else user,
        )
    return tuple(rows.values())


def parse_squeue(text: str) -> tuple[QueueRow, ...]:
    """`squeue -h -o SQUEUE_FORMAT`."""
    rows = []
    for line in text.splitlines():
        if not line.strip():
            continue
        fields = line.split("|", 2)
        if len(fields) != 3 or not _is_number(fields[0].strip()):
            raise _nonsense("squeue", "'job id|state|comment'", line)
        comment = fields[2].strip()
        rows.append(
            QueueRow(
                job=JobId(fields[0].strip()),
                state=fields[1].strip().upper(),
                comment="" if comment == "(null)" else comment,
            )
        )
    return tuple(rows)


def parse_sacct(text: str) -> tuple[AcctRow, ...]:
    """`sacct -P` with its header line, whatever columns it has; State and JobID or JobIDRaw must be among them."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return ()
    columns = lines[0].split("|")
    if "State" not in columns or not {"JobID", "JobIDRaw"} & set(columns):
        raise _nonsense("sacct", "a header with JobIDRaw and State", lines[0])
    return tuple(_parse_acct(columns, line) for line in lines[1:])


def _parse_acct(columns: list[str], line: str) -> AcctRow:
    # the last column, a comment, may hold the separator
    values = line.split("|", len(columns) - 1)
    if len(values) != len(columns):
        raise _nonsense("sacct", "|".join(columns), line)
    fields = dict(zip(columns, values, strict=True))
    job, _, step = (fields.get("JobIDRaw") or fields.get("JobID", "")).partition(".")
    state = _BY.match(fields["State"])
    if not job or not state:
        raise _nonsense("sacct", "a job id and a state", line)
    code, _, number = fields.get("ExitCode", "").partition(":")
    return AcctRow(
        job=JobId(job),
        slurm_step=step,
        state=state[1].rstrip("+").upper(),
        by_uid=int(state[2]) if state[2] else None,
        exit_code=int(code) if _is_number(code) else 0,
        posix_signal=int(number) if _is_number(number) else 0,
        nodes=expand(fields.get("NodeList", "")),
        name=fields.get("JobName", ""),
        comment=fields.get("Comment", ""),
    )


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`: setting -> value, '' for Slurm's (null)."""
    settings = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip() and " " not in key.strip():
            settings[key.strip()] = "" if value.strip() == "(null)" else value.strip()
    return settings


def _records(text: str) -> Iterator[str]:
    """One line for each job or node: without -o their further lines are indented."""
    record = ""
    for line in text.splitlines():
        if record and not line[:1].isspace() and line.strip():
            yield record
            record = ""
        record += line if line.strip() else ""
    if record:
        yield record


def _fields(line: str) -> dict[str, str]:
    """Key=value pairs; values may hold blanks. The first of two equal keys counts: later text is users' text."""
    fields: dict[str, str] = {}
    for key, value in _pairs(line):
        fields.setdefault(key, value)
    return fields


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    found = list(_KEY.finditer(line))
    ends = [*(following.start() for following in found[1:]), len(line)]
    for this, end in zip(found, ends, strict=False):
        yield this[1], line[this.end() : end].strip()


def _value(fields: dict[str, str], key: str) -> str:
    value = fields.get(key, "")
    return "" if value in ("(null)", "None", "N/A") else value


def _is_number(text: str) -> bool:
    # isdigit() alone accepts superscripts, which int() refuses
    return text.isascii() and text.isdigit() and len(text) <= 18


def _nonsense(command: str, expected: str, line: str) -> SlurmError:
    shown = line.strip()[:120]
    return SlurmError(f"{command}: expected {expected}, got {shown!r}", again=True, output=line)
