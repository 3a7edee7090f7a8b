"""Kernel lines in every prefix form, and XIDs in the forms of all driver generations."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.monitors.kernel_text import parse_kernel_line
from outlast.monitors.xid_text import (
    BusLossMemory,
    find_sxid,
    find_xid,
    normalise_pci,
    nvlink_detail,
    recovery_text,
    sm_location,
)

MESSAGE = "NVRM: Xid (PCI:0000:3b:00): 79, pid=71, name=python3, GPU has fallen off the bus."
AT_S = 1737801294.0  # 2025-01-25 10:34:54 UTC

FORMS = [
    ("bare", MESSAGE),
    ("dmesg", f"[  966.503025] {MESSAGE}"),
    ("dmesg with thread", f"[  966.503025][  T123] {MESSAGE}"),
    ("dmesg delta", f"[  966.503025 <    0.000003>] {MESSAGE}"),
    ("dmesg human", f"[  +0.000316] {MESSAGE}"),
    ("dmesg human minute", f"[Jan25 10:34] {MESSAGE}"),
    ("dmesg -T", f"[Sat Jan 25 10:34:54 2025] {MESSAGE}"),
    ("dmesg -x", f"kern  :err   : [  966.503025] {MESSAGE}"),
    ("dmesg -x iso", f"kern  :err   : 2025-01-25T10:34:54,859532+00:00 {MESSAGE}"),
    ("dmesg iso", f"2025-01-25T10:34:54,859532+00:00 {MESSAGE}"),
    ("dmesg -r", f"<3>[  966.503025] {MESSAGE}"),
    ("priority", f"<3>{MESSAGE}"),
    ("record", f"3,340,966503025,-;{MESSAGE}"),
    ("record with caller", f"3,340,966503025,-,caller=T7;{MESSAGE}"),
    ("journal short", f"Jan 25 10:34:54 gpu-1 kernel: {MESSAGE}"),
    ("journal short-precise", f"Jan 25 10:34:54.859532 gpu-1 kernel: {MESSAGE}"),
    ("journal short-iso", f"2025-01-25T10:34:54+0000 gpu-1 kernel: {MESSAGE}"),
    ("journal short-full", f"Sat 2025-01-25 10:34:54 UTC gpu-1 kernel: {MESSAGE}"),
    ("journal short-unix", f"1737801294.859532 gpu-1 kernel: {MESSAGE}"),
    ("journal short-monotonic", f"[  966.503025] gpu-1 kernel: {MESSAGE}"),
    ("syslog", f"Jan 25 10:34:54 gpu-1 kernel: [  966.503025] {MESSAGE}"),
    ("syslog with priority", f"<3>Jan 25 10:34:54 gpu-1 kernel: [  966.503025] {MESSAGE}"),
    ("syslog iso", f"2025-01-25T12:34:54.859532+02:00 gpu-1 kernel: [  966.503025] {MESSAGE}"),
    ("rfc 5424", f"<3>1 2025-01-25T10:34:54.859Z gpu-1 kernel - - - {MESSAGE}"),
    ("rfc 5424 with data", f'<3>1 2025-01-25T10:34:54Z gpu-1 kernel - - [a@1 b="c"] {MESSAGE}'),
    ("no time", f"gpu-1 kernel: {MESSAGE}"),
    (
        "journal json",
        json.dumps(
            {
                "MESSAGE": MESSAGE,
                "_TRANSPORT": "kernel",
                "SYSLOG_IDENTIFIER": "kernel",
                "SYSLOG_FACILITY": "0",
                "__REALTIME_TIMESTAMP": "1737801294859532",
                "_HOSTNAME": "gpu-1",
            }
        ),
    ),
]


@pytest.mark.parametrize(("form", "line"), FORMS, ids=[f for f, _ in FORMS])
def test_every_form_gives_the_same_message(form: str, line: str) -> None:
    parsed = parse_kernel_line(line, year=2025)
    assert parsed.text == MESSAGE
    assert parsed.from_kernel
    if "Jan 25" in line or "2025-01" in line or "17378" in line:
        assert parsed.at_s is not None and AT_S <= parsed.at_s < AT_S + 1
    if "966" in line:
        assert parsed.uptime_s == 966.503025
    if "gpu-1" in line:
        assert parsed.node == "gpu-1"


@pytest.mark.parametrize(
    "line",
    [
        f"Jan 25 10:34:54 gpu-1 python3[71]: {MESSAGE}",
        f"2025-01-25T10:34:54+00:00 gpu-1 slurmstepd[71]: {MESSAGE}",
        f"<13>{MESSAGE}",
        f"11,340,966503025,-;{MESSAGE}",
        f"user  :err   : [  966.503025] {MESSAGE}",
        f"<3>1 2025-01-25T10:34:54Z gpu-1 app 12 - - {MESSAGE}",
        json.dumps({"MESSAGE": MESSAGE.removeprefix("NVRM: "), "SYSLOG_IDENTIFIER": "NVRM", "_TRANSPORT": "kernel"}),
    ],
)
def test_a_program_that_prints_an_xid_is_not_the_kernel(line: str) -> None:
    parsed = parse_kernel_line(line)
    assert parsed.text == MESSAGE
    assert not parsed.from_kernel


def test_a_time_without_a_year_stays_unknown_and_an_impossible_date_too() -> None:
    assert parse_kernel_line(f"Jan 25 10:34:54 gpu-1 kernel: {MESSAGE}").at_s is None
    odd = parse_kernel_line(f"2025-02-31T10:34:54,1+00:00 {MESSAGE}")
    assert odd.at_s is None and odd.text == MESSAGE


def test_a_device_is_not_taken_for_a_host() -> None:
    line = "kern  :warn  : 2025-01-25T10:34:54,859532+00:00 block nvme0n1: no available path"
    parsed = parse_kernel_line(line)
    assert parsed.text == "block nvme0n1: no available path" and parsed.node is None


def test_folded_lines_keep_their_count() -> None:
    parsed = parse_kernel_line("kernel: message repeated 9 times: [block nvme0n1: no available path]")
    assert (parsed.text, parsed.repeats) == ("block nvme0n1: no available path", 9)


def test_escapes_of_a_record_are_decoded_and_controls_removed() -> None:
    parsed = parse_kernel_line("4,1,2,-;caf\\xc3\\xa9 \\x1b[31mred\\x0anext")
    assert parsed.text == "café red next"


@pytest.mark.parametrize(
    ("text", "code", "gpu", "pid", "name"),
    [
        ("NVRM: Xid (0000:41:00): 13, 0005 00000000 0000902d", 13, "0000:41:00", None, ""),
        ("NVRM: Xid (PCI:0000:3f:00): 46", 46, "0000:3f:00", None, ""),
        ("NVRM: Xid (PCI:0000:3f:00): 46(", 46, "0000:3f:00", None, ""),
        ("NVRM: Xid (PCI:0009:01:00): 43, pid=3188489, name=trig_x, channel 0x0b", 43, "0009:01:00", 3188489, "trig_x"),
        ("NVRM: Xid (PCI:0000:3B:00): 13, pid='<unknown>', name=<unknown>, Graphics", 13, "0000:3b:00", None, ""),
        ("NVRM: Xid (PCI:0000:9b:00 GPU-I:03 GPU-CI:00): 94, pid=7, name=a::b, x", 94, "0000:9b:00", 7, "a::b"),
        ("NVRM: Xid (PCI:0000:9b:00 GPU-I:03): 94, pid=7, name=py", 94, "0000:9b:00", 7, "py"),
        ("NVRM: Xid (PCI:0000:66:00): 999, pid=1234, name=test", 999, "0000:66:00", 1234, "test"),
        ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", 79, "0000:3b:00", None, ""),
        ("NVRM: GPU at 00000000:3B:00.0 has fallen off the bus.", 79, "0000:3b:00", None, ""),
        ("NVRM: fallen off the bus and is not responding to commands.", 79, None, None, ""),
    ],
)
def test_xid_forms(text: str, code: int, gpu: str | None, pid: int | None, name: str) -> None:
    found = find_xid(text)
    assert found is not None
    assert (found.code, found.gpu, found.pid, found.name) == (code, gpu, pid, name)


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: GPU at PCI:0000:66:00: GPU-12345678-1234-5678-9abc-def012345678",
        "nvidia-nvswitch0: SXid (PCI:0000:85:00.0): 12028, Non-fatal, Link 61",
        "NVRM: Xid (PCI:0000:01",
        "Xid",
        "a cat has fallen off the bus" + " and walked on",
    ],
)
def test_what_is_no_xid(text: str) -> None:
    assert find_xid(text) is None


def test_the_cause_that_the_driver_names() -> None:
    found = find_xid("NVRM: Xid (PCI:0000:3b:00): 45, pid=7, name=py, Ch 00000008 caused by previous Xid 94")
    assert found is not None and (found.code, found.caused_by) == (45, 94)


def test_the_three_line_bus_loss_names_its_gpu() -> None:
    memory = BusLossMemory()
    lines = [
        "NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:2330)",
        "NVRM: installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ]
    found = [memory.find(line) for line in lines]
    assert found[:2] == [None, None]
    assert found[2] is not None and (found[2].code, found[2].gpu) == (79, "0000:3b:00")


def test_recovery_text_nvlink_words_and_sm() -> None:
    text = "NVRM: Xid (PCI:0000:ae:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    found = find_xid(text)
    assert found is not None and recovery_text(found) == "Node Reboot Required"
    cut = find_xid("NVRM: Xid (PCI:0000:01:00): 154 (")
    assert cut is not None and recovery_text(cut) is None
    nvlink = find_xid("NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i1 Link 09 (0x025525c6 0x0)")
    assert nvlink is not None
    detail = nvlink_detail(nvlink)
    assert detail is not None
    assert (detail.fatal, detail.link, detail.injected, detail.unit) == (True, 9, True, "NETIR_LINK_EVT")
    assert detail.subcode == (0x025525C6 >> 20) & 0x3F == 37
    older = find_xid("NVRM: Xid (PCI:0003:00:00): 74, NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000)")
    assert older is not None
    detail = nvlink_detail(older)
    assert detail is not None and (detail.link, detail.registers) == (14, (0, 0, 0x10000))
    sm = find_xid("NVRM: Xid (PCI:0000:38:00): 13, Graphics SM Warp Exception on (GPC 9, TPC 1, SM 1): Out Of Range")
    assert sm is not None and sm_location(sm) == "9/1/1"


def test_sxid_takes_the_word_of_the_line() -> None:
    found = find_sxid("nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 12028, Non-fatal, Link 61 egress (First)")
    assert found is not None
    assert (found.code, found.switch, found.gpu, found.fatal, found.link) == (12028, 2, "0000:85:00", False, 61)
    data = find_sxid("nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 12028, Data {0x000001c0}")
    assert data is not None and data.fatal is None


@pytest.mark.parametrize(
    ("text", "pci"),
    [
        ("PCI:0000:3B:00", "0000:3b:00"),
        ("00000000:3B:00.0", "0000:3b:00"),
        ("3b:00.0", "0000:3b:00"),
        ("0009:01:00", "0009:01:00"),
        ("::", None),
        ("", None),
        ("0000:3b:00:11:22", None),
    ],
)
def test_one_form_for_pci_addresses(text: str, pci: str | None) -> None:
    assert normalise_pci(text) == pci


PIECES = st.sampled_from(
    [
        *("NVRM: ", "Xid ", "(PCI:", "0000:3b:00", "): ", "79", "154 (", ", pid=", "<3>", "kernel: ", "[ 1.2] ", "{"),
        *('"MESSAGE":', "Jan 25 10:34:54 ", "2025-13-45T99:99:99,1+99:99 ", "SXid ", "nvidia-nvswitch9", "GPU "),
        *("fallen off the bus", "1,2,3,-;", "kern  :err   : ", "Link ", "0x", "99999999999999999999", "\\x41", "\x00"),
        *("\x1b[31m", "message repeated 3 times: ["),
    ]
)


@given(st.one_of(st.text(), st.lists(PIECES).map("".join), st.binary().map(lambda b: b.decode("latin-1"))))
@example("٣,٣,٣,-;x")
@example("[" * 5000)
@example('{"MESSAGE": ' + "[" * 2000)
@example("NVRM: Xid (PCI:0000:01:00): " + "9" * 5000)
def test_no_text_raises(text: str) -> None:
    parsed = parse_kernel_line(text, year=2025)
    memory = BusLossMemory()
    for part in (parsed.text, text):
        found = memory.find(part)
        if found is not None:
            assert found.worded or str(found.code) in part
            assert is_address(found.gpu) and found.text in part
            assert (recovery_text(found) or "") in part and len(sm_location(found).split("/")) <= 3
            detail = nvlink_detail(found)
            assert detail is None or all(r < 1 << 32 for r in detail.registers)
        switch = find_sxid(part)
        assert switch is None or ("SXid" in part and is_address(switch.gpu) and switch.text in part)
        assert is_address(normalise_pci(part))


def is_address(gpu: str | None) -> bool:
    return gpu is None or re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}", gpu) is not None
