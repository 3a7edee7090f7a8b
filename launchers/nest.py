"""What an agent owns on its node's own disk: a lock, the step record pages and the stop files of its ranks.

In /dev/shm where that can be written, else in the temporary directory: both are memory or local, never the shared
file system. The lock makes a second agent of the same run and node end at once; the kernel lets it go with the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from outlast.monitors.beat import StepReader, create_page
from outlast.reliability.model import Node, Rank

_DESERTED_S = 60.0


class NestError(Exception):
    """This node has no place for an agent, or has one already."""


class Nest:
    """`<place>/outlast-<uid>-<run>-<node>/`, mode 0700."""

    def __init__(self, run_root: Path, node: Node) -> None:
        run = hashlib.sha256(str(run_root).encode()).hexdigest()[:12]
        self.root = _make(f"outlast-{os.getuid()}-{run}-{node}")
        self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise NestError(f"{self.root}/lock is held: another agent of this run is alive on node {node}") from None
        for old in self.root.glob("attempt-*"):
            shutil.rmtree(old, ignore_errors=True)
        _clear_deserted(self.root)

    def attempt(self, attempt: int) -> Path:
        place = self.root / f"attempt-{attempt:04d}"
        place.mkdir(mode=0o700, exist_ok=True)
        return place

    def stop_file(self, attempt: int) -> Path:
        """Its being there asks the ranks to save and end."""
        return self.root / f"attempt-{attempt:04d}" / "stop"

    def page(self, attempt: int, rank: Rank) -> tuple[Path, StepReader] | None:
        """A new page for a rank; None where there is no memory for it: the rank then trains unrecorded."""
        path = self.attempt(attempt) / f"rank-{rank:05d}"
        try:
            path.unlink(missing_ok=True)
            create_page(path)
            return path, StepReader(path)
        except OSError:
            return None

    def ask_to_stop(self, attempt: int) -> bool:
        """Create the stop file; False where it cannot be."""
        try:
            self.attempt(attempt)
            self.stop_file(attempt).touch(mode=0o600)
        except OSError:
            return False
        return True

    def ask_to_end(self, attempt: int) -> None:
        """Say that the attempt ends and that nothing is to be saved: a program that saves on SIGTERM would else."""
        with contextlib.suppress(OSError):
            self.attempt(attempt)
            self.stop_file(attempt).with_name("end").touch(mode=0o600)

    def forget(self, attempt: int) -> None:
        shutil.rmtree(self.root / f"attempt-{attempt:04d}", ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _clear_deserted(mine: Path) -> None:
    """Remove what killed agents of other runs left here: those whose lock nobody holds, and not in this minute."""
    for nest in mine.parent.glob(f"outlast-{os.getuid()}-*-*"):
        lock = nest / "lock"
        with contextlib.suppress(OSError), open(lock) as f:
            if nest != mine and os.fstat(f.fileno()).st_mtime < time.time() - _DESERTED_S:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(nest, ignore_errors=True)


def _make(name: str) -> Path:
    errors: list[str] = []
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        root = place / name
        try:
            root.mkdir(mode=0o700, exist_ok=True)
            status = root.lstat()
            if status.st_uid == os.getuid() and not root.is_symlink() and status.st_mode & 0o77 == 0:
                return root
            errors.append(f"{root} is not ours alone")
        except OSError as e:
            errors.append(f"{root}: {e.strerror}")
    raise NestError(f"no place for the agent's pages: {'; '.join(errors)}")
