"""Upstream's faults, each shown twice: the trainer without the mend has it, with the mend it is gone.

The ranks are forked, so that a mend made in one attempt does not reach the next.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outlast.launchers.megatron_known import GUARDED, look_at_installed

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

MOE = ("--experts", "4")
OVERLAP = ("--overlap",)


class Attempts:
    """Save after 3 of 6 train_steps in one layout, restore into another."""

    def __init__(self, fork_ranks: Any, folder: Path) -> None:
        self._fork_ranks = fork_ranks
        self._folder = folder

    def save(self, name: str, *layout: str, ranks: int = 1, leave: tuple[str, ...] = ()) -> Any:
        """The whole run, whose checkpoint `restore` finds by this name."""
        argv = (*layout, "--save-every", "3", "--checkpoint-dir", str(self._folder / name))
        return self._fork_ranks(*argv, ranks=ranks, leave=leave).checked()

    def restore(self, name: str, *layout: str, ranks: int = 1, leave: tuple[str, ...] = ()) -> Any:
        argv = (*layout, "--restore-dir", str(self._folder / name / "iter_0000003"))
        return self._fork_ranks(*argv, ranks=ranks, leave=leave)


@pytest.fixture(scope="module")
def attempts(fork_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Attempts:
    return Attempts(fork_ranks, tmp_path_factory.mktemp("fixes"))


@pytest.fixture(scope="module")
def saved(attempts: Attempts) -> Any:
    """A run on one rank, saved as 'one'."""
    return attempts.save("one")


def difference(saved: Any, restored: Any) -> float:
    """The largest relative difference of a loss after the restore."""
    steps = restored.checked().losses
    assert list(steps) == [4, 5, 6]
    return max(abs(steps[s] - saved.losses[s]) / saved.losses[s] for s in steps)


def test_shared_step(attempts: Attempts, saved: Any) -> None:
    restored = attempts.restore("one")
    assert difference(saved, restored) == 0.0
    assert restored.digests == saved.digests
    # silently: no error, another loss
    assert difference(saved, attempts.restore("one", leave=("shared_step",))) > 1e-4


@pytest.mark.parametrize(
    ("name", "word"), [("fresh_optimizer", "AssertionError"), ("step_not_loaded", "KeyError: 'step'")]
)
def test_a_fresh_optimizer_loads(attempts: Attempts, saved: Any, name: str, word: str) -> None:
    # that it loads with the mend is test_shared_step's first half
    refused = attempts.restore("one", leave=(name,))
    assert refused.codes == [1]
    assert word in refused.ranks[0].output
    assert "distrib_optimizer.py" in refused.ranks[0].output


def test_padded_buckets(attempts: Attempts) -> None:
    whole = attempts.save("overlap", *OVERLAP, ranks=2)
    restored = attempts.restore("overlap", *OVERLAP, ranks=2)
    assert difference(whole, restored) == 0.0
    assert restored.digests == whole.digests
    leave = ("padded_buckets",)
    blind = (*OVERLAP, "--no-fingerprints")  # which would refuse it: test_live_prints.py
    whole = attempts.save("overlap-torn", *blind, ranks=2, leave=leave)
    assert difference(whole, attempts.restore("overlap-torn", *blind, ranks=2, leave=leave)) > 1e-3


@pytest.mark.long
def test_padded_buckets_of_pipeline_stages_on_three_replicas(attempts: Attempts) -> None:
    batch = ("--global-batch", "6", "--micro-batch", "2")
    whole = attempts.save("stages", "--pp", "2", *batch, ranks=6)
    assert difference(whole, attempts.restore("stages", *batch)) < 1e-5
    leave = ("padded_buckets",)
    batch = (*batch, "--no-fingerprints")
    whole = attempts.save("stages-torn", "--pp", "2", *batch, ranks=6, leave=leave)
    assert difference(whole, attempts.restore("stages-torn", *batch, leave=leave)) > 1e-3


def stale_tensors(checkpoint: Path) -> list[str]:
    """Weights whose value in the model's part is not the one in the optimizer's part."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    flat = {name: value for name, value in state.items() if torch.is_tensor(value)}
    pairs = [(name, f"optimizer.state.param.{name}") for name in flat if f"optimizer.state.param.{name}" in flat]
    assert len(pairs) > 5
    return [name for name, main in pairs if not torch.equal(flat[name], flat[main])]


def _leave_parameters_unsettled() -> None:
    from outlast.launchers import trainer_state

    trainer_state.settle_parameters = lambda _wrapped: None  # type: ignore[assignment]


def test_stale_model(fork_ranks: Any, tmp_path: Path) -> None:
    def save(name: str, **how: Any) -> Path:
        argv = (*OVERLAP, "--train-steps", "3", "--save-every", "3", "--checkpoint-dir", str(tmp_path / name))
        fork_ranks(*argv, ranks=2, **how).checked()
        return tmp_path / name / "iter_0000003"

    assert stale_tensors(save("settled")) == []
    assert stale_tensors(save("unsettled", before=_leave_parameters_unsettled)) != []


def test_experts_folded_into_the_dense_optimizer(attempts: Attempts) -> None:
    whole = attempts.save("ep2", *MOE, "--ep", "2", ranks=2)
    assert difference(whole, attempts.restore("ep2", *MOE)) < 1e-5
    refused = attempts.restore("ep2", *MOE, leave=("chained_optimizers",))
    assert "KeyError: 'optimizer'" in refused.ranks[0].output


def test_experts_unfolded_into_an_optimizer_of_their_own(attempts: Attempts) -> None:
    whole = attempts.save("ep1", *MOE)
    assert difference(whole, attempts.restore("ep1", *MOE, "--ep", "2", ranks=2)) < 1e-5
    refused = attempts.restore("ep1", *MOE, "--ep", "2", ranks=2, leave=("chained_optimizers",))
    assert "Expected 2 entries in state dict, but got 4" in refused.ranks[0].output


def test_missing_gemm(fork_ranks: Any) -> None:
    fork_ranks(*MOE, "--train-steps", "1").checked()
    broken = fork_ranks(*MOE, "--train-steps", "1", leave=("missing_gemm",))
    assert "NameError: name 'te_general_gemm' is not defined" in broken.ranks[0].output


PERSISTENT = '''
"""Save with a persistent worker, train on in place, load: prints the values found in a tensor that was all ones."""
import os, sys, warnings
warnings.filterwarnings("ignore")
from outlast.launchers import megatron_cpu
megatron_cpu.adapt()  # at the top: the spawned worker runs this file too
import torch
torch.cuda.device_count = lambda: 1  # the worker asks for rank % device_count

def main(folder):
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    weights = {f"w{i}": torch.ones(1_000_000) for i in range(8)}
    cut = lambda: {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in weights.items()}
    queue = AsyncCallsQueue(persistent=True)
    os.mkdir(folder)
    strategy = get_default_save_sharded_strategy("torch_dist")
    request = dist_checkpointing.save(cut(), folder, strategy, async_sharded_save=True)
    queue.schedule_async_request(request)
    while not queue.maybe_finalize_async_calls(blocking=False):
        for tensor in weights.values():
            tensor.add_(1.0)
    queue.close()
    for tensor in weights.values():
        tensor.zero_()
    found = {value for tensor in dist_checkpointing.load(cut(), folder).values() for value in tensor.tolist()}
    print("found", sorted(found))

if __name__ == "__main__":
    main(sys.argv[1])
'''


def _ask_for_a_persistent_worker() -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import (  # type: ignore[import-untyped]
        AsyncCallsQueue,
    )

    from outlast.launchers import megatron_fixes

    megatron_fixes.mend()
    AsyncCallsQueue(persistent=False)
    AsyncCallsQueue(persistent=True)


def test_persistent_worker(fork_ranks: Any, tmp_path: Path) -> None:
    refused = fork_ranks(before=_ask_for_a_persistent_worker).ranks[0].output
    assert "MegatronRefused" in refused
    assert "use persistent=False, which forks (fault 'persistent_worker')" in refused

    script = tmp_path / "persistent.py"
    script.write_text(PERSISTENT)
    argv = [sys.executable, str(script), str(tmp_path / "checkpoint")]
    plain = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.startswith("found [")
    assert plain.stdout.strip() != "found [1.0]"  # torn: the state of a later step, or of several


HANGING = PERSISTENT.replace(
    """    while not queue.maybe_finalize_async_calls(blocking=False):
        for tensor in weights.values():
            tensor.add_(1.0)
""",
    """    os.kill(queue.persistent_caller.process.pid, 9)
    print("waits", flush=True)
    queue.maybe_finalize_async_calls(blocking=True)
    print("came back", flush=True)
    os._exit(0)
""",
)


def test_hanging_wait(tmp_path: Path) -> None:
    """Upstream waits for a worker that is dead. Ours: tests/checkpoint/test_kills_everywhere.py, told to all ranks."""
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    argv = [sys.executable, str(script), str(tmp_path / "checkpoint")]
    said = tmp_path / "said"
    with said.open("w") as out:
        plain = subprocess.Popen(argv, stdout=out, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline_s = time.monotonic() + 120
        while said.read_text() != "waits\n":
            assert plain.poll() is None and time.monotonic() < deadline_s, said.read_text()
            time.sleep(0.05)
        with pytest.raises(subprocess.TimeoutExpired):
            plain.wait(timeout=5)
    finally:
        os.killpg(plain.pid, signal.SIGKILL)  # and what multiprocessing keeps beside it
        plain.wait()
    assert said.read_text() == "waits\n", "it never came back"


class TestGuard:
    """A mend for other code than it was written for is worse than none."""

    def test_another_version_is_refused(self, fork_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        import megatron.core  # type: ignore[import-untyped]

        from outlast.launchers import megatron_fixes

        monkeypatch.setattr(megatron.core, "__version__", "0.19.2")
        with pytest.raises(megatron_fixes.MegatronRefused) as refused:
            megatron_fixes.mend()
        assert refused.value.fault == "shared_step"
        assert "DistributedOptimizer.load_state_dict: megatron-core 0.19.2" in str(refused.value)
        assert "Install megatron-core==0.16.1" in str(refused.value)

    def test_another_source_is_refused(self, fork_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # type: ignore[import-untyped]

        from outlast.launchers import megatron_fixes

        # of the mended function's helper, not of the function itself
        monkeypatch.setattr(DistributedOptimizer, "get_parameter_state_dp_zero", lambda self: None)
        others = [f.name for f in megatron_fixes.FAULTS if f.name != "padded_buckets"]
        with pytest.raises(megatron_fixes.MegatronRefused, match="padded_buckets"):
            megatron_fixes.mend(leave=[*others, "missing_gemm"])

    def test_a_name_that_is_gone_is_refused(self, fork_ranks: Any) -> None:
        from outlast.launchers import megatron_fixes

        gone = replace(megatron_fixes.FAULTS[0], function="DistributedOptimizer.load_no_more")
        with pytest.raises(megatron_fixes.MegatronRefused, match=r"load_no_more: there is no such function"):
            megatron_fixes._mend_one(gone)

    def test_all_that_is_installed_is_known(self, fork_ranks: Any) -> None:
        from outlast.launchers import megatron_fixes

        for fault in megatron_fixes.FAULTS:
            owner, _ = megatron_fixes._find_owner(fault)
            assert megatron_fixes.why_unknown(fault, owner) == ""
        # what doctor reads from files is what is imported
        seen = look_at_installed()
        assert seen is not None and len(seen) == len(megatron_fixes.FAULTS) + len(GUARDED)
        assert all(one.is_mended for one in seen), [one for one in seen if not one.is_mended]
