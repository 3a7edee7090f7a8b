"""testbed, doctor, submit, status and stop on a real Slurm, through the command line alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.reliability.status import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.slurm]
OUTLAST = [sys.executable, "-m", "outlast.reliability.app"]
PATIENCE_S = 60.0


class Bed:
    """A testbed, and a directory to call `outlast` in."""

    def __init__(self, place: Path) -> None:
        self.place, self.bed = place, place / "bed"

    def say(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "SLURM_CONF": str(self.bed / "etc" / "slurm.conf")}
        return subprocess.run(
            [*OUTLAST, *words], cwd=self.place, env=env, capture_output=True, text=True, timeout=120, check=False
        )

    def until(self, run: str, state: str) -> None:
        deadline_s, seen = time.monotonic() + PATIENCE_S, ""
        while time.monotonic() < deadline_s:
            (row,) = read_rows([self.place / "runs" / run])
            if row.state == state:
                return
            seen = row.state
            time.sleep(0.05)
        log = "\n".join(path.read_text() for path in (self.place / "runs" / run / "slurm").glob("job-*.log"))
        raise AssertionError(f"{run} is {seen}, not {state}, after {PATIENCE_S:.0f} s:\n{log}")


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with tempfile.TemporaryDirectory(prefix="olc") as place:  # short: Unix sockets lie below it
        bed = Bed(Path(place))
        (bed.place / "run.yaml").write_text(
            "name: toy\ntask: {command: [python3, work.py]}\n"
            "cluster: {nodes: 2, spares: 1, ranks_per_node: 1, kernel_log: ''}\nlimits: {term_grace: 1s}\n"
        )
        started = bed.say("testbed", "start", "--dir", str(bed.bed), "--nodes", "3", "--no-accounting")
        try:
            assert started.returncode == 0, started.stderr
            assert f"export SLURM_CONF={bed.bed}/etc/slurm.conf" in started.stdout
            yield bed
        finally:
            assert bed.say("testbed", "stop", "--dir", str(bed.bed)).returncode == 0
            assert not bed.bed.exists()


def test_doctor_looks_at_this_slurm(bed: Bed) -> None:
    done = bed.say("doctor", "--json")
    rows = {row["subject"]: row for row in json.loads(done.stdout)["findings"]}
    assert rows["Slurm version"]["grade"] == "ok" and "PreemptMode" in rows and "drain rights" in rows
    assert done.returncode == (0 if json.loads(done.stdout)["fit"] else 4)


def test_testbed_tells_its_state_and_refuses_nonsense(bed: Bed) -> None:
    where = ("--dir", str(bed.bed))
    seen = json.loads(bed.say("testbed", "status", "--json", *where).stdout)
    assert all(seen["daemons"].values()) and set(seen["nodes"]) == {"n1", "n2", "n3"}
    assert bed.say("testbed", "fault", "crash", *where).returncode == 2
    assert bed.say("testbed", "fault", "kill-slurmctld", "n1", *where).returncode == 2
    unknown = bed.say("testbed", "fault", "drain", "n9", *where)
    assert unknown.returncode == 1 and "n9" in unknown.stderr
    assert bed.say("testbed", "status", "--dir", str(bed.place / "none")).returncode == 1


def test_submit_runs_to_the_end(bed: Bed) -> None:
    (bed.place / "work.py").write_text("import os; print('rank', os.environ['RANK'], os.environ['OUTLAST_NODE'])\n")
    shown = bed.say("submit", "run.yaml", "--dry-run")
    assert shown.returncode == 0 and "#SBATCH --nodes=3" in shown.stdout and not (bed.place / "runs").exists()
    done = bed.say("submit", "run.yaml", "--set", "name=whole")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("run whole-0001, job ") and "3 nodes (1 spare)" in done.stdout
    bed.until("whole-0001", "finished")
    logs = sorted((bed.place / "runs" / "whole-0001").glob("attempts/0001/ranks/*/log"))
    assert [log.read_text().split()[:2] for log in logs] == [["rank", "0"], ["rank", "1"]]


def test_stop_ends_the_job_and_it_is_not_queued_again(bed: Bed) -> None:
    (bed.place / "work.py").write_text("import time; time.sleep(600)\n")
    assert bed.say("submit", "run.yaml", "--set", "name=long").returncode == 0
    bed.until("long-0001", "starting")
    assert bed.say("stop", "long-0001").returncode == 0
    bed.until("long-0001", "stopped")
    deadline_s = time.monotonic() + PATIENCE_S
    while (left := _jobs(bed)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert not left, f"jobs are still there: {left}"


def test_user_space_is_believed_on_a_testbed_alone(bed: Bed, tmp_path: Path) -> None:
    words = ("submit", "run.yaml", "--dry-run", "--set", "cluster.accept_user_facility=true")
    assert bed.say(*words).returncode == 0
    # a Slurm that does not say that it is one
    away = tmp_path / "slurm.conf"
    away.write_text("SlurmctldHost=localhost\nSlurmctldPort=1\nClusterName=site\n")
    done = subprocess.run(
        [*OUTLAST, *words],
        cwd=bed.place,
        env={**os.environ, "SLURM_CONF": str(away)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and "accept_user_facility" in done.stderr and "outlast_testbed" in done.stderr


def test_a_job_that_slurm_refuses_is_told(bed: Bed) -> None:
    done = bed.say("submit", "run.yaml", "--set", "cluster.partition=none")
    assert done.returncode in (1, 75) and "not submitted" in done.stderr and "holds no job" in done.stderr


def _jobs(bed: Bed) -> str:
    env = {**os.environ, "SLURM_CONF": str(bed.bed / "etc" / "slurm.conf")}
    done = subprocess.run(["squeue", "-h"], env=env, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()
