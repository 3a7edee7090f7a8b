"""PyTorch's own state dicts (FSDP2, DDP, DTensor) through the same save: plain DCP reads them, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import Shard, distribute_tensor

from outlast.checkpoint import dcp_plan, stager
from outlast.checkpoint.dcp_restore import compare, restore
from outlast.checkpoint.errors import CheckpointError, SaveFailed
from outlast.checkpoint.points import KILL_AT, RANK_POINTS
from outlast.checkpoint.prints import NotAsSaved, read_prints
from outlast.checkpoint.resharding import judge_reshardable
from outlast.checkpoint.staging import Budget
from outlast.checkpoint.store import Store
from outlast.checkpoint.tensors import Tensors
from outlast.checkpoint.verify import verify
from outlast.checkpoint.writer import Saver
from outlast.reliability.model import Layout

pytestmark = pytest.mark.slow

STATES = Path(__file__).with_name("dcp_states.py")


def load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


states: Any = load_module(STATES)


def save_args(train_step: int) -> dict[str, Any]:
    return {"train_step": train_step, "samples": 8 * train_step, "layout": Layout(dp=dist.get_world_size())}


def save_once(root: Path, state: dict[str, Any], train_step: int = 10, **options: Any) -> None:
    saver = Saver(root, timeout_s=30.0, **options)
    try:
        saver.save(state, **save_args(train_step))
        assert saver.finish() == train_step
    finally:
        saver.close()


def train_and_save(root: Path, kind: str) -> Any:
    trainee = states.make_trainee(kind, seed=1)
    trainee.train()
    save_once(root, trainee.state())
    return states.digest(trainee.state())


def load_plainly(kind: str, path: Path, ranks: int) -> dict[str, str]:
    """In a fresh process and its forks, that do not know us."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"GLOO_SOCKET_IFNAME": "lo"}
    argv = [sys.executable, "-P", str(STATES), kind, str(path), str(ranks)]
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == ranks
    assert all(one == found[0] for one in found)
    return dict(found[0])


GRID = [
    *(("fsdp2", 2, 4), ("fsdp2", 4, 2), ("fsdp2", 2, 1), ("ddp", 2, 4)),
    *(("tp_dp", 4, 2), ("hsdp", 4, 2), ("fsdp2_tp", 2, 4)),
]


@pytest.mark.parametrize(("kind", "saved_on", "loaded_on"), GRID)
def test_plain_dcp_reads_a_save_in_another_world(
    run_ranks: Any, tmp_path: Path, kind: str, saved_on: int, loaded_on: int
) -> None:
    root = tmp_path / "ckpt"
    saved = run_ranks(saved_on, lambda rank: train_and_save(root, kind)).value()
    (choice,) = Store(root).durable_steps()
    place = root / f"iter_{choice:07d}"
    verify(place)
    assert sorted(path.suffix for path in place.iterdir() if path.suffix == ".distcp") == [".distcp"] * saved_on
    assert not (place / "common.pt").exists() and not (place / "metadata.json").exists()
    assert load_plainly(kind, place, loaded_on) == saved

    def load(rank: int) -> int:
        trainee = states.make_trainee(kind, seed=99)
        trainee.train(1)
        state = trainee.state()
        assert restore(state, place).train_step == 10
        trainee.take(state)
        assert states.digest(trainee.state()) == saved
        return compare(trainee.state(), place)

    reshardable = judge_reshardable(Tensors(place))
    assert (reshardable.weights, reshardable.optimizer_tensors, reshardable.problems) == (4, 12, ())
    prints = read_prints(place)
    assert prints is not None and prints.left_out == {}
    assert set(run_ranks(loaded_on, load).values.values()) == {len(prints.tensors)}
    assert len(prints.tensors) == 4 + 4 * 3, "weights, and step and two moments of each"


def test_what_is_the_same_on_all_ranks_is_written_once_and_by_all_of_them(run_ranks: Any, tmp_path: Path) -> None:
    """Also where a rank has something of its own: replicas go to the others first."""

    def body(rank: int) -> None:
        state: dict[str, Any] = {f"same{n}": torch.full((1000 + n,), 1.0) for n in range(20)}
        if rank == 0:
            state["own"] = torch.zeros(10_000)
        save_once(tmp_path / "ckpt", state)

    run_ranks(4, body).value()
    sizes = [path.stat().st_size for path in sorted((tmp_path / "ckpt" / "iter_0000010").glob("*.distcp"))]
    assert len(sizes) == 4 and sum(sizes) < 4 * 31_000 + 25 * 2000
    assert max(sizes) < 1.3 * min(sizes)


def test_a_state_that_looks_the_same_is_not_planned_again(run_ranks: Any, tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        planned = []
        plan_anew = dcp_plan.plan_anew
        dcp_plan.plan_anew = lambda *args: planned.append(1) or plan_anew(*args)  # type: ignore[func-returns-value]
        trainee = states.make_trainee("fsdp2", seed=1)
        saver = Saver(tmp_path / "ckpt")
        counts = []
        for step in (1, 2, 3):
            trainee.train(1)
            saver.save(trainee.state(), **save_args(step))
            assert saver.finish() == step
            counts.append(len(planned))
        extra = {"more": torch.zeros(3)} if rank == 1 else {}
        saver.save({**trainee.state(), **extra}, **save_args(4))
        assert saver.finish() == 4
        last = states.digest(trainee.state())
        saver.close()
        return [*counts, len(planned)], last

    ranks = run_ranks(2, body)
    assert {tuple(counts) for counts, _ in ranks.values.values()} == {(1, 1, 1, 2)}
    assert load_plainly("fsdp2", tmp_path / "ckpt" / "iter_0000004", 2) == ranks.value()[1]
    first, second = (read_prints(tmp_path / "ckpt" / f"iter_000000{n}") for n in (2, 3))
    assert first is not None and second is not None and first.tensors.keys() == second.tensors.keys()
    assert first.tensors != second.tensors


ALONE = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from outlast.checkpoint.dcp_restore import restore
from outlast.checkpoint.writer import Saver
root = Path(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)
saver = Saver(root / "ckpt")
saver.save({"w": torch.arange(5.0)}, train_step=1, samples=8)
assert saver.finish() == 1
saver.close()
state = {"w": torch.zeros(5)}
assert restore(state, root / "ckpt" / "iter_0000001").samples == 8
assert state["w"].tolist() == [0, 1, 2, 3, 4] and (root / "ckpt" / "iter_0000001" / "fingerprints.json").exists()
assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
"""


def test_a_program_without_megatron_never_imports_it(tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-c", ALONE, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_it_is_a_snapshot_and_stateful_objects_are_asked(run_ranks: Any, tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = torch.tensor([3])

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    def body(rank: int) -> Any:
        saver = Saver(tmp_path / "ckpt")
        weight, counter = torch.full((64, 64), 5.0), Counter()
        hold_s = saver.save({"w": weight, "counter": counter}, **save_args(10), overlap=True)
        assert saver.finish_copy() >= 0 and hold_s > 0
        weight.fill_(-1.0)
        assert saver.finish() == 10
        saver.close()
        counter = Counter()
        counter.count = torch.tensor([0])
        state = {"w": torch.zeros(64, 64), "counter": counter}
        restore(state, tmp_path / "ckpt" / "iter_0000010")
        return state["w"].unique().tolist(), counter.count.tolist()

    assert run_ranks(2, body).values == {0: ([5.0], [3]), 1: ([5.0], [3])}


def test_a_state_without_room_in_memory_is_written_at_once(run_ranks: Any, tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        trainee = states.make_trainee("fsdp2", seed=1)
        trainee.train()
        save_once(tmp_path / "ckpt", trainee.state(), budget=Budget(limit_bytes=1000))
        place = tmp_path / "ckpt" / "iter_0000010"
        compared = compare(trainee.state(), place)  # as rank 0 finds them, which has written them
        prints = read_prints(place)
        return compared, prints is not None and len(prints.tensors)

    assert run_ranks(2, body).values == {0: (16, 16), 1: (16, 16)}


# ---------------------------------------------------------------- faults


KILLS = [(point, victim) for point in (*RANK_POINTS, "write.half") for victim in (0, 1)]
KILLS += [("commit.manifest_tmp", 0)]  # rank 0 alone commits


@pytest.mark.parametrize(("point", "victim"), KILLS)
def test_a_process_killed_in_the_middle_leaves_nothing_committed(
    run_ranks: Any, tmp_path: Path, point: str, victim: int
) -> None:
    root = tmp_path / "ckpt"

    def body(rank: int) -> str:
        trainee = states.make_trainee("fsdp2", seed=1)
        trainee.train()
        save_once(root, trainee.state(), 5)
        if rank == victim:
            os.environ[KILL_AT] = point
        try:
            save_once(root, trainee.state(), 10)
        except (CheckpointError, RuntimeError) as e:
            return f"{type(e).__name__}: {e}"
        return ""

    ranks = run_ranks(2, body)
    assert ranks.exits[victim] == (-signal.SIGKILL if point in RANK_POINTS else 0)
    assert ranks.value(1 - victim), "the other rank was told"
    choice = Store(root).choose(quarantined=()).restore
    assert choice is not None
    verify(Path(choice.path))
    # once all ranks have handed over their copies, the save may become durable without them
    assert choice.train_step in ((5, 10) if point == "save.handed_over" else (5,))


def refuse(run_ranks: Any, tmp_path: Path, make_state: Any, ranks: int = 2) -> str:
    def body(rank: int) -> str:
        saver = Saver(tmp_path / "ckpt")
        with pytest.raises(SaveFailed) as e:
            saver.save(make_state(rank), **save_args(10))
        assert saver.in_flight is None
        saver.save({"w": torch.zeros(3)}, **save_args(11))
        assert saver.finish() == 11, "the next one is as good as ever"
        saver.close()
        return str(e.value)

    said = run_ranks(ranks, body)
    assert len(set(said.values.values())) == 1, "all ranks are told the same"
    return str(said.value())


def test_one_name_for_two_things_is_refused_where_dcp_keeps_one(run_ranks: Any, tmp_path: Path) -> None:
    said = refuse(run_ranks, tmp_path, lambda rank: {"rng": torch.zeros(4 + rank)})
    assert "rng: rank 0 has tensor torch.float32[4], rank 1 tensor torch.float32[5]" in said


def test_a_tensor_without_data_is_refused_on_all_ranks(run_ranks: Any, tmp_path: Path) -> None:
    said = refuse(run_ranks, tmp_path, lambda rank: {"w": torch.zeros(4, device="meta" if rank else "cpu")})
    assert "rank 1: w: a tensor on the meta device" in said


@pytest.mark.megatron
def test_two_kinds_of_state_are_refused_on_all_ranks(run_ranks: Any, tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def make(rank: int) -> dict[str, Any]:
        tensor = torch.zeros(4)
        return {"w": ShardedTensor.from_rank_offsets("w", tensor) if rank else tensor}

    assert "1 of 2 ranks gave a state without any of Megatron's ShardedTensor" in refuse(run_ranks, tmp_path, make)


def swap_two_tensors() -> None:
    """A fault in what writes the index: two moments of one size change places. All files are as they were written."""
    pickle_index = stager.pickle_index

    def swapped(*args: Any) -> bytes:
        index = pickle.loads(pickle_index(*args))
        names = ("optimizer.state.0.bias.exp_avg", "optimizer.state.0.bias.exp_avg_sq")
        first, second = ({k.offset: k for k in index.storage_data if k.fqn == name} for name in names)
        where = index.storage_data
        for offset, one in first.items():
            where[one], where[second[offset]] = where[second[offset]], where[one]
        return pickle.dumps(index)

    stager.pickle_index = swapped  # type: ignore[attr-defined]


def test_a_fault_of_the_mapping_is_found_by_name_where_plain_dcp_takes_it(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"

    def save(rank: int) -> Any:
        swap_two_tensors()
        return train_and_save(root, "fsdp2")

    saved = run_ranks(2, save).value()
    place = root / "iter_0000010"
    verify(place)
    assert load_plainly("fsdp2", place, 2) != saved

    def load(rank: int) -> str:
        trainee = states.make_trainee("fsdp2", seed=99)
        trainee.train(1)
        with pytest.raises(NotAsSaved) as e:
            restore(trainee.state(), place)
        return str(e.value)

    said = run_ranks(2, load)
    assert said.value(0) == said.value(1)
    assert "optimizer.state.0.bias.exp_avg: " in said.value() and "optimizer.state.0.bias.exp_avg_sq: " in said.value()
    assert "2 of 16 tensors" in said.value()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_one_changed_bit_of_one_copy_on_one_rank_is_seen(run_ranks: Any, tmp_path: Path, kind: str) -> None:
    root = tmp_path / "ckpt"

    def body(rank: int) -> str:
        train_and_save(root, kind)
        trainee = states.make_trainee(kind, seed=99)
        trainee.train(1)
        state = trainee.state()
        restore(state, root / "iter_0000010")
        if rank == 1:
            weight = state["model"]["0.weight"]
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.view(torch.int32)[0, 0] ^= 1
        with pytest.raises(NotAsSaved) as e:
            compare(state, root / "iter_0000010")
        return str(e.value)

    assert "1 of 16 tensors are not as they were saved: model.0.weight: " in run_ranks(2, body).value()


def test_a_part_is_restored_and_another_dtype_is_not_compared(run_ranks: Any, tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        whole = torch.arange(15.0).reshape(5, 3)
        state = {
            "w": distribute_tensor(whole, mesh, [Shard(0)]),
            "v": whole + 1,
            "c": torch.zeros(2, dtype=torch.cfloat),
        }
        save_once(tmp_path / "ckpt", state)
        place = tmp_path / "ckpt" / "iter_0000010"
        part = {"v": torch.zeros(5, 3)}
        restore(part, place)
        half = {"v": torch.zeros(5, 3, dtype=torch.bfloat16), "w": torch.zeros(5, 3)}
        restore(half, place)
        prints = read_prints(place)
        assert prints is not None
        return torch.equal(part["v"], whole + 1), torch.equal(half["w"], whole), compare(half, place), prints.left_out

    left_out = {"c": "complex numbers"}
    assert run_ranks(2, body).values == {rank: (True, True, 1, left_out) for rank in (0, 1)}


def test_without_fingerprints_there_is_nothing_to_compare_with(run_ranks: Any, tmp_path: Path) -> None:
    def body(rank: int) -> int:
        state = {"w": torch.zeros(3)}
        save_once(tmp_path / "ckpt", state, fingerprints=False)
        restore(state, tmp_path / "ckpt" / "iter_0000010")
        return compare(state, tmp_path / "ckpt" / "iter_0000010")

    assert run_ranks(1, body).value() == 0


def test_the_index_names_what_dcp_would(run_ranks: Any, tmp_path: Path) -> None:
    """The same state saved by torch itself: same entries, same chunks."""

    def body(rank: int) -> None:
        trainee = states.make_trainee("fsdp2_tp", seed=1)
        trainee.train()
        save_once(tmp_path / "ckpt", trainee.state())
        torch.distributed.checkpoint.save(trainee.state(), checkpoint_id=tmp_path / "plain")

    run_ranks(4, body).value()
    ours, theirs = (FileSystemReader(tmp_path / name).read_metadata() for name in ("ckpt/iter_0000010", "plain"))
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert ours.planner_data == theirs.planner_data
    for name, one in ours.state_dict_metadata.items():
        other = theirs.state_dict_metadata[name]
        assert type(one) is type(other), name
        if hasattr(one, "chunks"):
            assert (one.size, one.properties) == (other.size, other.properties), name
            assert sorted(map(str, one.chunks)) == sorted(map(str, other.chunks)), name
