"""Injected faults: read strictly, fired where they say, once where they say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.launchers.trainer_faults import Fault, FaultError, InjectedFault, due, inject, parse_faults


def test_faults_are_read() -> None:
    assert parse_faults("") == ()
    assert parse_faults(
        "exception:rank=1:train_step=25:once=/a:b/mark; exit:3:rank=0:train_step=2;slow:rank=0:train_step=3:seconds=.5;"
        "flood:rank=0:train_step=1:megabytes=2"
    ) == (
        Fault(kind="exception", rank=1, train_step=25, once=Path("/a:b/mark")),
        Fault(kind="exit", rank=0, train_step=2, code=3),
        Fault(kind="slow", rank=0, train_step=3, seconds=0.5),
        Fault(kind="flood", rank=0, train_step=1, megabytes=2),
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("explode:rank=1:train_step=2", "no such kind 'explode'"),
        ("exception:rank=1", "has \\['rank'\\], exception takes \\['rank', 'train_step'\\]"),
        ("exception:rank=1:train_step=2:seconds=1", "exception takes"),
        ("exception:rank=1:rank=1:train_step=2", "rank is given twice"),
        ("exception:rank=one:train_step=2", "rank is 'one'"),
        ("exception:rank=1:step=2", "no such field 'step'"),
        ("exception:rank=1:train_step=2:once=", "names no file"),
        ("exception:rank=-1:train_step=2", ">= 0"),
        ("slow:rank=1:train_step=2:seconds=nan", "finite"),
        ("exit:rank=1:train_step=2", "code"),
        ("exit:300:rank=1:train_step=2", "0 .. 255"),
    ],
)
def test_a_typing_error_is_an_error(text: str, word: str) -> None:
    with pytest.raises(FaultError, match=word):
        parse_faults(text)


@given(
    st.text(max_size=60) | st.from_regex(r"(exit|slow|flood|loop)(:[a-z_]{1,9}=?[0-9.e-]{0,4}){0,4}", fullmatch=True)
)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        faults = parse_faults(text)
    except FaultError:
        return
    assert all(fault.rank >= 0 and fault.train_step >= 0 for fault in faults)


def test_a_fault_is_due_on_its_rank_at_its_train_step() -> None:
    fault = parse_faults("exception:rank=1:train_step=5")[0]
    assert [due(fault, rank=r, train_step=t) for r, t in ((1, 5), (0, 5), (1, 4), (1, 6))] == [
        True,
        False,
        False,
        False,
    ]
    slow = parse_faults("slow:rank=1:train_step=5:seconds=1")[0]
    assert [due(slow, rank=1, train_step=t) for t in (4, 5, 6)] == [False, True, True]


def test_once_is_once_over_all_attempts(tmp_path: Path) -> None:
    faults = parse_faults(f"exception:rank=0:train_step=5:once={tmp_path / 'mark'}")
    inject(faults, rank=0, train_step=4)
    with pytest.raises(InjectedFault, match="train_step 5"):
        inject(faults, rank=0, train_step=5)
    inject(parse_faults(f"exception:rank=0:train_step=5:once={tmp_path / 'mark'}"), rank=0, train_step=5)
