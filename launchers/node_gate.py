"""The gate before an attempt: is this node fit, and which port is free on it. A thin use of monitors/gate.py.

The gate runs in a process of its own with a deadline: it asks drivers and file systems that may hang. No answer is
not a fault; it is unknown, and the start of the ranks will tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import sys
from dataclasses import dataclass

from outlast.reliability.model import GateOutcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NodeLook:
    outcome: GateOutcome
    findings: tuple[str, ...]
    free_port: int


async def look_at_node(address: str, *, timeout_s: float) -> NodeLook:
    """Run the gate. Never raises."""
    outcome, findings = await _ask_gate(timeout_s)
    return NodeLook(outcome=outcome, findings=findings, free_port=free_port(address))


def free_port(address: str) -> int:
    """A TCP port that nobody listens on just now; 0 where none can be had."""
    try:
        with socket.create_server((address, 0)) as server:
            return int(server.getsockname()[1])
    except OSError:
        return 0


async def _ask_gate(timeout_s: float) -> tuple[GateOutcome, tuple[str, ...]]:
    words = [sys.executable, "-m", "outlast.monitors.gate", "--json"]
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return GateOutcome.UNKNOWN, (f"the gate gave no answer within {timeout_s:.0f} s",)
    return parse_answer(out)


def parse_answer(out: bytes) -> tuple[GateOutcome, tuple[str, ...]]:
    """The gate's JSON: outcome, and findings as text."""
    try:
        said = json.loads(out)
        findings = tuple(str(f) for f in said.get("findings", ()))
        return GateOutcome(said["outcome"]), findings
    except (ValueError, KeyError, TypeError, AttributeError):
        return GateOutcome.UNKNOWN, ("the gate's answer could not be read",)
