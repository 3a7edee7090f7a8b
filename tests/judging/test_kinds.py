"""Kinds of trouble, each in a form that machines print, and the verdict and action it deserves. Names are invented."""

from __future__ import annotations

import json
from typing import Any

import judging_cases as told
import pytest

XID = "NVRM: Xid (PCI:0000:5e:00): "
GSP = XID + "119, pid=1, name=x, Timeout after 6s of waiting for RPC response from GPU4 GSP! Expected function 76 (X)."
MMU = (
    XID + "31, pid={}, name=p, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_1 faulted @ 0x7f_0."
)
SM = XID + "13, pid={}, name={}, Graphics SM Warp Exception on (GPC 3, TPC 4, SM 1): Illegal Instruction Encoding"
WAITED = (
    "[rank{0}]:[E1 01:00:00.1 ProcessGroupNCCL.cpp:1664] [PG 0 (default_pg) Rank {0}] Exception (either an error or "
    "timeout) detected by watchdog at work: {1}, last enqueued NCCL work: {1}, last completed NCCL work: {2}."
)
RERUN = "ts=2025-08-22 12:00:11.1 node=n3 device=5 jobID=9 rank=6 iteration=81 status={} result=nan message=x"
IB = "{}:9:13 [4] ib_plugin.c:16 NCCL WARN NET/IB : Got completion from peer 10.1.0.5<44> with status={} opcode=1 len=6"
LOST = "LustreError: 167-0: scratch-MDT0-mdc-ff: This client was evicted by scratch-MDT0; in progress operations fail."
STALL = "LustreError: 11-0: scratch-OST1-osc-ff: operation ost_write to node 10.0.8.21@o2ib failed: rc = -107"


def kernel(t: str, node: str, text: str) -> dict[str, str]:
    return {"t": t, "source": f"kernel {node}", "text": text}


def item(t: str, source: str, text: str) -> dict[str, str]:
    return {"t": t, "source": source, "text": text}


KINDS: list[tuple[str, Any, str, str]] = [
    # GPUs
    ("no comma after the code", "NVRM: Xid (PCI:0000:3f:00): 46", "hardware_suspect", "drain_reboot"),
    (
        "bus loss in three lines",
        "[1.1] NVRM: The NVIDIA GPU 0000:5e:00.0 (PCI ID: 10de:2330)\n[1.1] NVRM: installed in this system has\n"
        "[1.1] NVRM: fallen off the bus and is not responding to commands.",
        "hardware_fault",
        "drain_restart_spare",
    ),
    (
        "the driver names the cause",
        XID + "45, pid=7, name=p, Ch 8, caused by previous Xid 94",
        "transient",
        "restart_in_place",
    ),
    (
        "channels removed on many nodes",
        [kernel(f"+{i}", f"n{i}", XID + f"45, pid={i}, name=p, Ch 8") for i in range(12)],
        "no_fault",
        "log",
    ),
    (
        "double bit error",
        XID + "48, pid=8, name=p, An uncorrectable double bit error (DBE)",
        "hardware_fault",
        "drain_restart_spare",
    ),
    (
        "remap pending",
        XID + "63, pid=1, Row Remapper: New row marked for remapping",
        "hardware_suspect",
        "drain_at_job_end",
    ),
    (
        "remap and contained",
        XID + "63, pid=1, Row\n" + XID + "94, pid=2, name=p, Ch 8",
        "transient",
        "restart_in_place",
    ),
    (
        "contained twice",
        [
            kernel("10:00", "n1", XID + "94, pid=2, name=p, Ch 8"),
            kernel("10:40", "n1", XID + "94, pid=7, name=p, Ch 8"),
        ],
        "hardware_suspect",
        "drain_restart_spare",
    ),
    (
        "one SM, job after job",
        [kernel(f"1{i}:00", "n1", SM.format(100 * i, "abc"[i])) for i in range(3)],
        "hardware_suspect",
        "drain_restart_spare",
    ),
    (
        "one SM, one process",
        [kernel(f"1{i}:00", "n1", SM.format(100, "a")) for i in range(3)],
        "app_fault",
        "restart_in_place",
    ),
    (
        "one GPU, job after job",
        [kernel(f"2025-01-0{d}T10:00:00Z", "n1", MMU.format(100 * d)) for d in (1, 2, 3)],
        "hardware_suspect",
        "drain_restart_spare",
    ),
    (
        "firmware, after two reboots",
        [
            kernel("10:00", "n1", GSP),
            item("10:30", "operator", "host rebooted"),
            kernel("12:00", "n1", GSP),
            item("12:30", "operator", "host rebooted"),
            kernel("14:00", "n1", GSP),
        ],
        "hardware_fault",
        "drain_restart_spare",
    ),
    (
        "bus loss on five nodes",
        [kernel(f"10:00:0{i}", f"n{i}", XID + "79, GPU has fallen off the bus.") for i in range(5)],
        "infra_event",
        "page_only",
    ),
    ("unknown code", XID + "999, pid=1234, name=test", "ambiguous", "page_only"),
    (
        "recovery asked",
        XID + "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        "hardware_suspect",
        "drain_reboot",
    ),
    (
        "recovery taken back",
        XID + "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
        "no_fault",
        "log",
    ),
    ("a rank prints an XID", [item("1", "rank 3", XID + "79, GPU has fallen off the bus.")], "ambiguous", "page_only"),
    (
        "NVLink fatal by its word",
        XID + "149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x0)",
        "hardware_fault",
        "drain_restart_spare",
    ),
    (
        "SXid not fatal",
        "[1.3] nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 22013, Non-fatal, Link 61 x",
        "no_fault",
        "log",
    ),
    (
        "version mismatch",
        "NVRM: API mismatch: the client has the version 550.54.15, but",
        "software_fault",
        "page_only",
    ),
    # the node
    ("PCIe corrected", "[1.0] pcieport 0000:00:03.0: AER: Corrected error received: 0000:00:03.0", "no_fault", "log"),
    (
        "machine check",
        "mce: [Hardware Error]: CPU 17: Machine Check Exception: 5 Bank 7: be00000000800400",
        "hardware_fault",
        "drain_restart_spare",
    ),
    ("soft lockup", "watchdog: BUG: soft lockup - CPU#44 stuck for 26s! [python3:51122]", "ambiguous", "drain_reboot"),
    (
        "OOM in the job",
        "Memory cgroup out of memory: Killed process 1 (python3) total-vm:9kB, anon-rss:9kB",
        "app_fault",
        "stop_page",
    ),
    (
        "link flap",
        "mlx5_core 0000:5c:00.0 ibp92s0: Link down\nmlx5_core 0000:5c:00.0 ibp92s0: Link up",
        "transient",
        "log",
    ),
    ("link stays down", "mlx5_core 0000:5c:00.0 ibp92s0: Link down", "hardware_suspect", "drain_restart_spare"),
    (
        "NIC dead",
        "mlx5_core 0000:9a:00.0: poll_health:800:(pid 0): device's health compromised - reached miss count",
        "hardware_fault",
        "drain_restart_spare",
    ),
    ("one client evicted", LOST, "infra_event", "drain_reboot"),
    ("a server does not answer", [kernel("1", f"n{i}", STALL) for i in range(6)], "infra_event", "wait"),
    (
        "a server is back",
        "nfs: server 10.0.9.2 not responding, still trying\nnfs: server 10.0.9.2 OK",
        "transient",
        "log",
    ),
    (
        "half the lanes",
        "mlx5_core 0000:9c:00.0: 252.056 Gb/s available PCIe bandwidth, limited by 32.0 GT/s PCIe x8 link at "
        "0000:97:01.0 (capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)",
        "hardware_suspect",
        "drain_at_job_end",
    ),
    # collectives and ranks
    (
        "one rank behind",
        WAITED.format(1, 500, 499) + "\n" + WAITED.format(2, 499, 498),
        "ambiguous",
        "restart_in_place",
    ),
    (
        "the fault before the waiting",
        "[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered\n" + WAITED.format(1, 5, 4),
        "app_fault",
        "restart_in_place",
    ),
    (
        "out of GPU memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.",
        "app_fault",
        "stop_page",
    ),
    (
        "a peer went",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.0.3.14]:2184",
        "transient",
        "restart_in_place",
    ),
    (
        "one pair of NICs twice",
        [item("1", "job 1", IB.format("n4", 12)), item("2", "job 2", IB.format("n4", 12))],
        "hardware_suspect",
        "drain_restart_spare",
    ),
    ("repeat elsewhere", RERUN.format("first_rerun_reproducible"), "ambiguous", "drain_restart_spare"),
    ("another GPU disagrees", RERUN.format("second_rerun_not_reproducible"), "hardware_fault", "drain_restart_spare"),
    ("another GPU agrees", RERUN.format("second_rerun_reproducible"), "data_or_optimizer", "stop_page"),
    (
        "NaN",
        " iteration  81/ 500 | elapsed time per iteration (ms): 100.0 | lm loss: nan | grad norm: nan |",
        "ambiguous",
        "restart_in_place",
    ),
    (
        "a key is missing",
        "Traceback (most recent call last):\n  File \"/x/t.py\", line 5, in f\nKeyError: 'doc_1'",
        "app_fault",
        "restart_in_place",
    ),
    # Slurm
    (
        "node failure",
        "slurmstepd: error: *** STEP 9.0 ON n17 CANCELLED AT 2025-08-22T12:44:10 DUE TO NODE FAILURE, SEE LOG ***",
        "infra_event",
        "drain_restart_spare",
    ),
    (
        "time limit",
        "slurmstepd: error: *** JOB 9 ON n17 CANCELLED AT 2025-08-22T12:44:10 DUE TO TIME LIMIT ***",
        "scheduler_event",
        "restart_in_place",
    ),
    (
        "preempted",
        "slurmstepd: error: *** JOB 9 ON n17 CANCELLED AT 2025-08-22T12:44:10 DUE TO PREEMPTION ***",
        "scheduler_event",
        "restart_in_place",
    ),
    (
        "controller silent",
        "squeue: error: slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "infra_event",
        "wait",
    ),
    (
        "impossible request",
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        "software_fault",
        "stop_page",
    ),
    ("cut host list", "n-[001-", "parse_only", "refuse"),
    ("host list without end", "n[0-99999999999]", "parse_only", "refuse"),
    ("node states", "n1 idle*\nn2 drng\nn3 mix-", "parse_only", "none"),
    (
        "a GPU less",
        "error: Node n9: gres/gpu count reported lower than configured (7 < 8)",
        "hardware_suspect",
        "drain_restart_spare",
    ),
    ("waits for its turn", "JobId=7 JobState=PENDING Reason=Priority", "scheduler_event", "wait"),
    ("just submitted", "Submitted batch job 7\nslurm_load_jobs error: Invalid job id specified", "no_fault", "wait"),
    ("a window", "ReservationName=m1 StartTime=x Duration=1 Flags=MAINT,IGNORE_JOBS", "operator_action", "none"),
    ("held", "JobId=7 JobState=PENDING Reason=JobHoldMaxRequeue", "software_fault", "stop_page"),
    (
        "left behind after a kill",
        [
            item("1", "sinfo -R", "Kill task failed     root      2020-12-14T09:44:58 n[1-2]"),
            item("2", "n1", "python3 pid 4411 in state D, 40210 MiB used"),
        ],
        "software_fault",
        "drain_reboot",
    ),
    (
        "checker timed out",
        [item("1", "nhc n4", "NHC: Script timed out while executing check_ps_time")],
        "monitoring_fault",
        "page_only",
    ),
    # checkpoints and storage
    ("no space", "OSError: [Errno 28] No space left on device", "infra_event", "stop_page"),
    (
        "one node's disk",
        [item("1", "rank 5 on n03", "OSError: [Errno 5] Input/output error: '/s/x'")],
        "hardware_suspect",
        "drain_restart_spare",
    ),
    (
        "unreadable",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "checkpoint_unusable",
        "rollback",
    ),
    (
        "pointer astray",
        "latest_checkpointed_iteration.txt: 4000\niter_0003000/ .metadata a.distcp 9 b.distcp 9",
        "checkpoint_unusable",
        "rollback",
    ),
    (
        "one shard less",
        "iter_0000010/ .metadata __0_0.distcp 9 __1_0.distcp 9\niter_0000020/ __0_0.distcp 9",
        "checkpoint_unusable",
        "rollback",
    ),
    # monitors
    ("a gauge alone", 'DCGM_FI_DEV_XID_ERRORS{gpu="3",Hostname="n1"} 79', "hardware_suspect", "page_only"),
    (
        "a healthy page",
        'DCGM_FI_DEV_XID_ERRORS{gpu="3",Hostname="n1"} 0\nDCGM_FI_DEV_GPU_TEMP{gpu="3",Hostname="n1"} 40',
        "no_fault",
        "none",
    ),
    (
        "a remap failed, by counter",
        'DCGM_FI_DEV_ROW_REMAP_FAILURE{gpu="6",Hostname="n1"} 1',
        "hardware_fault",
        "drain_restart_spare",
    ),
    (
        "host engine gone",
        "Failed to collect metrics: DCGM host engine connection lost",
        "monitoring_fault",
        "page_only",
    ),
    ("a driver that loads", "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.195.03", "no_fault", "log"),
    ("an ordinary line", [kernel("1", "n1", "usb 1-1: new high-speed USB device number 3")], "no_fault", "log"),
    ("an empty case", "", "no_fault", "none"),
]


@pytest.mark.parametrize(("kind", "given", "verdict", "action"), KINDS, ids=[k[0] for k in KINDS])
def test_a_kind_of_trouble_gets_its_verdict(kind: str, given: Any, verdict: str, action: str) -> None:
    answer = told.judged({"id": kind, "input": given})
    assert (answer.verdict, str(answer.action)) == (verdict, action), answer.because


MORE: list[tuple[str, Any, str, str]] = [
    (
        "a counter of a window",
        'DCGM_EXP_XID_ERRORS_COUNT{gpu="1",Hostname="n1",window_size_in_ms="300000",xid="43"} 2',
        "app_fault",
        "log",
    ),
    (
        "health of a node",
        "| Overall Health            | Failure         |\n| GPU                       |                 |\n"
        "| -> 4                      | Failure         |",
        "hardware_suspect",
        "refuse",
    ),
    ("no page", [item("10:00", "scrape n3:9400", "connection refused")], "monitoring_fault", "page_only"),
    (
        "one SM, in jobs without times",
        [item(f"job {i}", "kernel n1", SM.format(100 * i, "abc"[i])) for i in range(3)],
        "hardware_suspect",
        "drain_restart_spare",
    ),
    ("several ranks missing", "collective 39 at entry 38: missing ranks: {4, 5, 6}", "ambiguous", "restart_in_place"),
    (
        "a rank missing, another each run",
        [item(f"run {i}", "NCCL RAS", f"rank {7 * i} one collective behind 511 others") for i in (1, 2, 3)],
        "software_fault",
        "stop_page",
    ),
    ("not known to the queue", "slurm_load_jobs error: Invalid job id specified", "ambiguous", "wait"),
]


@pytest.mark.parametrize(("kind", "given", "verdict", "action"), MORE, ids=[k[0] for k in MORE])
def test_more_kinds(kind: str, given: Any, verdict: str, action: str) -> None:
    answer = told.judged({"id": kind, "input": given})
    assert (answer.verdict, str(answer.action)) == (verdict, action), answer.because


RECORDED = [json.loads(line) for line in (told.DATA / "kinds.jsonl").read_text().splitlines()]
"""More of them, as data: forms of other drivers, releases and tools."""


@pytest.mark.parametrize("case", RECORDED, ids=lambda c: c["kind"])
def test_kinds_in_other_forms(case: dict[str, Any]) -> None:
    answer = told.judged({"id": case["kind"], "input": case["input"]})
    assert (answer.verdict, str(answer.action)) == (case["verdict"], case["action"]), answer.because


@pytest.mark.parametrize("case", RECORDED, ids=lambda c: c["kind"])
def test_carriage_returns_change_no_verdict(case: dict[str, Any]) -> None:
    """A collector on the way may end lines as Windows does."""
    given = case["input"]
    text = given.replace("\n", "\r\n") if isinstance(given, str) else [{**i, "text": i["text"] + "\r"} for i in given]
    answer = told.judged({"id": case["kind"], "input": text})
    assert (answer.verdict, str(answer.action)) == (case["verdict"], case["action"]), answer.because


def test_history_in_the_context_escalates_and_unknown_keys_are_ignored() -> None:
    line = XID + "94, pid=2, name=p, Ch 8"
    case = {"id": "h", "input": [kernel("2025-03-02T10:00:00Z", "n1", line)]}
    assert told.judged(case).verdict == "transient"
    past = {"t": "2025-03-01T10:00:00Z", "node": "n1", "gpu": "0000:5e:00", "xid": 94}
    for history in ([past], [kernel(past["t"], "n1", line)]):
        answer = told.judged(
            {**case, "context": {"history": history, "weather": [1, {"a": None}], "ranks_per_node": "x"}}
        )
        assert (answer.verdict, answer.action) == ("hardware_suspect", "drain_restart_spare")


def test_a_domain_of_the_context_is_named_when_many_of_its_nodes_lose_links() -> None:
    lines = [kernel("10:00:00", f"n{i}", XID + "149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x0)") for i in range(4)]
    case = {"id": "d", "input": lines, "context": {"domains": {"d7": [f"n{i}" for i in range(8)]}}}
    answer = told.judged(case)
    assert (answer.action, answer.culprit) == ("page_only", "domain d7")


def test_the_answers_are_lines_of_json() -> None:
    import io

    from outlast.reliability.cli.judge_io import run_judge

    out = io.BytesIO()
    cases = [json.dumps({"id": str(i), "input": given}).encode() for i, (_, given, _, _) in enumerate(KINDS)]
    run_judge([*cases, b"\n"], out, where="here")
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [r["id"] for r in rows] == [str(i) for i in range(len(KINDS))]
    assert all(set(r) == {"id", "verdict", "culprit", "action", "because", "checks"} for r in rows)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"nonsense", "not JSON"),
        (b"[1]", "expected an object"),
        (b'{"id": "a"}', "input: expected"),
        (b'{"input": "a"}', "id"),
    ],
)
def test_a_case_that_cannot_be_read_names_its_line(line: bytes, said: str) -> None:
    from outlast.reliability.cli.judge_io import judge_lines
    from outlast.reliability.judging.case import CaseError

    with pytest.raises(CaseError, match=r"here:2.*" + said):
        list(judge_lines([b"\n", line], told.TOOLS, where="here"))


def test_a_sites_rows_change_what_a_code_does(tmp_path) -> None:
    from outlast.reliability.cli.judge_io import make_tools
    from outlast.reliability.judging.case import read_case
    from outlast.reliability.judging.judge import judge_case

    rows = tmp_path / "rows.yaml"
    rows.write_text("xids:\n  94: {action: drain_reset, drains: true}\n  79: {action: watch, drains: false}\n")
    site = make_tools(rows)
    for code, ours, theirs in ((94, "restart_in_place", "drain_restart_spare"), (79, "drain_restart_spare", "log")):
        case = {"id": "r", "input": XID + f"{code}, pid=2, name=p, Ch 8"}
        assert told.judged(case).action == ours
        assert judge_case(read_case(case, "r"), site).action == theirs
