"""What a node adds to the environment that the supervisor composed for a rank. Pure: environments come as arguments.

the node's own environment  <  RankSpec.env  <  what only the node can say
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outlast.launchers.recorder import NODE_ENV, STEP_PAGE_ENV, STOP_FILE_ENV
from outlast.reliability.model import Node
from outlast.reliability.runfile import RunFile
from outlast.reliability.wire import RankSpec
from outlast.slurm import testbed_conf

TREE_ENV = "OUTLAST_TREE"
"""Marks all below one agent: `<run directory>:<node>:<agent's pid>:<its start ticks>`."""

_NODES_OWN = ("SLURMD_NODENAME", "SLURM_NODEID", "SLURM_TOPOLOGY_ADDR", "HOSTNAME", TREE_ENV)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Their libraries start a thread per core at import, and threads do not survive a fork."""


def warm_env(own: Mapping[str, str], run: RunFile, node: Node) -> dict[str, str]:
    """For the process that imports: what libraries read at import is what the ranks will be given."""
    return {**dict.fromkeys(_ONE_THREAD, "1"), **own, **run.task.env, NODE_ENV: node}


def rank_env(
    own: Mapping[str, str], run: RunFile, spec: RankSpec, *, node: Node, page: Path | None, stop: Path
) -> dict[str, str]:
    """The whole environment of one rank."""
    gpus = ",".join(str(i) for i in range(run.cluster.gpus_per_node))
    nodes_own = {name: own[name] for name in _NODES_OWN if name in own}
    env = {**own, **spec.env, **nodes_own, NODE_ENV: node, STOP_FILE_ENV: str(stop)}
    env.pop(STEP_PAGE_ENV, None)
    if page is not None:
        env[STEP_PAGE_ENV] = str(page)
    if gpus:
        env.setdefault("CUDA_VISIBLE_DEVICES", gpus)
    return env


def believes_user_space(run: RunFile, own: Mapping[str, str]) -> bool:
    """Whether kernel log lines that user space wrote may count: on a testbed and on the local cluster, nowhere else.

    Any root process could convict a node with them. `submit` refuses the setting elsewhere; a run directory that was
    made by other means is caught here, by the cluster's name that Slurm gives each task.
    """
    testbed = run.cluster.kind == "local" or own.get("SLURM_CLUSTER_NAME") == testbed_conf.CLUSTER
    return run.cluster.accept_user_facility and testbed


def program(run: RunFile, spec: RankSpec) -> tuple[str, str]:
    """(script | module | command, its path or name)."""
    if run.task.command:
        return "command", ""
    if run.task.module:
        return "module", run.task.module
    return "script", spec.argv[0] if spec.argv else run.task.script
