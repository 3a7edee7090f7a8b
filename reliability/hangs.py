"""Noticing that nothing moves, and asking for every rank's stack before it is said. An edge."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.reliability import model as m
from outlast.reliability import wire
from outlast.reliability.attempt import State
from outlast.reliability.driver import hang_limit_s, stalled_s
from outlast.reliability.evidence import AttemptFacts

if TYPE_CHECKING:
    from outlast.reliability.supervisor import Supervisor

_STACKS_S = 10.0
"""How long stacks may take before the hang is reported without the missing ones."""


@dataclass(frozen=True)
class Save:
    """A save that the train loop stood still for, and when that train_step ended."""

    train_step: int
    at_s: float
    save_s: float


@dataclass
class Collecting:
    attempt: int
    stalled_s: float
    limit_s: float
    until_mono_s: float
    stacks: dict[m.Rank, wire.RankStack] = field(default_factory=dict)


class HangWatch:
    """Looks at the beats each turn; a stall becomes one NoProgress signal with the suspect's stack."""

    def __init__(self, loop: Supervisor) -> None:
        self.loop = loop
        self.collecting: Collecting | None = None
        self.saves: deque[Save] = deque(maxlen=16)

    def stack(self, stack: wire.RankStack) -> None:
        if self.collecting is not None and stack.attempt == self.collecting.attempt:
            self.collecting.stacks[stack.rank] = stack

    def look(self) -> None:
        now = self.loop.state.evidence.current
        if now is None or not now.running or now.no_progress is not None or now.exits:
            # ranks that ended explain why nothing moves
            self.collecting = None
            return
        if self.collecting is not None:
            self._collected(now, self.collecting)
            return
        stalled, limit = self._stall(now)
        if stalled is not None and stalled > limit:
            self._collect(now, stalled, limit)

    def _stall(self, now: AttemptFacts) -> tuple[float | None, float]:
        limits, views = self.loop.parts.run.limits, self.loop.sender.views()
        beats = [v.beat for n in now.plan.nodes if (v := views.get(n)) and v.beat is not None]
        phases = [b.phase for b in beats]
        if self.loop.parts.run.task.kind == "plain":
            return min((b.output_age_s for b in beats), default=None), limits.silent_s
        if now.state is not State.TRAINING:
            return self.loop.now_s() - now.started_s, limits.start_timeout_s
        return stalled_s(now.plan.nodes, views, now.plan.attempt), hang_limit_s(now, limits, phases)

    def _collect(self, now: AttemptFacts, stalled: float, limit: float) -> None:
        loop = self.loop
        until = loop.parts.clock.mono_s() + _STACKS_S
        self.collecting = Collecting(now.plan.attempt, stalled, limit, until)
        for node in now.plan.nodes:
            command = wire.CollectStacks(command=loop.sender.next_number(), attempt=now.plan.attempt)
            loop.parts.board.command(node, command)

    def _collected(self, now: AttemptFacts, collecting: Collecting) -> None:
        loop = self.loop
        missing = len(now.plan.ranks) - len(collecting.stacks)
        if missing and loop.parts.clock.mono_s() < collecting.until_mono_s:
            return
        self.collecting = None
        stalled, limit = self._stall(now)
        if (
            stalled is not None
            and stalled <= limit
            and not any(s.process_state in ("T", "t", "Z") for s in collecting.stacks.values())
        ):
            loop.note(f"attempt {now.plan.attempt} moves again after {collecting.stalled_s:.1f} s: no hang")
            return
        suspect, how = loop.parts.find_suspect(tuple(collecting.stacks.values()))
        if missing:
            how += f"; no stack from {missing} ranks"
        where = {p.rank: p.node for p in now.plan.ranks}
        loop.see(
            m.NoProgress(
                at_s=loop.now_s(),
                attempt=now.plan.attempt,
                stalled_s=stalled if stalled is not None else collecting.stalled_s,
                limit_s=collecting.limit_s,
                suspect=suspect,
                node=where.get(suspect) if suspect is not None else None,
                how=how,
                stack=collecting.stacks[suspect].stack[-4000:] if suspect in collecting.stacks else "",
            )
        )
