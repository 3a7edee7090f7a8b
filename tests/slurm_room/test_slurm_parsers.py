"""Parsers on what real Slurms said (22.05.8 and 24.11.5), and on noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.reliability.model import Node
from outlast.slurm import parsers, parsers_json
from outlast.slurm.errors import SlurmError
from outlast.slurm.node_state import BASES, parse_state

DATA = Path(__file__).parents[1] / "data" / "slurm"


def said(name: str) -> str:
    return (DATA / name).read_text()


# ---------------------------------------------------------------- jobs


@pytest.mark.parametrize("name", ["scontrol-22.05-job-oneline.txt", "scontrol-22.05-job-running.txt"])
def test_a_running_job(name: str) -> None:
    (row,) = parsers.parse_jobs(said(name))
    assert (row.job, row.state, row.name, row.restarts) == ("1", "RUNNING", "basic", 0)
    assert row.nodes == tuple(f"n{i}" for i in range(1, 9))
    assert row.batch_node == "n1"
    assert row.comment == "run=abc"
    assert row.exclude == () and row.reason == ""
    assert row.left_s == 598


@pytest.mark.parametrize(
    ("end", "left_s"),
    [("2026-11-30T16:29:17", 598), ("2026-11-30T16:19:49", 30), ("Unknown", None), ("None", None), ("", None)],
)
def test_how_long_a_job_may_run_on(end: str, left_s: float | None) -> None:
    """A preemption with a grace time moves the end and leaves the limit; without a limit there is no end."""
    line = said("scontrol-22.05-job-oneline.txt").replace("EndTime=2026-11-30T16:29:17", f"EndTime={end}")
    (row,) = parsers.parse_jobs(line)
    assert row.left_s == left_s


def test_a_job_of_days(tmp_path: Path) -> None:
    line = said("scontrol-22.05-job-oneline.txt").replace("RunTime=00:00:02", "RunTime=2-01:00:02")
    (row,) = parsers.parse_jobs(line.replace("EndTime=2026-11-30T16:29:17", "EndTime=2026-12-07T16:19:17"))
    assert row.left_s == 5 * 86400 - 3602


def test_a_job_that_waits_after_a_node_failure() -> None:
    (row,) = parsers.parse_jobs(said("scontrol-22.05-job-requeued-after-node-failure.txt"))
    assert (row.state, row.restarts, row.nodes, row.batch_node) == ("PENDING", 1, (), None)
    assert row.reason == "ReqNodeNotAvail,_UnavailableNodes:n3"


def test_a_job_of_24_11() -> None:
    (row,) = parsers.parse_jobs(said("scontrol-24.11-job.txt"))
    assert (row.state, row.restarts, row.nodes, row.comment) == ("RUNNING", 1, ("n3", "n4", "n5", "n6"), "run=x")


def test_a_users_text_does_not_replace_what_slurm_says() -> None:
    line = said("scontrol-22.05-job-oneline.txt").replace("Comment=run=abc", "Comment=x JobState=CANCELLED JobId=7")
    (row,) = parsers.parse_jobs(line)
    assert (row.job, row.state) == ("1", "RUNNING")


def test_json_and_text_agree_on_a_running_job() -> None:
    (row,) = parsers.parse_jobs(said("scontrol-22.05-job-running.txt"))
    text = msgspec.structs.replace(row, left_s=None)  # squeue's JSON does not say what time it is
    rows = parsers_json.parse_jobs_json(said("squeue-22.05-running.json"))
    assert text in rows


def test_jobs_of_24_11_in_json() -> None:
    (row,) = parsers_json.parse_jobs_json(said("scontrol-24.11-job.json"))
    assert (row.job, row.state, row.batch_node, row.comment, row.restarts) == ("2", "RUNNING", "n1", "run=x", 0)
    assert row.nodes == ("n1", "n2", "n3", "n4")


def test_a_requeued_job_in_json() -> None:
    (row,) = parsers_json.parse_jobs_json(said("squeue-22.05-requeued.json"))[-1:]
    assert row.state == "PENDING" and row.restarts == 1


def test_squeue_keeps_a_comment_whole() -> None:
    (row,) = parsers.parse_squeue("12|RUNNING|outlast:run:/a b|c\n")
    assert row == parsers.QueueRow(job=row.job, state="RUNNING", comment="outlast:run:/a b|c")
    assert parsers.parse_squeue("12|PENDING|(null)\n")[0].comment == ""


# ---------------------------------------------------------------- nodes


def test_a_node_that_is_down() -> None:
    (row,) = parsers.parse_nodes(said("scontrol-22.05-node-down.txt"))
    assert (row.node, row.state, row.flags) == ("n3", "down", ("not_responding",))
    assert (row.reason, row.reason_user, row.address) == ("Not responding", "root", "127.0.0.1")


def test_a_reason_with_brackets_and_later_fields() -> None:
    line = (
        "NodeName=n3 State=IDLE+DRAIN NodeAddr=10.0.0.3 Reason=DIMM [slot 3] swap [ada@2026-01-01T00:00:00] Comment=x\n"
    )
    (row,) = parsers.parse_nodes(line)
    assert (row.reason, row.reason_user) == ("DIMM [slot 3] swap", "ada")
    assert row.state == "idle" and row.is_draining


def test_draining_in_json() -> None:
    rows = {row.node: row for row in parsers_json.parse_nodes_json(said("sinfo-22.05-draining.json"))}
    row = rows[Node("n3")]
    assert (row.state, row.flags, row.reason_user) == ("mixed", ("drain",), "root")
    assert row.reason == "xid79 GPU has fallen off the bus"
    assert rows[Node("n1")].flags == ()


def test_nodes_of_24_11_in_json() -> None:
    rows = parsers_json.parse_nodes_json(said("scontrol-24.11-nodes.json"))
    assert {row.state for row in rows} <= {"mixed", "idle"} and rows[0].node == "n1" and rows[0].address == "127.0.0.1"


def test_scontrol_and_sinfo_of_24_11_agree_on_reasons_and_flags() -> None:
    text = parsers.parse_nodes(said("scontrol-24.11-nodes-drained.txt"))
    assert [(r.node, r.state, r.flags, r.reason, r.reason_user) for r in text] == [
        ("n1", "mixed", ("drain",), "outlast: XID 79 on GPU 3 [pci 0000:3b:00]", "root"),
        ("n2", "mixed", ("not_responding",), "", ""),
        ("n3", "idle", ("drain",), "DIMM swap, ticket 5512", "root"),
    ]
    rows = parsers.parse_sinfo(said("sinfo-24.11-drained.txt"))
    assert [(r.node, r.flags, r.reason, r.reason_user) for r in rows] == [
        (r.node, r.flags, r.reason, r.reason_user) for r in text
    ]


def test_a_cancelled_job_of_24_11_while_it_completes() -> None:
    assert parsers.parse_squeue(said("squeue-24.11.txt"))[0].state == "COMPLETING"
    (row,) = parsers.parse_sacct(said("sacct-24.11-cancelled.txt"))
    assert (row.state, row.by_uid, row.comment) == ("CANCELLED", 0, "outlast:run:/runs/a")


def test_sinfo_lists_a_node_once_and_keeps_its_reason_whole() -> None:
    text = "n1|idle|Unknown|none\nn2|draining*|root|outlast: a|b\nn2|draining*|root|outlast: a|b\n"
    first, second = parsers.parse_sinfo(text)
    assert (first.reason, first.reason_user) == ("", "")
    assert (second.state, second.flags, second.reason) == ("allocated", ("drain", "not_responding"), "outlast: a|b")


@pytest.mark.parametrize(
    ("text", "base", "flags"),
    [
        ("IDLE", "idle", ()),
        ("MIXED+DRAIN", "mixed", ("drain",)),
        ("DOWN+NOT_RESPONDING", "down", ("not_responding",)),
        ("DOWN*+DRAIN", "down", ("drain", "not_responding")),
        ("ALLOCATED+MAINTENANCE+RESERVED", "allocated", ("maintenance", "reserved")),
        ("mixed*", "mixed", ("not_responding",)),
        ("down*", "down", ("not_responding",)),
        ("drained*", "idle", ("drain", "not_responding")),
        ("draining@", "allocated", ("drain", "reboot_requested")),
        ("idle~", "idle", ("powered_down",)),
        ("idle#", "idle", ("powering_up",)),
        ("allocated$", "allocated", ("maintenance",)),
        ("idle-", "idle", ("planned",)),
        ("allocated+", "allocated", ()),
        ("maint", "idle", ("maintenance",)),
        ("completing", "allocated", ("completing",)),
        ("inval", "idle", ("invalid_reg",)),
        ("fail", "idle", ("fail",)),
        ("quantum", "unknown", ("quantum",)),
        ("quantum+DRAIN", "unknown", ("drain", "quantum")),
        ("", "unknown", ()),
    ],
)
def test_node_states(text: str, base: str, flags: tuple[str, ...]) -> None:
    assert parse_state(text) == (base, flags)


@given(st.text(max_size=40))
def test_any_state_has_a_known_base(text: str) -> None:
    assert parse_state(text)[0] in BASES


# ---------------------------------------------------------------- accounting


def test_a_requeued_job_has_a_row_for_each_run() -> None:
    rows = [r for r in parsers.parse_sacct(said("sacct-22.05-requeue-D.txt")) if not r.slurm_step]
    assert [(r.state, r.nodes) for r in rows] == [("REQUEUED", ("n1", "n2", "n3", "n4")), ("PENDING", ())]


def test_who_cancelled() -> None:
    rows = parsers.parse_sacct(said("sacct-22.05-oom-preempt-bootfail.txt"))
    step = next(r for r in rows if r.job == "2" and r.slurm_step == "0")
    assert (step.state, step.by_uid, step.posix_signal) == ("CANCELLED", 0, 9)
    assert {r.state for r in rows} >= {"PREEMPTED", "REQUEUED", "RUNNING", "PENDING"}


def test_raw_ids_of_arrays_and_hetjobs() -> None:
    assert [r.job for r in parsers.parse_sacct(said("sacct-22.05-array.txt"))] == ["30", "31", "32", "33", "34", "23"]
    assert {r.job for r in parsers.parse_sacct(said("sacct-22.05-hetjob.txt"))} == {"35", "36"}


@pytest.mark.parametrize("path", sorted(DATA.glob("sacct-*.txt")), ids=lambda p: p.stem)
def test_every_captured_sacct_text(path: Path) -> None:
    rows = parsers.parse_sacct(path.read_text())
    assert len(rows) == len(path.read_text().splitlines()) - 1
    assert all((row.state.isupper() and row.state.isalpha()) or "_" in row.state for row in rows)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sacct-22.05-nodefail-requeue.json", [("14", "", "NODE_FAIL"), ("14", "batch", "COMPLETED")]),
        ("sacct-24.11-requeue.json", [("2", "", "REQUEUED"), ("2", "batch", "CANCELLED")]),
    ],
)
def test_sacct_in_json(name: str, expected: list[tuple[str, str, str]]) -> None:
    rows = parsers_json.parse_sacct_json(said(name))
    assert [(r.job, r.slurm_step, r.state) for r in rows[:2]] == expected
    assert any(r.posix_signal == 15 for r in rows)


def test_json_and_text_of_accounting_agree() -> None:
    text = parsers.parse_sacct(said("sacct-22.05-nodefail-requeue.txt"))
    rows = parsers_json.parse_sacct_json(said("sacct-22.05-nodefail-requeue.json"))
    assert [(r.job, r.slurm_step, r.state, r.nodes) for r in text] == [
        (r.job, r.slurm_step, r.state, r.nodes) for r in rows
    ]


# ---------------------------------------------------------------- noise

TEXTS: list[Callable[[str], object]] = [
    parsers.parse_jobs,
    parsers.parse_nodes,
    parsers.parse_sinfo,
    parsers.parse_squeue,
    parsers.parse_sacct,
    parsers.parse_config,
    parsers_json.parse_jobs_json,
    parsers_json.parse_nodes_json,
    parsers_json.parse_sacct_json,
]
PIECES = [
    "JobId=1 ",
    "JobState=RUNNING ",
    "NodeName=n1 ",
    "State=IDLE ",
    "NodeList=n[1-",
    "Reason=x [a@b]",
    "ExcNodeList=(null) ",
    "Restarts=²",
    "JobID|State\n",
    " by 0",
    "1|",
    "|",
    "=",
    " ",
    "\n",
]
pieces = st.sampled_from(PIECES)


@pytest.mark.parametrize("parse", TEXTS, ids=lambda p: p.__name__)
@given(text=st.text(max_size=80) | st.lists(pieces, max_size=12).map("".join))
def test_noise_is_a_slurm_error_or_rows(parse: Callable[[str], object], text: str) -> None:
    try:
        parse(text)
    except SlurmError as error:
        assert str(error)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["jobs", "nodes", "steps", "state", "current", "exit_code", "signal", "set", "number", "job_id"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("parse", TEXTS[-3:], ids=lambda p: p.__name__)
@given(items=st.lists(values, max_size=3))
def test_json_of_any_shape_is_a_slurm_error_or_rows(parse: Callable[[str], object], items: list[object]) -> None:
    try:
        parse(json.dumps({"jobs": items, "nodes": items}))
    except SlurmError as error:
        assert str(error)
