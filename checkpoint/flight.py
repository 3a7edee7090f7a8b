"""One save in flight, as a rank sees it: what writer.py has to remember between save() and the poll() that ends it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outlast.checkpoint.copying import Copying
from outlast.checkpoint.job import Spread
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.share import Asked


@dataclass
class Flight:
    """The save in flight, as this rank sees it."""

    train_step: int
    directory: Path
    began_s: float
    """Monotonic, as all times here."""
    deadline_s: float
    hold_s: float = 0.0
    error: str = ""
    asked: Asked | None = None
    """What the last poll has asked all ranks; the next one has the answer."""
    asked_words: str = ""
    """What this rank had to say of it."""
    copying: Copying | None = None
    is_open: bool = False
    """Until the caller has been told that the state may change: on all ranks alike, whatever has failed on one."""
    overlaps: bool = False
    manifest: Manifest | None = None
    spread: Spread | None = None
