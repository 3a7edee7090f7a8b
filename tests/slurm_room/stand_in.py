"""Stands in for `outlast run` and `outlast agent` under a real Slurm: shows where and how it was started.

Called by a wrapper as an interpreter would be: -P -m outlast.reliability.app run|agent --run-dir DIR [--in-batch].
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from outlast.launchers.slurm_cluster import SlurmCluster
from outlast.reliability.model import JobId, Node
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile


def main() -> None:
    verb, place = sys.argv[4], Path(sys.argv[6])
    node = Node(os.environ["SLURMD_NODENAME"])
    (place / f"{verb}.{node}.env").write_text("\n".join(f"{k}={v}" for k, v in sorted(os.environ.items())))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        beat(place, verb, node)
        wish = place / f"launch-from.{verb}.{node}"
        if wish.exists():
            nodes = [Node(n) for n in wish.read_text().split()]
            wish.unlink()
            launch(place, nodes)
        wish = place / f"requeue-from.{verb}.{node}"
        if wish.exists():
            requeue(place, os.environ["SLURM_JOB_ID"], wish.read_text().split())
        code = place / f"exit.{verb}"
        if code.exists():
            sys.exit(int(code.read_text()))
        time.sleep(0.1)


def beat(place: Path, verb: str, node: Node) -> None:
    step = os.environ.get("SLURM_STEP_ID", "")
    (place / f"{verb}.{node}.{step}.beat").write_text(f"{os.getpid()} {time.time()}")


def cluster_of(place: Path) -> SlurmCluster:
    run = msgspec.json.decode((place / "run.json").read_bytes(), type=RunFile)
    return SlurmCluster(RunDir(root=place), run, str(place / "python"))


def launch(place: Path, nodes: list[Node]) -> None:
    cluster = cluster_of(place)
    (allocation,) = cluster.allocations()
    cluster.launch_agents(allocation, nodes)


def requeue(place: Path, job: str, exclude: list[str]) -> None:
    """As the supervisor does it: the TERM that answers a requeue does not interrupt what it has begun."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (place / f"requeue-from.run.{os.environ['SLURMD_NODENAME']}").unlink()
    cluster_of(place).requeue(JobId(job), [Node(n) for n in exclude])
    (place / "requeued").touch()
    sys.exit(0)


if __name__ == "__main__":
    main()
