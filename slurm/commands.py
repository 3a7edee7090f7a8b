"""Slurm commands as argument lists. Pure; client.py runs them.

Formats are asked for explicitly, so that no site default and no human table is ever parsed. Node names and job ids come
from Slurm or from a checked configuration and always stand behind an option, so none can be read as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outlast.reliability.model import JobId, Node, Noun
from outlast.slurm.hostlist import compress
from outlast.slurm.parsers import SACCT_FIELDS, SINFO_FORMAT, SQUEUE_FORMAT


class Step(Noun, frozen=True, kw_only=True):
    """One slurm_step: one task on each of these nodes of a job."""

    job: JobId
    nodes: tuple[Node, ...]
    program: tuple[str, ...]
    output: str
    """File name pattern of the tasks' output. With %t each task's file is written on its own node, not by srun."""
    container: str = ""
    """Image for Pyxis' --container-image; '' for none."""
    mounts: tuple[str, ...] = ()
    """Directories that the container sees under their own names."""


def step_argv(step: Step) -> list[str]:
    """srun inside an allocation. It depends on no inherited environment and takes nothing from other steps.

    --overlap: it starts at once beside whatever runs there and sees all GPUs. --no-kill: a lost node does not end the
    others. --kill-on-bad-exit=0 --wait=0: nor does a task that ends. No --cpus-per-task, which implies --exact: without
    it and without binding a task has all CPUs that the job has on its node, however many that is on each.
    """
    count = str(len(step.nodes))
    argv = ["srun", f"--jobid={step.job}", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    argv += ["-N", count, "-n", count, "--ntasks-per-node=1", "-w", compress(step.nodes), "--mpi=none"]
    argv += ["--cpu-bind=none", "--input=none", f"--output={step.output}", "--open-mode=append"]
    if step.container:
        argv += [f"--container-image={step.container}", "--no-container-entrypoint"]
        argv += [f"--container-mounts={','.join(f'{m}:{m}' for m in step.mounts)}"] if step.mounts else []
    return [*argv, *step.program]


def sbatch_argv(script: Path) -> list[str]:
    """Prints the job id alone (and ;cluster where there are several)."""
    return ["sbatch", "--parsable", str(script)]


def scancel_argv(job: JobId) -> list[str]:
    return ["scancel", "--quiet", job]


def requeue_argv(job: JobId) -> list[str]:
    return ["scontrol", "requeue", job]


def exclude_argv(job: JobId, nodes: Sequence[Node]) -> list[str]:
    """The whole exclude list of a job that is pending, or completing before it is pending again."""
    return ["scontrol", "update", f"JobId={job}", f"ExcNodeList={compress(nodes)}"]


def keep_nodes_argv(job: JobId, nodes: Sequence[Node]) -> list[str]:
    """The running job keeps these nodes and loses its others: what runs there is killed, the rest goes on.

    By name: NumNodes would keep the first ones, whichever they are. Slurm refuses a list without the batch node, gives
    nothing back to a job that became smaller, and asks for the first number again when it requeues (tried on 22.05).
    """
    return ["scontrol", "update", f"JobId={job}", f"NodeList={compress(nodes)}"]


def show_job_argv(job: JobId) -> list[str]:
    return ["scontrol", "show", "job", "--oneliner", job]


def show_nodes_argv(nodes: Sequence[Node]) -> list[str]:
    """Exits 1 where it does not know one of the nodes, but shows the others."""
    return ["scontrol", "show", "node", "--oneliner", compress(nodes)]


def show_config_argv() -> list[str]:
    return ["scontrol", "show", "config"]


def ping_argv() -> list[str]:
    return ["scontrol", "ping"]


def squeue_argv() -> list[str]:
    """All jobs of this user that slurmctld knows, ended ones too (for MinJobAge seconds)."""
    return ["squeue", "--noheader", "--me", "--states=all", f"--format={SQUEUE_FORMAT}"]


def sinfo_argv(nodes: Sequence[Node] = ()) -> list[str]:
    """One line for each node (and partition); all nodes where none are named."""
    argv = ["sinfo", "--noheader", "--Node", f"--format={SINFO_FORMAT}"]
    return [*argv, f"--nodes={compress(nodes)}"] if nodes else argv


def sacct_argv(jobs: Sequence[JobId]) -> list[str]:
    """Every run of these jobs, requeued ones included, without steps."""
    return [*_sacct(), f"--jobs={','.join(jobs)}"]


def sacct_by_name_argv(user: str, name: str, since: str) -> list[str]:
    """Every run of this user's jobs of that name that began after `since` (as in sacct -S: now-30days)."""
    return [*_sacct(), f"--user={user}", f"--name={name}", f"--starttime={since}", "--endtime=now"]


def _sacct() -> list[str]:
    return ["sacct", "--duplicates", "--allocations", "--parsable2", f"--format={SACCT_FIELDS}"]


def rights_argv(user: str) -> list[str]:
    """Prints the user's administrator level: None, Operator or Administrator."""
    return ["sacctmgr", "--noheader", "--parsable2", "show", "user", user, "format=Admin"]
