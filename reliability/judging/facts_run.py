"""Typed facts, continued: Slurm, checkpoints and storage, people, the suite itself, and notes. Data only, Pure."""

from __future__ import annotations

from outlast.reliability.judging.facts import Fact
from outlast.reliability.judging.sources import Src

# ---------------------------------------------------------------- Slurm


class NamesListed(Fact, frozen=True, kw_only=True):
    """A line that is nothing but a host list."""

    text: str
    names: tuple[str, ...] = ()
    error: str = ""


class NodeListed(Fact, frozen=True, kw_only=True):
    """One node, or a count of nodes, with its state in Slurm."""

    state: str
    flags: tuple[str, ...] = ()
    reason: str = ""
    owner: str = ""
    """none | ours | slurm | checker | person"""
    count: int = 1
    nodes: tuple[str, ...] = ()


class JobListed(Fact, frozen=True, kw_only=True):
    """One job's state, by the queue (live) or by accounting."""

    job: str
    state: str
    live: bool = True
    reason: str = ""
    nodes: tuple[str, ...] = ()
    truncated: bool = False
    exit: str = ""


class LaunchFailed(Fact, frozen=True, kw_only=True):
    """A job could not be started on a node; `held`: Slurm will not try again by itself."""

    why: str
    """launch | prolog | epilog | check"""
    held: bool = False
    nodes: tuple[str, ...] = ()
    version: str = ""
    """Software that is new on these nodes, where that is known."""


class GpusShort(Fact, frozen=True, kw_only=True):
    """A node registers fewer GPUs than it is declared to have."""

    have: int
    want: int


class NodeGone(Fact, frozen=True, kw_only=True):
    """The controller lost a node: silent | rebooted."""

    how: str


class CheckFailed(Fact, frozen=True, kw_only=True):
    """A site's health checker took or would take a node out."""

    check: str
    timed_out: bool = False


class MemoryShort(Fact, frozen=True, kw_only=True):
    have_mb: int
    want_mb: int


class Refused(Fact, frozen=True, kw_only=True):
    """The scheduler or a tool of its refused or did not answer: missing | unreachable | impossible | unknown_job.

    `submitted` is the other answer: a job that was taken just now."""

    why: str
    tool: str = ""


class NothingQueued(Fact, frozen=True, kw_only=True):
    """The run has no job that runs or waits."""


# ---------------------------------------------------------------- checkpoints and storage


class SaveSeen(Fact, frozen=True, kw_only=True):
    """A checkpoint directory and what is in it."""

    name: str
    step: int = -1
    files: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    """Files of no bytes."""
    sizes: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    complete: bool | None = None


class PointerSeen(Fact, frozen=True, kw_only=True):
    """The tracker or `latest`: where it leads, '' where there is none."""

    to: str


class LoadFailed(Fact, frozen=True, kw_only=True):
    """A load ended badly: unreadable | missing_file | layout | nan | other_size."""

    why: str
    name: str = ""
    text: str = ""
    places: int = 1
    """On how many sets of nodes the same load ended so."""


class WriteFailed(Fact, frozen=True, kw_only=True):
    """A write ended badly: full | io | short | stale | thread."""

    why: str
    nodes: int = 0


class SavesCompared(Fact, frozen=True, kw_only=True):
    """Saves of different train_steps: equal where training must have changed them; or none durable for too long."""

    identical: int = 0
    none_durable: bool = False


class Resumed(Fact, frozen=True, kw_only=True):
    """How a resume went: exact, or what was not."""

    wrong: str
    """learning_rate | rng | loader | from_zero | exhausted | swings"""
    known_step: int = -1
    """Where the run is known to have been."""


# ---------------------------------------------------------------- people, the suite itself, and notes


class Will(Fact, frozen=True, kw_only=True):
    """A person's or the site's doing: cancel | drain | resume | reboot | maintenance | inject | upgrade."""

    what: str
    note: str = ""


class Returned(Fact, frozen=True, kw_only=True):
    """A node or GPU came back: reset | reboot | clean."""

    how: str


class Restarted(Fact, frozen=True, kw_only=True):
    """The suite started the job again."""


class Tried(Fact, frozen=True, kw_only=True):
    """One attempt: from which train_step it was restored, and where it died."""

    loaded: int
    died: int


class OwnDoing(Fact, frozen=True, kw_only=True):
    """A state of the suite itself: lease_lost | stale_action | cancelled_drain | repeated_action | stuck_request |
    false_alarm | clock_step | settling."""

    what: str


class Reach(Fact, frozen=True, kw_only=True):
    """How far something is said to reach. It may widen a scope or clear a node; it convicts nobody."""

    nodes: int = 0
    everywhere: bool = False
    others_fine: bool = False
    same_nodes: bool = False
    rotates: bool = False
    """It falls on another place each time."""


class Blind(Fact, frozen=True, kw_only=True):
    """A source that did not see a while."""

    why: str


class Stamped(Fact, frozen=True, kw_only=True):
    """When something began, on the wall clock: boot | job | reset | agent."""

    what: str
    wall_s: float


class Harmless(Fact, frozen=True, kw_only=True):
    """A line that is known to mean nothing, or an ordinary one of the kernel."""


class Note(Fact, frozen=True, kw_only=True):
    """Words of which nothing was recognised."""

    text: str = ""
    kind: Src = Src.NOTE
