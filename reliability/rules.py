"""The rules in the order in which they are asked. Pure: a table."""

from __future__ import annotations

from typing import Final

from outlast.reliability import rules_attempt, rules_checkpoint, rules_gpu, rules_node, rules_operator
from outlast.reliability.policy import Rule

RULES: Final[tuple[Rule, ...]] = (
    # a will first: it is obeyed whatever else is true
    rules_operator.asks,
    rules_operator.jobs,
    # then what may convict a node, the kernel's word before all
    rules_node.hardware_xids,
    rules_node.kernel_lines,
    rules_gpu.broken_gpus,
    rules_gpu.memory_again,
    rules_gpu.contained_again,
    rules_gpu.wedged_nodes,
    rules_gpu.hung_libraries,
    rules_node.lost_agents,
    rules_node.gates,
    rules_node.leftovers,
    rules_operator.drains,
    # then what only ends an attempt
    rules_attempt.misplaced,
    rules_attempt.replaced_agents,
    rules_checkpoint.bad_checkpoints,
    rules_node.killed_for_memory,
    rules_attempt.dead_ranks,
    rules_attempt.hangs,
    rules_attempt.ended_early,
    rules_node.other_xids,
    rules_gpu.suspect_gpus,
)
