"""What a supervisor is built from: the ports and pure pieces that app.py chose. One struct instead of ten arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.reliability.events import LogEvent
from outlast.reliability.model import Rank
from outlast.reliability.policy import Policy
from outlast.reliability.ports import CheckpointStore, Clock, Cluster, Pager, Starter
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile
from outlast.reliability.wire import RankStack

if TYPE_CHECKING:
    from outlast.reliability.switchboard import Switchboard


@dataclass(frozen=True)
class IdentityChanges:
    """What is not as it was when the run was frozen (identity.py), in words."""

    fatal: tuple[str, ...]
    """Another attempt would be another training."""
    other: tuple[str, ...]


FindSuspect = Callable[[Sequence[RankStack]], tuple[Rank | None, str]]
"""Stacks of all ranks -> the rank that waits for nobody (None: cannot be told) and how it was told."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    run_dir: RunDir
    run: RunFile
    cluster: Cluster
    store: CheckpointStore
    starter: Starter
    pager: Pager
    clock: Clock
    policy: Policy
    board: Switchboard
    find_suspect: FindSuspect
    on_event: Callable[[LogEvent], None] | None = None
    """Called with each event after it is durable: the narrator of a foreground run."""
    identity_changes: Callable[[], IdentityChanges] | None = None
    """Blocks: hashes the script and the image."""
    policy_notes: Callable[[], tuple[str, ...]] | None = None
    """Blocks: what the run is judged by, and whether the site's file says something else by now."""
    in_batch: bool = False
    """This supervisor runs in the allocation's batch script."""
    node: str = field(default="")
    """The node it runs on; '' outside any allocation."""
    can_feed: bool = False
    can_requeue: bool = False
    has_drains: bool = True
    """False where there is no scheduler that drains nodes (the local cluster)."""
    poll_s: float = 5.0
    """How often the scheduler is asked."""
