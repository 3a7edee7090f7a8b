"""Recorded cases: the verdict and action of each that machines wrote, and for every case what must not come out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import judging_cases as told
import pytest

LINES = [c for c in told.CASES if c["told"] == "lines"]
MISSES = {
    "NCCL-06": "that it comes back at the first step, which makes it the program's, is not in its lines: "
    "two lines of a rank that was told of another's time-out support no more than one restart",
}
"""Cases of which the recorded verdict cannot be had from the lines, with the reason."""
NAMES = ("c7-b", "node", "x1001c0s", "rack2-gpu")


def test_verdict_and_action_are_right_on_nearly_all_cases_that_machines_wrote() -> None:
    wrong = []
    for case in LINES:
        answer = told.judged(case)
        if answer.verdict != case["verdict"] or not told.same_action(answer.action, case["action"]):
            wrong.append((case["id"], answer.verdict, answer.action, answer.because.rule))
    assert [w for w in wrong if w[0] not in MISSES] == []
    assert len(wrong) <= 0.05 * len(LINES)


@pytest.mark.parametrize("case", told.CASES, ids=lambda c: c["id"])
def test_what_must_not_be_does_not_happen(case) -> None:
    assert not told.harm(told.judged(case), case["id"])


def test_an_answer_that_must_not_be_would_be_noticed() -> None:
    answer = told.judged(told.BY_ID["XID-13"])
    assert told.harm(answer, "XID-01") == ["action drain_restart_spare", "verdict hardware_fault"]
    assert told.harm(answer, "SLURM-30") == ["action drain_restart_spare"]


@pytest.mark.parametrize("name", NAMES)
def test_other_names_change_no_verdict(name: str) -> None:
    for case in told.CASES:
        before, after = told.judged(case), told.judged(told.renamed(case, name))
        assert (after.verdict, after.action) == (before.verdict, before.action), case["id"]


@pytest.mark.parametrize("hours", [1, 2, 5])
def test_other_times_change_no_verdict(hours: int) -> None:
    for case in told.CASES:
        before, after = told.judged(case), told.judged(told.shifted(case, hours))
        assert (after.verdict, after.action) == (before.verdict, before.action), case["id"]


def test_the_changes_do_change_something() -> None:
    changed = [c["id"] for c in told.CASES if told.renamed(c, "x")["input"] != c["input"]]
    moved = [c["id"] for c in told.CASES if told.shifted(c, 1)["input"] != c["input"]]
    assert len(changed) > 50 and len(moved) > 40


CHECKED = {
    *("incidents", "xid", "xids", "pci", "pid", "process", "gpu_index", "component", "fatal", "link", "occurrences"),
    *("samples_kept", "lines_rejected", "failed", "seq", "missing_ranks", "first_reporter", "primary_status", "local"),
    *("peer", "culprit_scope", "expand", "all_raise", "free_spares", "drained_or_draining", "not_responding"),
    *("not_drained", "gpu-120", "gpu-044", "max_nodes_drained", "state", "host", "chosen", "rank", "device"),
    *("gap_reported", "complete", "event_time", "states", "exit", "brake_nodes", "decoded"),
}


def _comparable() -> list[dict]:
    """Cases whose facts follow from a verdict that is reached; those told in prose are in test_signals.py."""
    return [c for c in told.CASES if c.get("checks") and told.judged(c).verdict == c["verdict"]]


@pytest.mark.parametrize("case", _comparable(), ids=lambda c: c["id"])
def test_facts_that_a_program_can_compare(case) -> None:
    answer = told.judged(case)
    for key in case["checks"].keys() & CHECKED:
        assert answer.checks.get(key) == case["checks"][key], key


@pytest.mark.parametrize("case", told.CASES, ids=lambda c: c["id"])
def test_every_answer_says_why(case) -> None:
    because = told.judged(case).because
    assert because.rule and because.text
    assert all(r.alternative and r.why for r in because.rejected)
    lines = case["input"] if isinstance(case["input"], str) else "\n".join(i["text"] or " " for i in case["input"])
    numbers = [int(e.removeprefix("e")) for e in because.evidence]
    assert numbers and all(1 <= n <= len(lines.splitlines()) for n in numbers)


HOUSE = Path(__file__).parents[2] / "reliability"


def test_no_rule_or_table_holds_a_name_an_address_or_a_sentence_of_a_case() -> None:
    """Seven words in a row, names of nodes, and PCI and IP addresses of the cases are looked for in our sources."""
    sources = [*(HOUSE / "judging").glob("*.py"), *(HOUSE / "catalog").glob("*.yaml")]
    text = "\n".join(p.read_text() for p in sources).lower()
    plain = " ".join(re.findall(r"[a-z0-9_]+", text))
    found = []
    for case in told.CASES:
        given = json.dumps(case["input"]).lower()
        for word in {*re.findall(r"\bgpu-\d{3}\b", given), *re.findall(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", given)}:
            found += [(case["id"], word)] if word in text else []
        for pci in set(re.findall(r"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\b", given)) - {"0000:3b:00", "0000:00:00"}:
            found += [(case["id"], pci)] if pci in text else []
        words = re.findall(r"[a-z0-9_]+", given.replace("\\n", " "))
        for i in range(len(words) - 6):
            run = " ".join(words[i : i + 7])
            found += [(case["id"], run)] if run in plain else []
    assert not found
