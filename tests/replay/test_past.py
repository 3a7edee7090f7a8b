"""Slurm's own records of the past: accounting and the controller's log, as captured and as garbage."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.reliability.model import NodeState
from outlast.slurm.errors import SlurmError
from outlast.slurm.past import ControllerLog, is_controller_log, parse_past, parse_time

DATA = Path(__file__).parent.parent / "data" / "slurm"
LOG = DATA / "slurmctld-22.05-drain-down-requeue.log"


def clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S")


def test_a_requeued_job_is_two_runs() -> None:
    first, second = parse_past((DATA / "sacct-24.11-requeue.txt").read_text())[:2]
    assert (first.job, first.nodes, first.state) == ("2", ("n1", "n2", "n3", "n4"), "REQUEUED")
    assert (clock(first.start_s), clock(first.end_s or 0)) == ("16:36:38", "16:36:40")
    assert second.job == "2" and second.start_s >= (first.end_s or 0)


@pytest.mark.parametrize("name", ["sacct-24.11-requeue.json", "sacct-22.05-nodefail-requeue.json"])
def test_json_of_both_dialects(name: str) -> None:
    jobs = parse_past((DATA / name).read_text())
    assert jobs and all(j.nodes and j.start_s > 1.7e9 and j.state for j in jobs)
    assert {j.state for j in jobs} & {"REQUEUED", "NODE_FAIL"}


def test_accounting_without_the_columns_says_which() -> None:
    with pytest.raises(SlurmError, match="Start, End and NodeList"):
        parse_past("JobIDRaw|State\n1|RUNNING\n")
    assert parse_past("") == ()
    assert parse_past("JobIDRaw|State|Start|End|NodeList\n7|PENDING|Unknown|Unknown|None assigned\n") == ()


def test_the_controllers_log_tells_drains_losses_returns_and_jobs() -> None:
    log = ControllerLog()
    states = [s for line in LOG.read_text().splitlines() for s in log.read(line)]
    told = [(clock(s.at_s), s.node, s.state, s.flags) for s in states]
    assert told == [
        ("19:34:51", "n1", "unknown", ("drain",)),
        ("19:35:01", "n1", "allocated", ()),
        ("19:39:03", "n2", "unknown", ("drain",)),
        ("19:39:05", "n2", "idle", ()),
        ("19:39:51", "n1", "down", ("not_responding",)),
        ("19:40:07", "n1", "idle", ()),
        ("19:40:33", "n3", "down", ("not_responding",)),
        ("19:40:33", "n3", "idle", ()),
    ]
    assert states[0].reason.startswith("outlast: gpu_bus_loss") and states[1].reason == ""
    assert [(j.job, j.nodes) for j in log.jobs][3] == ("6", ("n4", "n5"))
    assert is_controller_log(LOG.read_text().splitlines())
    assert not is_controller_log(["JobID|State", "1|RUNNING"])


def test_a_job_ends_with_its_line() -> None:
    log = ControllerLog()
    for line in (
        "[2026-11-30T19:00:00.000] sched: Allocate JobId=3 NodeList=n[1-2] #CPUs=48 Partition=train",
        "[2026-11-30T19:05:00.000] _job_complete: JobId=3 WEXITSTATUS 0",
        "[2026-11-30T19:05:00.001] _job_complete: JobId=3 done",
        "[2026-11-30T19:06:00.000] sched/backfill: _start_job: Started JobId=4 in train on n[1-2]",
        "[2026-11-30T19:07:00.000] _slurm_rpc_kill_job: REQUEST_KILL_JOB JobId=4 uid 0",
    ):
        assert not list(log.read(line))
    assert [(j.state, round((j.end_s or 0) - j.start_s)) for j in log.jobs] == [("COMPLETED", 300), ("CANCELLED", 60)]


@given(st.text(max_size=2_000))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(SlurmError):
        parse_past(text)
    log = ControllerLog()
    for line in (text, f"[2026-11-30T19:00:00.000] {text}"):
        assert all(isinstance(s, NodeState) for s in log.read(line))
    parse_time(text)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=8),
        lambda s: (
            st.lists(s)
            | st.dictionaries(st.sampled_from(["job_id", "time", "start", "end", "state", "current", "nodes"]), s)
        ),
        max_leaves=30,
    )
)
def test_any_json_is_read_or_refused(value: object) -> None:
    asked = value if isinstance(value, dict) else {}
    try:
        jobs = parse_past(json.dumps({"jobs": [value]}))
    except SlurmError as error:
        assert str(error)
    else:
        # at most the one that stands there, and it began
        assert len(jobs) <= 1
        assert all(job.job == str(asked["job_id"]) and job.start_s == asked["time"]["start"] > 0 for job in jobs)
