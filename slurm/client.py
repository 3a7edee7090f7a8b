"""The one function that runs Slurm commands, and small questions built on it.

Every call has a time-out and a minimal environment; every failure is a SlurmError that holds the command, what it said,
and whether asking again can help. Error texts differ between versions and are shown to people, never decided by.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Mapping, Sequence

from outlast.reliability.model import JobId, Node
from outlast.slurm import commands, parsers
from outlast.slurm.errors import SlurmError
from outlast.slurm.node_state import NodeRow
from outlast.slurm.parsers import AcctRow, JobRow, QueueRow

TIMEOUT_S = 30.0
"""Slurm's own MessageTimeout is 10 s and clients try more than once."""
_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "SLURM_CONF", "SLURM_JWT", "TMPDIR")


def site_environment() -> dict[str, str]:
    """What a Slurm client needs of this process's environment, and nothing that would change its output."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    path = kept.get("PATH", "/usr/local/bin:/usr/bin:/bin")
    # users' PATH often lacks sbin, where some sites have Slurm
    return {**kept, "PATH": f"{path}:/usr/local/sbin:/usr/sbin:/sbin", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}


def user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


class SlurmClient:
    """Asks and tells Slurm. Holds an environment and a time-out, nothing else."""

    def __init__(self, environment: Mapping[str, str] | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.environment = dict(site_environment() if environment is None else environment)
        self.timeout_s = timeout_s

    def run(self, argv: Sequence[str], *, accept_partial: bool = False) -> str:
        """Standard output. With accept_partial, output counts even where the exit code is not 0."""
        words = " ".join(argv)
        shown = words if len(words) <= 200 else words[:197] + "..."
        try:
            done = subprocess.run(
                list(argv),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{shown}: no answer within {self.timeout_s:g} s; is slurmctld up?", again=True) from None
        except FileNotFoundError:
            raise SlurmError(f"{argv[0]}: not found; is Slurm installed here and on PATH?", again=False) from None
        except OSError as error:
            raise SlurmError(f"{argv[0]}: cannot be started: {error}", again=True) from None
        out = done.stdout.decode("utf-8", "replace")
        if done.returncode == 0 or (accept_partial and out.strip()):
            return out
        said = done.stderr.decode("utf-8", "replace").strip() or out.strip() or "nothing"
        raise SlurmError(f"{shown}: exit code {done.returncode}, said: {said[:500]}", again=True, output=said)

    def job(self, job: JobId) -> JobRow | None:
        """None where slurmctld does not know it (any more); SlurmError where slurmctld does not answer."""
        text = self._ask(commands.show_job_argv(job))
        return next((row for row in parsers.parse_jobs(text or "") if row.job == job), None)

    def jobs_of_user(self) -> tuple[QueueRow, ...]:
        return parsers.parse_squeue(self.run(commands.squeue_argv()))

    def nodes(self, nodes: Sequence[Node]) -> tuple[NodeRow, ...]:
        """Those of these nodes that Slurm knows."""
        text = self._ask(commands.show_nodes_argv(nodes), accept_partial=True) if nodes else None
        # "Node n9 not found" stands among the output
        known = [line for line in (text or "").splitlines() if line.startswith("NodeName=")]
        return tuple(row for row in parsers.parse_nodes("\n".join(known)) if row.node in set(nodes))

    def _ask(self, argv: Sequence[str], *, accept_partial: bool = False) -> str | None:
        """None where Slurm answers, and twice refuses this: it does not know what was asked for.

        Refusals are told from a controller that is away by asking whether it is there, not by their text.
        """
        for last in (False, True):
            try:
                return self.run(argv, accept_partial=accept_partial)
            except SlurmError:
                if not self.is_up():
                    raise
                if last:
                    return None
        return None

    def history(self, jobs: Sequence[JobId]) -> tuple[AcctRow, ...]:
        """Accounting's rows of these jobs, each run of each; () where there is no accounting."""
        if not jobs:
            return ()
        try:
            return parsers.parse_sacct(self.run(commands.sacct_argv(jobs)))
        except SlurmError:
            return ()

    def is_up(self) -> bool:
        """Whether a slurmctld answers."""
        try:
            return " is UP" in self.run(commands.ping_argv(), accept_partial=True)
        except SlurmError:
            return False
