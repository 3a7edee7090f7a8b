"""The embedded cluster: ports.Cluster with each "node" an agent process on this machine. For laptops and the demo.

    local.json in the run directory: node -> agent's pid and start ticks, lost or not

No scheduler: the run's nodes are a, b, c ..., all there from the start, none can be had in addition unless the
cluster was made with a reserve. The file, not this object, holds what is true, so that a successor supervisor in
another process goes on with it. `crash` is a node's power loss: agent, warm process, ranks and whatever they started
are gone at once, without a word. Everything that matters is proven on real Slurm; see slurm/testbed.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

from outlast.launchers import node_env, reap
from outlast.launchers.recorder import NODE_ENV
from outlast.reliability.model import JobId, JobState, Node, NodeState, Noun
from outlast.reliability.ports import Allocation, PortError
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile

JOB = JobId("local")
_KILL_S = 10.0


class LocalNode(Noun, frozen=True, kw_only=True):
    """One "node" as local.json holds it."""

    name: Node
    job: JobId = JOB
    pid: int = 0
    """Its agent; 0 before the first."""
    start_ticks: int = 0
    down: bool = False
    """Crashed: it does not come back."""


class LocalState(Noun, frozen=True, kw_only=True):
    """local.json"""

    nodes: tuple[LocalNode, ...]
    reserve: tuple[Node, ...] = ()
    """Names that `feed` may still hand out."""
    feeders: int = 0
    cancelled: tuple[JobId, ...] = ()

    def node(self, name: Node) -> LocalNode | None:
        return next((n for n in self.nodes if n.name == name), None)

    def with_node(self, changed: LocalNode) -> LocalState:
        nodes = tuple(changed if n.name == changed.name else n for n in self.nodes)
        return msgspec.structs.replace(self, nodes=nodes)


class LocalCluster:
    """ports.Cluster on this machine."""

    def __init__(self, run_dir: RunDir, run: RunFile, *, reserve: int = 0) -> None:
        """reserve: nodes beyond the run's own that `feed` can give; counts where the state is made."""
        self._run_dir, self._run, self._reserve = run_dir, run, reserve
        self._file = run_dir.root / "local.json"
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """Agents that this process started: they are reaped here."""

    # ------------------------------------------------------------ ports.Cluster

    def allocations(self) -> tuple[Allocation, ...]:
        state = self._read()
        jobs = dict.fromkeys(n.job for n in state.nodes)
        return tuple(
            Allocation(
                job=job,
                nodes=tuple(n.name for n in state.nodes if n.job == job),
                state="CANCELLED" if job in state.cancelled else "RUNNING",
                feeder=job != JOB,
            )
            for job in jobs
        )

    def launch_agents(self, allocation: Allocation, nodes: Sequence[Node]) -> None:
        """Start agents where none lives. A crashed node is silently dead, as a real one would be."""
        with self._changing() as state:
            for name in nodes:
                node = state.node(name)
                if node is None or node.job != allocation.job:
                    raise PortError(f"node {name} is not in allocation {allocation.job}", again=False)
                if not node.down and not reap.is_alive(node.pid, node.start_ticks):
                    state = state.with_node(self._launch(node))
            self._write(state)

    def node_states(self, nodes: Sequence[Node]) -> tuple[NodeState, ...]:
        state, now = self._read(), time.time()
        known = [n for name in nodes if (n := state.node(name))]
        return tuple(NodeState(node=n.name, at_s=now, state="down" if n.down else "allocated") for n in known)

    def job_states(self, jobs: Sequence[JobId]) -> tuple[JobState, ...]:
        now = time.time()
        return tuple(
            JobState(job=a.job, at_s=now, state=a.state, nodes=a.nodes) for a in self.allocations() if a.job in jobs
        )

    def may_drain(self) -> bool:
        return False

    def drain(self, node: Node, reason: str) -> str:
        raise PortError(f"the local cluster has nobody to drain node {node} for", again=False)

    def feed(self, nodes: int, exclude: Sequence[Node]) -> JobId:
        """Nodes of the reserve join as an allocation of their own; refused where it has too few."""
        with self._changing() as state:
            free = [n for n in state.reserve if n not in exclude]
            if len(free) < nodes:
                raise PortError(
                    f"the local cluster has {len(free)} nodes beyond the run's own; {nodes} were wanted", again=False
                )
            job = JobId(f"local-{state.feeders + 1}")
            added = tuple(LocalNode(name=name, job=job) for name in free[:nodes])
            state = msgspec.structs.replace(
                state,
                nodes=state.nodes + added,
                reserve=tuple(n for n in state.reserve if n not in free[:nodes]),
                feeders=state.feeders + 1,
            )
            # a feeder job starts its own agents, as its batch script does under Slurm
            for node in added:
                state = state.with_node(self._launch(node))
            self._write(state)
        return job

    def requeue(self, job: JobId, exclude: Sequence[Node]) -> None:
        raise PortError("the local cluster has no queue", again=False)

    def release(self, node: Node, job: JobId) -> str:
        raise PortError(f"the local cluster has nobody to give node {node} back to", again=False)

    def cancel(self, job: JobId) -> None:
        """End an allocation: its agents get TERM, and end their ranks themselves."""
        with self._changing() as state:
            for node in (n for n in state.nodes if n.job == job):
                self._signal(node, signal.SIGTERM)
            cancelled = tuple(dict.fromkeys((*state.cancelled, job)))
            self._write(msgspec.structs.replace(state, cancelled=cancelled))

    # ------------------------------------------------------------ faults and the end

    def crash(self, node: Node) -> None:
        """The node loses its power. Blocks until nothing of it is left, some 10 s at most."""
        with self._changing() as state:
            lost = state.node(node)
            if lost is None:
                raise PortError(f"no node {node} here; there are {', '.join(n.name for n in state.nodes)}", again=False)
            others = {n.pid for n in state.nodes if n.name != node}
            self._write(state.with_node(msgspec.structs.replace(lost, down=True)))
        left = self._kill_tree(lost, spare=others | {os.getpid()})
        if left:
            raise PortError(f"node {node}: pids {', '.join(map(str, left))} outlived SIGKILL", again=True)

    def close(self, timeout_s: float = 30.0) -> None:
        """End all agents in order, then by force: nothing stays behind."""
        state = self._read()
        for node in state.nodes:
            self._signal(node, signal.SIGTERM)
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and any(self._lives(n) for n in state.nodes):
            time.sleep(0.05)
        for node in state.nodes:
            others = {n.pid for n in state.nodes if n is not node}
            self._kill_tree(node, spare=others | {os.getpid()})

    # ------------------------------------------------------------ inside

    def _launch(self, node: LocalNode) -> LocalNode:
        words = ["outlast.reliability.app", "agent", "--run-dir", str(self._run_dir.root), "--node", node.name]
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        env.pop(node_env.TREE_ENV, None)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**env, NODE_ENV: node.name},
                # not in our group: a Ctrl-C at the supervisor's terminal is the supervisor's to obey
                start_new_session=True,
            )
        except OSError as e:
            raise PortError(f"node {node.name}: its agent cannot be started: {e}", again=True) from e
        self._children[process.pid] = process
        proc = reap.read_proc(process.pid)
        return msgspec.structs.replace(node, pid=process.pid, start_ticks=proc.start_ticks if proc else 0)

    def _lives(self, node: LocalNode) -> bool:
        self._reap(node)
        return bool(node.pid) and reap.is_alive(node.pid, node.start_ticks)

    def _reap(self, node: LocalNode) -> None:
        child = self._children.get(node.pid)
        if child is not None:
            child.poll()

    def _signal(self, node: LocalNode, posix_signal: int) -> None:
        proc = reap.read_proc(node.pid) if node.pid else None
        if proc is not None and proc.start_ticks == node.start_ticks:
            reap.send(proc, posix_signal)

    def _kill_tree(self, node: LocalNode, *, spare: set[int]) -> list[int]:
        """KILL the agent first, so that it reports nothing, then all that it began; pids that are left."""
        mark = f"{self._run_dir.root}:{node.name}:"
        procs = reap.snapshot()
        begun = {p.pid: p for p in reap.descendants(node.pid, procs, spare=spare)} if self._lives(node) else {}
        self._signal(node, signal.SIGKILL)

        def tree() -> list[reap.Proc]:
            self._reap(node)
            now = reap.snapshot()
            same = [now[p.pid] for p in begun.values() if p.pid in now and now[p.pid].start_ticks == p.start_ticks]
            for top in list(same):
                same += reap.descendants(top.pid, now, spare=spare)
            marks = [p for p, _ in reap.marked(node_env.TREE_ENV, mark) if p.pid not in spare]
            begun.update((p.pid, p) for p in (*same, *marks))
            return list({p.pid: p for p in (*same, *marks)}.values())

        return [p.pid for p in reap.end_tree(tree, (), term_grace_s=0.0, kill_grace_s=_KILL_S).left]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[LocalState]:
        """The state, with other processes kept from changing it; write it before leaving."""
        lock = os.open(self._file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self._read()
        finally:
            os.close(lock)

    def _read(self) -> LocalState:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=LocalState)
        except FileNotFoundError:
            return self._first()
        except (OSError, msgspec.MsgspecError) as e:
            raise PortError(f"{self._file}: {e}", again=True) from e

    def _first(self) -> LocalState:
        asked = self._run.cluster
        names = [Node(name) for name in node_names(asked.nodes + asked.spares + self._reserve)]
        own = asked.nodes + asked.spares
        return LocalState(nodes=tuple(LocalNode(name=n) for n in names[:own]), reserve=tuple(names[own:]))

    def _write(self, state: LocalState) -> None:
        draft = self._file.with_name(f".local.{os.getpid()}.json")
        try:
            draft.write_bytes(msgspec.json.encode(state))
            os.replace(draft, self._file)
        except OSError as e:
            raise PortError(f"{self._file}: {e}", again=True) from e


def node_names(count: int) -> list[str]:
    """a b c ... z aa ab ..."""
    letters = string.ascii_lowercase
    return [(letters[i // 26 - 1] if i >= 26 else "") + letters[i % 26] for i in range(count)]
