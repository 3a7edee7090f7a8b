"""Becoming the supervisor of a run: bind, take the epoch, replay the log -- or follow the one that is alive.

A supervisor inside the batch script that finds another one alive, or that is overtaken, must not fight for the seat:
it stands by and follows the log to its end, since the end of the batch script would end the allocation.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Callable

import msgspec

from outlast.reliability.elastic import wanted
from outlast.reliability.ending import EXIT_CODES
from outlast.reliability.eventlog import EventLog, Follower, boot_id
from outlast.reliability.events import EpochTaken, Noted, RunEnded, RunStarted
from outlast.reliability.fence import Fence, Fenced, highest, take
from outlast.reliability.inputs import Terminated
from outlast.reliability.parts import Parts
from outlast.reliability.probe import answers
from outlast.reliability.rundir import RunDir
from outlast.reliability.runstate import replay
from outlast.reliability.supervisor import FENCED, Supervisor
from outlast.reliability.switchboard import Switchboard
from outlast.reliability.wire import Seat

Build = Callable[[Switchboard], Parts]
"""Makes the parts around a switchboard; app.py's work."""
_STANDBY_S = 1.0


async def supervise(
    run_dir: RunDir, build: Build, *, secret: bytes, host: str, node: str, why: str, stand_by: bool, epoch: int = 0
) -> int:
    """Supervise until the run is over; its exit code. 75: another supervises, and we were not to stand by.

    `epoch`: take exactly this one, as the agents agreed; 0 the next free one.
    """
    while True:
        seat = await asyncio.to_thread(highest, run_dir)
        if seat is not None and await answers(seat, secret):
            if not stand_by:
                return FENCED
            code = await _follow(run_dir, seat)
            if code is not None:
                return code
            continue  # its supervisor died and nobody took over: the seat is free
        code = await _supervise(run_dir, build, secret=secret, host=host, node=node, why=why, epoch=epoch)
        if code != FENCED or not stand_by:
            return code


async def _supervise(
    run_dir: RunDir, build: Build, *, secret: bytes, host: str, node: str, why: str, epoch: int
) -> int:
    board = Switchboard(secret=secret)
    bound = await board.listen(host)
    parts = build(board)
    try:
        seat = take(
            run_dir,
            Seat(epoch=epoch, node=node, pid=os.getpid(), host=bound[0], port=bound[1], at_s=parts.clock.wall_s()),
        )
    except Fenced:
        await board.close()
        return FENCED
    fence = Fence(run_dir, seat)
    log, past = EventLog.open(run_dir.events, seat.epoch, clock=parts.clock, boot=boot_id(), guard=fence.check)
    try:
        supervisor = Supervisor(parts, log, fence, replay(past.events))
        supervisor.record(EpochTaken(epoch=seat.epoch, node=node, pid=seat.pid, why=why))
        if supervisor.state.started is None:
            supervisor.record(_run_started(parts))
        for problem in past.problems:
            supervisor.record(Noted(text=problem))
        supervisor.commit()
        _obey_posix_signals(supervisor)
        await board.serve(seat.epoch)
        return await supervisor.run()
    finally:
        log.close()
        await board.close()


def _run_started(parts: Parts) -> RunStarted:
    run = parts.run
    return RunStarted(
        run=parts.run_dir.name,
        run_file_sha256=hashlib.sha256(msgspec.json.encode(run, order="sorted")).hexdigest(),
        train_steps=run.train_steps,
        layout=wanted(run.layout, nodes=run.cluster.nodes, ranks_per_node=run.ranks_per_node),
        nodes=run.cluster.nodes,
        spares=run.cluster.spares,
    )


def _obey_posix_signals(supervisor: Supervisor) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: supervisor.put(Terminated()))


async def _follow(run_dir: RunDir, seat: Seat) -> int | None:
    """Read along until the run ends (its exit code), or until nobody has the seat any more (None).

    A higher epoch is simply followed. SIGTERM ends the waiting with 75: nothing here needs to be stopped.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    follower = Follower(run_dir.events)
    secret = bytes.fromhex(run_dir.secret.read_text().strip())
    silent = 0
    while not stop.is_set():
        increment = await asyncio.to_thread(follower.read)
        for event in increment.events:
            if isinstance(event.body, RunEnded):
                return EXIT_CODES[event.body.outcome]
        now = await asyncio.to_thread(highest, run_dir) or seat
        silent = 0 if await answers(now, secret) else silent + 1
        if silent >= 30 and now.epoch == seat.epoch:
            # the agents elect a successor within the lease; this long without one means that there are none
            return None
        seat = now if now.epoch > seat.epoch else seat
        try:
            async with asyncio.timeout(_STANDBY_S):
                await stop.wait()
        except TimeoutError:
            continue
    return FENCED
