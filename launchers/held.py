"""The ranks that an agent holds, and the heartbeat that sums them up. Pure but for the reading of step pages.

A rank is what was asked for (RankSpec), the process it became, its output, its step record page and how it ended.
`compose_beat` makes wire.Beat of them at a given monotonic time; it decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outlast.launchers.logs import RankLog
from outlast.launchers.reap import Proc
from outlast.monitors.beat import PHASES, StepEntry, StepPage, StepReader
from outlast.reliability.model import Rank, StepSeen
from outlast.reliability.wire import STAND_IN_S, Beat, RankSpec

STEPS_KEPT = 100_000
"""Finished steps that wait for a supervisor to hear of them: hours, for any real step time."""
STEPS_A_BEAT = 2_000


@dataclass(kw_only=True, eq=False)
class HeldRank:
    """One rank of the present attempt, from the request to its end."""

    spec: RankSpec
    attempt: int
    log: RankLog
    pages: StepReader | None
    born_mono_s: float
    proc: Proc | None = None
    """The process; None until it is forked."""
    status: int | None = None
    """Exit code, or minus the POSIX signal; None while it lives."""
    page: StepPage | None = None
    """The last sound reading."""
    failed: str = ""
    """Why it could not be forked; '' otherwise."""
    placed: bool = False
    """RankPlaced was sent."""
    asked: bool = False
    """We had asked it to end before it did."""

    @property
    def rank(self) -> Rank:
        return self.spec.placement.rank

    @property
    def alive(self) -> bool:
        return self.proc is not None and self.status is None

    @property
    def phase(self) -> str:
        return self.page.phase if self.page else ""

    @property
    def train_step(self) -> int:
        return self.page.train_step if self.page else -1

    @property
    def moved_mono_s(self) -> float:
        """When it last finished a step or changed phase; its birth where it never did."""
        return max(self.born_mono_s, self.page.moved_mono_s if self.page else 0.0)

    def look(self) -> None:
        """Read the page; a page that cannot be read keeps what was known."""
        page = self.pages.read() if self.pages else None
        if page is not None:
            self.page = page


@dataclass(kw_only=True)
class Holding:
    """What the agent holds: nothing, or the ranks of one attempt in some state."""

    attempt: int = 0
    state: str = "idle"
    """idle | gating | running | stopping | clear | unclear"""
    ranks: dict[Rank, HeldRank] = field(default_factory=dict)
    steps: deque[StepEntry] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    """Finished steps of the reporting rank, or of its stand-in, that are not known to be in the log."""

    @property
    def living(self) -> list[HeldRank]:
        return [r for r in self.ranks.values() if r.alive]

    @property
    def born(self) -> bool:
        """No rank is still being forked."""
        return all(r.proc is not None or r.failed or r.status is not None for r in self.ranks.values())

    @property
    def finished(self) -> bool:
        return bool(self.ranks) and all(r.status == 0 for r in self.ranks.values())

    def look(self) -> None:
        """Read all pages and gather the reporting rank's new steps, an open one once the rank has ended.

        The ring is short: call it often.
        """
        for rank in self.ranks.values():
            rank.look()
            if (rank.spec.reports or rank.spec.stands_in) and rank.page is not None:
                known = self.steps[-1].end_mono_s if self.steps else 0.0
                over = [step for step in rank.page.steps if step.closed or not rank.alive]
                self.steps.extend(step for step in over if step.end_mono_s > known)

    def through(self, logged: tuple[int, int]) -> int:
        """Which train_step of these ranks all is in the log up to, where that much is of attempt `logged[0]`."""
        attempt, train_step = logged
        return train_step if attempt == self.attempt else 0

    def untold(self, steps_through: int, now_mono_s: float) -> list[StepEntry]:
        """Which finished steps to tell now. A stand-in leaves the new ones to the reporting rank, while they run."""
        reports = any(r.spec.reports for r in self.ranks.values())
        newest_s = now_mono_s if reports or self.state != "running" else now_mono_s - STAND_IN_S
        return [s for s in self.steps if s.train_step > steps_through and s.end_mono_s <= newest_s]

    def forget(self, steps_through: int) -> None:
        """Drop what is in the log, but the newest: it tells what has been gathered."""
        while len(self.steps) > 1 and self.steps[0].train_step <= steps_through:
            self.steps.popleft()


def compose_beat(
    held: Holding, *, now_mono_s: float, steps_through: int, warm: bool, output_age_s: Mapping[Rank, float]
) -> Beat:
    """The heartbeat of these ranks at this moment."""
    ranks = list(held.ranks.values())
    living = held.living
    step_min = min((r.train_step for r in ranks), default=-1)
    behind = [r for r in living if r.train_step == step_min]
    durable = max((r.page for r in ranks if r.page), key=lambda p: p.durable_step, default=None)
    new = held.untold(steps_through, now_mono_s)[:STEPS_A_BEAT]
    return Beat(
        attempt=held.attempt,
        state=held.state,
        warm=warm,
        ranks_alive=len(living),
        ranks_placed=sum(r.placed for r in ranks),
        phase=earliest_phase([r.phase for r in living]),
        step_min=step_min,
        step_max=max((r.train_step for r in ranks), default=-1),
        stalled_s=max(0.0, now_mono_s - max((r.moved_mono_s for r in ranks), default=now_mono_s)),
        laggard=min(behind, key=lambda r: r.moved_mono_s).rank if behind else None,
        durable_step=durable.durable_step if durable else -1,
        durable_s=durable.durable_s if durable else 0.0,
        steps=tuple(as_seen(s, now_mono_s) for s in new),
        output_age_s=min((output_age_s.get(r.rank, 0.0) for r in living), default=0.0),
        finished=held.finished,
    )


def earliest_phase(phases: Sequence[str]) -> str:
    """Of those that say one; '' where none does."""
    said = [p for p in phases if p]
    return min(said, key=PHASES.index) if said else ""


def as_seen(step: StepEntry, now_mono_s: float) -> StepSeen:
    return StepSeen(
        train_step=step.train_step,
        age_s=max(0.0, now_mono_s - step.end_mono_s),
        step_s=step.step_s,
        loss=step.loss,
        grad_norm=step.grad_norm,
        samples_from=step.samples_from,
        samples_to=step.samples_to,
        save_s=step.save_s,
    )
