"""Durable checkpoints on their way to an object store: every K-th, one at a time, each by a process of its own.

    a checkpoint is durable -> due(train_step) -> `outlast ckpt upload RUN/train_step` -> a line for the log

The child loads the store's library and may be ended at any line: the next one goes on where it was. A newer checkpoint
takes the place of one that still waits. Nothing here keeps the supervisor waiting, but for close().
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Final

from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import Tiers

UPLOAD_S: Final = 6 * 3600.0
CLOSE_S: Final = 600.0
"""For the last one, when the run is over."""
_DIES_WITH_US: Final = "outlast.launchers.successor"
"""Becomes `python -m ...` once the kernel will end it with the thread that started it."""
_WORDS_CHARS: Final = 600

Tell = Callable[[str], None]


class Copies:
    """The supervisor's end. `due` and `close` from one thread."""

    def __init__(self, run_dir: RunDir, tiers: Tiers, *, upload_s: float = UPLOAD_S) -> None:
        self._run_dir, self._tiers, self._upload_s = run_dir, tiers, upload_s
        self._durable = 0
        self._waiting: tuple[int, Tell] | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._child: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def due(self, train_step: int, tell: Tell) -> None:
        """A checkpoint is durable; it is copied if it is one of those. `tell` is called in another thread."""
        self._durable += 1
        if (self._durable - 1) % self._tiers.remote_every:
            return
        with self._changed:
            self._waiting = (train_step, tell)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
            self._thread.start()

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Let what is under way and what waits come to its end, so long; then end it. It is resumed another time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is None:
            return
        self._thread.join(limit_s)
        if self._thread.is_alive() and self._child is not None:
            self._waiting = None
            self._child.kill()
            self._thread.join(10.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None:
                    if self._closing:
                        return
                    self._changed.wait()
                (train_step, tell), self._waiting = self._waiting, None
            said = self._copy(train_step)
            try:
                tell(said)
            except RuntimeError:  # the loop that it belongs to is over
                sys.stderr.write(f"outlast {self._run_dir.name}: {said}\n")

    def _copy(self, train_step: int) -> str:
        """What came of it, in words."""
        words = ["ckpt", "upload", f"{self._run_dir.root}/{train_step}", "--keep-last"]
        words.append(str(self._tiers.remote_keep_last))
        what = f"checkpoint {train_step} to {self._tiers.remote_url}"
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", _DIES_WITH_US, str(os.getpid()), "outlast.reliability.app", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            output, _ = self._child.communicate(timeout=self._upload_s)
        except subprocess.TimeoutExpired:
            assert self._child is not None, "it was waited for"
            self._child.kill()
            self._child.communicate(timeout=10.0)
            return f"{what}: not done within {self._upload_s:.0f} s; the next one goes on with it"
        except (OSError, ValueError) as e:
            return f"{what}: the upload cannot be started: {e}"
        tail = " ".join(output.split())[-_WORDS_CHARS:]
        return tail if self._child.returncode == 0 else f"{what}: exit code {self._child.returncode}: {tail}"
