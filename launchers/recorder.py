"""The step recorder inside a rank: `current()` gives what the training program writes its steps to.

Installed by the rank's start before the user's script runs, from OUTLAST_STEP_PAGE and OUTLAST_NODE; without them
(the script run by hand) every call does nothing. It never raises into training and never waits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from outlast.monitors.beat import StepReader, StepWriter

STEP_PAGE_ENV = "OUTLAST_STEP_PAGE"
"""Path of this rank's step record page, made by the agent."""
STOP_FILE_ENV = "OUTLAST_STOP_FILE"
"""Once this file exists, the program is asked to save and to end with exit code 0."""
NODE_ENV = "OUTLAST_NODE"


class Recorder(Protocol):
    """What a training program tells. train_steps are 1-based; see monitors/beat.py for units."""

    def phase(self, name: str) -> None:
        """init load compile train eval save idle"""

    def step_started(self, train_step: int) -> None: ...

    def step_done(
        self,
        train_step: int,
        *,
        loss: float | None = None,
        grad_norm: float | None = None,
        samples_from: int = -1,
        samples_to: int = -1,
        tokens: int = 0,
        save_s: float = 0.0,
        compute_s: float = 0.0,
        wait_s: float = 0.0,
        data_s: float = 0.0,
        local_hash: int = 0,
        closed: bool = True,
    ) -> None: ...

    def step_closed(self, save_s: float = 0.0) -> None: ...

    def checkpoint_durable(self, train_step: int, durable_s: float = 0.0) -> None: ...


class Unrecorded:
    """The recorder of a program that nobody watches."""

    def phase(self, name: str) -> None: ...

    def step_started(self, train_step: int) -> None: ...

    def step_done(
        self,
        train_step: int,
        *,
        loss: float | None = None,
        grad_norm: float | None = None,
        samples_from: int = -1,
        samples_to: int = -1,
        tokens: int = 0,
        save_s: float = 0.0,
        compute_s: float = 0.0,
        wait_s: float = 0.0,
        data_s: float = 0.0,
        local_hash: int = 0,
        closed: bool = True,
    ) -> None: ...

    def step_closed(self, save_s: float = 0.0) -> None: ...

    def checkpoint_durable(self, train_step: int, durable_s: float = 0.0) -> None: ...


_here: Recorder | None = None
_here_pid = 0


def current() -> Recorder:
    """This process's recorder; the same object at each call."""
    global _here
    if _here is None:
        _here = install()
    return _here


def install() -> Recorder:
    """Open the page that the environment names, newly also where the process was forked with another one open."""
    global _here, _here_pid
    if _here is not None and _here_pid == os.getpid():
        return _here
    _here, _here_pid = _open(os.environ.get(STEP_PAGE_ENV, "")), os.getpid()
    return _here


def stop_asked() -> bool:
    """Whether the program has been asked to save and to end."""
    path = os.environ.get(STOP_FILE_ENV, "")
    return bool(path) and os.path.exists(path)


def _open(path: str) -> Recorder:
    if not path:
        return Unrecorded()
    if _is_taken(Path(path)):
        return Unrecorded()
    try:
        return StepWriter(Path(path), node=os.environ.get("SLURMD_NODENAME") or os.environ.get(NODE_ENV, ""))
    except (OSError, ValueError):
        return Unrecorded()


def _is_taken(path: Path) -> bool:
    """Whether another living process records here: a rank's spawned children inherit its environment."""
    try:
        reader = StepReader(path)
    except OSError:
        return False
    page = reader.read()
    reader.close()
    if page is None or page.pid in (0, os.getpid()) or not (page.phase or page.steps):
        return False  # a page that only says where the rank was started is for whoever comes to record
    return os.path.exists(f"/proc/{page.pid}")
