"""The end of a run: agents are let go, allocations that nothing else would end are given back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from outlast.reliability.acts import call
from outlast.reliability.model import Node
from outlast.reliability.ports import Allocation, PortError
from outlast.reliability.wire import Leave

if TYPE_CHECKING:
    from outlast.reliability.supervisor import Supervisor

EXIT_CODES: Final[Mapping[str, int]] = {"finished": 0, "stopped": 0, "cancelled": 1, "failed": 1}
_LEAVE_S = 10.0


async def wind_down(loop: Supervisor) -> None:
    """Everybody leaves. Done twice it does no harm; every step is bounded."""
    # a successor is a child of its node's agent, which therefore leaves last
    board, mine = loop.parts.board, Node("" if loop.parts.in_batch else loop.parts.node)
    for session in board.sessions():
        if session.node != mine:
            board.command(session.node, Leave(command=loop.sender.next_number(), why="the run is over"))
    await board.emptied(_LEAVE_S, but=mine)
    try:
        allocations = await call(loop.parts.cluster.allocations)
    except PortError as error:
        loop.say(f"allocations are not given back: {error}; see squeue")
        return
    live = [a for a in allocations if a.state in ("RUNNING", "PENDING", "CONFIGURING")]
    for allocation in sorted(live, key=lambda a: mine in a.nodes):  # our own last: it ends us too
        if allocation.feeder or _no_script(loop, allocation):
            await _cancel(loop, allocation)


def _no_script(loop: Supervisor, allocation: Allocation) -> bool:
    """No batch script is left in this allocation that would end it: its batch node is lost to the run."""
    facts = loop.state.evidence.node(allocation.batch_node or Node(""))
    return allocation.batch_node is not None and bool(facts.lost_seq)


async def _cancel(loop: Supervisor, allocation: Allocation) -> None:
    def cancel() -> None:
        loop.fence.check()
        loop.parts.cluster.cancel(allocation.job)

    try:
        await call(cancel)
    except PortError as error:
        loop.say(f"job {allocation.job} is not given back: {error}; see squeue")
