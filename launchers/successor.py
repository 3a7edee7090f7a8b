"""Starts the successor of a lost supervisor as a child of this agent.

It is not one of the ranks: no ladder touches it. But it is in the agent's tree, and the kernel ends it with the
agent (PDEATHSIG), so a crashed node never leaves a supervisor behind. It decides by itself, by the fence, whether it
may supervise; where another was faster it ends at once.
Run as `python -m outlast.launchers.successor PARENT_PID WORD ...`: arms PDEATHSIG, then becomes WORD ... .
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from outlast.launchers import reap
from outlast.launchers.node_env import TREE_ENV
from outlast.launchers.recorder import NODE_ENV
from outlast.reliability.model import Node
from outlast.reliability.rundir import RunDir


class Successor:
    """At most one at a time. Use it from the agent's main thread: PDEATHSIG follows the thread that starts it."""

    def __init__(self, run_dir: RunDir, node: Node, *, keep: Callable[[int], None]) -> None:
        """keep(pid): this child is to be spared by the ladder."""
        self._run_dir, self._node, self._keep = run_dir, node, keep
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, epoch: int = 0) -> int:
        """Start it, unless one of ours is still at work; its pid. OSError where it cannot be started."""
        if self._process is not None and self.alive:
            return self._process.pid
        env = {**os.environ, NODE_ENV: self._node}
        # what it starts (srun and the agents behind it) is not below this agent, and must not look so
        env.pop(TREE_ENV, None)
        words = [
            "outlast.reliability.app",
            "run",
            "--run-dir",
            str(self._run_dir.root),
            "--successor",
            "--epoch",
            str(epoch),
        ]
        with open(self._output(), "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "outlast.launchers.successor", str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )
        self._keep(self._process.pid)
        return self._process.pid

    def _output(self) -> str:
        """In the run directory; nowhere, where that cannot be written."""
        folder = self._run_dir.root / "agents"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"{self._node}.supervisor.log"
            path.touch(mode=0o600)
        except OSError:
            return os.devnull
        return str(path)


def main() -> int:
    """Become `python -m WORD ...`, to be killed with the parent."""
    if not reap.die_with_parent(int(sys.argv[1])):
        return 1
    os.execv(sys.executable, [sys.executable, "-P", "-m", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
