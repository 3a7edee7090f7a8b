"""Batch scripts of a run and of its feeder jobs, from a template and RUN.yaml. Pure: text in, text out.

Options stand in the script as #SBATCH lines, so that what was submitted can be read beside the run. The comment names
the run directory: whoever lists jobs (the supervisor, an admin, a fleet daemon) finds the run of a job by it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from outlast.reliability.model import JobId, Node
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile
from outlast.slurm.commands import Step, step_argv
from outlast.slurm.hostlist import compress

COMMENT = "outlast"
APP = "outlast.reliability.app"


def comment(run_dir: RunDir, *, feeder: bool) -> str:
    """`outlast:run:<run directory>` or `outlast:feeder:<run directory>`."""
    return f"{COMMENT}:{'feeder' if feeder else 'run'}:{run_dir.root.absolute()}"


def job_name(run_dir: RunDir, *, feeder: bool) -> str:
    return f"{run_dir.name}-feeder" if feeder else run_dir.name


def render_run(template: str, run_dir: RunDir, run: RunFile, *, python: str) -> str:
    """The batch script whose body keeps a supervisor alive; nodes and spares in one allocation."""
    nodes = run.cluster.nodes + run.cluster.spares
    return _fill(
        template,
        OPTIONS=_lines(_options(run_dir, run, nodes=nodes, exclude=(), feeder=False)),
        PYTHON=shlex.quote(python),
        RUN_DIR=shlex.quote(str(run_dir.root.absolute())),
    )


def render_feeder(
    template: str, run_dir: RunDir, run: RunFile, *, python: str, nodes: int, exclude: Sequence[Node]
) -> str:
    """The batch script whose body only runs agents on all its nodes."""
    return _fill(
        template,
        OPTIONS=_lines(_options(run_dir, run, nodes=nodes, exclude=exclude, feeder=True)),
        STEP=_feeder_step(run_dir, run, python),
    )


def agent_step(run_dir: RunDir, run: RunFile, *, job: JobId, nodes: Sequence[Node], python: str) -> Step:
    """One agent on each of these nodes."""
    where = str(run_dir.root.absolute())
    return Step(
        job=job,
        nodes=tuple(nodes),
        program=(python, "-P", "-m", APP, "agent", "--run-dir", where),
        output=f"{_escape(where)}/slurm/agent-%j.%s-%t.log",
        container=run.task.container,
        mounts=(where,) if run.task.container else (),
    )


def _feeder_step(run_dir: RunDir, run: RunFile, python: str) -> str:
    """The same srun, with the shell's word for job and count, on all nodes of the job."""
    argv = step_argv(agent_step(run_dir, run, job=JobId("@"), nodes=(Node("n"),), python=python))
    named, counted = argv.index("-w"), argv.index("-N")
    words = [shlex.quote(word) for word in argv]
    words[argv.index("--jobid=@")] = '--jobid="$job"'
    words[counted + 1] = words[counted + 3] = '"$count"'
    return " ".join(words[:named] + words[named + 2 :])


def _options(run_dir: RunDir, run: RunFile, *, nodes: int, exclude: Sequence[Node], feeder: bool) -> list[str]:
    cluster, where = run.cluster, run_dir.root.absolute()
    options = [
        f"--job-name={job_name(run_dir, feeder=feeder)}",
        f"--comment={comment(run_dir, feeder=feeder)}",
        f"--nodes={nodes}",
        # whole nodes: a feeder job must never land on a node that the run already has
        "--exclusive",
        "--ntasks-per-node=1",
        "--mem=0",
        "--no-kill",
        # a feeder that is queued again would come back to a run that has long gone on
        "--no-requeue" if feeder else "--requeue",
        "--open-mode=append",
        f"--chdir={where}",
        f"--output={_escape(str(where))}/slurm/job-%j.log",
    ]
    options += [f"--gpus-per-node={cluster.gpus_per_node}"] if cluster.gpus_per_node else []
    options += [f"--time={walltime(cluster.walltime_s)}"] if cluster.walltime_s else []
    asked = ("partition", "account", "qos", "reservation")
    options += [f"--{name}={value}" for name in asked if (value := getattr(cluster, name))]
    options += [f"--exclude={compress(exclude)}"] if exclude else []
    return [*options, *cluster.sbatch_args]


def walltime(seconds: float) -> str:
    """Slurm's days-hours:minutes:seconds; rounded up to whole minutes, as Slurm does."""
    minutes = max(1, math.ceil(seconds / 60))
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


def _lines(options: Sequence[str]) -> str:
    for option in options:
        if "\n" in option or "\0" in option:
            raise ValueError(f"sbatch option {option!r}: a line break cannot stand in a batch script; take it out")
    return "\n".join(f"#SBATCH {shlex.quote(option)}" for option in options)


def _escape(path: str) -> str:
    """A path inside a file name pattern of Slurm, where % begins a field."""
    return path.replace("%", "%%")


def _fill(template: str, **values: str) -> str:
    for name, value in values.items():
        template = template.replace(f"@{name}@", value)
    return template
