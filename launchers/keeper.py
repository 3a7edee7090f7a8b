"""The keeper of a node's ranks: starts them from the warm process, hears of their ends, stops them for certain.

    StartRanks -> pages, pipes, fork   ->  running --all end by themselves--> running (finished or failed)
    StopRanks  -> ladder -> proof      ->  stopping -> clear | unclear (NodeNotClear)

It holds one attempt at a time and refuses older ones; asking twice is answered twice and done once. It judges no
exit: RankExited goes to the supervisor, which alone decides that the others end.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable

from outlast.launchers import gpu_clear, last_words, node_env, reap
from outlast.launchers.held import HeldRank, Holding, compose_beat, earliest_phase
from outlast.launchers.logs import Pump
from outlast.launchers.nest import Nest
from outlast.launchers.warm_client import WarmClient, WarmError
from outlast.launchers.warm_wire import ForkFailed, ForkRank, FromWarm, RankEnded, RankForked, WarmReady
from outlast.reliability.model import Node, NodeNotClear, Rank, RankPlaced, Signal
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile
from outlast.reliability.wire import Beat, Done, RankSpec, StartRanks, StopRanks

log = logging.getLogger(__name__)

_PIPE_BYTES = 1024 * 1024
_FORK_S = 60.0
_SETTLE_S = 2.0
_LOST_S = 5.0
_WARM_TRIES = 3
"""Warm processes in a row that died before they were ready; then a start is refused."""


class Keeper:
    """One node's ranks. All methods run on the agent's event loop; the ladder runs in a thread."""

    def __init__(
        self,
        run: RunFile,
        run_dir: RunDir,
        node: Node,
        nest: Nest,
        pump: Pump,
        *,
        modules: tuple[str, ...],
        hear: Callable[[Signal], None],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """on_change: something that a beat says has changed; called at once, not only each second."""
        self.run, self.run_dir, self.node = run, run_dir, node
        self.held = Holding()
        self.helpers: set[int] = set()
        """Pids of our other children, which no ladder may touch."""
        self._nest, self._pump, self._modules, self._hear = nest, pump, modules, hear
        self._on_change, self._said = on_change, ("", "", 0, False)
        self._warm: WarmClient | None = None
        self._warm_deaths = 0
        self._highest_epoch = 0
        self._changed = asyncio.Event()
        self._stopping: asyncio.Task[str] | None = None
        self._hurry = False
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ what the agent asks at each beat

    def beat(self, logged: tuple[int, int]) -> Beat:
        """The heartbeat now. `logged`: an attempt, and up to which of its train_steps all is in the log."""
        steps_through = self.held.through(logged)
        now = time.monotonic()
        ages = {r.rank: now - r.log.last_mono_s for r in self.held.ranks.values()}
        warm = self._warm is not None and self._warm.ready is not None
        self.held.forget(steps_through)
        return compose_beat(self.held, now_mono_s=now, steps_through=steps_through, warm=warm, output_age_s=ages)

    def look(self) -> None:
        """Read the step records; report each rank's placement once."""
        self.held.look()
        for rank in self.held.ranks.values():
            if rank.page is not None and rank.page.pid and not rank.placed:
                rank.placed = True
                place = Node(rank.page.node or self.node)
                self._hear(
                    RankPlaced(node=place, at_s=time.time(), attempt=rank.attempt, rank=rank.rank, pid=rank.page.pid)
                )
        held = self.held
        said = (held.state, earliest_phase([r.phase for r in held.living]), len(held.living), held.finished)
        if said != self._said:
            self._said = said
            self._on_change()

    def start_warm(self) -> None:
        """Begin the imports, so that they are done when the first ranks are asked for."""
        if self._warm is None:
            env = node_env.warm_env(os.environ, self.run, self.node)
            self._warm = WarmClient(self._modules, env, on_message=self._on_warm, on_gone=self._on_gone)

    # ------------------------------------------------------------ start

    async def start(self, asked: StartRanks) -> Done:
        """Start an attempt's ranks; Done says that all were forked, or why not."""
        why = self._refusal(asked)
        if why is not None:
            return Done(command=asked.command, ok=not why, why=why or f"attempt {asked.attempt} runs already")
        if self.held.attempt:
            self._nest.forget(self.held.attempt)
        self._highest_epoch = asked.epoch
        self.held = held = Holding(attempt=asked.attempt, state="running")
        try:
            await self._until_warm()
            if held.state != "running":
                return Done(command=asked.command, ok=False, why=f"attempt {asked.attempt} was stopped at its start")
            for spec in asked.ranks:
                self._start_one(asked.attempt, spec)
            await self._until(lambda: held.born, _FORK_S, "ranks to be forked")
            if failed := [f"rank {r.rank}: {r.failed}" for r in held.ranks.values() if r.failed]:
                raise WarmError("; ".join(failed))
        except (WarmError, OSError) as e:
            log.error("attempt %d: %s", asked.attempt, e)
            return Done(command=asked.command, ok=False, why=str(e))
        log.info("attempt %d: %d ranks forked", asked.attempt, len(asked.ranks))
        return Done(command=asked.command, ok=True)

    def _refusal(self, asked: StartRanks) -> str | None:
        """None: go on. '': it is done already. Else why not."""
        held = self.held
        if asked.epoch < self._highest_epoch:
            return f"epoch {asked.epoch} is over: epoch {self._highest_epoch} has commanded this node"
        if asked.attempt < held.attempt:
            return f"attempt {asked.attempt} is over: this node holds attempt {held.attempt}"
        if asked.attempt == held.attempt:
            return "" if held.state == "running" else f"attempt {asked.attempt} is {held.state} on this node"
        if held.living or held.state in ("stopping", "unclear"):
            return f"attempt {held.attempt} is {held.state} on this node with {len(held.living)} ranks: stop it first"
        return None

    def _start_one(self, attempt: int, spec: RankSpec) -> None:
        rank = spec.placement.rank
        made = self._nest.page(attempt, rank)
        read_end, write_end = os.pipe()
        with contextlib.suppress(OSError):  # the default size works too
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        log_ = self._pump.add(read_end, self.run_dir.rank(attempt, rank), self.run.limits.log_bytes_per_rank)
        self.held.ranks[rank] = HeldRank(
            spec=spec,
            attempt=attempt,
            log=log_,
            pages=made[1] if made else None,
            born_mono_s=time.monotonic(),
        )
        kind, target = node_env.program(self.run, spec)
        env = node_env.rank_env(
            os.environ,
            self.run,
            spec,
            node=self.node,
            page=made[0] if made else None,
            stop=self._nest.stop_file(attempt),
        )
        request = ForkRank(
            attempt=attempt,
            rank=rank,
            kind=kind,
            target=target,
            argv=spec.argv,
            env=env,
            workdir=self.run.task.workdir or os.getcwd(),
        )
        try:
            if self._warm is None:
                raise WarmError("the warm process died while ranks were started")
            self._warm.fork(request, write_end)
        finally:
            os.close(write_end)

    async def _until_warm(self) -> None:
        self._warm_deaths = 0  # each start may try anew
        self.start_warm()

        def ready() -> bool:
            if self._warm_deaths >= _WARM_TRIES:
                raise WarmError(f"the process that ranks are forked from died {self._warm_deaths} times at its start")
            return self._warm is not None and self._warm.ready is not None

        await self._until(ready, self.run.limits.start_timeout_s, "imports in the warm process")

    async def _until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        until = time.monotonic() + limit_s
        while not condition():
            left = until - time.monotonic()
            if left <= 0:
                raise WarmError(f"waited {limit_s:.0f} s for {what}")
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
            except TimeoutError:
                continue

    # ------------------------------------------------------------ what the warm process says

    def _on_warm(self, message: FromWarm) -> None:
        self._changed.set()
        match message:
            case WarmReady(import_s=import_s, threads=threads, failed=failed):
                self._warm_deaths = 0
                log.info("warm process ready after %.1f s, %d threads", import_s, threads)
                for why in failed:
                    log.warning("preload failed: %s", why)
            case RankForked() as forked:
                held = self._find(forked.attempt, forked.rank)
                if held is not None:
                    held.proc = reap.Proc(
                        pid=forked.pid, ppid=0, group=forked.pid, state="", threads=1, start_ticks=forked.start_ticks
                    )
            case ForkFailed() as failed_:
                held = self._find(failed_.attempt, failed_.rank)
                if held is not None:
                    held.failed = failed_.why
            case RankEnded() as ended:
                held = self._find(ended.attempt, ended.rank)
                if held is not None:
                    self._ended(held, ended.status)

    def _find(self, attempt: int, rank: int) -> HeldRank | None:
        return self.held.ranks.get(Rank(rank)) if attempt == self.held.attempt else None

    def _ended(self, held: HeldRank, status: int, note: str = "") -> None:
        held.status = status
        task = asyncio.get_running_loop().create_task(self._report(held, note))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report(self, held: HeldRank, note: str) -> None:
        """RankExited, once all that the rank had written is read."""
        at_s = time.time()
        await asyncio.to_thread(self._pump.settle, held.log, _SETTLE_S)
        self.look()
        exited = last_words.compose(held, self.node, at_s=at_s, note=note)
        log.info("rank %d ended: %s", held.rank, held.status)
        self._hear(exited)

    def _on_gone(self, why: str) -> None:
        """The warm process died: its ranks died with it, by the kernel's hand."""
        log.error("%s", why)
        self._warm = None
        self._warm_deaths += 1
        self._changed.set()
        for held in self.held.ranks.values():
            if held.status is None:
                task = asyncio.get_running_loop().create_task(self._bury(held, why))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if self._warm_deaths < _WARM_TRIES:
            self.start_warm()

    async def _bury(self, held: HeldRank, why: str) -> None:
        until = time.monotonic() + _LOST_S
        proc = held.proc
        while proc and reap.is_alive(proc.pid, proc.start_ticks) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        if held.status is None:
            self._ended(held, -9, note=why)

    # ------------------------------------------------------------ stop

    async def stop(self, asked: StopRanks) -> Done:
        """Stop what is held; Done says that the node is proven empty, or why not."""
        if asked.attempt < self.held.attempt:
            why = f"attempt {asked.attempt} is over: this node holds attempt {self.held.attempt}"
            return Done(command=asked.command, ok=False, why=why)
        if self._stopping is None or self._stopping.done():
            self._hurry = False
            self._stopping = asyncio.get_running_loop().create_task(self._stop(asked))
        elif not asked.save_first and asked.term_grace_s < 1.0:
            self._hurry = True
        left = await asyncio.shield(self._stopping)
        return Done(command=asked.command, ok=not left, why=left)

    async def _stop(self, asked: StopRanks) -> str:
        """'' where the node is clear, else what is left."""
        held = self.held
        log.info("stopping attempt %d: %s", held.attempt, asked.why)
        held.state = "stopping"
        for rank in held.living:
            rank.asked = True
        with contextlib.suppress(WarmError):  # a request that is on its way would be born behind the ladder's back
            await self._until(lambda: held.born, _LOST_S, "ranks to be forked")
        for rank in held.living:
            rank.asked = True
        if asked.save_first and held.living and self._nest.ask_to_stop(held.attempt):
            await self._until_gone(asked.term_grace_s)
        elif asked.command:  # not where the node itself is told to end: what SIGTERM brings about is then welcome
            self._nest.ask_to_end(held.attempt)
        leaders = [r.proc for r in held.ranks.values() if r.proc is not None]
        cleared = await asyncio.to_thread(
            lambda: reap.end_tree(
                self._tree,
                leaders,
                term_grace_s=asked.term_grace_s,
                kill_grace_s=asked.kill_grace_s,
                hurry=lambda: self._hurry,
            )
        )
        await self._until_gone(_LOST_S)
        self.look()  # what they recorded last: the answer takes it along
        pids = cleared.seen | {leader.pid for leader in leaders}
        held_memory = await asyncio.to_thread(gpu_clear.still_held, pids)
        why = "; ".join([*([cleared.why] if cleared.left else []), *held_memory])
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LOST_S)
        held.state = "unclear" if why else "clear"
        if why:
            left = tuple(p.pid for p in cleared.left)
            self._hear(NodeNotClear(node=self.node, at_s=time.time(), attempt=held.attempt, pids=left, why=why))
        log.info("attempt %d: %s (%d killed)", held.attempt, why or "clear", cleared.killed)
        self._on_change()
        return why

    async def _until_gone(self, limit_s: float) -> None:
        """Until all ranks have ended, or the limit."""
        until = time.monotonic() + limit_s
        while self.held.living and time.monotonic() < until and not self._hurry:
            await asyncio.sleep(0.02)

    def _tree(self) -> list[reap.Proc]:
        """All below this agent but the warm process itself and our helpers with what is below them."""
        warm = self._warm.pid if self._warm else 0
        procs, me = reap.snapshot(), os.getpid()
        # a helper is our own child: a number that was given to somebody deeper since then spares nobody
        spared = {pid for pid in self.helpers if pid in procs and procs[pid].ppid == me}
        return [p for p in reap.descendants(me, procs, spare=spared) if p.pid != warm]

    async def close(self, *, term_grace_s: float, kill_grace_s: float, why: str) -> None:
        """Stop all ranks and the warm process."""
        stop = StopRanks(
            command=0, attempt=self.held.attempt, term_grace_s=term_grace_s, kill_grace_s=kill_grace_s, why=why
        )
        await self.stop(stop)
        warm, self._warm, self._warm_deaths = self._warm, None, _WARM_TRIES
        if warm is not None:
            await asyncio.to_thread(warm.close, kill_grace_s)
