"""Host lists: to names and back, bounded, and never a wrong name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.slurm.errors import SlurmError
from outlast.slurm.hostlist import compress, expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-2,4]", ["n1", "n2", "n4"]),
        ("gpu-[08-11],login", ["gpu-08", "gpu-09", "gpu-10", "gpu-11", "login"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("a[1-2]b[01-02]c", ["a1b01c", "a1b02c", "a2b01c", "a2b02c"]),
        ("n[9-10]", ["n9", "n10"]),
        ("n[007]", ["n007"]),
        ("", []),
        ("(null)", []),
        ("None assigned", []),
    ],
)
def test_expands(text: str, names: list[str]) -> None:
    assert list(expand(text)) == names


@pytest.mark.parametrize(
    "text",
    [
        "n[1-",
        "n]1[",
        "n[[1]]",
        "n[3-1]",
        "n[a-b]",
        "n[]",
        "n[1,]",
        "n1,,n2",
        "-w",
        "n 1",
        "n1;rm",
        "n[1-2]]",
        "é",
        "n[1]-",
    ],
)
def test_refuses_what_is_no_host_list(text: str) -> None:
    with pytest.raises(SlurmError, match="host list"):
        expand(text)


def test_expansion_is_bounded() -> None:
    with pytest.raises(SlurmError, match="more than 100,000"):
        expand("n[0-999999999999]")
    with pytest.raises(SlurmError, match="more than 100,000"):
        expand("a[0-999]b[0-999]")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n1", "n3", "n4"], "n[1,3-4]"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["n9", "n10"], "n[9-10]"),
        (["n8", "n09"], "n[8,09]"),
        (["n2", "n1"], "n[2,1]"),
        (["login", "n1", "m1"], "login,n1,m1"),
        ([], ""),
    ],
)
def test_compresses(names: list[str], text: str) -> None:
    assert compress(names) == text


numbers = st.from_regex(r"\A[0-9]{1,5}\Z")
node_names = st.builds(lambda a, b: a + b, st.sampled_from(["n", "gpu-", "r1n", "x", "a0b"]), numbers) | st.just(
    "login"
)


@given(st.lists(node_names, max_size=40))
def test_expansion_of_compression_is_the_same_list(names: list[str]) -> None:
    assert list(expand(compress(names))) == names


@given(st.text(alphabet="n1-9,[]0 .a", max_size=40) | st.text(max_size=40))
def test_any_text_gives_names_or_a_slurm_error(text: str) -> None:
    try:
        names = expand(text)
    except SlurmError:
        return
    assert list(expand(compress(names))) == list(names)
