"""Between attempts: looks at what there is, chooses the checkpoint, writes the next plan. An edge."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from outlast.reliability import model as m
from outlast.reliability import planning
from outlast.reliability.actions import Action, EndRun, Hold, Requeue, Wait
from outlast.reliability.decide import ladder
from outlast.reliability.events import AttemptPlanned
from outlast.reliability.lane import Lane
from outlast.reliability.ports import Choice, PortError
from outlast.reliability.saving import next_interval, too_late_s

if TYPE_CHECKING:
    from outlast.reliability.supervisor import Supervisor

_VERIFY_S = 3600.0
"""Verifying a large checkpoint reads all of it once."""
_SLOW_S = 60.0
"""After this a person is told that the store is still being read."""


class Planner:
    """Plans the next attempt when none is under way and nothing stands against it."""

    def __init__(self, loop: Supervisor) -> None:
        self.loop = loop
        self.choosing: asyncio.Task[None] | None = None
        self.lane = Lane("the checkpoint store")
        self.choice: Choice | None = None
        self.said = ""

    def look(self) -> None:
        loop = self.loop
        if not planning.may_plan(loop.state) or loop.terminated or not loop.watch.answered:
            self.choice = None
            return
        if planning.reached_target(loop.state, loop.parts.run):
            now = loop.state.evidence.current
            assert now is not None, "a target is reached by an attempt"
            steps = f"train_step {now.reached}" if now.reached > 0 else "exit 0 of all ranks"
            loop.intend(EndRun(outcome="finished", why=f"{steps} reached"))
            return
        left_s = too_late_s(loop.state, loop.parts.run, loop.watch.site.allocations, loop.now_s())
        if left_s is not None:
            self._say_once("the allocation ends too soon for another attempt to save: none is started in it")
            return
        failures, limit = loop.state.failures_without_progress, loop.parts.run.limits.attempts_without_progress
        if failures >= limit:
            loop.intend(Hold(why=f"{failures} attempts in a row without progress"))
            return
        if self._nodes_are_there():
            self._plan()

    def _nodes_are_there(self) -> bool:
        """Takes the ladder's present rung; True where ranks can be placed now."""
        loop = self.loop
        actions = ladder(loop.situation(), legal=loop.legal, why="next attempt")
        for action in actions[:-1]:
            if not loop.state.open(type(action)):
                loop.intend(action)
        last = actions[-1]
        if isinstance(last, Wait):
            if not loop.state.open(Wait):
                loop.intend(last)
            return False
        if isinstance(last, (Hold, Requeue)):
            loop.intend(last)
            return False
        if loop.state.evidence.current is not None:
            self._announce(last)
        return True

    def _announce(self, action: Action) -> None:
        """The rung that is really taken, where it is not the one that was said when the verdict fell."""
        opened = [a for a in self.loop.state.open_acts.values() if isinstance(a.action, planning.CHANGES)]
        for act in opened:
            same_kind = type(act.action) is type(action)
            if same_kind and getattr(act.action, "into", None) == getattr(action, "into", None):
                return
        self.loop.intend(action, incident=opened[-1].incident if opened else 0)

    def _plan(self) -> None:
        if self.choice is None:
            if self.choosing is None:
                self.choosing = asyncio.create_task(self._choose())
            return
        loop, choice = self.loop, self.choice
        self.choice = None
        now = loop.state.evidence.current
        plan = planning.next_plan(
            loop.situation(),
            (now.plan.attempt if now else 0) + 1,
            choice.restore,
            legal=loop.legal,
            why=loop.state.must_stop_why,
            saves=next_interval(loop.state.evidence, loop.parts.run),
        )
        if plan is None:
            return
        path = loop.parts.run_dir.plan(plan.attempt)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1))
        except OSError as error:
            self._say_once(f"attempt {plan.attempt} cannot be planned: {error}; tried again until it can")
            self.choice = choice
            return
        loop.record(AttemptPlanned(plan=plan))
        loop.awake.set()  # the gate is asked in the next turn, not at the next tick

    async def _choose(self) -> None:
        loop = self.loop
        try:
            quarantined = loop.state.quarantined
            slow = asyncio.get_running_loop().call_later(_SLOW_S, self._say_slow)
            try:
                choose = lambda: loop.parts.store.choose(quarantined=quarantined)  # noqa: E731
                self.choice = await self.lane.ask(choose, timeout_s=_VERIFY_S)
            finally:
                slow.cancel()
            self._passed_over(self.choice)
        except PortError as error:
            self._say_once(f"checkpoints: {error}")
            await asyncio.sleep(2.0)
        except Exception as error:  # noqa: BLE001 - a checkpoint that breaks its reader must not end the loop
            self._say_once(f"checkpoints: {type(error).__name__}: {error}")
            await asyncio.sleep(2.0)
        finally:
            self.choosing = None
            loop.awake.set()

    def _say_slow(self) -> None:
        self._say_once(f"checkpoints: no answer yet after {_SLOW_S:.0f} s: large ones, or a file system that hangs")

    def _say_once(self, text: str) -> None:
        """What comes back every two seconds is said once."""
        if text != self.said:
            self.said = text
            self.loop.put(text)

    def _passed_over(self, choice: Choice) -> None:
        """Committed checkpoints that do not verify are incidents; unfinished saves are only noted."""
        loop = self.loop
        for bad in choice.passed_over:
            if bad.unfinished:
                self._say_once(f"{bad.path} is not restored: {bad.why}")
            if not bad.unfinished and bad.train_step not in loop.state.quarantined:
                loop.put(
                    m.CheckpointSeen(
                        at_s=loop.now_s(), train_step=bad.train_step, verified=False, path=bad.path, why=bad.why
                    )
                )
