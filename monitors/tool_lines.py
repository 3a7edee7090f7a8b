"""Output of nvidia-smi, dcgmi diag, the DCGM exporter, fabric manager and Slurm, by line or by block. Pure.

A result cell of `dcgmi diag` may span rows, and nvidia-smi tells in several lines what is one fact: so each reader
takes a block of lines, of which a single line is the smallest.
"""

from __future__ import annotations

import re
from typing import Final

from outlast.monitors.reading import Reading
from outlast.monitors.xid_text import normalise_pci

_FIELD: Final = re.compile(r"^ {0,60}([A-Z][A-Za-z0-9 /()._-]{1,60}?) {0,60}: (\S.{0,120}?) *$")
_EXPORTER: Final = re.compile(
    r"^(DCGM_(?:FI|EXP)_[A-Z0-9_]{2,80}|dcgm_[a-z0-9_]{2,80})(?:\{(.{0,4000})\})?(?: +(.{0,120}))?$"
)
_LABEL: Final = re.compile(r'([A-Za-z_][A-Za-z0-9_]{0,80})="((?:[^"\\]|\\.){0,400})"')
_DIAG_ROW: Final = re.compile(r"^\|([^|]{1,60})\|([^|]{1,200})\|? *$")
_DIAG_FAIL: Final = re.compile(r"\bFail\b(?: ?- ?GPUs?: ?([0-9, ]{1,80}))?")
_FABRIC: Final = re.compile(r"detected (?:NVSwitch|NVLink) (non-?fatal|fatal) error(?: (\d{1,6}))?", re.IGNORECASE)
_BUS_ID: Final = re.compile(r"pci bus id ([0-9a-fA-F:.]{7,20})")
_GPU_HANDLE: Final = re.compile(r"GPU ?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F])")
_BLANKS: Final = (9.2e18, 2147483632.0, 140737488355328.0)
"""DCGM writes numbers of about this size where it has no value."""

_COUNTERS: Final = (
    (("ROW_REMAP_FAILURE",), "smi_remap_failed", ""),
    (("CORRECTABLE_REMAPPED_ROWS",), "smi_remap_done", "{:g} rows were remapped"),
    (("ROW_REMAP_PENDING", "RETIRED_PENDING"), "smi_remap_pending", ""),
    (("ECC_DBE",), "smi_ecc_uncorrectable", "{:g} uncorrectable errors"),
    (("PCIE_REPLAY",), "pcie_replay", ""),
    (("NVLINK*ERROR",), "nvlink_driver", "{:g} NVLink errors counted"),
    (("THERMAL_VIOLATION", "POWER_VIOLATION"), "exporter_violation", "{:g} of violation counted"),
)
"""(names of a counter above 0, row, note); a star stands for anything between."""

_HW_SLOWED: Final = 0x8 | 0x40 | 0x80
"""Reasons that hardware sets: slowdown, thermal slowdown, power brake. What software sets is a limit that was asked."""

_SLURM: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    (
        "slurm_node_fail",
        re.compile(
            r"DUE TO NODE FAILURE|[Nn]ode failure on |state set to DOWN|\bNODE_FAIL\b|due to failure of node "
            r"|on failed node |missing from batch node "
        ),
    ),
    ("slurm_time_limit", re.compile(r"DUE TO TIME LIMIT")),
    ("slurm_preempted", re.compile(r"DUE TO (?:JOB )?(?:PREEMPTION|REQUEUE)|preempted job \S{1,60} has been ")),
    ("slurm_kill_failed", re.compile(r"DUE TO JOB NOT ENDING WITH SIGNALS|[Kk]ill task failed")),
    (
        "slurm_oom",
        re.compile(
            r"[Dd]etected [0-9]{1,6} oom[-_]kill event|task [0-9,\[\]-]{1,40}: Out Of Memory|oom-kill event\(s\)"
        ),
    ),
    ("slurm_cancelled", re.compile(r"error: \*\*\* (?:STEP|JOB) .{1,60} CANCELLED AT")),
    (
        "slurm_task_exit",
        re.compile(
            r"srun: error: .{1,255}: tasks? [0-9,\[\]-]{1,80}: "
            r"(?:Exited with exit code|Segmentation|Aborted|Killed|Bus error|Terminated)"
        ),
    ),
    ("slurm_not_responding", re.compile(r"error: Nodes? \S{1,255} not responding")),
)
_SLURM_NODE: Final = re.compile(
    r"(?: ON |[Nn]ode failure on |failure of node |failed node |from batch node "
    r"|error: Nodes? (?=\S{1,64} not)|srun: error: (?=\S{1,64}: task))"
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})(?![\[A-Za-z0-9._-])"
)

_DIAG_TESTS: Final = (
    ("diag_memory", ("GPU Memory", "Memory Bandwidth", "Memtest", "EUD Memory")),
    ("diag_nvlink", ("NVLink", "NVBandwidth", "Interconnect")),
    ("diag_pcie", ("PCIe", "Pcie", "PCI")),
    ("diag_thermal", ("Targeted Power", "Thermal", "Power", "Pulse")),
)


def read_smi(text: str) -> Reading | None:
    """nvidia-smi: its complaints, and the parts of `nvidia-smi -q` that tell of memory, heat and the bus."""
    if "Unable to determine the device handle" in text or "GPU is lost" in text or "No devices were found" in text:
        m = _GPU_HANDLE.search(text)
        return Reading(kind="nvidia_smi", key="smi_lost", gpu=normalise_pci(m[1]) if m else None, text=text)
    fields = [(m[1].strip(), m[2]) for line in text.split("\n")[:400] if (m := _FIELD.match(line))]
    key = _smi_key(fields) if fields else ""
    return Reading(kind="nvidia_smi", key=key, text=text[:2000]) if key else None


_SMI_UNCORRECTABLE: Final = (
    *("SRAM Uncorrectable", "DRAM Uncorrectable", "SRAM Uncorrectable Parity", "SRAM Uncorrectable SEC-DED"),
)
_SMI_PENDING: Final = ("Pending", "Pending Page Blacklist", "Remapped Rows Pending")
_SMI_SLOWED: Final = ("HW Slowdown", "HW Thermal Slowdown", "HW Power Brake Slowdown", "SW Thermal Slowdown")
_SMI_WELL: Final = frozenset(
    (*_SMI_UNCORRECTABLE, *_SMI_PENDING, "Remapping Failure Occurred", "Correctable Error", "Uncorrectable Error")
)


def _smi_key(fields: list[tuple[str, str]]) -> str:
    """The strongest statement of a block: failure, then uncorrectable errors, then what waits for a reset."""
    values = dict(fields)

    def said(names: tuple[str, ...], value: str) -> bool:
        return any(n in names and v.startswith(value) for n, v in fields)

    def counted(names: tuple[str, ...]) -> bool:
        return any(n in names and v.split(" ")[0].isdigit() and v.split(" ")[0].strip("0") for n, v in fields)

    if said(("Remapping Failure Occurred",), "Yes"):
        return "smi_remap_failed"
    if counted(_SMI_UNCORRECTABLE) or said(("SRAM Threshold Exceeded",), "Yes"):
        return "smi_ecc_uncorrectable"
    if said(_SMI_PENDING, "Yes"):
        return "smi_remap_pending"
    if counted(("Uncorrectable Error", "Correctable Error", "Double Bit ECC", "Single Bit ECC")):
        return "smi_remap_done"
    if said(_SMI_SLOWED, "Active"):
        return "smi_thermal"
    now, most = values.get("Current", ""), values.get("Max", "")
    if now.endswith("x") and most.endswith("x") and now != most:
        return "smi_pcie_width"
    return "smi_well" if _SMI_WELL & values.keys() else ""


def read_diag(text: str, test: str = "") -> Reading | None:
    """`dcgmi diag`'s table. `test` names the row to which a continuation belongs."""
    failed: list[tuple[str, str]] = []
    rows = 0
    for line in text.split("\n")[:400]:
        m = _DIAG_ROW.match(line.strip())
        if not m:
            continue
        name = m[1].strip()
        test = name or test
        fail = _DIAG_FAIL.search(m[2])
        rows += bool(fail) or "Pass" in m[2]
        if fail:
            failed.append((test, (fail[1] or "").strip(" ,")))
    if failed:
        name, gpus = failed[0]
        key = next((k for k, names in _DIAG_TESTS if any(n.lower() in name.lower() for n in names)), "diag_other")
        one = gpus if gpus.isdigit() else None
        note = f"{name} failed on GPU {gpus}" if gpus else f"{name} failed"
        return Reading(kind="dcgm_diag", key=key, gpu=one, text=text[:2000], note=note)
    return Reading(kind="dcgm_diag", key="diag_pass", text=text[:2000]) if rows else None


def diag_test(line: str) -> str:
    """The name of the test in a row of the table, '' in a continuation."""
    m = _DIAG_ROW.match(line.strip())
    return m[1].strip() if m else ""


def read_exporter(line: str) -> Reading | None:
    """One sample of the DCGM exporter's page."""
    m = _EXPORTER.match(line.strip())
    if not m:
        return None
    labels = {k.lower(): v for k, v in _LABEL.findall(m[2] or "")}
    gpu = normalise_pci(labels.get("pci_bus_id", "")) or labels.get("gpu")
    node = labels.get("hostname")
    base = Reading(kind="dcgm_exporter", node=node, gpu=gpu, text=line[:2000])
    try:
        value = float((m[3] or "").split(" ")[0])
    except ValueError:
        return _with(base, unreadable=True, note="the value is no number")
    return _sample(base, m[1].upper(), value)


def _sample(base: Reading, name: str, value: float) -> Reading:
    if any(abs(value - blank) < 2**15 or value > 9e18 for blank in _BLANKS):
        return _with(base, key="exporter_blank", note="blank: the GPU has no such value")
    if name.endswith("XID_ERRORS"):
        code = int(value) if 0 <= value < 1e6 else 0
        return _with(base, code=code, key="" if code else "exporter_well", note="the gauge holds the last code only")
    if value <= 0:
        return _with(base, key="exporter_well")
    if name.endswith(("CLOCK_THROTTLE_REASONS", "CLOCKS_EVENT_REASONS")):
        return _with(base, key="exporter_violation" if int(min(value, 1e9)) & _HW_SLOWED else "exporter_well")
    for words, key, note in _COUNTERS:
        if any(all(w in name for w in word.split("*")) for word in words):
            return _with(base, key=key, note=note.format(value))
    return _with(base, key="exporter_well")


def _with(
    base: Reading, *, key: str = "", code: int | None = None, note: str = "", unreadable: bool = False
) -> Reading:
    return Reading(
        kind=base.kind,
        node=base.node,
        gpu=base.gpu,
        text=base.text,
        key=key,
        code=code,
        note=note,
        unreadable=unreadable,
    )


def read_fabric(line: str) -> Reading | None:
    """fabricmanager.log."""
    m = _FABRIC.search(line)
    if not m:
        return None
    fatal = not m[1].lower().startswith("non")
    bus = _BUS_ID.search(line)
    key = "nvswitch_daemon_fatal" if fatal else "nvswitch_daemon_nonfatal"
    code = int(m[2]) if m[2] else None
    gpu = normalise_pci(bus[1]) if bus else None
    return Reading(kind="fabric_manager", key=key, code=code, gpu=gpu, fatal=fatal, text=line[:2000])


def read_slurm(line: str) -> Reading | None:
    """slurmstepd, srun, slurmctld."""
    for key, regex in _SLURM:
        if regex.search(line):
            m = _SLURM_NODE.search(line)
            return Reading(kind="slurm", key=key, node=m[1] if m else None, text=line[:2000])
    return None
