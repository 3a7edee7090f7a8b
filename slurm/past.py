"""What Slurm's own records tell of the past: which job held which nodes when, and what became of nodes. Pure.

    sacct -P (with Start, End and NodeList)  or  sacct --json   -> JobPast
    slurmctld.log                                               -> JobPast, and NodeState by time

Times without a zone are read as UTC, as in the kernel's text. Lines of slurmctld.log that are not understood are passed
over: it is written for people. Forms are those of 22.05 and 24.11.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from outlast.reliability.model import JobId, Node, NodeState, Noun
from outlast.slurm.errors import SlurmError
from outlast.slurm.hostlist import expand

LINE_CHARS: Final = 8192
JOBS_MAX: Final = 1_000_000
_STAMP: Final = re.compile(r"\[([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?)\] ?")
_DOWN: Final = re.compile(r"error: Nodes (\S{1,4000}) not responding, setting DOWN")
_REBOOTED: Final = re.compile(r"(?:.{0,40}: )?Node (\S{1,255}) unexpectedly rebooted")
_BACK: Final = re.compile(r"(?:node_did_resp: )?node (\S{1,255}) returned to service")
_REASON: Final = re.compile(r"update_node: node (\S{1,255}) reason set to: (.*)")
_STATE: Final = re.compile(r"(?:update_node|drain_nodes): node (\S{1,255}) state set to ([A-Z_*+]{2,60})")
_ALLOCATED: Final = re.compile(
    r"sched(?:/backfill)?: (?:_start_job: )?(?:Allocate|Started) JobId=([0-9]{1,12})(?:\S*) .*"
)
_NODE_LIST: Final = re.compile(r" (?:NodeList=|on )(\S{1,4000})")
_COMPLETE: Final = re.compile(r"_job_complete: JobId=([0-9]{1,12})\S* done")
_KILLED: Final = re.compile(r"Requeuing JobId=([0-9]{1,12})|REQUEST_KILL_JOB JobId=([0-9]{1,12})")


class JobPast(Noun, frozen=True, kw_only=True):
    """One run of a job; a requeued job has one for each."""

    job: JobId
    nodes: tuple[Node, ...]
    start_s: float
    end_s: float | None = None
    state: str = ""


def parse_time(text: str) -> float | None:
    """Slurm's `2026-11-30T16:36:38`, with or without a fraction; None for Unknown, None and what is no time."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return None


def parse_past(text: str) -> tuple[JobPast, ...]:
    """sacct's text or JSON. Jobs that never started are left out. SlurmError where it is neither."""
    if text.lstrip()[:1] == "{":
        return _from_json(text)
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return ()
    columns = lines[0].split("|")
    wanted = {"State", "Start", "End", "NodeList"}
    if not wanted <= set(columns) or not {"JobID", "JobIDRaw"} & set(columns):
        expected = "a header with JobIDRaw, State, Start, End and NodeList (sacct -P -o ...)"
        raise SlurmError(f"sacct: expected {expected}, got {lines[0][:120]!r}", again=False)
    rows = (dict(zip(columns, line.split("|", len(columns) - 1), strict=False)) for line in lines[1:])
    return tuple(job for row in rows if (job := _from_row(row)) is not None)


def _from_row(row: dict[str, str]) -> JobPast | None:
    job = row.get("JobIDRaw") or row.get("JobID", "")
    start_s = parse_time(row.get("Start", ""))
    if not job or "." in job or start_s is None:
        return None
    end_s = parse_time(row.get("End", ""))
    state = row.get("State", "").split(" ", 1)[0].rstrip("+").upper()
    return JobPast(job=JobId(job), nodes=expand(row.get("NodeList", "")), start_s=start_s, end_s=end_s, state=state)


def _from_json(text: str) -> tuple[JobPast, ...]:
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, UnicodeEncodeError) as error:
        raise SlurmError(f"sacct --json: {error}", again=False) from None
    items = document.get("jobs") if isinstance(document, dict) else None
    if not isinstance(items, list):
        raise SlurmError("sacct --json: expected an object with a list 'jobs'", again=False)
    return tuple(job for item in items if isinstance(item, dict) and (job := _from_item(item)) is not None)


def _from_item(item: dict[str, Any]) -> JobPast | None:
    times, state, nodes, number = item.get("time"), item.get("state"), item.get("nodes"), item.get("job_id")
    start, end = (times.get("start"), times.get("end")) if isinstance(times, dict) else (None, None)
    if not isinstance(start, int) or isinstance(start, bool) or not 0 < start < 1 << 40 or not isinstance(number, int):
        return None
    current = state.get("current") if isinstance(state, dict) else state
    words = [w for w in (current if isinstance(current, list) else [current]) if isinstance(w, str)]
    return JobPast(
        job=JobId(str(number)),
        nodes=expand(nodes if isinstance(nodes, str) else ""),
        start_s=float(start),
        end_s=float(end) if isinstance(end, int) and 0 < end < 1 << 40 else None,
        state=("REQUEUED" if "REQUEUED" in words else words[0].upper()) if words else "",
    )


@dataclass
class ControllerLog:
    """slurmctld.log, line by line: `read` gives node states; `jobs` is what the lines so far tell of jobs."""

    jobs: list[JobPast] = field(default_factory=list)
    _open: dict[str, int] = field(default_factory=dict)
    """Job -> its place in `jobs`, while it runs."""
    _reasons: dict[str, str] = field(default_factory=dict)

    def read(self, line: str) -> Iterator[NodeState]:
        """What this line says of nodes. Never raises."""
        stamp = _STAMP.match(line)
        at_s = parse_time(stamp[1]) if stamp else None
        if stamp is None or at_s is None:
            return
        text = line[stamp.end() : LINE_CHARS].rstrip()
        yield from self._nodes(text, at_s)
        self._job(text, at_s)

    def _nodes(self, text: str, at_s: float) -> Iterator[NodeState]:
        if m := _DOWN.match(text):
            for node in _names(m[1]):
                yield NodeState(node=node, at_s=at_s, state="down", flags=("not_responding",), reason="Not responding")
        elif m := _REBOOTED.match(text):
            yield NodeState(node=Node(m[1]), at_s=at_s, state="down", reason="Node unexpectedly rebooted")
        elif m := _BACK.match(text):
            yield NodeState(node=Node(m[1]), at_s=at_s, state="idle")
        elif m := _REASON.match(text):
            if len(self._reasons) > 100_000:
                self._reasons.clear()
            self._reasons[m[1]] = m[2]
        elif m := _STATE.match(text):
            yield self._set(Node(m[1]), m[2], at_s)

    def _set(self, node: Node, word: str, at_s: float) -> NodeState:
        """The reason stands in a line of its own before the state."""
        drained = word.startswith("DRAIN")
        base = "unknown" if drained else word.lower().strip("*+")
        reason = self._reasons.pop(node, "")
        flags = ("drain",) if drained else ()
        return NodeState(node=node, at_s=at_s, state=base, flags=flags, reason=reason if drained else "")

    def _job(self, text: str, at_s: float) -> None:
        if m := _ALLOCATED.match(text):
            listed = _NODE_LIST.search(text)
            self._end(m[1], at_s, "")
            if listed and len(self.jobs) < JOBS_MAX:
                self._open[m[1]] = len(self.jobs)
                self.jobs.append(JobPast(job=JobId(m[1]), nodes=_names(listed[1]), start_s=at_s))
        elif m := _COMPLETE.match(text):
            self._end(m[1], at_s, "COMPLETED")
        elif m := _KILLED.search(text):
            self._end(m[1] or m[2], at_s, "REQUEUED" if m[1] else "CANCELLED")

    def _end(self, job: str, at_s: float, state: str) -> None:
        place = self._open.pop(job, None)
        if place is not None:
            self.jobs[place] = msgspec.structs.replace(self.jobs[place], end_s=at_s, state=state)


def _names(text: str) -> tuple[Node, ...]:
    try:
        return expand(text)
    except SlurmError:
        return ()


def is_controller_log(head: Iterable[str]) -> bool:
    """Whether these first lines are slurmctld's own log."""
    lines = [line for line in head if line.strip()]
    return bool(lines) and sum(1 for line in lines if _STAMP.match(line)) * 2 > len(lines)
