"""A site's rows: every fault with its path, every change with what it means."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.reliability import site_policy
from outlast.reliability.catalogue import load_catalogue
from outlast.reliability.cli.root import start
from outlast.reliability.policy_check import changes, check_tables


def said(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    site = tmp_path / "site.yaml"
    site.write_text(text)
    code = start(["policy", "check", str(site), *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_every_fault_is_told_with_its_path_and_what_was_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "xid: {}\n"
        "xids:\n  79: {drain: false, action: drain_rebot, blames: gpus}\n  abc: {}\n  500: {action: watch}\n  13: 3\n"
        "sxids: []\n"
        "kernel:\n  aer_corected: {action: watch}\n  aer_fatal: {alone: 1}\n"
    )
    code, out, err = said(text, tmp_path, capsys)
    assert (code, out) == (2, "")
    told = [line.partition("site.yaml: ")[2] for line in err.splitlines()]
    assert told == [
        "$.xid: no such table; did you mean 'xids'?",
        "$.xids.79.drain: no such setting; did you mean 'drains'?",
        "$.xids.79.action: found 'drain_rebot'; did you mean 'drain_reboot'?",
        "$.xids.79.blames: found 'gpus'; did you mean 'gpu'?",
        "$.xids.abc: found 'abc', expected a code such as 79",
        "$.xids.500: the catalogue has no such row: a new one needs name, class, blames too",
        "$.xids.13: found 3, expected a row such as {action: watch}",
        "$.sxids: found a list, expected rows by key",
        "$.kernel.aer_corected: no kind of line has this key; did you mean 'aer_corrected'?",
        "$.kernel.aer_fatal.alone: found 1, expected true or false",
    ]


def test_changes_and_what_follows_from_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "xids:\n  31: {drains: true}\n  79: {drains: false}\n  48: {}\n"
        "  500: {name: of next year, class: gpu_hang, action: drain_reset, blames: gpu, drains: true}\n"
        "kernel:\n  aer_fatal: {action: watch}\n"
    )
    code, out, err = said(text, tmp_path, capsys, "--json")
    assert (code, err) == (0, "")
    changed = {f"{c['table']}.{c['key']}": c for c in json.loads(out)["changes"]}
    assert list(changed) == ["xids.31", "xids.79", "xids.500", "kernel.aer_fatal"]
    assert "drains: false -> true" in changed["xids.31"]["fields"]
    assert "a program can cause this line" in changed["xids.31"]["beware"][0]
    # a row that no longer drains no longer convicts either, unless it says so: that must be seen
    assert "convicts: true -> false" in changed["xids.79"]["fields"]
    assert "a run goes on using the node" in changed["xids.79"]["means"]
    assert "stays in service" in changed["xids.79"]["beware"][0]
    assert any("no second witness" in text for text in changed["xids.500"]["means"])
    assert changed["kernel.aer_fatal"]["fields"] == ["action: drain_reboot -> watch"]
    code, out, _ = said(text, tmp_path, capsys)
    assert code == 0 and "xids.79  GPU fell off the bus" in out


@pytest.mark.parametrize("text", ["{}", "xids:\n  79: {action: drain_reboot}\n"])
def test_a_file_that_changes_nothing_says_so(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(text, tmp_path, capsys)[1].endswith("it changes nothing\n")


@pytest.mark.parametrize("text", ["", "[", "\x00", "- 1", "a: !!python/object:os.system {}"])
def test_what_is_no_table_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(text, tmp_path, capsys)
    assert (code, out) == (2, "") and "site.yaml" in err
    assert start(["policy", "check", str(tmp_path / "none.yaml")]) == 2


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["watch", "gpu"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["xids", "kernel", "sxids", "drains", "action", "blames", "name"])
            | st.integers(0, 200)
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


KNOWN = site_policy.tables_of(None)


@given(VALUES)
def test_any_data_has_findings_that_name_a_path(value: object) -> None:
    for finding in check_tables(value, source="site.yaml", known=KNOWN):
        assert str(finding).startswith("site.yaml: $") and len(str(finding)) < 1_000


ROWS = st.fixed_dictionaries(
    {},
    optional={
        "action": st.sampled_from(["watch", "drain_reset"]),
        "blames": st.sampled_from(["gpu", "program"]),
        "drains": st.booleans(),
        "alone": st.booleans(),
        "stops": st.booleans(),
        "meaning": st.text(max_size=5),
    },
)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.dictionaries(st.integers(1, 176), ROWS, max_size=3), st.dictionaries(st.sampled_from(["mce"]), ROWS))
def test_what_passes_the_check_can_be_loaded(xids: dict[int, object], kernel: dict[str, object]) -> None:
    data = {"xids": xids, "kernel": kernel}
    if check_tables(data, source="site.yaml", known=KNOWN):
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as site:
        yaml.safe_dump(data, site)
        site.flush()
        catalogue = load_catalogue(Path(site.name))
        after = site_policy.tables_of(catalogue, data)
    for change in changes(data, before=KNOWN, after=after):
        assert change.fields
