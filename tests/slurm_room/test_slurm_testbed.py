"""The testbed itself: up in seconds, as any user, faults that are real, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.slurm import testbed_daemons as daemons
from outlast.slurm.errors import TestbedError
from outlast.slurm.testbed import Testbed, check_directory, fault, load, start
from outlast.slurm.testbed_boot import find_port_block, require_programs
from outlast.slurm.testbed_conf import TestbedSpec, needs_cgroup_conf, render_gres_conf, render_slurm_conf


def spec(**changed: object) -> TestbedSpec:
    fields: dict[str, object] = {"directory": "/t", "port": 12000, "host": "head", "user": "ada", **changed}
    return TestbedSpec(**fields)  # type: ignore[arg-type]


def test_configuration_names_every_node_once() -> None:
    text = render_slurm_conf(spec(nodes=2, gpus=3))
    assert "NodeName=n1 NodeHostname=head NodeAddr=127.0.0.1 Port=12003" in text
    assert "NodeName=n2 NodeHostname=head NodeAddr=127.0.0.1 Port=12004" in text
    assert text.count("NodeName=") == 2 and "Gres=gpu:sim:3" in text
    assert render_gres_conf(spec(nodes=2, gpus=3)).count("\n") == 6


def test_without_accounting_there_is_no_slurmdbd() -> None:
    assert "slurmdbd" not in render_slurm_conf(spec(accounting=False))


@pytest.mark.parametrize(
    ("version", "needs"), [("slurm-wlm 22.05.8", False), ("slurm 23.11.4", True), ("slurm 24.11.5", True), ("", False)]
)
def test_newer_slurms_are_told_that_there_are_no_cgroups(version: str, needs: bool) -> None:
    assert needs_cgroup_conf(version) is needs


def test_missing_programs_are_named_with_their_packages() -> None:
    with pytest.raises(TestbedError, match=r"slurmctld.*munge.*apt-get install"):
        require_programs(accounting=True, path="/nonexistent")


def test_a_long_directory_is_refused() -> None:
    with pytest.raises(TestbedError, match="at most 70"):
        check_directory("/tmp/" + "x" * 70)


def test_no_testbed_in_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match="outlast testbed start"):
        load(tmp_path)


def test_ports_are_free() -> None:
    assert 10_000 <= find_port_block(11) < 32_000


@pytest.fixture
def place() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="outlast-slurm-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.slurm
def test_it_starts_quickly_stops_and_leaves_nothing(place: Path) -> None:
    begin = time.monotonic()
    bed = start(place, nodes=2, gpus=2)
    try:
        took_s = time.monotonic() - begin
        database = Path(bed._site.read().database_dir)
        assert bed.run(["srun", "-N2", "--gpus-per-node=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]) == "0,1\n0,1\n"
        again = load(place)
        again.stop()
        assert not any(again.status().daemons.values())
        bed.start()
        assert set(bed.status().nodes.values()) == {"idle"}
        with pytest.raises(TestbedError, match="holds a testbed of nodes=2"):
            start(place, nodes=3)
    finally:
        bed.destroy()
    assert took_s < 10
    assert not place.exists() and not database.exists()
    assert not daemons.find_tasks(bed.slurm_conf)
    conf = f"SLURM_CONF={bed.slurm_conf}".encode()
    assert not [p for p in daemons.list_processes() if conf in daemons.read_environment(p.pid)]


AS_NOBODY = """
import os, sys
from outlast.slurm.testbed import start
os.setgroups([]); os.setgid(65534); os.setuid(65534)
bed = start(sys.argv[1], nodes=2, accounting=False)
try:
    print(bed.run(["srun", "-N2", "id", "-u"]))
    bed.crash_node(2)
finally:
    bed.destroy()
"""


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.skipif(
    os.getuid() != 0, reason="only root can become another user; as another user all of these tests show it"
)
def test_it_needs_no_rights(place: Path) -> None:
    place.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(place / "t")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["65534", "65534"], done.stderr


@pytest.mark.slow
@pytest.mark.slurm
def test_a_crash_takes_reparented_processes_along(idle_testbed: Testbed, tmp_path: Path) -> None:
    # reparented: one in a session of its own, one with an empty environment in the session of its task
    orphans = ("setsid sleep 300", "env -i sleep 300")
    script = "".join(f"({orphan} & echo $! >> {tmp_path}/$SLURMD_NODENAME); " for orphan in orphans) + "sleep 300"
    argv = [
        "sbatch",
        "--parsable",
        "-N2",
        "--no-kill",
        "-w",
        "n[7-8]",
        "-o/dev/null",
        "--wrap",
        f"srun -N2 -n2 sh -c '{script}'",
    ]
    job = idle_testbed.run(argv).strip()
    files = [tmp_path / "n7", tmp_path / "n8"]
    both = lambda: all(f.exists() and len(f.read_text().split()) == 2 for f in files)  # noqa: E731
    assert daemons.wait_until(both, timeout_s=10)
    try:
        fault(load(idle_testbed.directory), "crash", "n8")
        alive = {f.name: [p is not None and p.state != "Z" for p in map(daemons.read_process, pids(f))] for f in files}
        assert alive == {"n7": [True, True], "n8": [False, False]}
        assert not idle_testbed.status().daemons.get("slurmd-n8", False)
        assert idle_testbed.run(["squeue", "-h", "-j", job, "-o", "%T"]).strip() == "RUNNING"
        idle_testbed.start_node("n8")
    finally:
        # Slurm does not know them any more, but waits for the pipes that they hold
        for pid in [*pids(files[0]), *pids(files[1])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pids(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()]


@pytest.mark.slow
@pytest.mark.slurm
def test_faults_by_name(idle_testbed: Testbed) -> None:
    fault(idle_testbed, "drain", "n1")
    assert idle_testbed.status().nodes["n1"] == "drain"
    fault(idle_testbed, "undrain", "n1")
    fault(idle_testbed, "kill-slurmd", "2")
    assert idle_testbed.status().daemons.get("slurmd-n2", False) is False
    fault(idle_testbed, "start", "n2")
    assert idle_testbed.status().daemons["slurmd-n2"] is True
    with pytest.raises(TestbedError, match="no node 'n9'"):
        fault(idle_testbed, "crash", "n9")
    with pytest.raises(TestbedError, match="choose one of"):
        fault(idle_testbed, "flood", "n1")
