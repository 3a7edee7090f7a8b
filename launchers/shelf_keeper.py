"""The agent's care for its node's shelf: started, started again when it ends, cleared away when the agent leaves.

The shelf is a process of its own (checkpoint/shelf.py): what it reads and sends costs the agent nothing. It is none of
the ranks, so no ladder touches it, and the kernel ends it with the agent. Only for runs that keep local checkpoints.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.shelf import ShelfTask
from outlast.checkpoint.shelf_box import Box
from outlast.launchers.tier_places import box_of, checkpoints_of, failure_domain, shelves_of
from outlast.reliability.model import Node
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
AGAIN_S: Final = (1.0, 30.0)
DESERTED_S: Final = 3600.0
END_S: Final = 5.0
_DIES_WITH_US: Final = "outlast.launchers.successor"


class ShelfKeeper:
    """Use it from the agent's main thread: the kernel's death signal follows the thread that starts a child."""

    def __init__(
        self,
        run_dir: RunDir,
        run: RunFile,
        node: Node,
        address: str,
        *,
        keep: Callable[[int], None],
        topology: str = "",
    ) -> None:
        """keep(pid): this child is to be spared by the ladder. topology: Slurm's address of this node."""
        self._run_dir, self._keep = run_dir, keep
        self.box = box_of(run_dir, run.tiers.local_dir, node)
        self._task = ShelfTask(
            node=node,
            host=address,
            checkpoints=str(checkpoints_of(run_dir, run)),
            box=str(self.box),
            roster=str(shelves_of(run_dir)),
            secret_file=str(run_dir.secret),
            domain=failure_domain(topology),
            keep_last=run.tiers.local_keep_last,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = -1

    async def keep(self) -> None:
        """Until cancelled."""
        wait_s = AGAIN_S[0]
        while True:
            began_s = time.monotonic()
            try:
                self._start()
                while self._process is not None and self._process.poll() is None:
                    await asyncio.sleep(LOOK_S)
                code = self._process.returncode if self._process else None
                log.warning("the shelf ended with %s: see %s", code, self._output())
            except (OSError, CheckpointError) as e:
                log.warning("no shelf: %s", e)
            wait_s = AGAIN_S[0] if time.monotonic() - began_s > AGAIN_S[1] else min(2 * wait_s, AGAIN_S[1])
            await asyncio.sleep(wait_s)

    def close(self) -> None:
        """End it and free the memory: the parts are of no use without a shelf that hands them out."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        shutil.rmtree(self.box, ignore_errors=True)
        with suppress(OSError):
            (shelves_of(self._run_dir) / f"{self._task.node}.json").unlink()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _start(self) -> None:
        Box(self.box).claim()
        if self._lock < 0:
            self._lock = os.open(self.box / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            clear_deserted(self.box)
        words = [_DIES_WITH_US, str(os.getpid()), "outlast.checkpoint.shelf", msgspec.json.encode(self._task).decode()]
        with open(self._output(), "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._keep(self._process.pid)

    def _output(self) -> str:
        """In the run directory; nowhere, where that cannot be written."""
        folder = self._run_dir.root / "agents"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"{self._task.node}.shelf.log"
            path.touch(mode=0o600)
        except OSError:
            return os.devnull
        return str(path)


def clear_deserted(mine: Path) -> None:
    """Free what killed agents of other runs left here: boxes whose lock nobody holds, and not in this hour."""
    for lock in mine.parent.glob("*/lock"):
        with suppress(OSError), open(lock) as file:
            info = os.fstat(file.fileno())
            if lock.parent != mine and info.st_uid == os.getuid() and info.st_mtime < time.time() - DESERTED_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
