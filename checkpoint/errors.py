"""What can go wrong with a checkpoint, as exceptions that carry the facts. Pure.

One base for the folder. `StoreError` is also a `PortError`, so that a caller who knows only the port can tell "try
again" from "do not": a directory that does not answer is no checkpoint fault.
"""

from __future__ import annotations

from outlast.reliability.ports import PortError


class CheckpointError(Exception):
    """Base of all checkpoint errors. `path` names the file or directory that it is about; '' where none."""

    def __init__(self, what: str, *, path: str = "") -> None:
        Exception.__init__(self, what)  # not super(): StoreError has a second base with another signature
        self.path = path


class ManifestError(CheckpointError):
    """A manifest or commit marker that is not one: unreadable, of another schema, or hostile."""


class NotWhole(CheckpointError):
    """A checkpoint that must not be restored. `problems` says why, one sentence each."""

    def __init__(self, path: str, problems: tuple[str, ...]) -> None:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        super().__init__(f"checkpoint {path}: {shown}. Not restored; take an older one", path=path)
        self.problems = problems

    def __reduce__(self) -> tuple[type[NotWhole], tuple[str, tuple[str, ...]]]:
        """It travels between ranks."""
        return type(self), (self.path, self.problems)


class NotCommitted(NotWhole):
    """It has no commit marker: a save that something interrupted or that is under way, no fault of its files."""


class SaveFailed(CheckpointError):
    """A save did not become durable. Its directory stays uncommitted; older checkpoints are untouched."""

    def __init__(self, what: str, *, path: str, train_step: int) -> None:
        super().__init__(what, path=path)
        self.train_step = train_step


class StoreError(CheckpointError, PortError):
    """The directory of checkpoints does not answer, or refuses. `again` tells whether trying again can help."""

    def __init__(self, what: str, *, again: bool, path: str = "") -> None:
        CheckpointError.__init__(self, what, path=path)
        self.again = again
