"""Batch scripts: rendered, and their shell run for real with a stand-in supervisor; no Slurm needed."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from outlast.launchers import sbatch
from outlast.launchers.slurm_cluster import read_template
from outlast.launchers.slurm_step import clean_environment
from outlast.reliability.model import Node
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import Cluster, RunFile, Task

RUN = RunFile(
    name="demo",
    task=Task(module="m"),
    cluster=Cluster(
        nodes=3,
        spares=1,
        gpus_per_node=8,
        walltime_s=90061,
        partition="train",
        account="lab",
        qos="high",
        reservation="r1",
        sbatch_args=("--constraint=h100",),
    ),
)


def options(text: str) -> list[str]:
    return [shlex.split(line[8:])[0] for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_options_of_a_run() -> None:
    run_dir = RunDir(root=Path("/runs/a b's/demo-0001"))
    found = options(sbatch.render_run(read_template("run.sbatch"), run_dir, RUN, python="/venv/bin/python"))
    assert {
        "--job-name=demo-0001",
        "--comment=outlast:run:/runs/a b's/demo-0001",
        "--nodes=4",
        "--gpus-per-node=8",
        "--no-kill",
        "--requeue",
        "--exclusive",
        "--open-mode=append",
        "--time=1-01:02:00",
        "--partition=train",
        "--account=lab",
        "--qos=high",
        "--reservation=r1",
    } <= set(found)
    assert found[-1] == "--constraint=h100", "the user's words come last and win"


def test_options_of_a_feeder() -> None:
    run_dir = RunDir(root=Path("/runs/demo-0001"))
    text = sbatch.render_feeder(
        read_template("feeder.sbatch"), run_dir, RUN, python="/p", nodes=2, exclude=(Node("n1"), Node("n2"))
    )
    assert {"--nodes=2", "--exclude=n[1-2]", "--no-requeue", "--comment=outlast:feeder:/runs/demo-0001"} <= set(
        options(text)
    )
    assert 'srun \'--jobid="$job"' not in text and '--jobid="$job" ' in text and '-N "$count" -n "$count"' in text
    assert " -w " not in text and "@" not in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1, "0-00:01:00"), (3600, "0-01:00:00"), (86400 * 7, "7-00:00:00"), (5399.5, "0-01:30:00")]
)
def test_walltime(seconds: float, text: str) -> None:
    assert sbatch.walltime(seconds) == text


def test_a_line_break_cannot_become_a_second_line_of_the_script() -> None:
    run = RunFile(name="demo", task=Task(module="m"), cluster=Cluster(sbatch_args=("--x\nrm -rf /",)))
    with pytest.raises(ValueError, match="line break"):
        sbatch.render_run(read_template("run.sbatch"), RunDir(root=Path("/r")), run, python="/p")


def test_an_inherited_job_does_not_reach_the_step() -> None:
    inherited = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_NTASKS": "64",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURMD_NODENAME": "n1",
        "SBATCH_PARTITION": "x",
        "PMIX_RANK": "0",
        "CUDA_VISIBLE_DEVICES": "0",
        "OUTLAST_NODE": "n1",
        "MY_VAR": "1",
    }
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURMD_NODENAME": "n1", "MY_VAR": "1"}
    assert clean_environment(inherited, gpus=True) == kept
    assert clean_environment(inherited, gpus=False) == {**kept, "CUDA_VISIBLE_DEVICES": "0"}


# ---------------------------------------------------------------- the shell of run.sbatch

SUPERVISOR = """#!/bin/bash
echo x >> {place}/starts
n=$(wc -l < {place}/starts)
{body}
"""


class Script:
    """run.sbatch under bash with a supervisor and an squeue of ours."""

    def __init__(self, place: Path, body: str, *, agents: str = "") -> None:
        self.place = place
        bin_dir = place / "bin"
        bin_dir.mkdir()
        self.supervisor = bin_dir / "python"
        write_program(self.supervisor, SUPERVISOR.format(place=place, body=body))
        write_program(bin_dir / "squeue", f"#!/bin/bash\n{agents}\n")
        text = sbatch.render_run(read_template("run.sbatch"), RunDir(root=place), RUN, python=str(self.supervisor))
        text = text.replace("busy_wait_s=5", "busy_wait_s=0").replace("pause 10", "pause 0.1")
        path = os.environ["PATH"]
        self.process = subprocess.Popen(
            ["bash", "-c", text],
            env={"PATH": f"{bin_dir}:{path}", "SLURM_JOB_ID": "7"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def starts(self) -> int:
        file = self.place / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def wait(self, timeout_s: float = 20) -> int:
        try:
            self.process.wait(timeout=timeout_s)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4])
def test_the_script_ends_with_the_supervisors_code(tmp_path: Path, code: int) -> None:
    script = Script(tmp_path, f"exit {code}")
    assert script.wait() == code
    assert script.starts() == 1


def test_a_killed_supervisor_is_started_again(tmp_path: Path) -> None:
    script = Script(tmp_path, "[ $n -lt 4 ] && kill -KILL $$; exit 3")
    assert script.wait() == 3
    assert script.starts() == 4


@pytest.mark.slow
def test_a_supervisor_that_is_killed_all_the_time_is_given_up(tmp_path: Path) -> None:
    script = Script(tmp_path, "kill -SEGV $$")
    assert script.wait() == 1
    assert script.starts() == 21


@pytest.mark.slow
def test_while_agents_live_the_script_does_not_end(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    steps = f"echo >> {asked}; [ -e {tmp_path}/gone ] || printf '7.batch\\n7.3\\n'"
    script = Script(tmp_path, "kill -KILL $$", agents=steps)
    wait_for(lambda: script.starts() == 21)
    wait_for(lambda: asked.exists() and len(asked.read_text()) >= 4)  # it asks, and asks again
    assert script.process.poll() is None and script.starts() == 21
    (tmp_path / "gone").touch()
    assert script.wait() == 1


def test_try_again_is_tried_again(tmp_path: Path) -> None:
    script = Script(tmp_path, "[ $n -lt 5 ] && exit 75; exit 0")
    assert script.wait() == 0
    assert script.starts() == 5


@pytest.mark.parametrize(("end", "code"), [("exit 75", 75), ("kill -KILL $$", 137)])
def test_term_reaches_the_supervisor_and_its_end_is_awaited(tmp_path: Path, end: str, code: int) -> None:
    body = f"trap 'sleep 0.2; touch {tmp_path}/saved; {end}' TERM; touch {tmp_path}/ready; sleep 30 & wait"
    script = Script(tmp_path, body)
    wait_for((tmp_path / "ready").exists)
    os.kill(script.process.pid, signal.SIGTERM)
    assert script.wait() == code
    assert (tmp_path / "saved").exists() and script.starts() == 1


def wait_for(condition: object, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)
