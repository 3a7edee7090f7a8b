"""The gate before an attempt: is this node fit, and which port is free on it. A thin use of monitors/gate.py.

The gate runs in a process of its own with a deadline: it asks drivers and file systems that may hang. No answer is
not a fault; it is unknown, and the start of the ranks will tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from dataclasses import dataclass

import msgspec

from outlast.reliability.model import GateOutcome


@dataclass(frozen=True, kw_only=True)
class NodeLook:
    outcome: GateOutcome
    findings: tuple[str, ...]
    free_port: int


async def look_at_node(address: str, *, gpus: int, timeout_s: float, helpers: set[int]) -> NodeLook:
    """Run the gate. Never raises. Its pid is among `helpers` meanwhile, so that no ladder takes it for a rank's."""
    outcome, findings = await _ask_gate(gate_words(gpus, timeout_s), timeout_s, helpers)
    return NodeLook(outcome=outcome, findings=findings, free_port=await asyncio.to_thread(free_port, address))


def gate_words(gpus: int, timeout_s: float) -> list[str]:
    """The gate's command line. Its own deadline comes first, so that it can say what it did not get to see."""
    words = [sys.executable, "-P", "-m", "outlast.monitors.gate", "--json", "--skip", "port"]
    return [*words, "--deadline", f"{max(1.0, min(10.0, timeout_s / 2)):g}", *(["--gpus", str(gpus)] if gpus else [])]


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
    return report.outcome, tuple(str(f) for f in report.findings if f.outcome is not GateOutcome.WELL)


class _Finding(msgspec.Struct):
    """As monitors/gate_checks.py prints it; fields that are new there are passed over."""

    check: str
    outcome: GateOutcome
    found: str = ""
    expected: str = ""

    def __str__(self) -> str:
        expected = f", expected {self.expected}" if self.expected else ""
        return f"{self.check}: {self.outcome}: {self.found}{expected}"


class _Report(msgspec.Struct):
    outcome: GateOutcome
    findings: list[_Finding] = []


_decoder = msgspec.json.Decoder(_Report)
