"""Where the demo plays: on the embedded local cluster, or on a real Slurm of three nodes on this host."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from outlast.reliability.cli.compose import run_supervisor
from outlast.reliability.ending import EXIT_CODES
from outlast.reliability.eventlog import Follower
from outlast.reliability.events import LogEvent, RunEnded
from outlast.reliability.model import Node
from outlast.reliability.rundir import RunDir

Watch = Callable[[LogEvent], None]
SLURM_RUN_S = 300.0


class Stage(Protocol):
    @property
    def kind(self) -> str: ...

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Two that train and a spare."""

    def supervise(self, run_dir: RunDir, on_event: Watch) -> int:
        """The run's exit code; `on_event` is called with each event as it happens."""

    def crash(self, node: Node) -> None:
        """The node dies: everything on it is killed at once."""

    def close(self) -> None: ...


class LocalStage:
    """Each node a process group of this machine; the supervisor runs in this process."""

    kind = "local"
    nodes = (Node("a"), Node("b"), Node("c"))

    def __init__(self) -> None:
        self._crash: Callable[[Node], None] | None = None

    def supervise(self, run_dir: RunDir, on_event: Watch) -> int:
        from outlast.launchers.local import LocalCluster
        from outlast.reliability.config import load_frozen

        cluster = LocalCluster(run_dir, load_frozen(run_dir))
        self._crash = cluster.crash
        return run_supervisor(run_dir, why="outlast demo", cluster=cluster, on_event=on_event)

    def crash(self, node: Node) -> None:
        assert self._crash is not None, "nothing runs yet"
        self._crash(node)

    def close(self) -> None:
        return


class SlurmStage:
    """A real Slurm on this host; runs are submitted as a user does, and followed by their event log."""

    kind = "slurm"

    def __init__(self, say: Callable[[str], None]) -> None:
        import os

        from outlast.slurm.testbed import start

        # not below the demo's directory: Slurm's sockets need a short path
        self._place = Path(tempfile.mkdtemp(prefix="outlast-demo-", dir="/tmp"))
        self._bed = start(self._place, nodes=3, gpus=0, accounting=True)
        os.environ["SLURM_CONF"] = self._bed.slurm_conf
        self.nodes = self._bed.nodes
        say(f" Slurm with {len(self.nodes)} nodes is up; SLURM_CONF={self._bed.slurm_conf}")

    def supervise(self, run_dir: RunDir, on_event: Watch) -> int:
        from outlast.launchers.slurm_cluster import submit
        from outlast.reliability.config import load_frozen

        submit(run_dir, load_frozen(run_dir))
        follower = Follower(run_dir.events)
        deadline = time.monotonic() + SLURM_RUN_S
        while time.monotonic() < deadline:
            for event in follower.read().events:
                on_event(event)
                if isinstance(event.body, RunEnded):
                    self._bed.reset()
                    return EXIT_CODES[event.body.outcome]
            time.sleep(0.2)
        return 1

    def crash(self, node: Node) -> None:
        self._bed.crash_node(node)

    def close(self) -> None:
        self._bed.destroy()
        shutil.rmtree(self._place, ignore_errors=True)
