"""The environment of one rank, as torchrun would set it. Pure.

A program that runs under torchrun finds every name that it reads there; nothing is read from this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outlast.reliability.model import Placement, Plan
from outlast.reliability.runfile import RunFile


def rank_env(
    run: RunFile,
    plan: Plan,
    placement: Placement,
    *,
    master_addr: str,
    master_port: int,
    run_dir: Path,
    program: Mapping[str, str] | None = None,
    inherited: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Complete but for what the node adds. `program` is Launcher.env; `inherited` is the node's own environment.

    Ours stand last: a run file cannot give a rank another number.
    """
    local, world = sum(1 for one in plan.ranks if one.node == placement.node), str(len(plan.ranks))
    ours = {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(plan.nodes.index(placement.node)),
        "GROUP_WORLD_SIZE": str(len({one.node for one in plan.ranks})),
        "NODE_RANK": str(plan.nodes.index(placement.node)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(placement.rank),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(plan.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(max(plan.attempt - 1, 0)),
        "TORCHELASTIC_RUN_ID": run_dir.name,
        # rank 0 opens the store itself: no agent of torch's is there to hold it
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "OUTLAST_RUN_DIR": str(run_dir),
        "OUTLAST_RUN": run_dir.name,
        "OUTLAST_ATTEMPT": str(plan.attempt),
        "OUTLAST_NODE": placement.node,
    }
    return {**_defaults(local, inherited or {}), **run.task.env, **(program or {}), **ours}


def _defaults(local_ranks: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """What torchrun sets where nobody did: several ranks a node must not each take all cores."""
    wanted = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **({"OMP_NUM_THREADS": "1"} if local_ranks > 1 else {})}
    return {name: value for name, value in wanted.items() if name not in inherited}
