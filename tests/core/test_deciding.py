"""What follows from a verdict, and the budgets that it stays inside."""

from __future__ import annotations

import pytest

from outlast.reliability import model as m
from outlast.reliability.actions import Action, Advise, Drain, Hold, RestartInPlace, Swap
from outlast.reliability.decide import Situation, decide
from outlast.reliability.model import Layout, Node, Rank
from outlast.reliability.runfile import LayoutAsked, Limits
from outlast.reliability.verdict import Kind, Scope, Verdict

NODES = tuple(Node(n) for n in "abc")
PLAN = m.Plan(
    attempt=1,
    layout=Layout(tp=2, dp=2),
    nodes=NODES[:2],
    ranks=tuple(m.Placement(rank=Rank(i), node=NODES[i // 2], local_rank=i % 2) for i in range(4)),
)
BROKEN = Verdict(
    key="hardware:a:1",
    kind=Kind.HARDWARE_FAULT,
    scope=Scope.GPU,
    rule="gpu_bus_loss",
    because="XID 79",
    node=Node("a"),
    convicts=True,
    drains=True,
    stops=True,
)
CRASHED = Verdict(
    key="exit:1", kind=Kind.APP_FAULT, scope=Scope.RANK, rule="program_exception", because="KeyError", stops=True
)


def now(**changes: object) -> Situation:
    fields = {
        "now_s": 1000.0,
        "limits": Limits(drains_per_hour=2, attempts_without_progress=3),
        "asked": LayoutAsked(tp=2, global_batch=8),
        "ranks_per_node": 2,
        "nodes_wanted": 2,
        "nodes_min": 1,
        "plan": PLAN,
        "usable": NODES,
        "may_drain": True,
        **changes,
    }
    return Situation(**fields)  # type: ignore[arg-type]


def acts(verdict: Verdict, situation: Situation) -> list[type[Action]]:
    return [type(a) for a in decide(verdict, situation, legal=lambda _: "")]


def test_inside_its_budget_a_drain_comes_first_and_the_change_of_the_run_last():
    assert acts(BROKEN, now(usable=NODES[1:], excluded=NODES[:1], drains_last_hour=1)) == [Drain, Swap]


@pytest.mark.parametrize("spent", [2, 3, 100])
def test_past_its_budget_a_drain_is_advice(spent):
    assert acts(BROKEN, now(usable=NODES[1:], excluded=NODES[:1], drains_last_hour=spent)) == [Advise, Swap]


def test_who_may_not_drain_advises():
    assert acts(BROKEN, now(usable=NODES[1:], excluded=NODES[:1], may_drain=False)) == [Advise, Swap]


@pytest.mark.parametrize(("failures", "then"), [(0, RestartInPlace), (1, RestartInPlace), (2, Hold), (9, Hold)])
def test_attempts_without_progress_end_in_a_hold(failures, then):
    assert acts(CRASHED, now(failures_without_progress=failures)) == [then]


def test_no_verdict_drains_unless_it_says_so():
    for kind in Kind:
        verdict = Verdict(key="k", kind=kind, scope=Scope.NODE, rule="r", because="b", node=Node("a"), convicts=True)
        assert Drain not in acts(verdict, now()) and Advise not in acts(verdict, now())
