"""Takeover: at most one starter among those who see the same, none in a minority, and the fence settles the rest."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.launchers.election import Election, Freshness, Turns, should_start
from outlast.reliability.fence import Fenced, highest, take
from outlast.reliability.model import Node
from outlast.reliability.rundir import RunDir
from outlast.reliability.switchboard import Switchboard
from outlast.reliability.wire import Seat

World = Any
"""conftest.World; test modules cannot import it."""
InWorld = Callable[[Callable[[World], Awaitable[None]]], None]

ROSTERS = st.integers(1, 9).map(lambda n: tuple(Node(f"n{i}") for i in range(n)))


# ---------------------------------------------------------------- the rule


@pytest.mark.slow
@settings(deadline=None)
@given(ROSTERS, st.data())
def test_of_those_who_see_the_same_exactly_one_starts_if_they_are_a_majority(
    roster: tuple[Node, ...], data: st.DataObject
) -> None:
    alive = data.draw(st.sets(st.sampled_from(roster)))
    starters = [n for n in alive if should_start(n, roster, alive - {n}, 1)]
    assert starters == ([min(alive)] if 2 * len(alive) > len(roster) else [])


@pytest.mark.slow
@settings(deadline=None)
@given(ROSTERS, st.data())
def test_two_sides_of_a_partition_never_both_start(roster: tuple[Node, ...], data: st.DataObject) -> None:
    left = data.draw(st.sets(st.sampled_from(roster)))
    right = set(roster) - left
    sides = [any(should_start(n, roster, side - {n}, 1) for n in side) for side in (left, right)]
    assert sum(sides) <= 1
    assert not sides[0] or len(left) > len(right)


def test_who_is_not_counted_does_not_count() -> None:
    roster = (Node("a"), Node("b"), Node("c"))
    assert not should_start(Node("x"), roster, {Node("a"), Node("b")}, 1)
    assert not should_start(Node("a"), roster, {Node("x"), Node("y")}, 1)
    assert not should_start(Node("a"), (), set(), 1)
    assert not should_start(Node("a"), roster, {Node("b")}, 0)
    assert should_start(Node("b"), roster, {Node("a")}, 1, passed={Node("a")})


def test_a_first_sight_is_not_life() -> None:
    freshness, a = Freshness(), Node("a")
    freshness.saw({a: 7}, 0.0)
    assert freshness.fresh(0.1, 3.0) == frozenset()
    freshness.saw({a: 7}, 1.0)
    assert freshness.fresh(1.1, 3.0) == frozenset()
    freshness.saw({a: 3}, 2.0)
    assert freshness.fresh(5.0, 3.0) == {a} and freshness.fresh(5.1, 3.0) == frozenset()


# ---------------------------------------------------------------- turns, in simulated time


@dataclass
class Simulated:
    """Agents that tick in any order on clocks with any offset; each sees the living of its own side at once."""

    roster: tuple[Node, ...]
    turns: dict[Node, Turns]
    offset_s: dict[Node, float]

    def tick(self, now_s: float, side: set[Node]) -> list[Node]:
        return [
            n
            for n in sorted(side, reverse=True)
            if self.turns[n].step(now_s + self.offset_s[n], n, self.roster, side - {n}, 1)
        ]


def simulated(roster: tuple[Node, ...], data: st.DataObject) -> Simulated:
    offsets = {n: data.draw(st.floats(-1e6, 1e6)) for n in roster}
    return Simulated(roster, {n: Turns(10.0) for n in roster}, offsets)


@pytest.mark.slow
@settings(deadline=None)
@given(ROSTERS, st.data())
def test_each_turn_has_one_starter_and_all_get_their_turn(roster: tuple[Node, ...], data: st.DataObject) -> None:
    world = simulated(roster, data)
    alive = data.draw(st.sets(st.sampled_from(roster), min_size=len(roster) // 2 + 1))
    started: list[tuple[float, Node]] = []
    now_s = 0.0
    while now_s < 11.0 * len(alive):
        started += [(now_s, n) for n in world.tick(now_s, alive)]
        now_s += 0.5
    # in index order, each once in a round, a whole turn apart
    assert [n for _, n in started[: len(alive)]] == sorted(alive)[: len(started)]
    assert len(started) >= len(alive) - 1
    assert all(b - a >= 9.5 for (a, _), (b, _) in itertools.pairwise(started))


@pytest.mark.slow
@settings(deadline=None)
@given(ROSTERS, st.data())
def test_a_minority_never_starts_however_long_it_waits(roster: tuple[Node, ...], data: st.DataObject) -> None:
    world = simulated(roster, data)
    few = data.draw(st.sets(st.sampled_from(roster), max_size=len(roster) // 2))
    for tick in range(400):
        assert world.tick(tick * 2.0, few) == []
    # and when the others are back, the first in order starts at once
    for tick in range(400, 800):
        if started := world.tick(tick * 2.0, set(roster)):
            assert len(started) == 1
            break
    else:
        raise AssertionError("nobody started although all are there")


def test_rounds_become_slower() -> None:
    turns, me, when = Turns(10.0), Node("a"), []
    for tick in range(4_000):
        if turns.step(tick * 0.5, me, (me,), set(), 1):
            when.append(tick * 0.5)
    gaps = [b - a for a, b in itertools.pairwise(when)]
    assert gaps[0] <= 11.0 and gaps == sorted(gaps) and gaps[-1] <= 81.0 and len(when) > 20


# ---------------------------------------------------------------- the edge


@dataclass
class Lease:
    """What an agent link knows; the test moves it."""

    lease_age_s: float = 0.0
    epoch: int = 1
    roster: tuple[Node, ...] = ()


def elections(run_dir: RunDir, leases: dict[Node, Lease], started: list[tuple[Node, int]]) -> dict[Node, Election]:
    def election(node: Node) -> Election:
        async def start(epoch: int) -> None:
            started.append((node, epoch))

        return Election(
            run_dir=run_dir,
            me=node,
            lease=leases[node],
            lease_s=0.2,
            start_successor=start,
            note=lambda _: None,
            show_s=0.02,
            fresh_s=0.2,
            turn_s=0.5,
        )

    return {n: election(n) for n in leases}


ABC = (Node("a"), Node("b"), Node("c"))


async def until(what: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline_s, "waited in vain"
        await asyncio.sleep(0.005)


def shown(run_dir: RunDir) -> set[str]:
    """Agents that have shown themselves."""
    folder = run_dir.orphans / "1"
    return {p.name for p in folder.iterdir()} if folder.exists() else set()


async def watch(
    run_dir: RunDir, alive: tuple[Node, ...], lapsed_s: float, until_started: int, roster: tuple[Node, ...] = ABC
) -> list[tuple[Node, int]]:
    leases = {n: Lease(roster=roster) for n in alive}
    started: list[tuple[Node, int]] = []
    tasks = [asyncio.create_task(e.run()) for e in elections(run_dir, leases, started).values()]
    try:
        await until(lambda: shown(run_dir) >= set(alive))
        assert started == []
        for lease in leases.values():
            lease.lease_age_s = 1.0
        deadline_s = time.monotonic() + lapsed_s
        while len(started) < until_started and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return started


@pytest.mark.slow
def test_where_the_lowest_is_dead_the_next_starts_and_then_its_next(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    # the dead agent's file is there, and does not move
    (run_dir.orphans / "1").mkdir(parents=True)
    (run_dir.orphans / "1" / "a").write_text("12\n")
    assert asyncio.run(watch(run_dir, ABC[1:], 10.0, 2)) == [(Node("b"), 2), (Node("c"), 2)]


@pytest.mark.slow
def test_one_of_three_starts_nothing(tmp_path: Path) -> None:
    assert asyncio.run(watch(RunDir(root=tmp_path), (Node("a"),), 1.5, 1)) == []


def test_half_is_enough_only_while_the_log_is_quiet() -> None:
    two = (Node("a"), Node("b"))
    assert not should_start(Node("b"), two, (), 1)
    assert should_start(Node("b"), two, (), 1, quiet=True)
    assert not should_start(Node("b"), ABC, (), 1, quiet=True)


@pytest.mark.slow
def test_one_of_two_starts_when_nobody_writes_the_log_any_more(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    run_dir.events.write_text("a line\n")
    assert asyncio.run(watch(run_dir, (Node("b"),), 10.0, 1, roster=ABC[:2])) == [(Node("b"), 2)]


@pytest.mark.slow
def test_one_of_two_starts_nothing_while_somebody_writes_the_log(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.02):
            with run_dir.events.open("a") as log:
                log.write("a line\n")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert asyncio.run(watch(run_dir, (Node("b"),), 2.0, 1, roster=ABC[:2])) == []
    finally:
        stop.set()
        writer.join(5)


@pytest.mark.slow
def test_with_all_alive_the_lowest_starts_first(tmp_path: Path) -> None:
    assert asyncio.run(watch(RunDir(root=tmp_path), ABC, 10.0, 1)) == [(Node("a"), 2)]


@pytest.mark.slow
def test_in_a_large_run_who_sees_a_lower_one_alive_reads_no_further(tmp_path: Path) -> None:
    """80 agents, the first of them dead; only the next in order ever looks at all of them."""
    run_dir = RunDir(root=tmp_path)
    roster = tuple(Node(f"n{i:02d}") for i in range(80))

    async def test() -> None:
        leases = {n: Lease(roster=roster) for n in roster[1:]}
        started: list[tuple[Node, int]] = []
        made = elections(run_dir, leases, started)
        for election in made.values():
            election._show_s, election._fresh_s, election._turn_s = 0.2, 2.0, 60.0
        tasks = [asyncio.create_task(e.run()) for e in made.values()]
        await until(lambda: shown(run_dir) >= set(roster[1:]))
        for lease in leases.values():
            lease.lease_age_s = 1.0
        deadline_s = time.monotonic() + 20.0
        while not started and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        reads = {n: len(e._worth_reading()) for n, e in made.items()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert started == [(roster[1], 2)]
        assert reads[roster[1]] == 79 and max(reads[n] for n in roster[2:]) <= 3

    asyncio.run(test())


@pytest.mark.slow
def test_nobody_starts_where_a_higher_epoch_is_there_already(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    take(run_dir, Seat(epoch=2, node="x", pid=1, host="h", port=1, at_s=0.0))
    assert asyncio.run(watch(run_dir, ABC, 1.5, 1)) == []


@pytest.mark.slow
def test_agents_whose_supervisor_dies_bring_up_one_successor_and_go_on(in_world: InWorld) -> None:
    """All parts but the supervisor's own loop: links, election, fence, a second switchboard."""

    async def test(world: World) -> None:
        first = await world.supervise()
        agents = [world.agent(n, lease_s=0.5) for n in ABC]
        await world.until(lambda: all(len(a.link.roster) == 3 for a in agents))
        boards: list[Any] = []
        lost: list[Node] = []

        def election(agent: Any) -> Election:
            node = agent.link._me.node

            async def start(epoch: int) -> None:
                # the worst case: all of them believe that it is their turn, and start at the same moment
                for who in ABC:
                    with contextlib.suppress(Fenced):
                        boards.append(await successor(world, who, epoch))
                        continue
                    lost.append(who)

            return Election(
                run_dir=world.run_dir,
                me=node,
                lease=agent.link,
                lease_s=0.5,
                start_successor=start,
                note=agent.notes.append,
                show_s=0.05,
                fresh_s=0.3,
                turn_s=5.0,
            )

        tasks = [asyncio.create_task(election(a).run()) for a in agents]
        await first.close()
        try:
            await world.until(lambda: all(a.link.connected and a.link.epoch == 2 for a in agents), 15.0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        seat = highest(world.run_dir)
        assert len(boards) == 1 and len(lost) == 2 and seat is not None and (seat.epoch, seat.node) == (2, "a")
        assert sum("I start epoch 2" in n for a in agents for n in a.notes) == 1

    in_world(test)


async def successor(world: World, node: Node, epoch: int) -> Any:
    one = Switchboard(secret=b"s" * 32, pulse_s=0.05)
    world.boards.append(one)
    host, port = await one.listen("127.0.0.1")
    taken = take(world.run_dir, Seat(epoch=epoch, node=node, pid=1, host=host, port=port, at_s=0.0))
    await one.serve(taken.epoch)
    return one
