"""Typed facts: what the lines of a case say, one struct a kind of thing that can be seen. Data only, Pure.

Readers (read*.py) make them from text; tests and other callers may make them by hand, as signals. A fact says what was
seen and where, never whose fault it is. `id` is the number of the line that bears it.
"""

from __future__ import annotations

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
    run: str = ""
    """Which job or try, where the source says it."""
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
