"""The agent's own log, `agents/<node>.log` in the run directory: for people, never waited for.

Lines go through a bounded queue to a thread of their own, since the shared file system may hang. What the queue
cannot hold is lost. Rotated: two files of 4 MiB a node.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import threading
import time
from pathlib import Path

from outlast.reliability.model import Node
from outlast.reliability.rundir import RunDir

_BYTES = 4 * 1024 * 1024
_QUEUED = 2_000


class _File(logging.handlers.RotatingFileHandler):
    """Opens on the thread that writes, making its directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace", delay=True)

    def _open(self):  # type: ignore[no-untyped-def]  # TextIOWrapper, by the standard library's own stubs
        Path(self.baseFilename).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be written is lost; the next one opens the file anew."""
        if self.stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self.stream.close()
            self.stream = None


class AgentLog:
    """Log of the whole process, from its making to `close`."""

    def __init__(self, run_dir: RunDir, node: Node) -> None:
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(_QUEUED)
        self._file = _File(run_dir.root / "agents" / f"{node}.log")
        form = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        form.converter = time.gmtime
        self._file.setFormatter(form)
        self._thread = threading.Thread(target=self._write, name="agent log", daemon=True)
        self._thread.start()
        handler = logging.Handler()
        handler.emit = self._take  # type: ignore[method-assign]
        root = logging.getLogger()
        root.handlers[:] = [handler]
        root.setLevel(logging.INFO)

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for timeout_s at most."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)

    def _take(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(record)

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            self._file.handle(record)
