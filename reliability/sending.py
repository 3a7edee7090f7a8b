"""Commands to agents: each wanted one is sent once to each incarnation of an agent, and again by a successor.

The switchboard repeats an unanswered command after a reconnect; agents take a repeated one for the same.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from outlast.reliability import wire
from outlast.reliability.driver import AgentView
from outlast.reliability.evidence import AttemptFacts
from outlast.reliability.model import Node
from outlast.reliability.saves_seen import SAVE_FIRST
from outlast.reliability.saving import grace_s

if TYPE_CHECKING:
    from outlast.reliability.supervisor import Supervisor

_LEAVE_S: Final = 10.0


class Sender:
    """What was sent to whom, and what agents answered."""

    def __init__(self, loop: Supervisor) -> None:
        self.loop = loop
        self.sent: dict[tuple[int, Node, str, str], int] = {}
        """(attempt, node, incarnation, what) -> command number."""
        self.stopped: set[tuple[int, Node, str]] = set()
        self.number = 0

    def next_number(self) -> int:
        """Unique over supervisors: the epoch is its upper part."""
        self.number += 1
        return self.loop.state.epoch * 1_000_000 + self.number

    def views(self) -> dict[Node, AgentView]:
        now = self.loop.state.evidence.current
        attempt = now.plan.attempt if now else 0
        views: dict[Node, AgentView] = {}
        for session in self.loop.parts.board.sessions():
            views[session.node] = AgentView(
                node=session.node,
                connected=session.connected,
                incarnation=session.incarnation,
                beat=session.beat,
                stop_done=(attempt, session.node, session.incarnation) in self.stopped,
            )
        return views

    def send(self, node: Node, what: str) -> None:
        """gate | start | stop for the present attempt, once to each incarnation that is connected."""
        now = self.loop.state.evidence.current
        session = self.loop.parts.board.session(node)
        if now is None or session is None or not session.connected:
            return
        key = (now.plan.attempt, node, session.incarnation, what)
        if key in self.sent:
            return
        number = self.next_number()
        if self.loop.parts.board.command(node, self._command(what, node, now, number)):
            self.sent[key] = number

    def _command(self, what: str, node: Node, now: AttemptFacts, number: int) -> wire.FromSupervisor:
        loop, plan = self.loop, now.plan
        if what == "gate":
            return wire.Gate(command=number, attempt=plan.attempt)
        if what == "start":
            evidence = loop.state.evidence
            gate = evidence.node(plan.nodes[0]).gate
            specs = loop.parts.starter.ranks(
                loop.parts.run,
                loop.parts.run_dir,
                plan,
                addresses={n: evidence.node(n).address for n in plan.nodes},
                master_port=gate.free_port if gate else 0,
            )
            mine = tuple(s for s in specs if s.placement.node == node)
            return wire.StartRanks(
                command=number, epoch=loop.state.epoch, attempt=plan.attempt, layout=plan.layout, ranks=mine
            )
        limits, ending = loop.parts.run.limits, loop.state.ending
        called = now.why_stopped.startswith(SAVE_FIRST)
        saves = called or (ending is not None and ending.outcome == "stopped" and now.last_step >= 0)
        return wire.StopRanks(
            command=number,
            attempt=plan.attempt,
            term_grace_s=grace_s(loop.state, loop.parts.run) if saves else limits.term_grace_s,
            kill_grace_s=limits.kill_grace_s,
            why=now.why_stopped,
            save_first=saves,
        )

    async def let_go(self, node: Node) -> bool:
        """Ask this node's agent to leave the run; True once it has, or where there is none."""
        board = self.loop.parts.board
        deadline_s = self.loop.parts.clock.mono_s() + _LEAVE_S
        asked = False
        while (session := board.session(node)) is not None and session.connected:
            asked = asked or board.command(node, wire.Leave(command=self.next_number(), why="the node is given back"))
            if self.loop.parts.clock.mono_s() >= deadline_s:
                return False
            await asyncio.sleep(0.05)
        return True

    def done(self, node: Node, incarnation: str, done: wire.Done) -> None:
        """An answer. A stop that was refused is over too: an agent that was started anew holds no ranks."""
        for (attempt, to, whom, what), number in self.sent.items():
            if number == done.command and to == node and whom == incarnation:
                if not done.ok:
                    self.loop.note(f"{node} did not {what} attempt {attempt}: {done.why}")
                if what == "stop":
                    self.stopped.add((attempt, node, whom))
                return
