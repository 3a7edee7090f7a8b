"""The gate before an attempt: is this node fit, and which port is free on it. A thin use of monitors/gate.py.

    the run directory is writable here    all GPUs are there and well    no rank of an earlier attempt is left

The gate runs in a process of its own with a deadline: it asks drivers and file systems that may hang. No answer is
not a fault; it is unknown, and the start of the ranks will tell. A file system that is full is full for every node
of the run: that convicts none.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outlast.launchers.recorder import STOP_FILE_ENV
from outlast.reliability.model import GateOutcome

_EVERYBODYS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
"""What a shared file system says to all nodes alike."""


@dataclass(frozen=True, kw_only=True)
class NodeLook:
    outcome: GateOutcome
    findings: tuple[str, ...]
    free_port: int


async def look_at_node(
    address: str,
    *,
    gpus: int,
    timeout_s: float,
    helpers: set[int],
    run_dir: Path | None = None,
    marker: str = "",
) -> NodeLook:
    """Run the gate. Never raises. Its pid is among `helpers` meanwhile, so that no ladder takes it for a rank's."""
    words = gate_words(gpus, timeout_s, run_dir=run_dir, marker=marker)
    outcome, findings = await _ask_gate(words, timeout_s, helpers)
    return NodeLook(outcome=outcome, findings=findings, free_port=await asyncio.to_thread(free_port, address))


def gate_words(gpus: int, timeout_s: float, *, run_dir: Path | None = None, marker: str = "") -> list[str]:
    """The gate's command line. Its own deadline comes first, so that it can say what it did not get to see."""
    words = [sys.executable, "-P", "-m", "outlast.monitors.gate", "--json", "--skip", "port"]
    words += ["--deadline", f"{max(1.0, min(10.0, timeout_s / 2)):g}"]
    words += ["--gpus", str(gpus)] if gpus else []
    words += ["--path", str(run_dir)] if run_dir is not None else []
    return [*words, *(["--marker", marker] if marker else [])]


def rank_marker(nest: Path) -> str:
    """What stands in the environment of this node's ranks alone. `nest`: the agent's own place (launchers/nest.py)."""
    return f"{STOP_FILE_ENV}={nest}/"


def free_port(address: str) -> int:
    """A TCP port that nobody listens on just now; 0 where none can be had."""
    try:
        with socket.create_server((address, 0)) as server:
            return int(server.getsockname()[1])
    except OSError:
        return 0


async def _ask_gate(words: list[str], timeout_s: float, helpers: set[int]) -> tuple[GateOutcome, tuple[str, ...]]:
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    helpers.add(process.pid)
    try:
        out, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        return GateOutcome.UNKNOWN, (f"the gate gave no answer within {timeout_s:.0f} s",)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        helpers.discard(process.pid)
    return parse_answer(out)


def parse_answer(out: bytes) -> tuple[GateOutcome, tuple[str, ...]]:
    """The gate's JSON: its outcome, and what is not well, as text."""
    try:
        report = _decoder.decode(out)
    except msgspec.MsgspecError as e:
        return GateOutcome.UNKNOWN, (f"the gate's answer could not be read: {e}",)
    bad = [f.of_this_node() for f in report.checks if f.outcome is not GateOutcome.WELL]
    outcomes = {f.outcome for f in bad} or {report.outcome}
    for worst in (GateOutcome.FAULT, GateOutcome.UNKNOWN):
        if worst in outcomes:
            return worst, tuple(map(str, bad))
    return GateOutcome.WELL, ()


class _Finding(msgspec.Struct):
    """As monitors/gate_checks.py prints it; fields that are new there are passed over."""

    check: str
    outcome: GateOutcome
    found: str = ""
    expected: str = ""

    def __str__(self) -> str:
        expected = f", expected {self.expected}" if self.expected else ""
        return f"{self.check}: {self.outcome}: {self.found}{expected}"

    def of_this_node(self) -> _Finding:
        if self.check.startswith("writable ") and self.found in _EVERYBODYS:
            return msgspec.structs.replace(self, outcome=GateOutcome.UNKNOWN)
        return self


class _Report(msgspec.Struct):
    outcome: GateOutcome
    checks: list[_Finding] = []


_decoder = msgspec.json.Decoder(_Report)
