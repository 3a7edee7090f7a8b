"""`outlast judge` and `outlast classify` as commands: lines in, lines out, exit codes."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.reliability.cli import root
from outlast.reliability.cli.judge_io import judge_lines, make_tools
from outlast.reliability.judging.case import CaseError

LINE = "NVRM: Xid (PCI:0000:3b:00): 79, pid=0, GPU has fallen off the bus."


def test_a_file_of_cases_is_judged(tmp_path, capfdbinary) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text(json.dumps({"id": "a", "input": LINE, "more": 1}) + "\n\n" + json.dumps({"id": "b", "input": ""}))
    assert root.start(["judge", str(file)]) == 0
    rows = [json.loads(row) for row in capfdbinary.readouterr().out.splitlines()]
    assert [(r["id"], r["verdict"], r["action"]) for r in rows] == [
        ("a", "hardware_fault", "drain_restart_spare"),
        ("b", "no_fault", "none"),
    ]


@pytest.mark.parametrize("command", ["judge", "classify"])
def test_standard_input_is_read(command, monkeypatch, capfdbinary) -> None:
    given = LINE if command == "classify" else json.dumps({"id": "a", "input": LINE})
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given.encode() + b"\n")))
    assert root.start([command, "-"]) == 0
    (row,) = capfdbinary.readouterr().out.splitlines()
    assert json.loads(row)["action"] in ("drain_reboot", "drain_restart_spare")


def test_a_case_that_cannot_be_read_is_wrong_use(tmp_path, capfd) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text('{"id": "a", "input": "x"}\n{"id": 7}\n')
    assert root.start(["judge", str(file)]) == root.WRONG
    assert f"{file}:2: expected an object with id and input" in capfd.readouterr().err


def test_rows_that_cannot_be_used_are_wrong_use(tmp_path, capfd) -> None:
    cases, rows = tmp_path / "cases.jsonl", tmp_path / "rows.yaml"
    cases.write_text('{"id": "a", "input": "x"}\n')
    rows.write_text("xids: {79: {blames: everybody}}\n")
    assert root.start(["judge", str(cases), "--rows", str(rows)]) == root.WRONG
    assert "everybody" in capfd.readouterr().err


@given(
    st.binary(max_size=200)
    | st.dictionaries(
        st.sampled_from(["id", "input", "context", "x"]),
        st.text(max_size=40) | st.integers() | st.none() | st.lists(st.dictionaries(st.text(max_size=6), st.text())),
    ).map(lambda case: json.dumps(case).encode())
)
def test_any_bytes_are_answers_or_name_their_line(data: bytes) -> None:
    try:
        answers = list(judge_lines(data.split(b"\n"), make_tools(), where="cases.jsonl"))
    except CaseError as error:
        assert str(error).startswith("cases.jsonl:")
    else:
        assert all(answer.verdict and answer.action for answer in answers)


def test_a_missing_file_asks_to_try_again(tmp_path) -> None:
    assert root.start(["judge", str(tmp_path / "no")]) == root.AGAIN
    assert root.start(["classify", str(tmp_path / "no")]) == root.AGAIN
