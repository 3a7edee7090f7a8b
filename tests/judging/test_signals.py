"""Cases that somebody tells in prose, as the typed facts that the suite's own parts would report.

Words convict nobody, so `outlast judge` answers most of these with a page for a person when it is given the words. With
the facts, the verdict is the recorded one, and nothing that must not be happens.
"""

from __future__ import annotations

from collections.abc import Callable

import judging_cases as told
import pytest

from outlast.reliability.judging import facts as f
from outlast.reliability.judging import facts_more as more
from outlast.reliability.judging import facts_run as run
from outlast.reliability.judging.case import read_case
from outlast.reliability.judging.judge import answer
from outlast.reliability.runfile import LayoutAsked

PROSE = [c for c in told.CASES if c["told"] == "prose"]
LAG = "behind"


def own(what: str) -> tuple[f.Fact, ...]:
    return (run.OwnDoing(id=1, what=what),)


def resumed(wrong: str, **more: int) -> tuple[f.Fact, ...]:
    return (run.Resumed(id=1, wrong=wrong, **more),)


def gib(*numbers: int) -> tuple[int, ...]:
    return tuple(n << 30 for n in numbers)


def killed_for_memory(id_: int, node: str) -> f.HostFault:
    return f.HostFault(id=id_, node=node, key="oom_job", class_="oom_job", action="stop_job", blames="program")


def nan_again(id_: int, node: str, key: str) -> f.RankSaid:
    return f.RankSaid(
        id=id_, node=node, rank=85, key=key, class_="sdc_suspect", action="rerun_elsewhere", train_step=8120
    )


def brake(id_: int, node: str, mask: int) -> f.PowerLooked:
    return f.PowerLooked(id=id_, node=node, gpu="2", mask=mask)


STAGES = (118.0, 118.0, 119.0, 118.0), (139.0, 138.0, 166.0, 139.0)

SIGNALS: dict[str, Callable[[], tuple[f.Fact, ...]]] = {
    "NCCL-10": lambda: tuple(
        f.Missing(id=i, rank=rank, node=node, run=f"run {i}", how=LAG)
        for i, (rank, node) in enumerate(((147, "gpu-037"), (402, "gpu-101"), (9, "gpu-003")), 1)
    ),
    "NCCL-11": lambda: (f.Missing(id=2, rank=12, node="gpu-002", how="outside"),),
    "SLURM-06": lambda: tuple(
        run.NamesListed(id=1, text=name, names=(name,)) for name in ("node", "node9", "node010", "node011")
    ),
    "CKPT-10": lambda: (run.SavesCompared(id=1, identical=3),),
    "CKPT-11": lambda: (run.LoadFailed(id=1, why="nan", name="iter_0003000", places=2),),
    "CKPT-13": lambda: (run.LoadFailed(id=2, why="other_size", text="loader state of dp 2, restored with dp 1"),),
    "CKPT-15": lambda: resumed("exhausted"),
    "CKPT-16": lambda: resumed("learning_rate"),
    "CKPT-18": lambda: (
        more.HostMemory(id=1, used_bytes=gib(120, 224, 354)),
        killed_for_memory(4, "gpu-007"),
        killed_for_memory(5, "gpu-031"),
    ),
    "CKPT-20": lambda: (run.SavesCompared(id=3, none_durable=True),),
    "CKPT-23": lambda: (
        more.NodesLeft(
            id=1, nodes=95, ranks_per_node=4, asked=LayoutAsked(tp=2, pp=4, global_batch=1024, micro_batch=1)
        ),
    ),
    "CKPT-25": lambda: (more.StuckSaving(id=2, ranks=(14, 15)),),
    "CKPT-26": lambda: resumed("rng"),
    "STRAG-03": lambda: own("false_alarm"),
    "STRAG-05": lambda: tuple(
        more.Paused(id=1, rank=r, pause_s=s) for r, s in ((37, 1.31), (5, 1.25), (201, 1.46), (88, 1.29))
    ),
    "STRAG-06": lambda: tuple(
        more.Compared(
            id=1,
            names=tuple(f"r{i}" for i in range(6)),
            times_s=tuple(4.2 if i == slow else 2.25 for i in range(6)),
            work=tuple(4.2e9 if i == slow else 2.2e9 for i in range(6)),
        )
        for slow in (3, 0, 5, 1)
    ),
    "STRAG-08": lambda: tuple(
        more.Compared(id=1, names=tuple(f"stage {n} replica {r}" for r in "ABCD"), times_s=times, held=20)
        for n, times in zip((0, 3), STAGES, strict=True)
    ),
    "STRAG-10": lambda: (*(brake(i, f"gpu-{i:03d}", 0x84) for i in range(1, 10)), brake(10, "gpu-090", 0x04)),
    "STRAG-16": lambda: tuple(
        more.PairTest(id=i, pair=(a, b), took_s=s)
        for i, (a, b, s) in enumerate(
            (("a", "b", 14.2), ("c", "d", 6.1), ("e", "f", 6.0), ("a", "d", 6.1), ("b", "f", 14.3), ("c", "e", 6.0)), 1
        )
    ),
    "STRAG-18": lambda: (more.CommunicationVaries(id=1),),
    "STRAG-20": lambda: tuple(
        f.Step(id=1, iteration=6000 * i + 1, total=90000, step_s=s, batch=b)
        for i, (s, b) in enumerate(((11.2, 192), (11.2, 192), (12.9, 224), (12.9, 224), (14.7, 256), (14.7, 256)))
    ),
    "STRAG-21": lambda: tuple(
        f.Step(id=1, iteration=i, total=1000, step_s=s) for i, s in enumerate((769.0, 131.0, 106.0, *(105.0,) * 9), 1)
    ),
    "SDC-03": lambda: (more.Changed(id=1, what="the dependency's upgrade at the restart"),),
    "SDC-06": lambda: (nan_again(1, "gpu-011", "rerun_elsewhere"), nan_again(2, "gpu-040", "rerun_unexpected")),
    "SDC-08": lambda: (more.Changed(id=1, what="the new stack at that scale", trains=False),),
    "SDC-10": lambda: (more.Changed(id=3, what="the optimiser flag"),),
    "SDC-13": lambda: resumed("swings"),
    "SDC-15": lambda: (f.HashVote(id=1, odd=(16,), voters=8, node="gpu-003", last_equal=3900),),
    "SDC-16": lambda: (f.HashVote(id=1, odd=(), voters=8, deterministic=False),),
    "SDC-18": lambda: (f.Strike(id=1, rank=77, train_step=7003),),
    "SUP-05": lambda: own("stale_action"),
    "SUP-10": lambda: tuple(
        run.LaunchFailed(id=i, why="epilog", version="the image pushed before", nodes=nodes)
        for i, nodes in enumerate((("gpu-001", "gpu-002"), ("gpu-003", "gpu-004"), ("gpu-007",)), 2)
    ),
    "SUP-13": lambda: own("repeated_action"),
    "SUP-15": lambda: own("lease_lost"),
    "SUP-20": lambda: (more.PartitionDown(id=1, nodes=48, reason="emergency maintenance"),),
    "SUP-23": lambda: tuple(
        more.Excluded(id=1, node=n, times=t)
        for n, t in (("gpu-017", 9), ("gpu-044", 7), ("gpu-051", 6), ("gpu-002", 1))
    ),
    "SUP-25": lambda: own("settling"),
    "SUP-26": lambda: own("cancelled_drain"),
    "SUP-28": lambda: own("stuck_request"),
}


@pytest.mark.parametrize("id_", SIGNALS)
def test_the_facts_get_the_recorded_verdict(id_: str) -> None:
    case = told.BY_ID[id_]
    given = answer(read_case(case, id_), SIGNALS[id_](), told.TOOLS)
    assert (given.verdict, told.same_action(given.action, case["action"])) == (case["verdict"], True), given
    assert not told.harm(given, id_)
    for key in case.get("checks", {}).keys() & given.checks.keys():
        assert given.checks[key] == case["checks"][key], key


def test_every_case_is_right_by_its_lines_or_by_its_facts() -> None:
    wrong = []
    for case in PROSE:
        given = told.judged(case)
        if case["id"] in SIGNALS:
            given = answer(read_case(case, case["id"]), SIGNALS[case["id"]](), told.TOOLS)
        if given.verdict != case["verdict"] or not told.same_action(given.action, case["action"]):
            wrong.append((case["id"], given.verdict, given.action, given.because.rule))
    assert not wrong


def test_facts_that_contradict_each_other_blame_nobody() -> None:
    """Half of the replicas against the other half, two ranks missing, a slow pair alone."""
    case = read_case({"id": "x", "input": "a\nb\nc"}, "x")
    for facts in (
        (f.HashVote(id=1, odd=(0, 1), voters=4, node="n1"),),
        (f.Missing(id=1, rank=3, node="n1"), f.Missing(id=2, rank=9, node="n2")),
        (more.PairTest(id=1, pair=("n1", "n2"), took_s=9.0), more.PairTest(id=2, pair=("n3", "n4"), took_s=3.0)),
    ):
        given = answer(case, facts, told.TOOLS)
        assert given.culprit is None and given.action not in told.DRAINS, given
