"""Where a run's local checkpoints lie on a node, and what a shelf is told. Pure."""

from __future__ import annotations

import hashlib
from pathlib import Path

from outlast.checkpoint.shelf_peers import domain_of
from outlast.reliability.model import Node
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile


def checkpoints_of(run_dir: RunDir, run: RunFile) -> Path:
    return Path(run.checkpoint.dir) if run.checkpoint.dir else run_dir.checkpoints


def box_of(run_dir: RunDir, local_dir: str, node: Node) -> Path:
    """This run's directory on this node. `%n` is the node's name; runs of one name in two run roots are told apart."""
    root = hashlib.sha256(str(run_dir.root).encode()).hexdigest()[:8]
    return Path(local_dir.replace("%n", node)) / f"{run_dir.name}-{root}"


def shelves_of(run_dir: RunDir) -> Path:
    return run_dir.root / "shelves"


def failure_domain(topology_address: str) -> str:
    return domain_of(topology_address)
