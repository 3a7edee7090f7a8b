"""Saving with real ranks: what is committed verifies, loads without us and into other sizes; nothing else counts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from outlast.checkpoint import reader
from outlast.checkpoint.store import Store
from outlast.checkpoint.writer import Saver
from outlast.reliability.model import Layout

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

ROWS, COLUMNS = 12, 5


def whole(value: float) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + value


def make_state(rank: int, world_size: int, value: float) -> dict[str, Any]:
    """Rows of one matrix sharded over ranks, a view into a larger buffer, a replicated vector, an object a rank."""
    rows = ROWS // world_size
    buffer = torch.zeros(ROWS, COLUMNS)
    buffer[:rows] = whole(value)[rank * rows : (rank + 1) * rows]
    return {
        "model": {
            "w": ShardedTensor.from_rank_offsets("w", buffer[:rows], (0, rank, world_size)),
            "b": ShardedTensor.from_rank_offsets("b", torch.full((3,), value, dtype=torch.bfloat16), replica_id=rank),
        },
        "rng": ShardedObject("rng", {"rank": rank, "value": value}, (world_size,), (rank,)),
        "samples": int(value),
    }


def save_args(train_step: int, world_size: int) -> dict[str, Any]:
    return {"train_step": train_step, "samples": 8 * train_step, "layout": Layout(dp=world_size)}


def poll_until_durable(saver: Saver, timeout_s: float = 30.0) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (durable := saver.poll()) is not None:
            return durable
        time.sleep(0.002)
    raise AssertionError("not durable in time")


def test_a_save_is_a_snapshot_and_loads_without_us_and_into_another_size(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"

    def save(rank: int) -> Any:
        seen = []
        saver = Saver(root, on_durable=lambda *said: seen.append(said))
        state = make_state(rank, 2, 100.0)
        live = [state["model"]["w"].data, state["model"]["b"].data]
        hold_s = saver.save(state, **save_args(10, 2))
        for tensor in live:
            tensor.fill_(-1.0)  # training goes on in place
        assert saver.in_flight == 10
        assert poll_until_durable(saver) == 10
        assert saver.in_flight is None and saver.poll() is None
        saver.close()
        return hold_s, seen

    for hold_s, ((train_step, said_hold_s, durable_s),) in run_ranks(2, save).values.values():
        assert train_step == 10 and said_hold_s == hold_s and 0 < hold_s < durable_s
    choice = Store(root).choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 10 and choice.restore.samples == 80

    def load_plain(rank: int) -> Any:
        got = dist_checkpointing.load(make_state(rank, 1, 0.0), choice.restore.path)
        assert torch.equal(got["model"]["w"], whole(100.0)) and got["samples"] == 100
        return got["model"]["b"].tolist()

    state = {k: v for k, v in make_state(0, 1, 0.0).items() if k != "rng"}
    assert set(state) == {"model", "samples"}
    del state

    def load_three(rank: int) -> Any:
        template = make_state(rank, 3, 0.0)
        del template["rng"]
        got, manifest = reader.load(template, choice.restore.path)
        assert torch.equal(got["model"]["w"], whole(100.0)[rank * 4 : rank * 4 + 4])
        assert manifest.layout == Layout(dp=2) and manifest.data_frontier.consumed == 80
        return got["model"]["b"].tolist()

    def load_same(rank: int) -> Any:
        got, _ = reader.load(make_state(rank, 2, 0.0), choice.restore.path)
        return got["rng"]

    def load_plain_one(rank: int) -> Any:
        template = make_state(rank, 1, 0.0)
        del template["rng"]
        got = dist_checkpointing.load(template, choice.restore.path)
        assert torch.equal(got["model"]["w"], whole(100.0)) and got["samples"] == 100
        return got["model"]["b"].tolist()

    assert run_ranks(1, load_plain_one).value() == [100.0] * 3
    assert run_ranks(3, load_three).value(2) == [100.0] * 3
    assert run_ranks(2, load_same).values == {r: {"rank": r, "value": 100.0} for r in (0, 1)}
