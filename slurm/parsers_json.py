"""Slurm's JSON to the same rows, for the dialects of 22.05 (openapi v0.0.38) and 24.11. Pure.

The two differ in almost every field: 24.11 makes states lists, and wraps numbers as {set, infinite, number}. Not all
commands have --json in all versions, so the client asks for text; this is for sites' own dumps and for newer tools.
"""

from __future__ import annotations

from typing import Any

import msgspec

from outlast.reliability.model import JobId, Node
from outlast.slurm.errors import SlurmError
from outlast.slurm.hostlist import expand
from outlast.slurm.node_state import NodeRow, parse_state
from outlast.slurm.parsers import AcctRow, JobRow

Json = dict[str, Any]

_SHOWN_FIRST = (
    "COMPLETING",
    "CONFIGURING",
    "RESIZING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "STOPPED",
    "REVOKED",
)


def parse_jobs_json(text: str | bytes) -> tuple[JobRow, ...]:
    """`squeue --json`, or `scontrol show job --json`."""
    return tuple(_parse_job(item) for item in _items(text, "jobs"))


def _parse_job(item: Json) -> JobRow:
    batch = _text(item.get("batch_host"))
    return JobRow(
        job=JobId(str(_number(item.get("job_id")))),
        state=_state(item.get("job_state")),
        reason=_none(_text(item.get("state_reason"))),
        name=_text(item.get("name")),
        nodes=expand(_text(item.get("nodes"))),
        batch_node=Node(batch) if batch else None,
        restarts=_number(item.get("restart_cnt")),
        exclude=expand(_text(item.get("excluded_nodes"))),
        comment=_text(item.get("comment")),
    )


def parse_nodes_json(text: str | bytes) -> tuple[NodeRow, ...]:
    """`sinfo --json` of 22.05, or `scontrol show nodes --json` of 24.11."""
    return tuple(_parse_node(item) for item in _items(text, "nodes"))


def _parse_node(item: Json) -> NodeRow:
    words = [*_words(item.get("state")), *_words(item.get("state_flags"))]
    base, flags = parse_state("+".join(words))
    return NodeRow(
        node=Node(_text(item.get("name"))),
        state=base,
        flags=flags,
        reason=_text(item.get("reason")),
        reason_user=_text(item.get("reason_set_by_user")),
        address=_text(item.get("address")),
    )


def parse_sacct_json(text: str | bytes) -> tuple[AcctRow, ...]:
    """`sacct --json`: each job's line, then its steps."""
    rows: list[AcctRow] = []
    for item in _items(text, "jobs"):
        rows.append(_parse_acct(item, job=str(_number(item.get("job_id"))), step=""))
        steps = item.get("steps")
        for part in steps if isinstance(steps, list) else []:
            step = part.get("step") if isinstance(part, dict) else None
            name = step.get("id") if isinstance(step, dict) else None
            # 24.11 writes "14.batch", 22.05 {"job_id": 14, "id": "batch"}
            rows.append(_parse_acct(part, job=rows[-1].job, step=str(name).rpartition(".")[2]))
    return tuple(rows)


def _parse_acct(item: Any, *, job: str, step: str) -> AcctRow:
    if not isinstance(item, dict):
        raise _nonsense(f"a job or step is {type(item).__name__}, expected an object")
    state, code, nodes = item.get("state"), item.get("exit_code"), item.get("nodes")
    code = code if isinstance(code, dict) else {}
    posix_signal = code.get("signal")
    posix_signal = posix_signal if isinstance(posix_signal, dict) else {}
    return AcctRow(
        job=JobId(job),
        slurm_step=step,
        state=_state(state.get("current") if isinstance(state, dict) else state),
        exit_code=_number(code.get("return_code")),
        posix_signal=_number(posix_signal.get("signal_id", posix_signal.get("id"))),
        nodes=expand(_text(nodes.get("range") if isinstance(nodes, dict) else nodes)),
        name=_text(item.get("name")),
        comment=_comment(item.get("comment")),
    )


def _comment(value: Any) -> str:
    return _text(value.get("job")) if isinstance(value, dict) else _text(value)


def _items(text: str | bytes, key: str) -> list[Json]:
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _nonsense(str(error)) from None
    items = document.get(key) if isinstance(document, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _nonsense(f"expected an object with a list {key!r} of objects")
    return items


def _number(value: Any) -> int:
    """A plain or a wrapped number; 0 where it is not set."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") else 0
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63 else 0


def _words(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, str) and v]


def _state(value: Any) -> str:
    """As Slurm's text has it: a flag of _SHOWN_FIRST hides the base state, which stands first in a list."""
    words = [word.upper() for word in _words(value)]
    if not words:
        raise _nonsense("a job or step without a state")
    return next((flag for flag in _SHOWN_FIRST if flag in words), words[0])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _none(value: str) -> str:
    return "" if value == "None" else value


def _nonsense(why: str) -> SlurmError:
    return SlurmError(f"Slurm's JSON: {why}", again=True)
