"""What the checkpoint bench says of its measurements: medians, limits, the best peer, and who did not run."""

from __future__ import annotations

from tests.bench.checkpoint import COPY, OURS, OVERLAPPED, RAW, Detail, _table, judge
from tests.bench.checkpoint_memory import Extra, find_peak, judge_memory
from tests.bench.checkpoint_rank import Sample

GIB = 1 << 30


def sample(method: str, lost_s: float, durable_s: float, load_s: float, at_s: float) -> Sample:
    return Sample(method=method, lost_s=lost_s, durable_s=durable_s, load_s=load_s, began_s=at_s, ended_s=at_s + 5.0)


def make_detail(ours_lost_s: float) -> Detail:
    samples = [
        sample(COPY, 1.0, 0.0, 0.0, 0.0),
        sample(RAW, 0.0, 4.0, 3.0, 0.0),
        sample("DCP save", 9.0, 9.0, 9.0, 10.0),
        sample("DCP async thread", 5.0, 8.0, 9.0, 20.0),
        *(sample(OURS, lost_s, 4.5, 3.5, 30.0) for lost_s in (0.1, ours_lost_s, 50.0)),
        sample(OVERLAPPED, 0.4, 4.5, 3.5, 40.0),
        Sample(method="torchsnapshot async", error="ImportError: no"),
    ]
    reshard = {"4 -> 2": [sample(OURS, 0.0, 0.0, 3.0, 0.0), sample("DCP save", 0.0, 0.0, 6.0, 0.0)]}
    memory = [
        Extra(method="DCP async thread", extra_bytes=2 * GIB),
        Extra(method="torchsnapshot async", extra_bytes=0, error="ImportError: no"),
        Extra(method=OURS, extra_bytes=GIB + (64 << 20)),
    ]
    return Detail(state_bytes=GIB, samples=samples, samples_both_cores_computing=[], reshard=reshard, memory=memory)


def test_memory_is_the_peak_above_what_was_held_before() -> None:
    seen = [(9.0, 5 * GIB), (10.0, GIB), (12.0, 4 * GIB), (13.0, 5 * GIB), (14.0, 2 * GIB), (16.0, 9 * GIB)]
    assert find_peak(Sample(method="x", began_s=10.5, ended_s=15.0), seen).extra_bytes == 3 * GIB
    assert find_peak(Sample(method="x", began_s=8.0, ended_s=15.0), seen).error == "it was not seen"


def test_memory_that_was_not_measured_is_not_met() -> None:
    rows = judge_memory([Extra(method=OURS, extra_bytes=0, error="why")], OURS, ["DCP async thread"], GIB)
    assert [(row.met, row.missed) for row in rows] == [(False, False)] and "not measured: why" in rows[0].figure


def test_each_figure_is_held_to_the_limit_and_to_the_best_peer() -> None:
    rows = {row.figure: row for row in judge(make_detail(1.05))}
    assert not [row.figure for row in rows.values() if row.missed]
    assert rows["lost training time against the limit"].ratio == 1.05
    assert rows["lost training time"].peers == {"DCP save": 9.0, "DCP async thread": 5.0}


def test_a_miss_is_a_miss() -> None:
    missed = [row.figure for row in judge(make_detail(1.2)) if row.missed]
    assert missed == ["lost training time against the limit"]


def test_the_table_names_who_did_not_run() -> None:
    table = _table("title", make_detail(1.0).samples)
    assert "does not run here: ImportError: no" in table
    assert "outlast, overlapped" in table
