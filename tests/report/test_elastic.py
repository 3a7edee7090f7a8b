"""Properties of the elastic planner: what is kept, what may shrink, and that more ranks never give less."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.reliability.elastic import LayoutError, nodes_needed, places, plan_layout, wanted, why_none
from outlast.reliability.model import Layout, Node
from outlast.reliability.runfile import LayoutAsked

SIZES = st.sampled_from([1, 2, 3, 4, 8])
PARTS = st.lists(st.sampled_from(["dp", "tp", "pp", "cp", "ep"]), unique=True).map(tuple)


@st.composite
def layouts_asked(draw: st.DrawFn) -> LayoutAsked:
    return LayoutAsked(
        tp=draw(SIZES),
        pp=draw(SIZES),
        cp=draw(st.sampled_from([1, 2])),
        ep=draw(st.sampled_from([1, 2, 4])),
        may_change=draw(PARTS),
        global_batch=draw(st.integers(1, 96)),
        micro_batch=draw(st.sampled_from([1, 2, 3])),
    )


def even_pipelines_only(layout: Layout) -> str:
    return "" if layout.pp in (1, 2, 4) else f"12 layers do not divide by pp {layout.pp} here"


@settings(max_examples=60, deadline=None)
@given(layouts_asked(), st.integers(0, 130), st.integers(1, 8), st.integers(1, 4))
def test_a_planned_layout_keeps_what_must_be_kept(asked: LayoutAsked, ranks: int, per_node: int, dp: int) -> None:
    layout = plan_layout(asked, ranks=ranks, ranks_per_node=per_node, legal=even_pipelines_only, dp=dp)
    if layout is None:
        assert "no legal layout" in why_none(asked, ranks=ranks, ranks_per_node=per_node, legal=even_pipelines_only)
        return
    assert layout.world_size <= ranks
    assert asked.global_batch % (asked.micro_batch * layout.dp) == 0
    assert not even_pipelines_only(layout)
    assert (layout.dp * layout.cp) % layout.ep == 0
    for part in ("tp", "pp", "cp", "ep"):
        size, was = getattr(layout, part), getattr(asked, part)
        assert was % size == 0
        assert size == was or part in asked.may_change
    if "dp" not in asked.may_change:
        assert layout.dp == dp
    nodes = [Node(f"n{i}") for i in range(nodes_needed(layout, per_node))]
    placed = places(layout, nodes, per_node)
    if asked.tp <= per_node:
        for start in range(0, layout.world_size, layout.tp):
            assert len({p.node for p in placed[start : start + layout.tp]}) == 1


@settings(max_examples=60, deadline=None)
@given(layouts_asked(), st.integers(1, 8))
def test_more_ranks_never_give_a_smaller_layout(asked: LayoutAsked, per_node: int) -> None:
    sizes = []
    for ranks in range(0, 70):
        layout = plan_layout(asked, ranks=ranks, ranks_per_node=per_node)
        sizes.append(layout.world_size if layout else 0)
    assert sizes == sorted(sizes)


def test_no_layout_of_the_same_model_part_is_larger() -> None:
    asked = LayoutAsked(tp=2, pp=1, may_change=("dp",), global_batch=24)
    assert plan_layout(asked, ranks=10, ranks_per_node=2) == Layout(tp=2, dp=4)
    assert plan_layout(asked, ranks=14, ranks_per_node=2) == Layout(tp=2, dp=6)


def test_tensor_parallelism_is_given_up_last() -> None:
    asked = LayoutAsked(tp=4, pp=4, may_change=("dp", "tp", "pp"), global_batch=16)
    assert plan_layout(asked, ranks=31, ranks_per_node=4) == Layout(tp=4, pp=4, dp=1)
    assert plan_layout(asked, ranks=15, ranks_per_node=4) == Layout(tp=4, pp=2, dp=1)
    assert plan_layout(asked, ranks=3, ranks_per_node=4) == Layout(tp=2, pp=1, dp=1)


def test_the_demo_shrinks_from_two_nodes_to_one() -> None:
    asked = LayoutAsked(tp=2, may_change=("dp",), global_batch=8)
    assert wanted(asked, 2, 2) == Layout(tp=2, dp=2)
    assert plan_layout(asked, ranks=2, ranks_per_node=2) == Layout(tp=2, dp=1)


def test_why_none_names_the_smallest_that_would_do() -> None:
    asked = LayoutAsked(tp=8, pp=4, may_change=("dp",), global_batch=64)
    why = why_none(asked, ranks=24, ranks_per_node=8)
    assert "24 ranks" in why and "32 ranks, 4 nodes of 8" in why


def test_wanted_says_what_a_replica_needs() -> None:
    with pytest.raises(LayoutError, match=r"needs 32 ranks a replica .* 3 nodes x 8 = 24"):
        wanted(LayoutAsked(tp=8, pp=4, global_batch=64), 3, 8)


def test_places_refuses_too_few_or_doubled_nodes() -> None:
    with pytest.raises(LayoutError, match="needs 2 different nodes"):
        places(Layout(tp=2, dp=2), [Node("a")], 2)
    with pytest.raises(LayoutError):
        places(Layout(tp=2, dp=2), [Node("a"), Node("a")], 2)
    last = places(Layout(tp=2, dp=2), [Node("a"), Node("b"), Node("c")], 2)[-1]
    assert (last.rank, last.node, last.local_rank) == (3, "b", 1)
