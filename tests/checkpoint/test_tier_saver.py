"""Ranks that save to their nodes and load from them: what is committed, what is brought, what a kill leaves."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from outlast.checkpoint import reader
from outlast.checkpoint.bringing import bring
from outlast.checkpoint.errors import NotWhole
from outlast.checkpoint.job import Spread
from outlast.checkpoint.local_tier import LocalTier, is_local
from outlast.checkpoint.points import KILL_AT
from outlast.checkpoint.shelf import Shelf, ShelfTask
from outlast.checkpoint.shelf_box import Box
from outlast.checkpoint.shelf_roster import Roster
from outlast.checkpoint.verify import verify
from outlast.checkpoint.writer import Saver
from outlast.reliability.model import Layout, Node

pytestmark = [pytest.mark.slow, pytest.mark.megatron]
SECRET = bytes(range(32))
RANKS = 4


def tensor_of(rank: int, value: float) -> Any:
    """A state dict with one matrix that this rank alone has."""
    mine = torch.arange(15, dtype=torch.float32).reshape(3, 5) + value + 100 * rank
    return {"w": ShardedTensor.from_rank_offsets(f"w{rank}", mine), "samples": int(value)}


def node_of(rank: int) -> str:
    return "ab"[rank // 2]


def box(root: Path, node: str) -> Box:
    return Box(root / f"node-{node}")


def save(root: Path, run_ranks: Any, step: int, value: float) -> Any:
    """A local checkpoint of four ranks on two nodes."""

    def one(rank: int) -> Any:
        saver = Saver(root / "ckpt")
        spread = Spread(node=Node(node_of(rank)), shards=str(box(root, node_of(rank)).directory(step)))
        saver.save(tensor_of(rank, value), train_step=step, samples=step, layout=Layout(pp=RANKS), spread=spread)
        done = saver.finish()
        saver.close()
        return done

    return run_ranks(RANKS, one)


def shelf(root: Path, node: str) -> Shelf:
    task = ShelfTask(
        node=Node(node),
        host="127.0.0.1",
        checkpoints=str(root / "ckpt"),
        box=str(box(root, node).root),
        roster=str(root / "shelves"),
        secret_file="",
    )
    one = Shelf(task, SECRET)
    one.start()
    return one


def load_one(root: Path, run_ranks: Any, rank: int, value: float, *, step: int = 10) -> list[str]:
    """On a new node z, the matrix of one rank of four; the names that were asked for."""
    local, mine = LocalTier(root / "ckpt"), box(root, "z")
    roster = Roster(folder=root / "shelves", secret=SECRET, me=Node("z"))
    asked: list[str] = []

    def more(names: Collection[str]) -> None:
        asked.extend(names)
        bring(local, step, mine, roster, names=names, index=False)

    def one(_: int) -> Any:
        path = bring(local, step, mine, roster, names=("common.pt",))
        common, _ = reader.load_common(path, partial=True)
        wanted = tensor_of(rank, 0.0)
        got, manifest = reader.load(wanted, path, bring=more)
        assert manifest.train_step == step and common["samples"] == int(value)
        assert torch.equal(got["w"], tensor_of(rank, value)["w"].data)
        return asked

    names: list[str] = run_ranks(1, one).value()
    return names


def test_each_node_has_its_own_part_and_a_new_one_brings_what_it_needs(run_ranks: Any, tmp_path: Path) -> None:
    assert save(tmp_path, run_ranks, 10, 100.0).value() == 10
    local = LocalTier(tmp_path / "ckpt")
    assert local.steps() == (10,) and is_local(local.path(10))
    manifest, parts = local.read(10)
    for node, ranks in (("a", "01"), ("b", "23")):
        mine = {name for name in parts.of(Node(node)) if name.endswith(".distcp")}
        assert mine == {f"__{rank}_0.distcp" for rank in ranks}
        assert set(parts.of(Node(node))) == {path.name for path in box(tmp_path, node).directory(10).iterdir()}
    assert not list(local.path(10).glob("*.distcp")), "no shard lies on the shared file system"
    assert not (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").exists()

    shelves = [shelf(tmp_path, "a"), shelf(tmp_path, "b")]
    try:
        assert load_one(tmp_path, run_ranks, 3, 100.0) == ["__3_0.distcp"]
        assert [path.name for path in box(tmp_path, "z").directory(10).glob("*.distcp")] == ["__3_0.distcp"]
        # all of it: an ordinary checkpoint
        roster = Roster(folder=tmp_path / "shelves", secret=SECRET, me=Node("y"))
        assert verify(bring(local, 10, box(tmp_path, "y"), roster)) == manifest
        # its node has gone and nobody has a copy: every rank is told, nothing is loaded
        shelves[1].close()
        shutil.rmtree(box(tmp_path, "z").root)
        with pytest.raises(AssertionError, match="__2_0"):
            load_one(tmp_path, run_ranks, 2, 100.0)
    finally:
        for one in shelves:
            one.close()


def test_the_same_train_step_again_replaces_parts_and_outdates_copies(run_ranks: Any, tmp_path: Path) -> None:
    assert save(tmp_path, run_ranks, 10, 100.0).value() == 10
    local = LocalTier(tmp_path / "ckpt")
    manifest, parts = local.read(10)
    local.note_copy(10, Node("a"), Node("b"), manifest, parts)
    assert save(tmp_path, run_ranks, 10, 200.0).value() == 10
    assert local.copies(10) == {} and local.read(10)[0] != manifest
    shelves = [shelf(tmp_path, "a"), shelf(tmp_path, "b")]
    try:
        load_one(tmp_path, run_ranks, 1, 200.0)
    finally:
        for one in shelves:
            one.close()


def test_a_node_without_room_costs_a_local_checkpoint_and_nothing_else(run_ranks: Any, tmp_path: Path) -> None:
    """Whatever is wrong with a node's own directory, training and the shared checkpoints go on."""
    box(tmp_path, "b").root.parent.mkdir(parents=True, exist_ok=True)
    box(tmp_path, "b").root.write_text("no directory")

    def one(rank: int) -> Any:
        saver = Saver(tmp_path / "ckpt")
        said = {"train_step": 10, "samples": 10, "layout": Layout(pp=RANKS)}
        spread = Spread(node=Node(node_of(rank)), shards=str(box(tmp_path, node_of(rank)).directory(10)))
        saver.save(tensor_of(rank, 1.0), **said, spread=spread)
        first = saver.finish()
        failure = saver.last_failure
        saver.save(tensor_of(rank, 2.0), **said)
        done = first, failure, saver.finish()
        saver.close()
        return done

    first, failure, second = run_ranks(RANKS, one).value()
    assert first is None and ("rank 2" in failure or "rank 3" in failure) and second == 10, "both are on node b"
    assert LocalTier(tmp_path / "ckpt").steps() == () and verify(tmp_path / "ckpt" / "iter_0000010").train_step == 10


@pytest.mark.parametrize("point", ["write.half", "commit.names", "commit.marker_tmp"])
def test_a_save_that_dies_leaves_no_local_checkpoint(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    assert save(tmp_path, run_ranks, 10, 100.0).value() == 10
    monkeypatch.setenv(KILL_AT, point)
    assert save(tmp_path, run_ranks, 20, 200.0).values == dict.fromkeys(range(RANKS)), "it cost no rank its life"
    monkeypatch.delenv(KILL_AT)
    local = LocalTier(tmp_path / "ckpt")
    assert local.steps() == (10,)
    with pytest.raises(NotWhole):
        local.read(20)
    assert save(tmp_path, run_ranks, 20, 300.0).value() == 20
    assert local.steps() == (10, 20)
    assert msgspec.structs.asdict(local.read(20)[1])["nodes"]["__3_0.distcp"] == "b"
