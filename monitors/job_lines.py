"""Lines of a training job: NCCL and gloo, CUDA, Python, Megatron's log and its re-run tracker. Pure.

All of it is a program's word. A step that took too long is told from those before it, so `TrainingLog` remembers
recent steps of each run that it sees; one line alone says nothing about speed.
"""

from __future__ import annotations

import re
import statistics
from collections import OrderedDict, deque
from typing import Final

from outlast.monitors.rank_log import timeout_class
from outlast.monitors.rank_patterns import PATTERNS
from outlast.monitors.reading import Reading

_ITERATION: Final = re.compile(r"iteration {0,12}([0-9]{1,12}) ?/ {0,12}([0-9]{1,12}) \|")
_CELL: Final = re.compile(
    r"([a-zA-Z][a-zA-Z ()/]{1,60}): {0,12}([-+]?(?:[0-9.]+(?:[eE][-+]?[0-9]+)?|nan|inf|NaN|Inf))(?= ?\||$)"
)
_RANKED: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)/([0-9]{1,7})\b")
_STATUS: Final = re.compile(r"\bstatus=(?:RerunValidationStatus\.)?([A-Za-z_]{3,40})")
_COMPLETION: Final = re.compile(r"Got completion (?:from|with).{0,120}?status=([0-9]{1,3})")
_SEQUENCES: Final = re.compile(
    r"last enqueued (?:NCCL )?work: (-?[0-9]{1,12}), last completed (?:NCCL )?work: (-?[0-9]{1,12})"
)
_TIMED_OUT: Final = re.compile(r"(?:watchdog at work(?: sequence id)?|SeqNum[=:]) ?:? ?([0-9]{1,12})")
_EXCEPTION: Final = re.compile(
    r"(?:[A-Za-z_][A-Za-z0-9_]{0,80}\.){0,12}[A-Z][A-Za-z0-9_]{0,80}(?:Error|Exception)(?::|$)"
)
_ASKED: Final = re.compile(r"SignalException: Process [0-9]{1,10} got signal: (?:2|15)\b")
_LAUNCHER: Final = re.compile(
    r"failed \(exitcode: -?[1-9][0-9]{0,4}\)|^ {0,8}exitcode {0,4}: -?[1-9][0-9]{0,4}\b"
    r"|Signal [0-9]{1,3} \(SIG[A-Z]{2,8}\) received by PID|MPI_ABORT was invoked on rank"
    r"|(?:mpirun|mpiexec|prterun) noticed that process|\] exits with return code = -?[1-9]"
)
_FLUSH_STATUS: Final = 5
"""IBV_WC_WR_FLUSH_ERR: the request was flushed after an earlier error."""

SLOW_FACTOR: Final = 1.5
"""A step this much longer than the median of those before it is called slow."""
SPIKE_FACTOR: Final = 10.0
"""As Megatron's own check of gradient norms: ten times the usual."""
RANK_FACTOR: Final = 0.9
"""A rank below this share of the next slowest stands out."""
REMEMBERED_STEPS: Final = 32
REMEMBERED_RUNS: Final = 16

_RERUN: Final = {
    "initial_run": "rerun_unexpected",
    "rerun_disabled": "rerun_unexpected",
    "first_rerun_not_reproducible": "rerun_transient",
    "first_rerun_reproducible": "rerun_elsewhere",
    "second_rerun_not_reproducible": "rerun_persistent",
    "second_rerun_reproducible": "rerun_same_everywhere",
}
_KINDS: Final = {
    "cuda": "cuda",
    "collective": "nccl_timeout",
    "peer": "gloo",
    "nccl": "nccl_err",
    "crash": "kernel",
    "rerun": "megatron_rerun",
    "host": "oom",
}


class _Run:
    """Recent steps of one run."""

    def __init__(self) -> None:
        self.step_ms: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self.grad_norm: deque[float] = deque(maxlen=REMEMBERED_STEPS)


class TrainingLog:
    """Iteration lines of one or several runs in one stream. Bounded: the run that was silent longest is forgotten."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, str], _Run] = OrderedDict()

    def read(self, line: str) -> Reading | None:
        m = _ITERATION.search(line)
        if not m:
            return None
        cells = {name.strip().lower(): value for name, value in _CELL.findall(line[m.end() : m.end() + 2000])}
        run = self._run((m[2], cells.get("global batch size", "")))
        key, note = _judge_step(int(m[1]), cells, run)
        return Reading(kind="megatron", key=key, table="rank_log", text=line[:2000], note=note)

    def _run(self, key: tuple[str, str]) -> _Run:
        run = self._runs.pop(key, None) or _Run()
        self._runs[key] = run
        if len(self._runs) > REMEMBERED_RUNS:
            self._runs.popitem(last=False)
        return run


def _judge_step(iteration: int, cells: dict[str, str], run: _Run) -> tuple[str, str]:
    if any(v.lower().lstrip("+-") in ("nan", "inf") for k, v in cells.items() if "loss" in k or "norm" in k):
        return "loss_nan", "loss or gradient norm is no number"
    if _number(cells, "number of nan iterations"):
        return "loss_nan", "an iteration gave NaN"
    norm = _number(cells, "grad norm")
    usual = statistics.median(run.grad_norm) if run.grad_norm else 0.0
    spike = bool(usual and norm > SPIKE_FACTOR * usual)
    if norm and not spike:
        run.grad_norm.append(norm)
    if spike:
        return "loss_spike", f"gradient norm {norm:g}, usually {usual:g}"
    step_ms = _number(cells, "elapsed time per iteration (ms)") or 1000 * _number(
        cells, "elapsed time per iteration (s)"
    )
    median = statistics.median(run.step_ms) if run.step_ms else 0.0
    # the first iteration compiles and allocates: it is neither judged nor a measure for others
    slow = iteration > 1 and bool(median) and step_ms > SLOW_FACTOR * median
    if step_ms and iteration > 1 and not slow:
        run.step_ms.append(step_ms)
    if slow:
        return "step_slow", f"{step_ms:.0f} ms, {step_ms / median:.1f} times the usual; no rank is named"
    return "progress", ""


def _number(cells: dict[str, str], name: str) -> float:
    try:
        return float(cells.get(name, "0"))
    except ValueError:
        return 0.0


def read_straggler(line: str) -> Reading | None:
    """Megatron's straggler report and nvidia-resiliency-ext's."""
    if "Affected ranks" in line or "STRAGGLER DETECTION" in line:
        return Reading(kind="megatron_straggler", key="rank_slow", table="rank_log", text=line[:2000])
    if not ("Ranks with" in line or "MnRtt" in line or "MxRtt" in line):
        return None
    values = sorted((float(v), r) for v, r in _RANKED.findall(line[:4000])) if "lowest" in line else []
    if len(values) > 1 and values[0][0] < RANK_FACTOR * values[1][0]:
        note = f"rank {values[0][1]} reaches {values[0][0] / values[1][0]:.2f} of the next slowest"
        return Reading(kind="megatron_straggler", key="rank_slow", table="rank_log", text=line[:2000], note=note)
    return Reading(kind="megatron_straggler", key="ranks_even", table="rank_log", text=line[:2000])


def read_rerun(line: str) -> Reading | None:
    """The re-run tracker's lines: `ts=... status=first_rerun_reproducible result=... message=...`."""
    m = _STATUS.search(line)
    if not m or "rank=" not in line:
        return None
    key = _RERUN.get(m[1].lower())
    if key is None:
        return None
    node = re.search(r"\bnode=(\S{1,255})", line)
    device = re.search(r"\bdevice=(\S{1,40})", line)
    # a second rerun accuses or clears the GPU of the first, which this line does not name
    here = m[1].lower().startswith(("initial", "first"))
    return Reading(
        kind="megatron_rerun",
        key=key,
        table="rank_log",
        node=node[1] if node and here else None,
        gpu=device[1] if device and here else None,
        text=line[:2000],
    )


def read_nccl(line: str) -> Reading | None:
    """Completion errors and ordinary lines of NCCL's own log."""
    m = _COMPLETION.search(line)
    if m:
        flush = int(m[1]) == _FLUSH_STATUS
        key = "nccl_net_flush" if flush else "nccl_net"
        note = "" if flush else f"status {m[1]}: the peer or the path, not the printer"
        return Reading(kind="nccl_net", key=key, table="rank_log", text=line[:2000], companion=flush, note=note)
    if "NCCL INFO" in line:
        return Reading(kind="nccl_net", key="nccl_info", table="rank_log", text=line[:2000])
    return None


def _timeout_key(line: str) -> tuple[str, str, str]:
    """(kind, key, note) of a line about a collective time-out."""
    if "signal dumping" in line or "dump signal" in line:
        return "flight_recorder", "collective_dump", "a time-out was seen; who is behind is told by the dumps"
    sequences, work = _SEQUENCES.search(line), _TIMED_OUT.search(line)
    behind = sequences is not None and work is not None and int(sequences[1]) < int(work[1])
    if behind or timeout_class(line) == "nccl_timeout_culprit":
        return "nccl_timeout", "collective_culprit", "this rank is behind the others"
    return "nccl_timeout", "collective_timeout", ""


def read_program(line: str) -> Reading | None:
    """A rank's own error lines, by the table of rank_patterns; else any Python exception."""
    return _known_error(line) or _launcher(line) or _python(line)


def _launcher(line: str) -> Reading | None:
    """What torchrun, mpirun and their like say of a process below them: the cause stands in its own output."""
    if _ASKED.search(line):
        return Reading(kind="python", key="interrupted", table="rank_log", text=line[:2000])
    if _LAUNCHER.search(line):
        return Reading(kind="python", key="task_exit", table="rank_log", text=line[:2000])
    return None


def _python(line: str) -> Reading | None:
    if line.startswith("Traceback (most recent call last)"):
        return Reading(kind="python", key="python_exception", table="rank_log", text=line[:200], companion=True)
    if _EXCEPTION.match(line):
        return Reading(kind="python", key="python_exception", table="rank_log", text=line[:2000])
    return None


def _known_error(line: str) -> Reading | None:
    for pattern in PATTERNS:
        if not pattern.regex.search(line):
            continue
        key, note = pattern.key, ""
        kind = _KINDS.get(key.partition("_")[0], "python")
        if key == "collective_timeout":
            kind, key, note = _timeout_key(line)
            if "gloo" in line or "recv operation" in line or "send operation" in line:
                kind = "gloo"
        elif key == "peer_died" and "gloo" not in line:
            kind = "nccl_err"
        elif key == "nccl_net":
            kind = "nccl_net" if "NET/IB" in line else "nccl_err"
        elif key == "filesystem":
            key = _filesystem_key(line)
        elif key == "cuda_ecc" and ("CONTAINED" in line or "NVLink" in line or "Nvlink" in line or "nvlink" in line):
            key = "cuda_nvlink"
        return Reading(kind=kind, key=key, table="rank_log", text=line[:2000], note=note)
    return None


def _filesystem_key(line: str) -> str:
    if "No space left" in line or "quota" in line:
        return "filesystem_full"
    return "filesystem_stale" if "Stale file handle" in line or "Transport endpoint" in line else "filesystem"
