"""`outlast classify`: each line its class and action, alone and in a stream, quickly and within bounded memory."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.monitors.kernel_events import KERNEL_EVENTS
from outlast.monitors.lines import LineReader
from outlast.monitors.rank_patterns import PATTERNS
from outlast.monitors.sieve import LINE_BYTES, NEEDLES, marked, whole_lines
from outlast.reliability.catalogue import load_catalogue
from outlast.reliability.classify import NOTHING, Row, classify_block, classify_lines, classify_stream
from outlast.reliability.cli.classify_io import run_classify

DATA = Path(__file__).parent.parent / "data" / "classify" / "lines.jsonl"
"""line, and the kind, code, class and action that it should get; lines of one stream, in order."""
KNOWN: list[dict[str, Any]] = [json.loads(line) for line in DATA.read_text().splitlines()]
CATALOGUE = load_catalogue()


def answer(row: Row) -> tuple[str | None, int | None, str | None, str]:
    return row.kind, row.code, row.class_, row.action


def test_every_known_line_is_right_in_one_stream() -> None:
    reader = LineReader()
    wrong = []
    for known in KNOWN:
        line = known["line"]
        row = (
            classify_block(line, reader, CATALOGUE) if "\n" in line else next(classify_lines([line], reader, CATALOGUE))
        )
        if answer(row) != (known["kind"], known["code"], known["class"], known["action"]):
            wrong.append((line[:100], known, row))
    assert not wrong


BUS_LOSS = "NVRM: Xid (PCI:0000:4b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "<4>",
        "[ 8812.004211] ",
        "[Tue Mar  4 02:11:09 2025] ",
        "kern  :warn  : [ 8812.004211] ",
        "kern  :warn  : [Tue Mar  4 02:11:09 2025] ",
        "kern  :err   : 2025-03-04T02:11:09,120011+01:00 ",
        "Mar  4 02:11:09 cn-0412 kernel: ",
        "Mar  4 02:11:09 cn-0412 kernel: [ 8812.004211] ",
        "2025-03-04T02:11:09.120011+01:00 cn-0412 kernel: [ 8812.004211] ",
        "<4>1 2025-03-04T02:11:09.120Z cn-0412 kernel - - - ",
        "<4>1 2025-03-04T02:11:09.120Z cn-0412.cluster.local kernel 0 - - [ 8812.004211] ",
        "<4>Mar  4 02:11:09 cn-0412 kernel: ",
        "4,12011,8812004211,-;",
        "4,12011,8812004211,-,caller=T4111;",
        "[T4111] ",
        "[ 8812.004211] [T4111] ",
        "[ 8812.004211][ T4111] ",
        "cn-0412: [ 8812.004211] ",
        "Mar  4 02:11:09 cn-0412 kern.warn kernel: ",
        "1741050669.120 cn-0412 kernel: ",
        "\x1b[33m[  881.2] \x1b[0m\x1b[1m",
        "cn-0412: Mar  4 02:11:09 cn-0412 kernel: ",
        "Mar 04 02:11:09 cn-0412 kernel: ",
        "2025-03-04 02:11:09 cn-0412 kernel: ",
        "2025-03-04T02:11:09+0100 cn-0412 kernel: ",
        "cn-0412: ",
        "cn-0412 kernel: ",
        "kernel: ",
        "Tue 2025-03-04 02:11:09 CET cn-0412 kernel: ",
        "Mar  4 02:11:09.120011 cn-0412 kernel: ",
        "<0>",
        "[  +0.000012] ",
        "[Mar 4 02:11] ",
    ],
)
@pytest.mark.parametrize("end", ["", "\r"])
def test_a_line_is_read_whatever_wrote_it(prefix: str, end: str) -> None:
    (row,) = classify_lines([prefix + BUS_LOSS + end], LineReader(), CATALOGUE)
    assert (row.code, row.gpu, row.class_, row.action) == (79, "0000:4b:00", "gpu_bus_loss", "drain_reboot")
    assert row.node in (None, "cn-0412", "cn-0412.cluster.local") and (row.node is None) == ("cn-0412" not in prefix)


@pytest.mark.parametrize(
    "line",
    [
        f"python3[881]: {BUS_LOSS}",
        f"Mar  4 02:11:09 n1 slurmstepd[912]: rank 3: {BUS_LOSS}",
        json.dumps({"_HOSTNAME": "n1", "MESSAGE": BUS_LOSS, "_TRANSPORT": "journal", "SYSLOG_IDENTIFIER": "python3"}),
        json.dumps({"log": BUS_LOSS, "stream": "stdout"}, separators=(",", ":")),
        f'audit: type=1400 audit(1.1:2): apparmor="DENIED" name="{BUS_LOSS}"',
    ],
)
def test_what_a_program_printed_is_no_evidence_however_it_was_kept(line: str) -> None:
    (row,) = classify_lines([line], LineReader(), CATALOGUE)
    assert (row.kind, row.class_, row.action) == ("not_xid", "benign", "ignore")


@pytest.mark.parametrize("message", [BUS_LOSS, list(BUS_LOSS.encode())])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",", " : ")])
def test_a_journal_entry_is_read_with_its_message_as_text_or_as_numbers(message: object, separators: Any) -> None:
    entry = {"__REALTIME_TIMESTAMP": "1741050669120011", "MESSAGE": message, "_TRANSPORT": "kernel", "_HOSTNAME": "n1"}
    line = json.dumps(entry, separators=separators)
    (row,) = classify_lines([line], LineReader(), CATALOGUE)
    assert (row.code, row.gpu, row.node) == (79, "0000:4b:00", "n1")
    chunk = f"{line}\n".encode()
    (said,) = classify_stream([chunk], LineReader(), CATALOGUE, marked=marked)
    assert json.loads(said)["code"] == 79


PREFIXES = [
    "[1084456.074562] ",
    "kern  :err   : 2025-01-25T10:34:54,859532+00:00 ",
    "Jan 25 10:34:54 gpu-9 kernel: [12.5] ",
    "<4>",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_changes_nothing_but_the_node(prefix: str) -> None:
    for known in KNOWN:
        if (
            known["kind"] in ("xid", "sxid", "aer", "edac", "mce", "nic", "oom", "lustre", "nfs")
            and known["line"][:1] not in "[k"
        ):
            row = next(classify_lines([prefix + known["line"]], LineReader(), CATALOGUE))
            assert answer(row) == (known["kind"], known["code"], known["class"], known["action"]), known["line"]
            if "gpu-9" in prefix and not known["line"].startswith("node-"):
                assert row.node == "gpu-9"


def test_the_row_says_why_and_where() -> None:
    line = "gpu-3 kernel: NVRM: Xid (PCI:0000:3B:00): 79, pid=0, GPU has fallen off the bus."
    row = next(classify_lines([line], LineReader(), CATALOGUE))
    assert (row.node, row.gpu) == ("gpu-3", "0000:3b:00")
    assert "XID 79" in row.because and "blames gpu" in row.because


def test_three_lines_of_one_loss_name_the_gpu_once() -> None:
    text = (
        "NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:2330)\nNVRM: installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands."
    )
    row = classify_block(text, LineReader(), CATALOGUE)
    assert (row.class_, row.action, row.gpu) == ("gpu_bus_loss", "drain_reboot", "0000:3b:00")


def test_a_block_speaks_with_its_strongest_line() -> None:
    text = (
        "NVRM: Xid (PCI:0000:9c:00): 63, pid=5, Row Remapper: New row marked for remapping, reset gpu to activate.\n"
        "NVRM: Xid (PCI:0000:9c:00): 94, pid=5, name=python, Contained ECC error\n"
        "NVRM: Xid (PCI:0000:9c:00): 48, pid=5, name=python, DBE (double bit error) detected\n"
    )
    assert classify_block(text, LineReader(), CATALOGUE).code == 48
    assert classify_block("nothing here\n", LineReader(), CATALOGUE) is NOTHING


def test_a_companion_of_an_sxid_keeps_the_word_of_its_event() -> None:
    event = "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 11002, {}Link 30 x"
    reader = LineReader()
    rows = list(
        classify_lines(
            [event.format("Fatal, "), "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 11002, Data {0x5}"], reader, CATALOGUE
        )
    )
    assert [(r.class_, r.action) for r in rows] == [("nvswitch_fatal", "drain_reset"), ("nvswitch_fatal", "ignore")]


def step(iteration: int, ms: float, extra: str = "", batch: int = 8) -> str:
    return (
        f" iteration {iteration:8d}/     400 | consumed samples: 80 | elapsed time per iteration (ms): {ms} | "
        f"global batch size: {batch:5d} | lm loss: 5.0E+00 | {extra}number of nan iterations:   0 |"
    )


def test_a_slow_step_is_told_from_those_before_it() -> None:
    lines = [
        step(1, 9000.0),
        *(step(i, 100.0 + i) for i in range(2, 9)),
        step(9, 250.0),
        step(10, 101.0),
        step(11, 900.0, batch=16),
    ]
    classes = [r.class_ for r in classify_lines(lines, LineReader(), CATALOGUE)]
    assert classes == ["progress"] * 8 + ["straggler", "progress", "progress"]


def test_a_gradient_spike_is_told_from_the_usual() -> None:
    lines = [*(step(i, 100.0, f"grad norm: 0.{i} | ") for i in range(2, 9)), step(9, 100.0, "grad norm: 40.0 | ")]
    assert [r.class_ for r in classify_lines(lines, LineReader(), CATALOGUE)][-1] == "loss_anomaly"


def test_every_key_of_the_readers_has_its_row() -> None:
    for event in KERNEL_EVENTS:
        assert CATALOGUE.kernel(event.key) is not None, event.key
    for pattern in PATTERNS:
        assert CATALOGUE.rank_log(pattern.key) is not None, pattern.key
    assert not [k for k in KNOWN if k["class"] == "unparsed" and k["kind"] not in ("xid", "dcgm_exporter")]


def in_chunks(data: bytes, size: int) -> Iterator[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
def test_a_stream_of_bytes_gives_the_same_rows(size: int) -> None:
    lines = [k["line"] for k in KNOWN if "\n" not in k["line"]]
    data = "\n".join(["noise", "", *lines, "more noise"]).encode()
    out = b"".join(classify_stream(whole_lines(in_chunks(data, size)), LineReader(), CATALOGUE, marked=marked))
    rows = [json.loads(row) for row in out.splitlines()]
    expected = classify_lines(["noise", *lines, "more noise"], LineReader(), CATALOGUE)
    assert [(r["kind"], r["code"], r["class"], r["action"]) for r in rows] == [answer(r) for r in expected]
    only = b"".join(
        classify_stream(whole_lines(in_chunks(data, size)), LineReader(), CATALOGUE, marked=marked, every=False)
    )
    assert len(only.splitlines()) == sum(1 for r in rows if r["kind"])


def test_the_sieve_lets_every_known_line_through() -> None:
    for known in KNOWN:
        if known["kind"] is not None:
            assert marked(known["line"].encode()), known["line"]


PIECES = st.sampled_from(
    [
        *(needle for event in KERNEL_EVENTS for needle in event.needles),
        *(n.decode() for n in NEEDLES),
        *(
            "NVRM: Xid (PCI:0000:3b:00): 79, ",
            "nvidia-nvswitch0: SXid (PCI:0000:3b:00.0): 1, Fatal, ",
            "pcieport 0000:5d:00.0:",
            "[12] ",
        ),
        *(
            "Timeout",
            'DCGM_FI_DEV_XID_ERRORS{gpu="1"} ',
            "iteration 5/ 9 |",
            "lm loss: nan |",
            "| GPU Memory | Fail |",
            "\x00",
            "9",
        ),
        *(
            "status=first_rerun_reproducible rank=1",
            "lowest 1.0/2, 3.0/4",
            "ran for 9 milliseconds",
            "*** JOB 1 ON a CANCELLED AT",
        ),
    ]
)


@given(st.one_of(st.text(), st.lists(PIECES, max_size=8).map("".join), st.binary().map(lambda b: b.decode("latin-1"))))
@example("|" * 5000)
@example("DCGM_A{" + 'a="' * 3000)
@example("iteration 1/2 |" + " a:" * 5000)
@example("mlx5" + " link" * 20000)
def test_any_text_is_a_row_or_nothing_and_the_sieve_loses_none(text: str) -> None:
    line = text.replace("\n", " ").replace("\r", " ")
    reader = LineReader()
    rows = list(classify_lines([line], reader, CATALOGUE))
    assert len(rows) == bool(line.strip())
    if rows and rows[0] is not NOTHING:
        assert marked(line.encode("utf-8", "replace")), line
    classify_block(text, reader, CATALOGUE)


def noise(size: int) -> Iterator[bytes]:
    line = b"Jan 25 10:34:54 gpu-1 kernel: [12.345678] usb 1-1: new high-speed USB device number 3 using xhci_hcd\n"
    block = (
        line * 2000 + b"NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=x, MMU Fault\n" + b"x" * (LINE_BYTES * 3) + b"\n"
    )
    for _ in range(size // len(block)):
        yield block


@pytest.mark.slow
@pytest.mark.parametrize("size", [32 << 20, pytest.param(1 << 30, marks=pytest.mark.long)])
def test_a_large_log_streams_within_bounded_memory(size: int) -> None:
    tracemalloc.start()
    try:
        rows = sum(
            chunk.count(b"\n")
            for chunk in classify_stream(whole_lines(noise(size)), LineReader(), CATALOGUE, marked=marked, every=False)
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows >= size // 500_000
    assert peak < 16 << 20


def test_the_parts_together_answer_a_pipe_and_a_block() -> None:
    line = b"NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
    out = io.BytesIO()
    run_classify(io.BytesIO(b"noise\n" + line), out)
    assert [json.loads(row)["class"] for row in out.getvalue().splitlines()] == [None, "gpu_bus_loss"]
    out = io.BytesIO()
    run_classify(io.BytesIO(b"noise\n" + line), out, block=True)
    row = json.loads(out.getvalue())
    assert list(row) == ["kind", "code", "node", "gpu", "class", "action", "because"]
    assert (row["code"], row["action"]) == (79, "drain_reboot")
