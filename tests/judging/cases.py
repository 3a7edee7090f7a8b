"""The recorded cases, what must come out and what must not, and the same cases under other names and at other times.

Not a test. `told` says whether a case is lines that machines wrote, or what somebody tells of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from outlast.reliability.cli.judge_io import make_tools
from outlast.reliability.judging.case import read_case
from outlast.reliability.judging.judge import judge_case
from outlast.reliability.judging.words import Answer

DATA = Path(__file__).parent.parent / "data" / "cases"
CASES: list[dict[str, Any]] = [json.loads(line) for line in (DATA / "cases.jsonl").read_text().splitlines()]
BY_ID = {case["id"]: case for case in CASES}
_forbidden = yaml.safe_load((DATA / "forbidden.yaml").read_text())
FORBIDDEN: dict[str, dict[str, Any]] = _forbidden["cases"]
DRAINS: list[str] = _forbidden["drains"]
TOOLS = make_tools()


def judged(case: dict[str, Any]) -> Answer:
    return judge_case(read_case(case, case["id"]), TOOLS)


def same_action(action: str, wanted: str) -> bool:
    """Writing it down and doing nothing are the same to the cluster."""
    return action == wanted or {action, wanted} <= {"none", "log"}


def harm(answer: Answer, id_: str) -> list[str]:
    """What of this answer must not be."""
    rules = FORBIDDEN[id_]
    actions = DRAINS if rules.get("actions") == "drains" else rules.get("actions", [])
    found = [f"action {answer.action}"] if answer.action in actions else []
    found += [f"verdict {answer.verdict}"] if answer.verdict in rules.get("verdicts", []) else []
    culprit = answer.culprit or ""
    # a name at the end of a word: gpu-00 does not stand for gpu-001
    found += [
        f"culprit {culprit!r} names {word}"
        for word in rules.get("culprits", [])
        if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", culprit)
    ]
    incidents = answer.checks.get("incidents")
    if isinstance(incidents, int) and incidents > rules.get("incidents", incidents):
        found.append(f"{incidents} incidents")
    return found


# ---------------------------------------------------------------- other names, other times

_NODE = re.compile(r"\bgpu-([0-9]{3})\b(?!-[0-9a-f]{4})|\bgpu-(?=\[)")
_PCI = re.compile(r"\b([0-9a-fA-F]{4}|[0-9a-fA-F]{8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\b")
_PID = re.compile(r"(\bpid[= ]|\(pid:? ?|\w\[(?=[0-9]{2,7}\]:))([0-9]{2,7})(?![0-9.])")
"""`pid=7011`, `pid 4312`, `(pid 268269)`, `python3[51122]`."""
_THREAD = re.compile(r"(?<=:)([0-9]{2,7}):([0-9]{2,7})(?= \[[0-9]\])")
"""NCCL's `node:pid:tid [gpu]`."""
_UUID = re.compile(r"\b((?:GPU|gpu)-)([0-9a-f]{8})(?=-[0-9a-f]{4})")
_CLOCK = re.compile(r"(?<![\d:.\w])([01]\d|2[0-3]):([0-5]\d)(?=$|[:\s,.+Z]|\b)(?!:\d{3})")
_CLOCK_ISO = re.compile(r"(?<=T)([01]\d|2[0-3]):([0-5]\d)")
_UPTIME = re.compile(r"^\[ {0,4}([0-9]+)\.([0-9]{6})\]")


def renamed(case: dict[str, Any], name: str) -> dict[str, Any]:
    """All nodes, GPUs and processes of a case called otherwise; the same thing by the same new name."""

    def swap(text: str) -> str:
        text = _NODE.sub(lambda m: f"{name}{m[1]}" if m[1] else name, text)
        text = _PCI.sub(lambda m: f"{m[1]}:{(int(m[2], 16) * 7 + 13) % 256:02x}:{m[3]}", text)
        text = _UUID.sub(lambda m: f"{m[1]}{(int(m[2], 16) + 0x51ABCD) % (1 << 32):08x}", text)
        text = _THREAD.sub(lambda m: f"{int(m[1]) + 1009}:{int(m[2]) + 1009}", text)
        return _PID.sub(lambda m: f"{m[1]}{int(m[2]) + 1009}", text)

    return _changed(case, swap)


def shifted(case: dict[str, Any], hours: int) -> dict[str, Any]:
    """The same at another time of day, where that does not pass midnight."""
    text = json.dumps(case["input"])
    seen = [int(h) for h, _ in (*_CLOCK.findall(text), *_CLOCK_ISO.findall(text))]
    if seen and max(seen) + hours > 23:
        hours = -min(seen)

    def swap(text: str) -> str:
        for clock in (_CLOCK, _CLOCK_ISO):
            text = clock.sub(lambda m: f"{int(m[1]) + hours:02d}:{m[2]}", text)
        return _UPTIME.sub(lambda m: f"[{int(m[1]) + 3600 * hours + 86400}.{m[2]}]", text)

    return _changed(case, swap)


def _changed(case: dict[str, Any], swap: Any) -> dict[str, Any]:
    given = case["input"]
    if isinstance(given, str):
        new: Any = "\n".join(swap(line) for line in given.split("\n"))
    else:
        new = [{key: "\n".join(swap(row) for row in item[key].split("\n")) for key in item} for item in given]
    return {**case, "input": new}
