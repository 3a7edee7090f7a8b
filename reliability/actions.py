"""Actions: the cheapest sound step, rung by rung. Data only; decide.py chooses, acts.py and driver.py carry out."""

from __future__ import annotations

from outlast.reliability.model import JobId, Layout, Node, Noun


class LeaveIt(Noun, frozen=True, kw_only=True, tag="leave_it"):
    """Rung 1: record it, change nothing."""

    why: str


class RestartInPlace(Noun, frozen=True, kw_only=True, tag="restart_in_place"):
    """Rung 2: the program died, the nodes are clear."""

    why: str


class Swap(Noun, frozen=True, kw_only=True, tag="swap"):
    """Rung 3: the convicted nodes leave, spares enter."""

    out: tuple[Node, ...]
    into: tuple[Node, ...]
    why: str
    at_checkpoint: bool = False


class Shrink(Noun, frozen=True, kw_only=True, tag="shrink"):
    """Rung 4: no spare; train on with fewer nodes in a legal layout while a feeder job asks for replacements."""

    out: tuple[Node, ...]
    layout: Layout
    feed: int
    """Nodes to ask the scheduler for; 0 where it cannot give any."""
    why: str


class Grow(Noun, frozen=True, kw_only=True, tag="grow"):
    """Rung 4, the way back: enough nodes are there again; restart at the next checkpoint in the wanted layout."""

    layout: Layout
    why: str


class Requeue(Noun, frozen=True, kw_only=True, tag="requeue"):
    """Rung 5: the allocation cannot carry the run; ask for another without the convicted nodes."""

    exclude: tuple[Node, ...]
    why: str


class RollBack(Noun, frozen=True, kw_only=True, tag="roll_back"):
    """Rung 6: the checkpoint of this train_step is quarantined; go on from the one before."""

    quarantine: int
    why: str
    too: tuple[int, ...] = ()
    """Further train_steps whose checkpoints are quarantined with it."""


class Hold(Noun, frozen=True, kw_only=True, tag="hold"):
    """Rung 7: stop, keep everything, call a person."""

    why: str


class Wait(Noun, frozen=True, kw_only=True, tag="wait"):
    """Not enough nodes yet: wait for a spare or a feeder job until the deadline."""

    until_s: float
    why: str


class Drain(Noun, frozen=True, kw_only=True, tag="drain"):
    """Ask Slurm to drain a node, with our reason."""

    node: Node
    reason: str


class Advise(Noun, frozen=True, kw_only=True, tag="advise"):
    """What an admin should do and we may not: named with the command."""

    node: Node
    command: str
    why: str


class Feed(Noun, frozen=True, kw_only=True, tag="feed"):
    """Submit a feeder job for this many nodes."""

    nodes: int
    exclude: tuple[Node, ...]
    why: str


class Release(Noun, frozen=True, kw_only=True, tag="release"):
    """A draining node that nothing of the run uses leaves its allocation, and so becomes drained."""

    node: Node
    job: JobId
    why: str


class EndRun(Noun, frozen=True, kw_only=True, tag="end_run"):
    """The run is over: finished, stopped, cancelled or failed."""

    outcome: str
    why: str


Action = (
    LeaveIt
    | RestartInPlace
    | Swap
    | Shrink
    | Grow
    | Requeue
    | RollBack
    | Hold
    | Wait
    | Drain
    | Advise
    | Feed
    | Release
    | EndRun
)
