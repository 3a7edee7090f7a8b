"""Facts of GPUs and of the node under them: kernel lines, nvidia-smi, NVML, dcgmi diag, health agents. Pure.

What a line is, is told by the reader of monitors/ and the catalogue; here it gets the details that judging weighs: the
SM, the link, the register, the process, whether the fault was injected. Nothing is blamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from outlast.reliability.catalogue import Catalogue, LineRow
from outlast.reliability.classify import Reading, row_of
from outlast.reliability.judging.case import Line
from outlast.reliability.judging.facts import DiagRow, Fact, GpuFault, GpuLooked, HostFault, PowerLooked, Unanswered
from outlast.reliability.judging.facts_run import Returned
from outlast.reliability.judging.sources import Src, clock_seconds
from outlast.reliability.judging.tools import Tools

KERNEL_KINDS: Final = frozenset(
    "aer edac mce kernel oom nic pcie_width lustre nfs gpfs xid sxid not_xid fabric_manager".split()  # noqa: SIM905
)
_UNRECOGNISED: Final = re.compile(r"\bUNRECOGNIZED_(?:CLIENT|FAULT|ACCESS)")
_LOST: Final = re.compile(r"\bERROR_GPU_IS_LOST\b|\bGPU is lost\b|Unable to determine the device handle")
_REMAP_FAILED: Final = re.compile(r"Remapping Failure Occurred {0,40}:? ?(Yes|No)\b")
_PENDING: Final = re.compile(r"\bPending(?: Page Blacklist)? {0,40}:? ?(Yes|No)\b")
_CLEAN: Final = re.compile(
    r"\bno (?:user |gpu |leftover )?process(?:es)? (?:left|running|found|remains?)|No running processes found"
    r"|\b0 ?MiB (?:/ ?[0-9]{1,7} ?MiB )?(?:used|in use)",
    re.IGNORECASE,
)
_LEFTOVER: Final = re.compile(
    r"\b(?:process|pid|task)\S{0,12} .{0,60}\b(?:state D|D state|D-state|<defunct>|zombie|unkillable)"
    r"|\b[1-9][0-9]{2,6} ?MiB (?:still )?(?:used|in use)|uninterruptible|^\s*[0-9]{2,8} +D[sl<N+]{0,4} +\S",
    re.IGNORECASE,
)
_GPU_RESET: Final = re.compile(r"\bGPU \S{1,24} was successfully reset|\breset(?: of GPU)? (?:done|succeeded)", re.I)
_BOOTED: Final = re.compile(r"^Linux version [0-9]|\bhost rebooted\b|\bBoot_?time\b|\brebooted\b", re.IGNORECASE)
_DEVICE: Final = re.compile(
    r"\b(nvme[0-9]{1,3}(?:n[0-9]{1,3})?|sd[a-z]{1,2}|md/?\S{0,20}[0-9]|mlx[45]_[0-9]{1,2}|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
)
_GPU_INDEX: Final = re.compile(r"\bGPU ?([0-9]{1,2})\b(?! GSP!)")
_HUNG_TOOL: Final = re.compile(r"\b(\w{3,40}) has not returned after ([0-9.]{1,8}) ?s\b")
_HOST_ENGINE: Final = re.compile(
    r"(?:[Hh]ost ?[Ee]ngine|nv-hostengine|dcgm-exporter|DCGM).{0,120}(?:not valid|unreachable|timed? ?out|not running"
    r"|[Ff]ailed to (?:collect|init)|connection (?:is |was )?(?:lost|refused))"
    r"|\bcontext deadline exceeded\b|\bscrape.{0,40}(?:timed out|timeout)",
)
_NO_PAGE: Final = re.compile(
    r"\bconnection refused\b|\btimed? ?out\b|\bHTTP 5[0-9]{2}\b|\bno (?:data|page|answer)\b", re.I
)
_DOWN: Final = re.compile(r"^up(?:\{.{0,400}\})? 0$")
_RISING: Final = re.compile(r"\b(?:error )?counters? (?:are )?rising\b|\bcounters? (?:rise|went up|increas)", re.I)
_ONLY_NODE: Final = re.compile(r"\bonly (?:this|that|one) (?:node|host) of ([0-9]{1,6})\b")


def read_kernel(line: Line, reading: Reading, tools: Tools) -> Iterator[Fact]:
    """The facts of a line that a kernel or a driver's tool printed."""
    if reading.kind in ("xid", "sxid") and not reading.key:
        fault = _gpu_fault(line, reading, tools)
        yield fault
        if reading.caused_by is not None:
            yield _cause(fault, reading.caused_by, tools)
        return
    row = tools.catalogue.kernel(reading.key)
    if row is None or row.class_ == "benign":
        return
    if reading.key.startswith(("smi_", "gpu_lost")):
        what = {"smi_lost": "lost", "gpu_lost": "lost", "smi_remap_failed": "remap_failed", "smi_driver": "mismatch"}
        other = {"smi_remap_pending": "remap_pending", "smi_ecc_uncorrectable": "errors", "smi_thermal": "hot"}
        found = {**what, **other}.get(reading.key)
        if found:
            yield GpuLooked(**where(line, reading.node), what=found, gpu=reading.gpu, text=line.text[:200])
        return
    yield _host_fault(line, reading, row, tools)


def where(line: Line, node: str | None = None) -> dict[str, Any]:
    """The fields that every fact of a line shares. A node in the line itself is closer than the item's source."""
    return {"id": line.id, "at_s": line.at_s, "node": node or line.label.node, "past": line.past}


def _gpu_fault(line: Line, reading: Reading, tools: Tools) -> GpuFault:
    answer = row_of(reading, tools.catalogue)
    kernel = tools.kernel_line(line.text)
    detail = tools.xid(kernel.text)
    row = tools.catalogue.xid(reading.code or 0, reading.text or " ") if reading.kind == "xid" else None
    at_s = line.at_s if line.at_s is not None else line_seconds(line, tools)
    return GpuFault(
        id=line.id,
        at_s=at_s,
        node=line.label.node or reading.node,
        past=line.past,
        code=reading.code or 0,
        class_=answer.class_ or "unparsed",
        action=answer.action,
        name=row.name if row else "NVSwitch",
        blames=row.blames if row else "link",
        gpu=reading.gpu,
        alone=row.alone if row else reading.fatal is True,
        companion=reading.companion,
        injected=detail.injected if detail else False,
        caused_by=reading.caused_by,
        pid=detail.pid if detail else None,
        process=detail.name if detail else "",
        sm=detail.sm if detail else "",
        link=detail.link if detail else None,
        bits=detail.registers[0] if detail and detail.registers else 0,
        fatal=detail.fatal if detail else None,
        switch=detail.switch if detail else None,
        run=line.label.run,
        uptime_s=kernel.uptime_s,
        unrecognised=bool(_UNRECOGNISED.search(line.text)),
    )


def _cause(fault: GpuFault, code: int, tools: Tools) -> GpuFault:
    """The earlier XID that the driver names: it happened, whether or not its own line is at hand."""
    row = tools.catalogue.xid(code)
    return msgspec.structs.replace(
        fault,
        code=code,
        class_=row.class_,
        action=row.action,
        name=row.name,
        blames=row.blames,
        alone=row.alone,
        caused_by=None,
    )


def line_seconds(line: Line, tools: Tools) -> float | None:
    """When the line itself says that it was written."""
    kernel = tools.kernel_line(line.text)
    for found in (kernel.at_s, kernel.uptime_s):
        if found is not None:
            return found
    return clock_seconds(line.text[:40])


def _host_fault(line: Line, reading: Reading, row: LineRow, tools: Tools) -> HostFault:
    kernel = tools.kernel_line(line.text)
    device = _DEVICE.search(kernel.text)
    return HostFault(
        id=line.id,
        at_s=line.at_s if line.at_s is not None else line_seconds(line, tools),
        node=line.label.node or reading.node,
        past=line.past,
        key=reading.key,
        class_=row.class_,
        action="ignore" if reading.companion else row.action,
        meaning=row.meaning,
        blames=row.blames,
        alone=row.alone,
        device=device[1] if device else reading.gpu or "",
        times=kernel.repeats,
    )


def read_looks(line: Line) -> Iterator[Fact]:
    """What tools and people find on a GPU or node when they look at it, also retold in one line."""
    text, at = line.text, where(line)
    index = _GPU_INDEX.search(line.label.raw) or _GPU_INDEX.search(text)
    gpu = index[1] if index else None
    if _LOST.search(text):
        yield GpuLooked(**at, what="lost", gpu=gpu, text=text[:200])
    failed, pending = _REMAP_FAILED.search(text), _PENDING.search(text)
    if failed and failed[1] == "Yes":
        yield GpuLooked(**at, what="remap_failed", gpu=gpu, text=text[:200])
    elif pending:
        yield GpuLooked(**at, what="remap_pending" if pending[1] == "Yes" else "well", gpu=gpu, text=text[:200])
    if _LEFTOVER.search(text):
        yield GpuLooked(**at, what="leftover", gpu=gpu, text=text[:200])
    elif _CLEAN.search(text):
        yield Returned(**at, how="clean")
    if _GPU_RESET.search(text):
        yield Returned(**at, how="reset")
    if _BOOTED.search(text) and not line.text.startswith("NVRM"):
        yield Returned(**at, how="reboot")
    hung = _HUNG_TOOL.search(text)
    only = _ONLY_NODE.search(text)
    engine = _HOST_ENGINE.search(text) or _DOWN.match(text.strip())
    if line.label.kind is Src.EXPORTER and _NO_PAGE.search(text):
        engine = _NO_PAGE.search(text)
    if hung or only or engine or _RISING.search(text):
        yield Unanswered(
            **at,
            what=hung[1] if hung else "host engine or exporter" if engine else "",
            gpu=gpu or "",
            fine=int(only[1]) - 1 if only else 0,
            counters_rise=bool(_RISING.search(text)),
        )


# ---------------------------------------------------------------- dcgmi diag

_ROW: Final = re.compile(r"^\s{0,8}\|([^|]{1,60})\|([^|]{1,400})\|?\s*$")
_CELL: Final = re.compile(r"\b(Pass|Fail|Skip|Warn)\b(?: {0,3}- {0,3}GPUs?: ?([0-9, ]{1,120}))?")
_HEALTH: Final = re.compile(r"^(?:Overall Health|-> ?([0-9]{1,3}))$")
_CELL4: Final = re.compile(r"\bGPU ?([0-9]{1,3}): (Pass|Fail|Skip|Warn)")


def read_diag_table(lines: Iterable[Line]) -> Iterator[Fact]:
    """Each test of a `dcgmi diag` table. A result may stand in rows of its own below the test's name."""
    test = ""
    found: dict[str, tuple[int, set[int], bool, bool]] = {}
    for line in lines:
        m = _ROW.match(line.text)
        if not m:
            continue
        name, cell = m[1].strip(), m[2].strip()
        health = _HEALTH.match(name)
        if health and cell in ("Failure", "Warning", "Healthy"):
            # `dcgmi health`: one row for all, then one a GPU
            _, failed, passed, _ = found.get("health", (line.id, set(), False, False))
            failed = failed | {int(health[1])} if health[1] and cell != "Healthy" else failed
            bare = cell != "Healthy" and not failed
            found["health"] = (line.id, failed, passed or cell == "Healthy", bare)
            continue
        for word, gpus in _results(cell):
            test = name or test
            first, failed, passed, bare = found.get(test, (line.id, set(), False, False))
            failed = failed | gpus if word == "Fail" else failed
            found[test] = (first, failed, passed or word == "Pass", bare or (word == "Fail" and not gpus))
        test = name or test
    for test, (id_, failed, passed, bare) in found.items():
        yield DiagRow(id=id_, test=test, failed=tuple(sorted(failed)) or ((-1,) if bare else ()), passed=passed)


def _results(cell: str) -> Iterator[tuple[str, set[int]]]:
    each = _CELL4.findall(cell)
    if each:
        yield from ((word, {int(gpu)}) for gpu, word in each)
        return
    for word, gpus in _CELL.findall(cell):
        yield word, {int(g) for g in re.findall(r"[0-9]{1,3}", gpus)}


# ---------------------------------------------------------------- clocks and power

MASKS: Final = (
    (0x01, "idle"),
    (0x02, "app_clocks"),
    (0x04, "sw_power_cap"),
    (0x08, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal"),
    (0x40, "hw_thermal"),
    (0x80, "power_brake"),
    (0x100, "display"),
)
"""NVML's clocks event reasons."""
HARD_MASK: Final = 0x08 | 0x40 | 0x80
"""Reasons that speak of hardware: slowdown, heat, the power brake line. A software power cap is normal boost."""
_DRAW: Final = re.compile(r"\bGPU ?([0-9]{1,2}) ([0-9]{2,5})/([0-9]{1,5}) ?W\b")


def decode_mask(mask: int) -> tuple[str, ...]:
    return tuple(word for bit, word in MASKS if mask & bit)


def read_power(line: Line) -> Iterator[Fact]:
    """`GPU2 300/150 W`: limit and draw under load."""
    for gpu, limit, draw in _DRAW.findall(line.text):
        if int(limit):
            yield PowerLooked(**where(line), gpu=gpu, share_of_limit=int(draw) / int(limit))


def is_kernel_kind(reading: Reading, catalogue: Catalogue) -> bool:
    """Whether this reading is of the kernel or a tool, not a rank's word."""
    if reading.table != "kernel":
        return False
    tool = reading.kind == "nvidia_smi" or (reading.kind == "dcgm_exporter" and reading.key.startswith("smi_"))
    return reading.kind in KERNEL_KINDS or (tool and catalogue.kernel(reading.key) is not None)
