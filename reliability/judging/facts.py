"""Typed facts: what the lines of a case say, one struct a kind of thing that can be seen. Data only, Pure.

Readers (read*.py) make them from text; tests and other callers may make them by hand, as signals. A fact says what was
seen and where, never whose fault it is. `id` is the number of the line that bears it.
"""

from __future__ import annotations

from outlast.reliability.judging.sources import Src
from outlast.reliability.model import Noun


class Fact(Noun, frozen=True, kw_only=True):
    id: int = 0
    at_s: float | None = None
    """On the case's own time axis; None where nothing tells."""
    node: str | None = None
    past: bool = False
    """Before the case began: history."""


# ---------------------------------------------------------------- GPUs and nodes, by machines that report


class GpuFault(Fact, frozen=True, kw_only=True):
    """An XID or SXid, from the kernel's log."""

    code: int
    class_: str
    """Word of docs/vocabulary.md."""
    action: str
    """What the line alone would justify."""
    name: str = ""
    blames: str = "unknown"
    gpu: str | None = None
    alone: bool = False
    companion: bool = False
    injected: bool = False
    caused_by: int | None = None
    pid: int | None = None
    process: str = ""
    sm: str = ""
    """GPC/TPC/SM that stopped."""
    link: int | None = None
    bits: int = 0
    """XID 74: the first register."""
    fatal: bool | None = None
    switch: int | None = None
    """NVSwitch index, for an SXid."""
    uptime_s: float | None = None
    """Seconds since boot, as the record is stamped."""
    unrecognised: bool = False
    """The driver cannot name the client of a fault: its own state is damaged."""


class HostFault(Fact, frozen=True, kw_only=True):
    """Any other line of the kernel."""

    key: str
    class_: str
    action: str
    meaning: str = ""
    blames: str = "unknown"
    alone: bool = False
    device: str = ""
    times: int = 1
    """A folded line stands for several."""


class GpuLooked(Fact, frozen=True, kw_only=True):
    """What a tool found on a GPU: lost, remap_failed, remap_pending, well, errors, hot, mismatch."""

    what: str
    gpu: str | None = None
    text: str = ""


class Sample(Fact, frozen=True, kw_only=True):
    """One line of an exporter's page."""

    metric: str
    """Upper case, whatever the page prints."""
    gpu: str = ""
    """Index, else UUID: the physical GPU, MIG instances not told apart."""
    value: float | None = None
    blank: bool = False
    """The exporter's mark for `no value`."""
    lower: bool = False
    """The page spells names in lower case."""

    @property
    def kept(self) -> bool:
        return self.value is not None and not self.blank


class SeriesGone(Fact, frozen=True, kw_only=True):
    """Series that were there are missing."""

    metrics: tuple[str, ...] = ()
    gpu: str = ""
    everywhere: bool = False


class DiagRow(Fact, frozen=True, kw_only=True):
    """One test of a diagnostic's table."""

    test: str
    failed: tuple[int, ...] = ()
    passed: bool = False


class Unanswered(Fact, frozen=True, kw_only=True):
    """A health agent or tool that does not come back; `fine`: so many other nodes show nothing of the kind."""

    what: str
    gpu: str = ""
    fine: int = 0
    counters_rise: bool = False


class PowerLooked(Fact, frozen=True, kw_only=True):
    """A GPU's clocks under load: the throttle mask, and how its draw compares with its limit."""

    gpu: str = ""
    mask: int = 0
    share_of_limit: float | None = None


# ---------------------------------------------------------------- ranks: a program's word


class RankSaid(Fact, frozen=True, kw_only=True):
    """A line of a rank's output that was recognised."""

    key: str
    class_: str
    action: str
    echo: bool = False
    rank: int | None = None
    device: int | None = None
    run: str = ""
    """Which job or try, where the source says it."""
    train_step: int | None = None
    text: str = ""
    domain: str | None = None
    nodes: int = 0
    """How many nodes print it, where the source says so."""
    same_nodes: bool = False


class Waited(Fact, frozen=True, kw_only=True):
    """A collective time-out as one rank tells it."""

    how: str
    """timeout | heartbeat | dump"""
    rank: int | None = None
    seq: int | None = None
    enqueued: int | None = None
    completed: int | None = None
    first_reporter: int | None = None


class Missing(Fact, frozen=True, kw_only=True):
    """A rank that others wait for: it lags behind, or its stack shows it alone outside the collective."""

    rank: int | None = None
    run: str = ""
    how: str = "behind"
    """behind | outside | barrier"""


class Disagreed(Fact, frozen=True, kw_only=True):
    """Ranks called collectives that do not fit together."""

    what: str = ""


class NetError(Fact, frozen=True, kw_only=True):
    """A completion error of the network, as the printer sees it."""

    status: int
    local: str = ""
    peer: str = ""
    gpu: str = ""
    run: str = ""


class Ended(Fact, frozen=True, kw_only=True):
    """A process, task or job ended."""

    how: str
    """exit | signal | time_limit | preempted | cancelled | node_fail | oom | kill_failed | finished | time_boxed"""
    exit_code: int | None = None
    posix_signal: int | None = None
    rank: int | None = None
    run: str = ""
    job: str = ""


class Step(Fact, frozen=True, kw_only=True):
    """One line of a training log."""

    iteration: int
    total: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    step_s: float | None = None
    batch: int | None = None


class Measured(Fact, frozen=True, kw_only=True):
    """A comparison somebody measured: `communication time +30%`, `ranks 8-15 on n02 +5.5%`."""

    what: str = ""
    """compute | communication | '' """
    change: float = 0.0
    """0.3 for +30%."""
    first_rank: int | None = None
    last_rank: int | None = None
    others_flat: bool = False


class HashVote(Fact, frozen=True, kw_only=True):
    """Replicas' hashes of what must be equal: who differs, of how many, and whether equality was promised."""

    odd: tuple[int, ...] = ()
    """Ranks that differ from the majority."""
    voters: int = 0
    deterministic: bool = True
    last_equal: int = -1


class Strike(Fact, frozen=True, kw_only=True):
    """An anomaly confined to one rank before anything was reduced over ranks."""

    rank: int | None = None
    gpu: str = ""
    train_step: int | None = None


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


class MemoryShort(Fact, frozen=True, kw_only=True):
    have_mb: int
    want_mb: int


class Refused(Fact, frozen=True, kw_only=True):
    """The scheduler, or a tool of its, refused or did not answer: missing | unreachable | impossible."""

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

    progress: bool | None = None
    """Whether the attempt before got further than the one before it."""


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


class Note(Fact, frozen=True, kw_only=True):
    """Words of which nothing was recognised."""

    text: str = ""
    kind: Src = Src.NOTE
