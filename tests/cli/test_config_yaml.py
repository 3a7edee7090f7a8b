"""The YAML reader is strict and never surprised; what the writer writes, every reader reads back."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from outlast.reliability.config_yaml import LIMIT_BYTES, YamlError, parse_yaml, render_yaml

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
TREES = st.recursive(
    SCALARS | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-3", 0.003),
        ("2E5", 2e5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-7", -7),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("12:30:00", "12:30:00"),
        ("010", "010"),
        ("0x1f", "0x1f"),
        ("1_000", "1_000"),
        ("2026-01-02", "2026-01-02"),
        (".inf", ".inf"),
        ("~", None),
        ("", None),
    ],
)
def test_scalars_are_read_as_yaml_1_2_reads_them(text: str, value: object) -> None:
    found = parse_yaml(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: 'a' is given twice, first on line 1"),
        ("x: {a: 1, a: 1}", "'a' is given twice"),
        ("1: x", "a key must be text"),
        ("? [a]\n: x", "a key must be text"),
        ("a: [1", "expected ',' or ']'"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: !!timestamp 2026-01-01", "could not determine a constructor"),
        ("a: !!int x", "does not fit its type"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("a: \x00", "not allowed"),
        ("9" * 5000, "does not fit its type"),
        ("[" * 1500, "nested too deeply"),
        ("a" * (LIMIT_BYTES + 1), "expected a file of at most 262,144 bytes"),
    ],
)
def test_what_is_not_acceptable_is_said(text: str, words: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    assert words in str(caught.value)


def test_merge_keys_and_anchors_work() -> None:
    assert parse_yaml("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}\nc: {<<: *x}") == {
        "a": {"p": 1, "q": 2},
        "b": {"p": 1, "q": 3},
        "c": {"p": 1, "q": 2},
    }


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_input_gives_a_tree_or_a_yaml_error(text: bytes | str) -> None:
    try:
        parse_yaml(text)
    except YamlError as error:
        assert str(error)


@pytest.mark.slow
@given(TREES)
def test_what_is_written_reads_back_in_three_languages(tree: object) -> None:
    text = render_yaml(tree)  # type: ignore[arg-type]
    for read in (parse_yaml, json.loads, yaml.safe_load):
        found = read(text)  # type: ignore[operator]
        assert found == tree and repr(found) == repr(tree)
