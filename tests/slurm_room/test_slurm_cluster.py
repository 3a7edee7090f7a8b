"""SlurmCluster on a real Slurm, with stand-ins for supervisor and agents: what survives what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from outlast.launchers import slurm_cluster
from outlast.launchers.slurm_cluster import SlurmCluster
from outlast.reliability.model import JobId, Node
from outlast.reliability.ports import Allocation, PortError
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import Cluster, RunFile, Task
from outlast.slurm.client import SlurmClient
from outlast.slurm.testbed import Testbed

pytestmark = [pytest.mark.slow, pytest.mark.slurm]

STAND_IN = Path(__file__).parent / "stand_in.py"


class Run:
    """A run directory with stand-ins for its programs, and what the test wants to know of them."""

    def __init__(self, root: Path, nodes: int, gpus: int = 0) -> None:
        # blanks and quotes must pass through sbatch, srun and the shell
        self.place = root / "it's here" / "demo-0001"
        self.place.mkdir(parents=True)
        self.file = RunFile(name="demo", task=Task(module="m"), cluster=Cluster(nodes=nodes, gpus_per_node=gpus))
        (self.place / "run.json").write_bytes(msgspec.json.encode(self.file))
        python = self.place / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
        python.chmod(0o755)
        self.dir = RunDir(root=self.place)
        self.python = str(python)
        self.cluster = SlurmCluster(self.dir, self.file, self.python)

    def submit(self) -> Allocation:
        job = slurm_cluster.submit(self.dir, self.file, self.python)
        eventually(lambda: self.beats("run"), what="the supervisor's beat")
        return self.allocation(job)

    def allocation(self, job: JobId | None = None) -> Allocation:
        return next(a for a in self.cluster.allocations() if job in (None, a.job))

    def beats(self, verb: str, *, slurm_step: str = "*", since: float = 0.0) -> set[str]:
        """Nodes whose stand-in gave a sign of life after `since`."""
        found = set()
        for file in self.place.glob(f"{verb}.*.{slurm_step}.beat"):
            words = file.read_text().split()
            if len(words) == 2 and float(words[1]) > since:
                found.add(file.name.split(".")[1])
        return found

    def await_beats(self, verb: str, nodes: set[str], *, slurm_step: str = "*") -> None:
        """Until each of these nodes, and no other, has given a sign of life since some moment from now on."""
        since = [time.time()]

        def settled() -> bool:
            seen = self.beats(verb, slurm_step=slurm_step, since=since[-1])
            if not seen <= nodes:
                since.append(time.time())  # one that ended just now had a last word
            return seen == nodes

        eventually(settled, what=f"signs of life of {verb}.{slurm_step} on {sorted(nodes)} and nowhere else")

    def environment(self, verb: str, node: str) -> dict[str, str]:
        lines = (self.place / f"{verb}.{node}.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def ask(self, verb: str, node: str, nodes: set[str], *, what: str = "launch") -> None:
        """Have that stand-in launch agents on these nodes, or requeue without them."""
        wish = self.place / "wish"
        wish.write_text(" ".join(sorted(nodes)))
        wish.rename(self.place / f"{what}-from.{verb}.{node}")


def eventually(condition: Callable[[], object], *, what: str, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.05)


@pytest.fixture
def run(idle_testbed: Testbed, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    assert os.environ["SLURM_CONF"] == idle_testbed.slurm_conf
    yield lambda nodes, gpus=0: Run(tmp_path, nodes, gpus)


def test_agents_outlive_their_srun_and_the_batch_host(run: Callable[..., Run], idle_testbed: Testbed) -> None:
    r = run(4, gpus=8)
    allocation = r.submit()
    assert (allocation.state, allocation.feeder, allocation.restarts) == ("RUNNING", False, 0)
    lost, nodes = allocation.batch_node, set(allocation.nodes)
    assert len(nodes) == 4 and lost in nodes

    # step 0, from the head node
    r.cluster.launch_agents(allocation, allocation.nodes)
    r.await_beats("agent", nodes, slurm_step="0")
    for node in nodes:
        seen = r.environment("agent", node)
        assert seen["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert seen["SLURMD_NODENAME"] == node and seen["SLURM_STEP_NUM_TASKS"] == "4"
    (srun,) = r.cluster._steps
    os.kill(srun.pid, signal.SIGKILL)
    srun.wait(timeout=5)

    # step 1, from inside the batch script; then the batch host dies, with script, supervisor and srun
    r.ask("run", lost, nodes)
    r.await_beats("agent", nodes, slurm_step="1")
    idle_testbed.crash_node(lost)
    rest = nodes - {lost}
    r.await_beats("agent", rest, slurm_step="0")
    r.await_beats("agent", rest, slurm_step="1")
    eventually(lambda: set(r.allocation().nodes) == rest, what="Slurm taking the node away", timeout_s=30)
    assert r.allocation().state == "RUNNING"
    r.await_beats("agent", rest, slurm_step="0")
    r.await_beats("agent", rest, slurm_step="1")
    (state,) = r.cluster.node_states([lost])
    assert state.state == "down"

    # step 2, from an agent on a survivor
    r.ask("agent", min(rest), rest)
    r.await_beats("agent", rest, slurm_step="2")
    with pytest.raises(PortError, match="srun") as refused:
        r.cluster.launch_agents(r.allocation(), allocation.nodes)
    assert refused.value.again


def test_a_users_scancel_is_known_at_once_and_final(run: Callable[..., Run]) -> None:
    r = run(3)
    allocation = r.submit()
    r.cluster.cancel(allocation.job)
    eventually(lambda: r.cluster.job_states([allocation.job])[0].state == "CANCELLED", what="the word CANCELLED")
    (state,) = r.cluster.job_states([allocation.job])
    assert state.reason == f"cancelled by uid {os.getuid()}"
    assert r.allocation().state == "CANCELLED"
    with pytest.raises(PortError, match="is not queued again") as refused:
        r.cluster.requeue(allocation.job, ())
    assert not refused.value.again
    r.cluster.cancel(allocation.job)


def test_a_requeue_lands_without_the_excluded_node(run: Callable[..., Run], idle_testbed: Testbed) -> None:
    r = run(3)
    first = r.submit()
    r.cluster.launch_agents(first, first.nodes)
    bad = first.nodes[0]
    assert bad == first.batch_node
    # from inside the job that it ends, then once more from outside
    r.ask("run", bad, {bad}, what="requeue")
    eventually((r.place / "requeued").exists, what="the requeue from inside")
    r.cluster.requeue(first.job, [bad])
    assert r.allocation().state in ("COMPLETING", "PENDING", "REQUEUED")
    eventually(lambda: r.allocation().state == "RUNNING", what="its second run", timeout_s=30)
    second = r.allocation()
    assert second.job == first.job and second.restarts == 1
    assert bad not in second.nodes and len(second.nodes) == 3
    # the same again keeps what is excluded already
    r.cluster.requeue(first.job, [second.nodes[0]])
    row = SlurmClient().job(first.job)
    assert row and set(row.exclude) == {bad, second.nodes[0]}


def test_a_node_is_given_back_and_the_others_go_on(run: Callable[..., Run], idle_testbed: Testbed) -> None:
    r = run(4)
    allocation = r.submit()
    r.cluster.launch_agents(allocation, allocation.nodes)
    r.await_beats("agent", set(allocation.nodes), slurm_step="0")
    batch = allocation.batch_node
    out = max(n for n in allocation.nodes if n != batch)
    assert batch is not None and "draining" in r.cluster.drain(out, "outlast: test")

    assert "keeps 3 nodes" in r.cluster.release(out, allocation.job)
    eventually(lambda: r.cluster.node_states([out])[0].state == "idle", what="the node empty of jobs")
    assert "drain" in r.cluster.node_states([out])[0].flags
    rest = set(allocation.nodes) - {out}
    assert set(r.allocation().nodes) == rest and r.allocation().state == "RUNNING"
    r.await_beats("agent", rest, slurm_step="0")
    assert "not in job" in r.cluster.release(out, allocation.job), "twice does no harm"
    with pytest.raises(PortError, match="batch script") as refused:
        r.cluster.release(batch, allocation.job)
    assert not refused.value.again and set(r.allocation().nodes) == rest
    # another step on what is left, and a requeue asks for all four again
    r.cluster.launch_agents(r.allocation(), tuple(sorted(rest)))
    r.await_beats("agent", rest, slurm_step="1")
    began = time.time()
    r.cluster.requeue(allocation.job, [])
    eventually(
        lambda: r.beats("run", since=began + 2) and r.allocation().restarts == 1, what="a new start", timeout_s=60
    )
    assert len(r.allocation().nodes) == 4 and out not in r.allocation().nodes
    idle_testbed.undrain(out)


def test_a_feeder_that_gives_its_only_node_back_ends(run: Callable[..., Run]) -> None:
    r = run(2)
    r.submit()
    job = r.cluster.feed(1, [])
    eventually(lambda: r.allocation(job).state == "RUNNING", what="the feeder")
    (node,) = r.allocation(job).nodes
    assert "ended" in r.cluster.release(node, job)
    eventually(lambda: r.allocation(job).state == "CANCELLED", what="the feeder's end")
    assert any(a.state == "RUNNING" and not a.feeder for a in r.cluster.allocations())


def test_a_feeder_runs_agents_and_nothing_else(run: Callable[..., Run]) -> None:
    r = run(3)
    first = r.submit()
    job = r.cluster.feed(2, [Node("n8")])
    eventually(lambda: len(r.beats("agent")) == 2, what="agents of the feeder")
    feeder = r.allocation(job)
    assert feeder.feeder and feeder.state == "RUNNING"
    assert r.beats("agent") == set(feeder.nodes)
    assert not set(feeder.nodes) & {*first.nodes, "n8"}
    assert [a.job for a in r.cluster.allocations()] == [first.job, job]
    # its agents leave: the job is over
    (r.place / "exit.agent").write_text("0")
    eventually(lambda: r.allocation(job).state == "COMPLETED", what="the feeder's end")
    # the supervisor ends as held: so does the job
    (r.place / "exit.run").write_text("3")
    eventually(lambda: r.allocation(first.job).state == "FAILED", what="the run's end")


def test_a_killed_supervisor_comes_back_in_the_same_job(run: Callable[..., Run]) -> None:
    r = run(2)
    first = r.submit()
    (beat,) = r.place.glob("run.*.beat")
    pid = int(beat.read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: beat.read_text().split()[:1] not in ([], [str(pid)]), what="another supervisor")
    assert r.allocation().state == "RUNNING" and r.allocation().restarts == first.restarts


def test_another_users_reason_stays(run: Callable[..., Run], idle_testbed: Testbed) -> None:
    r = run(2)
    cluster = r.cluster
    assert cluster.may_drain() is True
    allocation = r.submit()
    busy, idle = allocation.nodes[0], Node("n8")
    assert cluster.drain(busy, "XID 79\non gpu 3").startswith("draining")
    assert cluster.drain(busy, "XID 79").startswith("drained by us before: outlast: XID 79 on gpu 3")
    assert cluster.drain(idle, "XID 48").startswith("drained")
    idle_testbed.drain("n7", "DIMM swap, ticket 5512")
    with pytest.raises(PortError, match="ticket 5512") as refused:
        cluster.drain(Node("n7"), "XID 79")
    assert not refused.value.again
    states = {s.node: s for s in cluster.node_states([Node("n7"), busy, Node("n99")])}
    assert set(states) == {"n7", busy}
    assert states[Node("n7")].reason == "DIMM swap, ticket 5512" and "drain" in states[busy].flags
    with pytest.raises(PortError, match="no such node"):
        cluster.drain(Node("n99"), "XID 79")


def test_a_controller_that_is_away_means_try_again(run: Callable[..., Run], idle_testbed: Testbed) -> None:
    r = run(1)
    allocation = r.submit()
    assert r.cluster.job_states([JobId("99999999")]) == ()
    assert r.cluster.address(allocation.nodes[0]) == "127.0.0.1"
    # a controller forgets what it had no time to write down, and writes only when something has changed
    begun = time.time()
    subprocess.run(["scontrol", "update", f"JobId={allocation.job}", "AdminComment=touched"], check=True, timeout=20)
    saved = idle_testbed.directory / "state" / "job_state"
    eventually(lambda: saved.exists() and saved.stat().st_mtime > begun, what="the controller's own save")
    idle_testbed.kill_slurmctld()
    for ask in (r.cluster.allocations, lambda: r.cluster.node_states(allocation.nodes)):
        with pytest.raises(PortError) as failed:
            ask()
        assert failed.value.again
    idle_testbed.restart_slurmctld()
    assert r.allocation().state == "RUNNING"


def test_a_client_that_hangs_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "squeue").chmod(0o755)
    client = SlurmClient({"PATH": f"{tmp_path}:/bin:/usr/bin"}, timeout_s=0.3)
    with pytest.raises(PortError, match=r"no answer within 0\.3 s"):
        SlurmCluster(RunDir(root=tmp_path), RunFile(name="x", task=Task(module="m")), client=client).allocations()
