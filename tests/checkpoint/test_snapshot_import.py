"""A snapshot that torchsnapshot 0.1.0 wrote with torch 2.13 (tests/data/torchsnapshot) becomes a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.store import Store
from outlast.checkpoint.verify import verify

pytestmark = pytest.mark.slow

SMALL = Path(__file__).parents[1] / "data" / "torchsnapshot" / "small"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SMALL, tmp_path / "snapshot"))


def bring(snapshot: Path, root: Path) -> Path:
    from outlast.checkpoint.snapshot_import import import_snapshot

    return import_snapshot(snapshot, root, train_step=3, samples=24)


def test_it_is_whole_and_plain_dcp_reads_it(snapshot: Path, tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    made = bring(snapshot, tmp_path / "ckpt")
    assert verify(made).samples == 24
    restore = Store(tmp_path / "ckpt").choose(quarantined=()).restore
    assert restore is not None and (restore.train_step, restore.path) == (3, str(made))
    model = torch.nn.Linear(3, 4)
    state: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()},
        "optim": {"state": {0: {"step": torch.tensor(0.0), "exp_avg": torch.zeros(4, 3)}}},
        "progress": {"step": 0, "name": "", "lr": 0.0, "half": torch.zeros(6).bfloat16(), "big": torch.zeros(6, 4)},
    }
    dcp.load(state, checkpoint_id=made, no_dist=True)
    progress = state["progress"]
    assert (progress["step"], progress["name"], progress["lr"]) == (3, "x", 1e-3)
    # cut into chunks by the snapshot, and put together again
    assert torch.equal(progress["big"], torch.arange(24.0).reshape(6, 4))
    assert torch.equal(progress["half"], torch.arange(6).bfloat16())
    assert float(state["optim"]["state"][0]["step"]) == 1.0 and state["optim"]["state"][0]["exp_avg"].abs().sum() > 0
    torch.manual_seed(0)
    trained = torch.nn.Linear(3, 4).weight
    assert torch.allclose(state["model"]["weight"], trained, atol=2e-3), "one step away from where it began"


def edit(snapshot: Path, path: str, **changes: Any) -> None:
    told = json.loads((snapshot / ".snapshot_metadata").read_text())
    told["manifest"][path].update(changes)
    (snapshot / ".snapshot_metadata").write_text(json.dumps(told))


def largest(snapshot: Path) -> Path:
    return max((path for path in snapshot.rglob("*") if path.is_file() and path.name[0] != "."), key=os.path.getsize)


def cut(snapshot: Path) -> None:
    for path in snapshot.rglob("*"):
        if path.is_file() and "batched" in str(path):
            os.truncate(path, 20)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "bytes; nothing was imported"),
        (lambda s: (s / ".snapshot_metadata").write_text("{"), "expected a snapshot's metadata"),
        (lambda s: (s / ".snapshot_metadata").unlink(), "expected a snapshot's metadata"),
        (lambda s: edit(s, "0/model/bias", location="../../etc/passwd"), "part; nothing was imported"),
        (lambda s: edit(s, "0/model/bias", location="0/none"), "No such file"),
        (lambda s: edit(s, "0/model/bias", dtype="torch.qint8"), "dtype torch.qint8"),
        (lambda s: edit(s, "0/model", keys=["weight", "bias", "other"]), "0/model/other: not in the metadata"),
        (lambda s: edit(s, "0/progress/step", type="complex"), "kind 'complex'"),
    ],
)
def test_what_is_not_whole_or_not_known_is_refused_and_leaves_nothing(
    snapshot: Path, tmp_path: Path, damage: Any, words: str
) -> None:
    damage(snapshot)
    with pytest.raises(CheckpointError, match=words.replace(".", r"\.")):
        bring(snapshot, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


def test_code_in_an_object_is_not_run(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, ("unpickled",)

    monkeypatch.chdir(tmp_path)
    told = json.loads((snapshot / ".snapshot_metadata").read_text())["manifest"]
    (name,) = [path for path, entry in told.items() if entry["type"] == "object" and path.endswith("betas")]
    torch.save(Evil(), snapshot / "evil")
    edit(snapshot, name, location="evil")
    with pytest.raises(CheckpointError, match="no plain data"):
        bring(snapshot, tmp_path / "ckpt")
    assert not (tmp_path / "unpickled").exists()


def test_one_that_is_there_is_not_touched(snapshot: Path, tmp_path: Path) -> None:
    made = bring(snapshot, tmp_path / "ckpt")
    before = (made / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="is there already"):
        bring(snapshot, tmp_path / "ckpt")
    assert (made / "manifest.json").read_bytes() == before


def test_the_command(snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from outlast.reliability.cli.root import start

    argv = ["ckpt", "import", str(snapshot), str(tmp_path / "ckpt"), "--train-step", "3"]
    assert start(argv) == 0 and "iter_0000003: committed" in capsys.readouterr().out
    assert start(argv) == 1 and "is there already" in capsys.readouterr().err
