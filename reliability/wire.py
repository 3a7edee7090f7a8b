"""What agents and the supervisor say to each other: message types, and the frames that carry them.

Messages are a closed tagged union, MessagePack-encoded. A frame is length, sequence number, MAC, payload; both
sides prove the per-run secret by an HMAC challenge first, so the secret itself never crosses the wire.
Framing and the handshake are pure (bytes in, bytes out); sockets are in launchers/link.py and supervisor code.
"""

from __future__ import annotations

from outlast.reliability.model import JobId, Layout, Node, Noun, Placement, Rank, Signal, StepSeen


class Seat(Noun, frozen=True, kw_only=True):
    """Who supervises, as written in `epochs/<n>`."""

    epoch: int
    node: str
    pid: int
    host: str
    """Address on which the supervisor listens, reachable from the run's nodes."""
    port: int
    at_s: float


# ---------------------------------------------------------------- agent -> supervisor


class Hello(Noun, frozen=True, kw_only=True, tag="hello"):
    """First message after the handshake."""

    node: Node
    job: JobId
    incarnation: str
    pid: int
    address: str
    attempt: int
    """The attempt whose ranks it holds; 0 where none."""
    highest_epoch: int


class Beat(Noun, frozen=True, kw_only=True, tag="beat"):
    """Each second: the node's ranks, summarised."""

    attempt: int
    """0 where no ranks are held."""
    state: str
    """idle | gating | running | stopping | clear (stopped, proven empty) | unclear"""
    warm: bool = False
    """The process that ranks are forked from has finished its imports."""
    ranks_alive: int = 0
    ranks_placed: int = 0
    phase: str = ""
    """The earliest phase over its living ranks: init load compile train eval save idle; '' unknown."""
    step_min: int = -1
    step_max: int = -1
    stalled_s: float = 0.0
    """Seconds since any of its ranks last finished a train_step or changed phase."""
    laggard: Rank | None = None
    """The rank at step_min that has been still for longest."""
    durable_step: int = -1
    """Newest checkpoint that its ranks know to be committed."""
    durable_s: float = 0.0
    """From the beginning of that save to its commit; 0 where the program does not say."""
    steps: tuple[StepSeen, ...] = ()
    """Finished steps above Pulse.steps_through, oldest first, if this node holds the reporting rank or its stand-in."""
    output_age_s: float = 0.0
    """Seconds since any of its ranks last wrote output."""
    finished: bool = False
    """All its ranks exited 0."""


class Heard(Noun, frozen=True, kw_only=True, tag="heard"):
    """A signal, numbered by this incarnation of the agent so that a reconnect neither loses nor doubles it."""

    number: int
    signal: Signal


class RankStack(Noun, frozen=True, kw_only=True, tag="rank_stack"):
    """Answer to CollectStacks for one rank."""

    attempt: int
    rank: Rank
    process_state: str
    """R S D T Z as in /proc/PID/stat; '' where the process is gone."""
    waiting: bool | None = None
    """True: inside a collective or waiting for a peer; False: in code that waits for nobody; None: cannot tell."""
    phase: str = ""
    train_step: int = -1
    still_s: float = 0.0
    stack: str = ""


class Done(Noun, frozen=True, kw_only=True, tag="done"):
    """A command was carried out, or refused with the reason."""

    command: int
    ok: bool
    why: str = ""


FromAgent = Hello | Beat | Heard | RankStack | Done


# ---------------------------------------------------------------- supervisor -> agent


class Welcome(Noun, frozen=True, kw_only=True, tag="welcome"):
    epoch: int
    heard: int
    """Highest signal number of this incarnation that is already in the log."""


class Pulse(Noun, frozen=True, kw_only=True, tag="pulse"):
    """Each second: the lease. Agents that miss it for `lease_s` start a successor."""

    epoch: int
    heard: int
    steps_through: int
    """Highest train_step of `attempt` that is in the log: the reporting agent sends what is newer."""
    roster: tuple[Node, ...]
    """All agents that the supervisor counts, in index order: the base of the majority."""
    attempt: int = 0
    """A pulse of the attempt before says nothing about the steps of this one, which may be the same numbers again."""


class Gate(Noun, frozen=True, kw_only=True, tag="gate"):
    command: int
    attempt: int


STAND_IN_S = 2.0
"""For how long the stand-in leaves a finished train_step to the reporting rank; a beat and its pulse take one."""


class RankSpec(Noun, frozen=True, kw_only=True):
    """One rank to start on this node."""

    placement: Placement
    env: dict[str, str]
    """As torchrun sets it, and OUTLAST_*; complete but for what the node itself adds."""
    argv: tuple[str, ...]
    """For script and module: sys.argv. For a command: the program and its words."""
    reports: bool = False
    """This rank's step records are the run's (the last rank)."""
    stands_in: bool = False
    """Its step records are told too, STAND_IN_S later: where the reporting rank dies with its node, they remain."""


class StartRanks(Noun, frozen=True, kw_only=True, tag="start_ranks"):
    """Idempotent: an agent that already runs this attempt says so; one that runs a higher one refuses."""

    command: int
    epoch: int
    attempt: int
    layout: Layout
    ranks: tuple[RankSpec, ...]


class StopRanks(Noun, frozen=True, kw_only=True, tag="stop_ranks"):
    """TERM, after the grace KILL, then the whole tree; answered by Beat.state clear or by NodeNotClear."""

    command: int
    attempt: int
    term_grace_s: float
    kill_grace_s: float
    why: str
    save_first: bool = False
    """Ask the program to save before it ends (the signal file, then TERM)."""


class CollectStacks(Noun, frozen=True, kw_only=True, tag="collect_stacks"):
    command: int
    attempt: int


class Leave(Noun, frozen=True, kw_only=True, tag="leave"):
    """The run is over or this node is released: stop ranks, exit 0."""

    command: int
    why: str


FromSupervisor = Welcome | Pulse | Gate | StartRanks | StopRanks | CollectStacks | Leave
