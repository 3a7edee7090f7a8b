"""Which node keeps the copy of which node's parts. Pure.

    domains  A: a1 a2 a3   B: b1 b2   C: c1         ring  a1 a2 a3 b1 b2 c1, peer = 3 places on
             a1->b1  a2->b2  a3->c1  b1->a1  b2->a2  c1->a3

Nodes stand in a ring, grouped by failure domain, the largest first. A peer as many places on as the largest domain has
nodes is outside every domain, as long as no domain holds more than half of all. Where one does, as many as can be are
outside. Every node keeps the parts of exactly one other: memory is bounded alike on all.
"""

from __future__ import annotations

from collections.abc import Mapping

from outlast.reliability.model import Node


def choose_peers(domains: Mapping[Node, str]) -> dict[Node, Node]:
    """node -> the node that keeps its copy; {} where there are fewer than two.

    `domains` names each node's failure domain; '' where it is not known: then the node is a domain of its own.
    """
    nodes = set(domains)
    if len(nodes) < 2:
        return {}
    groups: dict[str, list[Node]] = {}
    for node in sorted(nodes):
        groups.setdefault(f"in {domains[node]}" if domains[node] else f"node {node}", []).append(node)
    by_size = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    ring = [node for _, members in by_size for node in members]
    largest = len(by_size[0][1])
    places = max(1, min(largest, len(ring) - largest))
    return {node: ring[(at + places) % len(ring)] for at, node in enumerate(ring)}


def domain_of(topology_address: str) -> str:
    """The failure domain from Slurm's SLURM_TOPOLOGY_ADDR, `spine.leaf3.node17` -> `spine.leaf3`; '' where none is.

    All that is above the node itself: two nodes of one leaf switch share its power and its cables.
    """
    above, _, _ = topology_address.rpartition(".")
    return above
