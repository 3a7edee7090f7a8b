"""Which parallel layouts a run may take when nodes are lost, and where each rank then sits. Pure.

Not a performance model: it never asks which layout is faster. A changed tensor or pipeline size means other kernels,
another memory footprint and a resharded checkpoint, so those sizes are given up last; data-parallel replicas, which
cost nothing but time, are given up first. The global batch is a property of the training, never of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from outlast.reliability.model import Layout, Node, Placement, Rank
from outlast.reliability.runfile import LayoutAsked

Legal = Callable[[Layout], str]
"""'' where the program can run in this layout, else why not."""


class LayoutError(ValueError):
    """A layout that cannot be had from what is there; the text says what is missing and what would help."""


def anything(layout: Layout) -> str:
    """The program that runs in any layout."""
    return ""


def plan_layout(
    asked: LayoutAsked, *, ranks: int, ranks_per_node: int, legal: Legal = anything, dp: int = 0
) -> Layout | None:
    """The largest legal layout on at most `ranks` ranks; None where there is none (`why_none` tells why).

    `dp` is the wanted number of replicas, needed only where dp may not change. More ranks never give a smaller
    layout. Half-used nodes need no rule of their own: on the same nodes a layout that fills them is the larger one.
    """
    for model_part in _model_parts(asked):
        for replicas in _replicas(asked, dp):
            layout = _layout(model_part, replicas)
            if layout.world_size <= ranks and not _objection(asked, layout, ranks_per_node, legal):
                return layout
    return None


def why_none(asked: LayoutAsked, *, ranks: int, ranks_per_node: int, legal: Legal = anything, dp: int = 0) -> str:
    """Why `plan_layout` finds nothing: what the smallest layout needs, and what stands against those that would fit."""
    smallest: Layout | None = None
    refusals: list[str] = []
    for model_part in _model_parts(asked):
        for replicas in _replicas(asked, dp):
            layout = _layout(model_part, replicas)
            if objection := _objection(asked, layout, ranks_per_node, legal):
                if layout.world_size <= ranks and len(refusals) < 3:
                    refusals.append(f"{layout}: {objection}")
            elif smallest is None or layout.world_size < smallest.world_size:
                smallest = layout
    lines = [f"{ranks} ranks carry no legal layout ({', '.join(asked.may_change) or 'nothing'} may change)"]
    if smallest is not None:
        nodes = nodes_needed(smallest, ranks_per_node)
        lines.append(f"the smallest is {smallest}: {smallest.world_size} ranks, {nodes} nodes of {ranks_per_node}")
    elif asked.global_batch % asked.micro_batch:
        lines.append(f"global_batch {asked.global_batch} is not a multiple of micro_batch {asked.micro_batch}")
    lines += refusals
    return "; ".join(lines)


def wanted(asked: LayoutAsked, nodes: int, ranks_per_node: int) -> Layout:
    """The layout of a whole run: the model parts as asked, dp is what is left over on `nodes` nodes.

    dp is the largest that divides the global batch; LayoutError where not even one replica fits.
    """
    ranks = nodes * ranks_per_node
    fixed = LayoutAsked(
        tp=asked.tp,
        pp=asked.pp,
        cp=asked.cp,
        ep=asked.ep,
        may_change=("dp",),
        global_batch=asked.global_batch,
        micro_batch=asked.micro_batch,
    )
    layout = plan_layout(fixed, ranks=ranks, ranks_per_node=ranks_per_node)
    if layout is None:
        unit = asked.tp * asked.pp * asked.cp
        raise LayoutError(
            f"layout tp {asked.tp} x pp {asked.pp} x cp {asked.cp} needs {unit} ranks a replica (ep {asked.ep}, "
            f"global_batch {asked.global_batch}, micro_batch {asked.micro_batch}); {nodes} nodes x {ranks_per_node} "
            f"= {ranks} carry none: {why_none(fixed, ranks=ranks, ranks_per_node=ranks_per_node)}"
        )
    return layout


def nodes_needed(layout: Layout, ranks_per_node: int) -> int:
    return -(-layout.world_size // ranks_per_node)


def places(layout: Layout, nodes: Sequence[Node], ranks_per_node: int) -> tuple[Placement, ...]:
    """Rank -> node -> local rank in Megatron's order: tp is innermost, so consecutive ranks share a node.

    Nodes beyond those needed stay empty; LayoutError where there are too few.
    """
    needed = nodes_needed(layout, ranks_per_node)
    if len(nodes) < needed or len(set(nodes)) < len(nodes):
        raise LayoutError(
            f"{layout} needs {needed} different nodes of {ranks_per_node} ranks; got {', '.join(nodes) or 'none'}"
        )
    return tuple(
        Placement(rank=Rank(rank), node=nodes[rank // ranks_per_node], local_rank=rank % ranks_per_node)
        for rank in range(layout.world_size)
    )


# ---------------------------------------------------------------- the candidates, best first

ModelPart = tuple[int, int, int, int]
"""tp, pp, cp, ep."""


def _model_parts(asked: LayoutAsked) -> Iterator[ModelPart]:
    """As asked first; then with ep, cp, pp and at last tp divided by something.

    plan_layout takes the first that fits, so a smaller model part is tried only where no larger one fits with even
    one replica: this keeps the size monotone in the ranks.
    """
    sizes = {name: _smaller(size, name in asked.may_change) for name, size in _asked_sizes(asked)}
    yield from product(sizes["tp"], sizes["pp"], sizes["cp"], sizes["ep"])


def _asked_sizes(asked: LayoutAsked) -> tuple[tuple[str, int], ...]:
    return ("tp", asked.tp), ("pp", asked.pp), ("cp", asked.cp), ("ep", asked.ep)


def _smaller(size: int, may_change: bool) -> tuple[int, ...]:
    """The size, and where it may change its divisors, largest first."""
    return divisors(size) if may_change else (size,)


def _replicas(asked: LayoutAsked, dp: int) -> tuple[int, ...]:
    """dp values that keep the global batch, largest first."""
    if asked.global_batch % asked.micro_batch:
        return ()
    batches = divisors(asked.global_batch // asked.micro_batch)
    if "dp" in asked.may_change:
        return batches
    return (dp,) if dp in batches else ()


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, largest first."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}, reverse=True))


def _layout(model_part: ModelPart, dp: int) -> Layout:
    tp, pp, cp, ep = model_part
    return Layout(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp)


def _objection(asked: LayoutAsked, layout: Layout, ranks_per_node: int, legal: Legal) -> str:
    """'' where this layout may be used, whatever the number of ranks."""
    if (layout.dp * layout.cp) % layout.ep:
        return f"ep {layout.ep} does not divide dp x cp = {layout.dp * layout.cp}"
    one_node = layout.world_size <= ranks_per_node
    if asked.tp <= ranks_per_node and ranks_per_node % layout.tp and not one_node:
        return f"tensor-parallel groups of {layout.tp} would span nodes of {ranks_per_node} ranks"
    return legal(layout)
