"""What the event log holds: one closed union, one JSON object a line. Pure; files are in eventlog.py.

Everything that a person or a program later asks is read back from these. Intent stands before an act, outcome after.
"""

from __future__ import annotations

from outlast.reliability.actions import Action
from outlast.reliability.attempt import Event, State
from outlast.reliability.model import Layout, Noun, Plan, Signal, StepSeen
from outlast.reliability.verdict import Verdict


class RunStarted(Noun, frozen=True, kw_only=True, tag="run_started"):
    run: str
    run_file_sha256: str
    train_steps: int
    layout: Layout
    nodes: int
    spares: int


class EpochTaken(Noun, frozen=True, kw_only=True, tag="epoch_taken"):
    """A supervisor took over (or began). Lines of lower epochs after this one are a fenced writer's: ignored."""

    epoch: int
    node: str
    pid: int
    why: str


class Seen(Noun, frozen=True, kw_only=True, tag="seen"):
    """A signal; this event's seq is its evidence id."""

    signal: Signal


class Judged(Noun, frozen=True, kw_only=True, tag="judged"):
    """An incident: a verdict with its number, counted from 1 in each run."""

    incident: int
    verdict: Verdict


class Intent(Noun, frozen=True, kw_only=True, tag="intent"):
    """About to act. `act` numbers acts from 1."""

    act: int
    action: Action
    incident: int = 0
    """0: no incident (routine)."""


class Outcome(Noun, frozen=True, kw_only=True, tag="outcome"):
    act: int
    ok: bool
    detail: str = ""


class AttemptPlanned(Noun, frozen=True, kw_only=True, tag="attempt_planned"):
    plan: Plan


class AttemptMoved(Noun, frozen=True, kw_only=True, tag="attempt_moved"):
    attempt: int
    event: Event
    state: State
    """The state after the event."""
    why: str = ""


class StepsDone(Noun, frozen=True, kw_only=True, tag="steps_done"):
    """Finished train_steps of an attempt, oldest first; each finished `age_s` before this line was written."""

    attempt: int
    steps: tuple[StepSeen, ...]


class Noted(Noun, frozen=True, kw_only=True, tag="noted"):
    """Something an operator may want to know and nothing is decided by."""

    text: str


class RunEnded(Noun, frozen=True, kw_only=True, tag="run_ended"):
    outcome: str
    """finished | stopped | cancelled | failed"""
    why: str


Body = (
    RunStarted
    | EpochTaken
    | Seen
    | Judged
    | Intent
    | Outcome
    | AttemptPlanned
    | AttemptMoved
    | StepsDone
    | Noted
    | RunEnded
)


class LogEvent(Noun, frozen=True, kw_only=True):
    """One line of events.jsonl."""

    seq: int
    """From 1, without gaps within an epoch's lines."""
    at_s: float
    """Wall time, UTC: for people."""
    mono_s: float
    """CLOCK_MONOTONIC of the writer: for durations between lines of the same boot."""
    boot: str
    """First 8 characters of the writer's boot id."""
    epoch: int
    body: Body
