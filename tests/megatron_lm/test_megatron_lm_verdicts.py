"""What Megatron-LM's exit codes 16 and 17 come to, from captured output to the rank that is blamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.monitors.rank_log import read_last_words
from outlast.reliability.evidence import ExitFact, primary_exit
from outlast.reliability.model import Node, Rank, RankExited

LOGS = Path(__file__).parent.parent / "data" / "megatron_lm"


@pytest.mark.parametrize(
    ("log", "culprit"),
    [
        ("0.16.1-rerun-first.txt", "sdc_suspect"),
        ("0.16.1-rerun-transient.txt", "sdc_suspect"),
        ("0.16.1-rerun-persistent.txt", "sdc_confirmed"),
        ("0.16.1-rerun-correct.txt", "instability"),
    ],
)
def test_the_rank_with_the_doubtful_result_tells_its_class_and_the_others_tell_none(log: str, culprit: str) -> None:
    told, others = (LOGS / log).read_text().split("==== another rank\n")
    assert read_last_words(told).error_class == culprit
    assert read_last_words(others).error_class == ""


def ended(rank: int, at_s: float, code: int, error_class: str = "") -> ExitFact:
    exited = RankExited(
        node=Node("ab"[rank]), at_s=at_s, attempt=1, rank=Rank(rank), exit_code=code, error_class=error_class
    )
    return ExitFact(seq=rank + 1, seen_s=at_s, exit=exited)


def test_of_a_reruns_exits_the_one_that_tells_leads_even_if_it_comes_last() -> None:
    first = primary_exit((ended(1, 1.0, 16), ended(0, 1.2, 16, "sdc_suspect")))
    assert first is not None and first.exit.rank == 0


def test_another_programs_exit_16_is_no_rerun() -> None:
    first = primary_exit((ended(1, 1.0, 16), ended(0, 1.2, 16)))
    assert first is not None and first.exit.rank == 1
