"""Carrying out actions through the ports. Each intent is in the log before it comes here, its outcome after.

Every act can be done twice without harm: a drain looks first, a feeder that is already there is adopted, a checkpoint
is set aside once. So a successor repeats what has no outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from outlast.reliability.actions import Action, Advise, Drain, Feed, Hold, Release, Requeue, RollBack
from outlast.reliability.lane import Lane
from outlast.reliability.model import JobId, Node
from outlast.reliability.ports import Allocation, CheckpointStore, Cluster, Pager, PortError
from outlast.reliability.runstate import OpenAct, RunState

T = TypeVar("T")
_TRIES = 3
_CALL_S = 60.0


async def call(what: Callable[[], T], *, timeout_s: float = _CALL_S) -> T:
    """A blocking port call in a thread, with a deadline. PortError(again=True) where it did not answer in time.

    The thread itself cannot be stopped; the port's own time limits end it.
    """
    try:
        return await asyncio.wait_for(asyncio.to_thread(what), timeout_s)
    except TimeoutError:
        raise PortError(f"no answer within {timeout_s:.0f} s", again=True) from None


class Acts:
    """Does what can be done at once; changes of the run's ranks are the driver's work."""

    def __init__(
        self,
        cluster: Cluster,
        store: CheckpointStore,
        pager: Pager,
        run_name: str,
        let_go: Callable[[Node], Awaitable[bool]],
    ) -> None:
        """`let_go` asks a node's agent to leave, and waits for it."""
        self.cluster, self.store, self.pager, self.run_name = cluster, store, pager, run_name
        self.setting_aside = Lane("the checkpoint store")
        self.let_go = let_go

    async def perform(
        self, act: OpenAct, state: RunState, allocations: tuple[Allocation, ...], check: Callable[[], None]
    ) -> tuple[bool, str]:
        """(whether it worked, detail). Tries a few times where trying again can help; `check` is the fence."""
        for attempt in range(1, _TRIES + 1):
            try:
                check()
                return True, await self._once(act.action, state, allocations)
            except PortError as error:
                if not error.again or attempt == _TRIES:
                    return False, str(error)
                await asyncio.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable: the loop returns")

    async def _once(self, action: Action, state: RunState, allocations: tuple[Allocation, ...]) -> str:
        match action:
            case Drain(node=node, reason=reason):
                return await call(lambda: self.cluster.drain(node, reason))
            case Advise(node=node, command=command, why=why):
                await self.page(f"advice: drain {node}", f"{why}\n{command}")
                return command
            case Hold(why=why):
                await self.page("held: a person is needed", why)
                return "paged"
            case Feed(nodes=count, exclude=exclude):
                known = {f.job for f in state.feeders}
                for allocation in allocations:
                    live = allocation.state in ("PENDING", "CONFIGURING", "RUNNING")
                    if allocation.feeder and live and allocation.job not in known:
                        return allocation.job
                return await call(lambda: self.cluster.feed(count, exclude))
            case Requeue(exclude=exclude):
                job = _own_job(allocations)
                await call(lambda: self.cluster.requeue(job, exclude))
                return f"job {job} queued again without {', '.join(exclude) or 'anything'}"
            case Release(node=node, job=job):
                left = await self.let_go(node)
                done = await call(lambda: self.cluster.release(node, job))
                return done if left else f"{done}; its agent had not left by then"
            case RollBack() as back:
                return await self._set_aside(back)
            case _:
                return ""

    async def _set_aside(self, back: RollBack) -> str:
        steps = (back.quarantine, *back.too)
        for step in steps:
            await self.setting_aside.ask(partial(self.store.quarantine, step, back.why), timeout_s=_CALL_S)
        return f"checkpoint {', '.join(map(str, steps))} set aside"

    async def page(self, title: str, text: str) -> None:
        await asyncio.to_thread(self.pager.page, f"{self.run_name}: {title}", text)


def _own_job(allocations: tuple[Allocation, ...]) -> JobId:
    for allocation in allocations:
        if not allocation.feeder and allocation.state == "RUNNING":
            return allocation.job
    raise PortError("no running allocation of this run that could be given back", again=False)
