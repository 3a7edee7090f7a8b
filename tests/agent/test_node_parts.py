"""The pure parts of an agent: stacks, process facts, environments, beats, hooks after import."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.launchers import after_import, gpu_clear, node_env, reap
from outlast.launchers.held import HeldRank, Holding, compose_beat, earliest_phase
from outlast.launchers.local import node_names
from outlast.launchers.logs import RankLog
from outlast.launchers.node_gate import free_port, parse_answer
from outlast.launchers.specs import stand_in_of
from outlast.launchers.stacks import is_waiting, parse_dump, render
from outlast.monitors.beat import StepEntry, StepPage
from outlast.reliability.model import GateOutcome, Layout, Node, Placement, Plan, Rank
from outlast.reliability.runfile import Cluster, RunFile, Task
from outlast.reliability.wire import RankSpec

DUMP = """Process 4242: python pretrain_gpt.py --lr 3e-3
Python v3.11.7 (/usr/bin/python3.11)

Thread 4242 (idle): "MainThread"
    {name} ({file}:{line})
    training_step (megatron/training/training.py:1400)
    <module> (pretrain_gpt.py:310)
Thread 4300 (idle): "Thread-1"
    wait (threading.py:327)
"""


@pytest.mark.parametrize(
    ("name", "file", "waiting"),
    [
        ("all_reduce", "torch/distributed/distributed_c10d.py", True),
        ("wrapper", "torch/distributed/c10d_logger.py", False),
        ("synchronize", "torch/cuda/__init__.py", True),
        ("finish_grad_sync", "megatron/core/distributed/param_and_grad_buffer.py", True),
        ("wait", "threading.py", False),
        ("forward", "megatron/core/transformer/mlp.py", False),
        ("all_reduce", "my_own_math.py", False),
    ],
)
def test_waiting_is_told_by_names_in_the_libraries(name: str, file: str, waiting: bool) -> None:
    threads = parse_dump(DUMP.format(name=name, file=file, line=7))
    assert is_waiting(threads, "S") is waiting
    assert is_waiting(threads, "T") is False
    assert render(threads).splitlines()[-1] == f"{name} ({file}:7)"


def test_without_a_stack_it_cannot_be_told() -> None:
    assert is_waiting((), "S") is None


@given(st.text(max_size=500))
def test_any_text_is_some_dump(text: str) -> None:
    threads = parse_dump(text)
    assert len(render(threads)) <= 4000
    assert is_waiting(threads, "T") is False
    assert (is_waiting(threads, "S") is None) == (render(threads) == "")


def test_a_process_name_may_hold_anything() -> None:
    fields = " ".join(str(i) for i in range(4, 53))
    raw = f"77 (a) R 1 (b c)) S 1 {fields}".encode()
    proc = reap.parse_stat(raw)
    assert proc is not None and (proc.pid, proc.state, proc.ppid, proc.start_ticks) == (77, "S", 1, 21)


@given(st.binary(max_size=200))
@example(b"7 (x) S 1 2" + b" 3" * 18)
@example(b"7 (x) S 1 2" + b" 3" * 16)
@example(b"seven (x) S 1 2" + b" 3" * 18)
def test_any_bytes_are_a_process_or_none(raw: bytes) -> None:
    proc = reap.parse_stat(raw)
    head, _, tail = raw.rpartition(b")")
    fields = tail.split()
    numbers = [head.split(b" ", 1)[0], *fields[1:3], *fields[17:18], *fields[19:20]]
    whole = len(numbers) == 5 and fields[0].isascii() and all(map(is_number, numbers))
    assert (proc is not None) == whole
    if proc is not None:
        found = [proc.pid, proc.ppid, proc.group, proc.threads, proc.start_ticks]
        assert found == [int(n) for n in numbers]


def is_number(text: bytes) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


@given(name=st.binary(max_size=40), numbers=st.lists(st.integers(0, 1 << 40), max_size=49))
def test_a_process_of_any_name_is_read_as_far_as_its_line_goes(name: bytes, numbers: list[int]) -> None:
    proc = reap.parse_stat(b"77 (" + name + b") S " + b" ".join(b"%d" % n for n in numbers))
    if len(numbers) < 19:
        assert proc is None
    else:
        ppid, group, threads, ticks = numbers[0], numbers[1], numbers[16], numbers[18]
        assert proc == reap.Proc(pid=77, state="S", ppid=ppid, group=group, threads=threads, start_ticks=ticks)


def test_a_pid_that_is_another_process_is_not_signalled() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        proc = reap.read_proc(child.pid)
        assert proc is not None
        other = reap.Proc(pid=proc.pid, ppid=0, group=0, state="S", threads=1, start_ticks=proc.start_ticks - 1)
        assert not reap.send(other, 9) and child.poll() is None
        assert reap.send(proc, 9)
        child.wait(5.0)


def test_descendants_leave_out_what_is_spared_with_all_below() -> None:
    def proc(pid: int, ppid: int) -> reap.Proc:
        return reap.Proc(pid=pid, ppid=ppid, group=pid, state="S", threads=1, start_ticks=1)

    procs = {p.pid: p for p in (proc(1, 0), proc(2, 1), proc(3, 2), proc(4, 1), proc(5, 4))}
    assert {p.pid for p in reap.descendants(1, procs, spare={2})} == {4, 5}


def test_what_outlives_sigkill_is_named_in_bounded_time() -> None:
    me = reap.read_proc(os.getpid())
    assert me is not None
    unkillable = in_state(me, state="D")
    looks = 0

    def tree() -> list[reap.Proc]:
        nonlocal looks
        looks += 1
        return [unkillable]

    began = time.monotonic()
    cleared = reap.end_tree(tree, (), term_grace_s=5.0, kill_grace_s=0.1)
    assert 0.1 <= time.monotonic() - began < 2.0 and looks > 2
    assert cleared.left == (unkillable,) and cleared.killed == 0
    assert f"pid {unkillable.pid} in state D" in cleared.why


def in_state(proc: reap.Proc, *, state: str) -> reap.Proc:
    """The same process as it would look to an agent that must not hit it: another start time."""
    return dataclasses.replace(proc, state=state, start_ticks=proc.start_ticks - 1)


def spec(rank: int = 0, *, reports: bool = False, stands_in: bool = False, **env: str) -> RankSpec:
    place = Placement(rank=Rank(rank), node=Node("a"), local_rank=rank)
    return RankSpec(placement=place, env=env, argv=("x.py",), reports=reports, stands_in=stands_in)


def test_only_the_node_says_where_it_is() -> None:
    run = RunFile(name="r", task=Task(script="x.py"), cluster=Cluster(gpus_per_node=4))
    own = {"SLURMD_NODENAME": "n3", "PATH": "/bin", "OUTLAST_STEP_PAGE": "stale", "LR": "1"}
    env = node_env.rank_env(own, run, spec(SLURMD_NODENAME="n1", LR="2"), node=Node("n3"), page=None, stop=Path("/s"))
    assert env["SLURMD_NODENAME"] == env["OUTLAST_NODE"] == "n3"
    assert (env["PATH"], env["LR"], env["CUDA_VISIBLE_DEVICES"]) == ("/bin", "2", "0,1,2,3")
    assert "OUTLAST_STEP_PAGE" not in env
    given_ = node_env.rank_env({"CUDA_VISIBLE_DEVICES": "5"}, run, spec(), node=Node("a"), page=None, stop=Path("/s"))
    assert given_["CUDA_VISIBLE_DEVICES"] == "5"
    warm = node_env.warm_env({"OMP_NUM_THREADS": "3"}, run, Node("a"))
    assert (warm["OMP_NUM_THREADS"], warm["OPENBLAS_NUM_THREADS"]) == ("3", "1")


def held(
    rank: int,
    *,
    train_step: int,
    phase: str,
    moved_s: float,
    reports: bool = False,
    stands_in: bool = False,
    closed: bool = True,
) -> HeldRank:
    steps = tuple(
        StepEntry(train_step=s, end_mono_s=float(s), step_s=1.0, loss=4.0, closed=closed or s < train_step)
        for s in range(1, train_step + 1)
    )
    page = StepPage(
        phase=phase,
        phase_since_mono_s=moved_s,
        train_step=train_step,
        started_mono_s=0.0,
        durable_step=rank,
        pid=1,
        node="a",
        steps=steps,
    )
    proc = reap.Proc(pid=1, ppid=0, group=1, state="S", threads=1, start_ticks=1)
    log = RankLog(directory=Path("/"), limit_bytes=1, fd=-1)
    asked = spec(rank, reports=reports, stands_in=stands_in)
    return HeldRank(spec=asked, attempt=3, log=log, pages=None, born_mono_s=0.0, proc=proc, page=page)


def test_a_beat_names_the_laggard_and_sends_what_is_new() -> None:
    ranks = {
        Rank(0): held(0, train_step=5, phase="train", moved_s=50.0),
        Rank(1): held(1, train_step=4, phase="train", moved_s=60.0),
        Rank(2): held(2, train_step=4, phase="save", moved_s=55.0, reports=True),
    }
    holding = Holding(attempt=3, state="running", ranks=ranks)
    holding.look()
    beat = compose_beat(
        holding, now_mono_s=100.0, steps_through=2, warm=True, output_age_s={Rank(0): 9.0, Rank(1): 4.0}
    )
    assert (beat.step_min, beat.step_max, beat.laggard, beat.stalled_s) == (4, 5, 2, 40.0)
    assert (beat.phase, beat.durable_step, beat.ranks_alive, beat.finished) == ("train", 2, 3, False)
    assert [(s.train_step, s.age_s) for s in beat.steps] == [(3, 97.0), (4, 96.0)]
    holding.look()
    assert len(holding.steps) == 4  # nothing is gathered twice
    for rank in ranks.values():
        rank.status = 0
    assert compose_beat(holding, now_mono_s=100.0, steps_through=4, warm=True, output_age_s={}).finished


def test_a_stand_in_tells_only_what_the_reporting_rank_has_not_told() -> None:
    ranks = {Rank(1): held(1, train_step=5, phase="train", moved_s=5.0, stands_in=True)}
    holding = Holding(attempt=3, state="running", ranks=ranks)
    holding.look()

    def told(now_s: float, through: int) -> list[int]:
        beat = compose_beat(holding, now_mono_s=now_s, steps_through=through, warm=True, output_age_s={})
        return [s.train_step for s in beat.steps]

    assert told(5.5, 3) == [], "steps 4 and 5 are new: the reporting rank tells them"
    assert told(6.5, 3) == [4], "it should have been told by now"
    assert told(9.0, 5) == [], "it was"
    holding.state = "stopping"
    assert told(5.5, 3) == [4, 5], "after the stop nobody will ask again"


def test_a_step_that_is_being_saved_is_told_once_it_is_over_or_its_rank_has_ended() -> None:
    saving = held(0, train_step=3, phase="save", moved_s=3.0, reports=True, closed=False)
    holding = Holding(attempt=3, state="running", ranks={Rank(0): saving})

    def told() -> list[int]:
        holding.look()
        beat = compose_beat(holding, now_mono_s=9.0, steps_through=0, warm=True, output_age_s={})
        return [s.train_step for s in beat.steps]

    assert told() == [1, 2], "how long the save of 3 will hold it is not known yet"
    saving.status = -15
    assert told() == [1, 2, 3], "its checkpoint may be committed all the same"
    assert told() == [1, 2, 3]


def test_the_stand_in_knows_the_loss_and_lives_on_another_node() -> None:
    def stand_in(nodes: str, **layout: int) -> Rank | None:
        places = tuple(Placement(rank=Rank(i), node=Node(n), local_rank=0) for i, n in enumerate(nodes))
        return stand_in_of(Plan(attempt=1, layout=Layout(**layout), nodes=(Node("a"),), ranks=places, why=""))

    assert stand_in("aabb", tp=2, dp=2) == 1
    assert stand_in("abab", tp=2, pp=2) == 2, "rank 0 is of the first pipeline stage and knows no loss"
    assert stand_in("aabb", tp=2, pp=2) is None, "the whole last stage is on one node"
    assert stand_in("aaaa", dp=4) is None and stand_in("a") is None


def test_an_idle_beat_is_empty() -> None:
    held = Holding(attempt=2)
    assert (held.through((2, 6)), held.through((1, 6))) == (6, 0), "a late pulse is of the attempt before"
    beat = compose_beat(Holding(), now_mono_s=5.0, steps_through=0, warm=False, output_age_s={})
    assert (beat.attempt, beat.state, beat.stalled_s, beat.laggard, beat.finished) == (0, "idle", 0.0, None, False)


def test_the_earliest_phase_is_of_those_that_say_one() -> None:
    assert earliest_phase(["train", "load", "", "save"]) == "load"
    assert earliest_phase(["", ""]) == "" and earliest_phase([]) == ""


def test_the_gates_answer_is_read_or_unknown() -> None:
    bad = b'{"outcome": "fault", "free_port": 0, "checks": [{"check": "gpu", "outcome": "fault", "found": "3 GPUs"},'
    outcome, findings = parse_answer(bad + b'{"check": "shm", "outcome": "well", "found": "", "expected": ""}]}')
    assert (outcome, findings) == (GateOutcome.FAULT, ("gpu: fault: 3 GPUs",))
    assert parse_answer(b"Traceback")[0] is GateOutcome.UNKNOWN
    assert free_port("127.0.0.1") > 1024 and free_port("203.0.113.1") == 0


def test_nodes_have_letters() -> None:
    assert node_names(3) == ["a", "b", "c"] and node_names(28)[-2:] == ["aa", "ab"]


def test_a_hook_runs_after_the_module_and_before_its_importer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hooked_one.py").write_text("value = 1\ndef f():\n    return value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[ModuleType] = []

    def hook(module: ModuleType) -> None:
        seen.append(module)
        module.value = 2  # type: ignore[attr-defined]

    after_import.after_import("hooked_one", hook)
    assert after_import.pending() == ("hooked_one",)
    import importlib

    module = importlib.import_module("hooked_one")
    assert module.f() == 2 and seen == [module] and after_import.pending() == ()
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    after_import.after_import("hooked_one", seen.append)  # loaded already: at once
    assert len(seen) == 2
    after_import.after_import("hooked_never", hook)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_never")
    del sys.modules["hooked_one"]
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != after_import.__name__]


def test_strays_are_buried_at_the_second_look() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    first = reap.reap_strays(frozenset())
    assert child in first and reap.read_proc(child) is not None
    assert child not in reap.reap_strays(frozenset({child}))
    assert reap.read_proc(child) is None


@pytest.mark.slow
@pytest.mark.parametrize(("hangs", "found"), [(False, ()), (True, ("NVML did not answer within 1 s",))])
def test_gpu_memory_is_asked_for_with_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool, found: tuple[str, ...]
) -> None:
    source = Path(__file__).parents[1] / "data" / "nvml" / "fake_nvml.c"
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60.0)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(gpu_clear, "_has_library", lambda: True)
    if hangs:
        monkeypatch.setenv("FAKE_NVML_HANG", "1")
        monkeypatch.setattr(gpu_clear, "ASK_S", 1.0)
    said = gpu_clear.still_held({1, 2})
    assert tuple(text.split(":")[0] for text in said) == found


def test_lines_of_user_space_count_on_a_testbed_alone() -> None:
    def believes(kind: str, cluster: str, asked: bool = True) -> bool:
        run = RunFile(name="t", task=Task(module="m"), cluster=Cluster(kind=kind, accept_user_facility=asked))
        return node_env.believes_user_space(run, {"SLURM_CLUSTER_NAME": cluster} if cluster else {})

    assert believes("slurm", "outlast_testbed") and believes("local", "")
    assert not believes("slurm", "site") and not believes("slurm", "")
    assert not believes("slurm", "outlast_testbed", asked=False)
