"""Checkpoints of ours in plain Megatron-core and plain DCP, and theirs in ours: bit for bit, with the moments.

    ours (layout A) --plain Megatron-core--> ranks (B) --its own save--> theirs --our reader--> ranks (C, D, ...)

Each arrow ends in a comparison of every weight's, main parameter's and moment's fingerprint with those of the first
save, taken from live tensors.
"""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.checkpoint.exporting import fits, print_labels
from outlast.checkpoint.prints import read_prints
from outlast.checkpoint.tensors import unstack

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

RESTORED = re.compile(r"restored train_step 3 .*, (\d+) tensors as saved")
MOE = ("--experts", "4")
VPP = ("--pp", "2", "--vpp", "2")
SIZES = ("--layers", "4", "--train-steps", "3", "--global-batch", "24")
Layout = tuple[tuple[str, ...], int]

DENSE_GRID: tuple[Layout, ...] = (
    ((), 1),
    ((), 3),
    (("--tp", "4"), 4),
    (("--tp", "2", "--pp", "2"), 4),
    (("--pp", "2"), 4),
    (VPP, 2),
    ((*VPP, "--tp", "2"), 4),
)
MOE_GRID: tuple[Layout, ...] = (
    (MOE, 1),
    ((*MOE, "--ep", "4"), 4),
    ((*MOE, "--tp", "2", "--ep", "2"), 2),
    ((*MOE, "--pp", "2", "--ep", "2"), 4),
    ((*MOE, *VPP, "--ep", "2"), 4),
)
VPP_GRID: tuple[Layout, ...] = (((), 2), ((*VPP, "--tp", "2"), 4), (("--pp", "4"), 4))


def loads_with(load: Callable[[dict[str, Any]], Any], *, then_save: Path | None = None) -> Callable[[], None]:
    """What a rank does first: put `load` in the place of our reader, and after the restore let Megatron save."""

    def patch() -> None:
        from megatron.core import dist_checkpointing

        from outlast.launchers import trainer_state

        trainer_state.load = lambda request, path, **_: (load(request), None)
        restore = trainer_state.load_state

        def restore_and_save(path: Path, trainee: Any, world: Any, *args: Any, **kwargs: Any) -> Any:
            progress = restore(path, trainee, world, *args, **kwargs)
            if then_save is not None:
                then_save.mkdir(exist_ok=True)
                state = trainer_state.sharded_state(trainee, world, is_loading=False)
                dist_checkpointing.save(state, str(then_save), content_metadata=dict(trainer_state._FORMAT))
                for manager in multiprocessing.active_children():  # a forked rank's end runs no exit handlers
                    manager.terminate()
            return progress

        trainer_state.load_state = restore_and_save

    return patch


def plain_load(path: Path) -> Callable[[dict[str, Any]], Any]:
    def load(request: dict[str, Any]) -> Any:
        from megatron.core import dist_checkpointing

        return dist_checkpointing.load(request, str(path))

    return load


def our_load(path: Path) -> Callable[[dict[str, Any]], Any]:
    def load(request: dict[str, Any]) -> Any:
        from outlast.checkpoint.reader import load_foreign

        return load_foreign(request, path, megatron=True)

    return load


def restore(fork_ranks: Any, path: Path, layout: Layout, before: Callable[[], None]) -> int:
    """How many tensors were compared, and were as they were saved."""
    argv, ranks = layout
    words = (*argv, *SIZES, "--restore-dir", str(path))
    said = fork_ranks(*words, ranks=ranks, before=before).checked().ranks[-1].output
    found = RESTORED.search(said)
    assert found, said
    return int(found[1])


def save(fork_ranks: Any, place: Path, *argv: str, ranks: int) -> Path:
    words = (*argv, *SIZES, "--save-every", "3", "--checkpoint-dir", str(place))
    fork_ranks(*words, ranks=ranks).checked()
    return place / "iter_0000003"


@pytest.mark.parametrize(
    ("first", "plain", "grid"),
    [
        ((("--tp", "2"), 4), (("--pp", "2"), 2), DENSE_GRID),
        (((*MOE, "--ep", "2"), 2), (MOE, 2), MOE_GRID),
        ((VPP, 4), (("--tp", "2"), 2), VPP_GRID),
    ],
    ids=["dense", "moe", "vpp"],
)
def test_ours_in_plain_megatron_and_theirs_in_ours(
    fork_ranks: Any, tmp_path: Path, first: Layout, plain: Layout, grid: tuple[Layout, ...]
) -> None:
    ours = save(fork_ranks, tmp_path / "ours", *first[0], ranks=first[1])
    prints = read_prints(ours)
    assert prints is not None and any(label.endswith(":exp_avg_sq") for label in prints.tensors)
    theirs = tmp_path / "theirs"
    assert restore(fork_ranks, ours, plain, loads_with(plain_load(ours), then_save=theirs)) == len(prints.tensors)
    assert not (theirs / "manifest.json").exists() and (theirs / ".metadata").exists()
    for layout in grid:
        assert restore(fork_ranks, ours, layout, loads_with(our_load(theirs))) == len(prints.tensors), layout


WITHOUT_US = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "outlast":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
reader = FileSystemReader(sys.argv[1])
entries = reader.read_metadata().state_dict_metadata
state = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()
         if isinstance(e, TensorStorageMetadata)}
load(state, storage_reader=reader, no_dist=True)
assert not [name for name in sys.modules if name.partition(".")[0] == "outlast"]
torch.save(state, sys.argv[2])
"""


@pytest.mark.parametrize(
    ("argv", "ranks"), [(("--tp", "2"), 4), ((*MOE, "--ep", "2", "--pp", "2"), 4)], ids=["dense", "moe"]
)
def test_ours_in_plain_dcp_where_outlast_cannot_be_imported(
    fork_ranks: Any, tmp_path: Path, argv: tuple[str, ...], ranks: int
) -> None:
    ours = save(fork_ranks, tmp_path / "ours", *argv, ranks=ranks)
    prints = read_prints(ours)
    assert prints is not None
    out = tmp_path / "plain.pt"
    words = [sys.executable, "-W", "ignore", "-c", WITHOUT_US, str(ours), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = set()
    for stored, whole in torch.load(out, weights_only=True).items():
        for name, tensor in unstack(stored, whole):
            label = next((label for label in print_labels(name) if label in prints.tensors), None)
            assert label is not None, name
            assert fits(tensor.contiguous(), prints.tensors[label]), name
            seen.add(label)
    wanted = {label for label in prints.tensors if label.rpartition(":")[2] in ("exp_avg", "exp_avg_sq")}
    assert wanted <= seen and {label.partition(":")[0] for label in wanted} <= seen
