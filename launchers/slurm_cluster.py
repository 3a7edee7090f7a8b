"""The Cluster port over Slurm: the jobs of one run, agents on their nodes, drains, feeders, requeues.

Everything is asked anew; nothing is remembered but the user's rights. A job is ours by its comment, which names the run
directory, so a successor on another node finds the same jobs. Decisions are the supervisor's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from outlast.launchers import sbatch
from outlast.launchers.slurm_step import clean_environment, launch_step
from outlast.reliability.model import JobId, JobState, Node, NodeState
from outlast.reliability.ports import Allocation, PortError
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile
from outlast.slurm import commands, drain, fitness, parsers
from outlast.slurm.client import SlurmClient, user_name
from outlast.slurm.errors import SlurmError
from outlast.slurm.parsers import AcctRow, JobRow

STEP_TIMEOUT_S = 30.0
REQUEUE_TRIES = 40
REQUEUE_POLL_S = 0.25
HISTORY = "now-30days"
LIVE = frozenset({"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "REQUEUED", "REQUEUE_HOLD"})
"""States of a job that has not come to its end."""


class SlurmCluster:
    """One run's view of Slurm. Every SlurmError leaves here as a PortError."""

    def __init__(self, run_dir: RunDir, run: RunFile, python: str = "", *, client: SlurmClient | None = None) -> None:
        """`python`: absolute path of the interpreter that agents and supervisors run under; '' for this one's."""
        self._run_dir = run_dir
        self._run = run
        self._python = python or sys.executable
        self._client = client or SlurmClient()
        self._steps: list[subprocess.Popen[bytes]] = []
        self._may_drain: bool | None = None

    # ------------------------------------------------------------ what there is

    def allocations(self) -> tuple[Allocation, ...]:
        """From slurmctld; from accounting where slurmctld has forgotten all of them."""
        with _as_port_error():
            rows = [r for r in self._client.jobs_of_user() if r.comment in self._comments]
            found = [self._allocation(row) for r in rows if (row := self._client.job(r.job)) is not None]
            return tuple(sorted(found or self._past_allocations(), key=lambda a: int(a.job)))

    def job_states(self, jobs: Sequence[JobId]) -> tuple[JobState, ...]:
        """In the order asked for; jobs that neither slurmctld nor accounting knows are left out."""
        with _as_port_error():
            return tuple(state for job in jobs if (state := self._job_state(job)) is not None)

    def node_states(self, nodes: Sequence[Node]) -> tuple[NodeState, ...]:
        with _as_port_error():
            rows = self._client.nodes(nodes)
        now = time.time()
        return tuple(
            NodeState(node=r.node, at_s=now, state=r.state, flags=r.flags, reason=r.reason, reason_user=r.reason_user)
            for r in rows
        )

    def address(self, node: Node) -> str:
        """Where other nodes reach this one, as Slurm has it; '' where Slurm does not say."""
        with _as_port_error():
            rows = self._client.nodes([node])
        return rows[0].address if rows else ""

    # ------------------------------------------------------------ agents and jobs

    def launch_agents(self, allocation: Allocation, nodes: Sequence[Node]) -> None:
        """One detached slurm_step with an agent on each node. Works from the batch host, another node or a head node.

        A node of the list that is dead but not yet DOWN fails the step as a whole, seconds after this has returned.
        """
        if not nodes:
            return
        step = sbatch.agent_step(self._run_dir, self._run, job=allocation.job, nodes=tuple(nodes), python=self._python)
        self._steps = [s for s in self._steps if s.poll() is None]
        env = clean_environment(os.environ, gpus=self._run.cluster.gpus_per_node > 0) | self._slurm_conf()
        with _as_port_error():
            log = prepare(self._run_dir) / f"srun-{allocation.job}.log"
            self._steps.append(launch_step(commands.step_argv(step), env=env, log=log, timeout_s=STEP_TIMEOUT_S))

    def feed(self, nodes: int, exclude: Sequence[Node]) -> JobId:
        template = read_template("feeder.sbatch")
        text = sbatch.render_feeder(
            template, self._run_dir, self._run, python=self._python, nodes=nodes, exclude=exclude
        )
        with _as_port_error():
            return _submit(self._client, prepare(self._run_dir) / "feeder.sbatch", text)

    def requeue(self, job: JobId, exclude: Sequence[Node]) -> None:
        """Requeue first, then the exclude list: Slurm takes it from a job that is pending or completing.

        In this order a death in between leaves a job that comes back (and whose supervisor may try again), where a
        hold would leave one that never does. Asking again while it is queued only completes the exclude list.
        """
        with _as_port_error():
            row = self._known(job)
            settled = self._settled(row)
            if settled.state not in (*LIVE, "COMPLETING", "NODE_FAIL", "PREEMPTED"):
                raise PortError(f"job {job} is {settled.state}: it has ended and is not queued again", again=False)
            if row.state not in ("PENDING", "COMPLETING", "REQUEUED"):
                self._requeue(job)
            self._exclude(job, exclude)

    def release(self, node: Node, job: JobId) -> str:
        """By the list of nodes that stay. Its agent should have left: what still runs there is killed."""
        with _as_port_error():
            row = self._known(job)
            if row.state != "RUNNING" or node not in row.nodes:
                return f"{node} is not in job {job} any more"
            if row.nodes == (node,) and row.name == sbatch.job_name(self._run_dir, feeder=True):
                self._client.run(commands.scancel_argv(job))
                return f"feeder job {job} ended: it had no other node"
            if node == row.batch_node:
                raise PortError(
                    f"{node} runs the batch script of job {job}: Slurm frees it at the job's end", again=False
                )
            self._client.run(commands.keep_nodes_argv(job, [n for n in row.nodes if n != node]))
            after = self._known(job)
        if node in after.nodes:
            raise PortError(f"{node} is still in job {job}: Slurm took the change, but does not show it", again=True)
        return f"released from job {job}, which keeps {len(after.nodes)} nodes"

    def cancel(self, job: JobId) -> None:
        """Nothing where it has ended already."""
        with _as_port_error():
            row = self._client.job(job)
            if row is not None and row.state in LIVE:
                self._client.run(commands.scancel_argv(job))

    # ------------------------------------------------------------ drains

    def may_drain(self) -> bool:
        """Asked until Slurm says yes or no: rights do not change within a run. No answer means not now."""
        if self._may_drain is None:
            try:
                settings = parsers.parse_config(self._client.run(commands.show_config_argv()))
            except SlurmError:
                return False
            rights = fitness.ask_rights(self._client, settings)
            if not rights.may_drain and not rights.admin_level:
                return False
            self._may_drain = rights.may_drain
        return self._may_drain

    def drain(self, node: Node, reason: str) -> str:
        with _as_port_error():
            rows = self._client.nodes([node])
            if not rows:
                raise PortError(f"node {node}: Slurm knows no such node", again=False)
            if why := drain.refusal(rows[0]):
                raise PortError(f"node {node} is not drained by us: {why}. Left as it is", again=False)
            argv = drain.drain_argv(rows[0], reason)
            if argv is None:
                return f"drained by us before: {rows[0].reason}"
            self._client.run(argv)
            after = self._client.nodes([node])
        if not after or not after[0].is_draining:
            raise PortError(f"node {node}: Slurm took the drain, but does not show it", again=True)
        # draining while its jobs run, drained once it is empty
        word = "draining" if after[0].state in ("allocated", "mixed") else "drained"
        return f"{word}, was {'+'.join((rows[0].state, *rows[0].flags))}: {after[0].reason}"

    # ------------------------------------------------------------ parts

    @property
    def _comments(self) -> dict[str, bool]:
        """Comment -> is it a feeder's."""
        return {sbatch.comment(self._run_dir, feeder=f): f for f in (False, True)}

    def _slurm_conf(self) -> dict[str, str]:
        conf = self._client.environment.get("SLURM_CONF")
        return {"SLURM_CONF": conf} if conf else {}

    def _allocation(self, row: JobRow) -> Allocation:
        settled = self._settled(row)
        return Allocation(
            job=row.job,
            nodes=row.nodes,
            state=settled.state,
            # the name: a comment is cut apart by its own text in scontrol's line
            feeder=row.name == sbatch.job_name(self._run_dir, feeder=True),
            restarts=row.restarts,
            batch_node=row.batch_node,
            ends_at_s=time.time() + row.left_s if row.left_s is not None and row.state == "RUNNING" else 0.0,
        )

    def _past_allocations(self) -> list[Allocation]:
        """Jobs that only accounting still knows. Sites may not store comments: then the job's name tells."""
        found: dict[JobId, Allocation] = {}
        for feeder in (False, True):
            name = sbatch.job_name(self._run_dir, feeder=feeder)
            try:
                text = self._client.run(commands.sacct_by_name_argv(user_name(), name, HISTORY))
            except SlurmError:
                return []
            for row in parsers.parse_sacct(text):
                if row.comment in ("", sbatch.comment(self._run_dir, feeder=feeder)):
                    before = found.get(row.job)
                    found[row.job] = Allocation(
                        job=row.job,
                        nodes=row.nodes,
                        state=row.state,
                        feeder=feeder,
                        restarts=before.restarts + 1 if before else 0,
                    )
        return list(found.values())

    def _job_state(self, job: JobId) -> JobState | None:
        row = self._client.job(job)
        if row is not None:
            return self._settled(row)
        past = self._last_run(job)
        return _state_of(past) if past else None

    def _settled(self, row: JobRow) -> JobState:
        """A COMPLETING job hides whether it was cancelled; accounting tells at once, and who did it."""
        plain = JobState(job=row.job, at_s=time.time(), state=row.state, reason=row.reason, nodes=row.nodes)
        if row.state not in ("COMPLETING", "CANCELLED"):
            return plain
        past = self._last_run(row.job)
        if past is None or past.state in LIVE or past.state == "COMPLETING":
            return plain
        return JobState(job=row.job, at_s=plain.at_s, state=past.state, reason=_reason(past), nodes=row.nodes)

    def _last_run(self, job: JobId) -> AcctRow | None:
        rows = [r for r in self._client.history([job]) if r.job == job and not r.slurm_step]
        return rows[-1] if rows else None

    def _known(self, job: JobId) -> JobRow:
        row = self._client.job(job)
        if row is None:
            raise PortError(f"job {job}: Slurm does not know it (any more)", again=False)
        return row

    def _requeue(self, job: JobId) -> None:
        try:
            self._client.run(commands.requeue_argv(job))
        except SlurmError:
            # its TERM may have reached our own scontrol first; what counts is what the job does now
            if self._known(job).state not in ("PENDING", "COMPLETING", "REQUEUED"):
                raise

    def _exclude(self, job: JobId, exclude: Sequence[Node]) -> None:
        """Add to what the job excludes already, which may be the user's own list."""
        last: SlurmError | None = None
        for _ in range(REQUEUE_TRIES):
            row = self._known(job)
            missing = [n for n in exclude if n not in row.exclude]
            if not missing:
                return
            if row.state not in (*LIVE, "COMPLETING") or row.state == "RUNNING":
                raise PortError(
                    f"job {job} is {row.state} again before {', '.join(missing)} could be excluded", again=True
                )
            try:
                self._client.run(commands.exclude_argv(job, (*row.exclude, *missing)))
            except SlurmError as error:
                last = error
            time.sleep(REQUEUE_POLL_S)
        raise PortError(f"job {job} is queued, but does not exclude {', '.join(exclude)}: {last}", again=False)


def submit(run_dir: RunDir, run: RunFile, python: str = "", *, client: SlurmClient | None = None) -> JobId:
    """Submit the run's first job. The run directory must be there; SlurmError where Slurm refuses."""
    text = sbatch.render_run(read_template("run.sbatch"), run_dir, run, python=python or sys.executable)
    return _submit(client or SlurmClient(), prepare(run_dir) / "run.sbatch", text)


def prepare(run_dir: RunDir) -> Path:
    """`slurm/` in the run directory: batch scripts, output of jobs, agents and srun clients."""
    place = run_dir.root.absolute() / "slurm"
    place.mkdir(exist_ok=True)
    return place


def read_template(name: str) -> str:
    return (resources.files("outlast.launchers") / "templates" / name).read_text(encoding="utf-8")


def _submit(client: SlurmClient, script: Path, text: str) -> JobId:
    """The job inherits the caller's environment, which must not hold another job's."""
    script.write_text(text, encoding="utf-8")
    env = clean_environment(os.environ, gpus=True) | client.environment
    said = SlurmClient(env, timeout_s=client.timeout_s).run(commands.sbatch_argv(script)).strip()
    job = said.splitlines()[-1].partition(";")[0] if said else ""
    if not job.isdigit():
        raise SlurmError(
            f"sbatch: expected a job id, got {said[:120]!r}; see squeue before submitting again", again=False
        )
    return JobId(job)


def _state_of(row: AcctRow) -> JobState:
    return JobState(job=row.job, at_s=time.time(), state=row.state, reason=_reason(row), nodes=row.nodes)


def _reason(row: AcctRow) -> str:
    return f"cancelled by uid {row.by_uid}" if row.by_uid is not None else ""


@contextmanager
def _as_port_error() -> Iterator[None]:
    try:
        yield
    except SlurmError as error:
        raise PortError(str(error), again=error.again) from error
    except OSError as error:
        raise PortError(f"run directory: {error}", again=True) from error
