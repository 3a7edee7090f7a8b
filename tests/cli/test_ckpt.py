"""`outlast ckpt` on real directories: what it says, what it changes, its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.catalogue import State, survey
from outlast.checkpoint.commit import commit, write_bytes
from outlast.checkpoint.manifest import FileEntry, Manifest, hash_bytes
from outlast.checkpoint.names import name_step
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.prints import Prints, TensorPrint, write_prints
from outlast.checkpoint.store import Store
from outlast.reliability.cli.root import start
from outlast.reliability.freeze import freeze
from outlast.reliability.model import Layout
from outlast.reliability.runfile import Checkpoint, RunFile, Task

Say = Callable[..., tuple[int, str, str]]
SHARD = "__0_0.distcp"


def make(root: Path, step: int, *, committed: bool = True, made_at_s: float = 0.0) -> Path:
    """A checkpoint without torch: the files have Megatron's names."""
    ops = RealOps()
    directory = root / name_step(step)
    directory.mkdir(parents=True)
    data = {SHARD: b"weights" * 100, "common.pt": b"common", ".metadata": b"index"}
    files = {name: write_bytes(ops, directory / name, raw) for name, raw in data.items()}
    if committed:
        manifest = Manifest(
            schema=1, train_step=step, samples=8 * step, layout=Layout(tp=2), files=files, made_at_s=made_at_s
        )
        commit(ops, directory, manifest)
    return directory


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[3] ^= 1
    path.write_bytes(raw)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTLAST_RUN_ROOT", raising=False)

    def saying(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = start(["ckpt", *words])
        done = capsys.readouterr()
        return code, done.out, done.err

    return saying


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    for step in (10, 20, 30):
        make(folder, step)
    return folder


def rows(root: Path, **how: Any) -> dict[str, Any]:
    return {row.name: row for row in survey(root, **how)}


def test_a_run_is_named_and_its_directory_found(say: Say, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    freeze(RunFile(name="lm", task=Task(script="t.py"), checkpoint=Checkpoint(dir=str(place))), Path("runs"))
    make(place, 1200)
    code, out, _ = say("ls", "lm-0001")
    assert code == 0 and "iter_0001200" in out and "committed" in out
    assert say("show", "lm-0001/1200")[0] == say("show", "lm-0001")[0] == 0
    code, _, err = say("show", "lm-0001/7")
    assert code == 2 and "no checkpoint of train_step 7" in err
    code, _, err = say("ls", "lm-0002")
    assert code == 2 and "no such run" in err


def test_every_state_is_listed(say: Say, root: Path) -> None:
    make(root, 40, committed=False)
    flip(root / "iter_0000020" / SHARD)
    Store(root).quarantine(10, "NaN in its weights")
    os.truncate(root / "iter_0000030" / "common.pt", 2)
    (root / "notes").mkdir()
    states = {name: row.state for name, row in rows(root).items()}
    assert states == {
        "quarantine/iter_0000010": State.QUARANTINED,
        "iter_0000020": State.COMMITTED,  # sizes cannot tell
        "iter_0000030": State.BROKEN,
        "iter_0000040": State.UNFINISHED,
    }
    code, out, _ = say("ls", str(root))
    assert code == 1
    assert "quarantine/iter_0000010: NaN in its weights" in out
    assert "common state common.pt: 2 bytes, manifest says 6 (truncated)" in out
    code, out, _ = say("ls", "--verify", "--json", str(root))
    found = {row["name"]: row for row in json.loads(out)["checkpoints"]}
    assert code == 1 and found["iter_0000020"]["state"] == "broken" and "(changed)" in found["iter_0000020"]["why"]


def test_verify_reads_everything(say: Say, root: Path) -> None:
    read: list[int] = []
    assert rows(root, on_bytes=read.append)["iter_0000030"].state is State.VERIFIED
    assert sum(read) == 3 * (700 + 6 + 5)
    assert say("verify", str(root))[:2] == (0, "iter_0000030: verified: 711 B\n")
    assert say("verify", "--all", str(root))[0] == 0
    flip(root / "iter_0000010" / SHARD)
    code, out, _ = say("verify", f"{root}/10")
    assert code == 1 and "iter_0000010: broken: model shard __0_0.distcp: xxh3_128" in out
    assert say("verify", "--all", str(root))[0] == 1
    unfinished = make(root, 40, committed=False)
    assert say("verify", str(unfinished))[0] == 1
    assert say("verify", str(root))[0] == 0  # the newest committed one


def test_show_tells_what_the_manifest_says(say: Say, root: Path) -> None:
    one = TensorPrint(dtype="float32", shape=(2, 3), fingerprint="00000000000000ff")
    write_prints(RealOps(), root / "iter_0000030", Prints(scheme="sum64-1", train_step=30, tensors={"w": one}))
    code, out, _ = say("show", str(root))
    assert code == 0
    for words in ("train_step    30", "tp 2 pp 1 dp 1 (2 ranks)", "1 tensors (sum64-1)", "__0_0.distcp", "700"):
        assert words in out
    told = json.loads(say("show", "--json", f"{root}/30")[1])
    assert told["manifest"]["samples"] == 240 and told["fingerprints"]["tensors"]["w"]["shape"] == [2, 3]
    (root / "iter_0000030" / "COMMITTED").unlink()
    code, _, err = say("show", f"{root}/30")
    assert code == 1 and "no COMMITTED" in err
    assert say("show", str(root), "--json")[0] == 0  # 20 is the newest committed one


def test_prune_says_first_what_it_would_do(say: Say, root: Path) -> None:
    for step in (40, 50):
        make(root, step)
    words = ("prune", "--keep-last", "1", "--keep-every", "20", "--keep", "10", str(root))
    code, out, _ = say(*words, "--dry-run")
    assert (code, out) == (0, "would remove train_step 30\n1 would go, 4 stay\n")
    assert Store(root).durable_steps() == (10, 20, 30, 40, 50)
    assert json.loads(say(*words, "--json")[1]) == {"removed": [30], "would_remove": []}
    assert Store(root).durable_steps() == (10, 20, 40, 50)
    code, out, _ = say("prune", "--keep-last", "1", str(root))
    assert out.endswith("3 removed, 1 stay\n")
    assert say("prune", str(root))[0] == 2  # how many stay is not guessed
    assert say("prune", "--keep-last", "0", str(root))[0] == 2


def test_a_promoted_one_is_verified_listed_and_kept(say: Say, root: Path) -> None:
    assert say("promote", f"{root}/10", "best-eval")[0] == 0
    assert rows(root)["iter_0000010"].names == ("best-eval",)
    Store(root).lease(10, "eval-7")
    assert rows(root)["iter_0000010"].leases == ("eval-7",)
    assert "best-eval lease:eval-7" in say("ls", str(root))[1]
    say("prune", "--keep-last", "1", str(root))
    assert Store(root).durable_steps() == (10, 30)
    code, _, err = say("promote", f"{root}/30", "best-eval")
    assert code == 2 and "best-eval is the name of train_step 10" in err
    assert say("promote", f"{root}/10", "best-eval", "--undo")[0] == 0
    Store(root).release(10, "eval-7")
    say("prune", "--keep-last", "1", str(root))
    assert Store(root).durable_steps() == (30,)


def test_what_is_not_whole_gets_no_name(say: Say, root: Path) -> None:
    flip(root / "iter_0000020" / SHARD)
    code, _, err = say("promote", f"{root}/20", "good")
    assert code == 1 and "(changed)" in err
    assert rows(root)["iter_0000020"].names == ()
    assert say("promote", f"{root}/30", "a/b")[0] == 2


def test_words_that_name_nothing(say: Say, root: Path) -> None:
    assert say("ls", str(root / "iter_0000010"))[0] == 2
    code, _, err = say("show", str(root.parent))
    assert code == 2 and "no committed checkpoint in" in err
    assert say("lss")[0] == 2


def test_a_clock_that_went_back_shows_no_negative_age(say: Say, root: Path) -> None:
    make(root, 40, made_at_s=time.time() + 1e6)
    code, out, _ = say("ls", str(root))
    assert code == 0 and "0 s ago" in out


@pytest.mark.long
def test_ten_thousand_are_listed_in_bounded_time(say: Say, root: Path) -> None:
    source = root / "iter_0000010"
    names = [path.name for path in source.iterdir()]
    for step in range(10_000, 20_000):
        target = root / name_step(step)
        target.mkdir()
        for name in names:
            os.link(source / name, target / name)
    began_s = time.monotonic()
    assert len(rows(root)) == 10_003
    assert time.monotonic() - began_s < 30


@pytest.mark.slow
def test_the_page_tells_how_to_verify_without_us(root: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    program = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "sys.argv" in block)

    def run(step: int) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-I", "-c", program, str(root / name_step(step))]
        return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)

    flip(root / "iter_0000020" / SHARD)
    flip(root / "iter_0000010" / "manifest.json")
    assert run(30).returncode == 0
    assert run(20).stderr == f"not whole: ['{SHARD}']\n"
    assert run(10).returncode == 1


# ---------------------------------------------------------------- what reads tensors

torch_tests = pytest.mark.slow
"""The first of them waits for the import of torch."""


def save_dcp(root: Path, step: int, state: dict[str, Any], prints: dict[str, Any] | None = None) -> Path:
    """A DCP save in one process, marked as Megatron's, with a manifest and a commit marker of ours."""
    import torch.distributed.checkpoint as dcp

    directory = root / name_step(step)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    raws = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
    files = {name: FileEntry(size_bytes=len(raw), xxh3_128=hash_bytes(raw)) for name, raw in raws.items()}
    commit(RealOps(), directory, Manifest(schema=1, train_step=step, samples=step, layout=Layout(), files=files))
    if prints is not None:
        write_prints(RealOps(), directory, Prints(scheme="sum64-1", train_step=step, tensors=prints))
    return directory


def a_state(seed: int = 0) -> dict[str, Any]:
    """Two layers of two experts, stacked as Megatron stores them, with moments."""
    import torch

    rng = torch.Generator().manual_seed(seed)
    shapes = {
        "embedding.word_embeddings.weight": (8, 4),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (2, 4),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (2, 2, 6, 4),
    }
    state = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, shape in shapes.items():
            state[f"optimizer.state.{kind}.{name}"] = torch.randn(shape, generator=rng)
    return state


def a_print(tensor: Any) -> TensorPrint:
    from outlast.checkpoint.fingerprint import fingerprint

    number = fingerprint(tensor.numpy())
    return TensorPrint(dtype="float32", shape=tuple(tensor.shape), fingerprint=f"{number:016x}")


@torch_tests
def test_diff_finds_what_changed_and_what_did_not(say: Say, tmp_path: Path) -> None:
    import torch

    root = tmp_path / "dcp"
    state = a_state()
    save_dcp(root, 1, state)
    save_dcp(root, 2, state)
    code, out, _ = say("diff", f"{root}/1", f"{root}/2")
    assert code == 1 and "BAD: every weight is bit-identical, but they are of train_steps 1 and 2" in out
    state["embedding.word_embeddings.weight"][3, 2] += 0.5
    save_dcp(root, 3, state)
    code, out, _ = say("diff", f"{root}/1", f"{root}/3")
    assert code == 0 and "1 of 9 tensors differ; 2 of 3 weights are unchanged" in out
    assert "1 of 32" in out and "0.5" in out
    assert say("diff", "--exact", f"{root}/1", f"{root}/3")[0] == 1
    assert say("diff", "--exact", f"{root}/1", f"{root}/1")[0] == 0
    state["decoder.layers.mlp.linear_fc1.layer_norm_weight"][0, 0] = torch.nan
    del state["optimizer.state.exp_avg.embedding.word_embeddings.weight"]
    state["optimizer.state.exp_avg_sq.embedding.word_embeddings.weight"] = torch.full((4, 4), torch.inf).bfloat16()
    save_dcp(root, 4, state)
    code, out, _ = say("diff", "--json", f"{root}/3", f"{root}/4")
    told = json.loads(out)
    by_name = {row["name"]: row for row in told["tensors"]}
    assert code == 1 and told["summary"]["not_finite"] == 1
    assert by_name["decoder.layers.mlp.linear_fc1.layer_norm_weight"]["nans"] == [0, 1]
    assert by_name["optimizer.state.exp_avg.embedding.word_embeddings.weight"]["only_in"] == "first"
    changed = by_name["optimizer.state.exp_avg_sq.embedding.word_embeddings.weight"]["change"]
    assert changed == "float32[8, 4] -> bfloat16[4, 4]"
    flip(root / "iter_0000004" / SHARD)
    code, _, err = say("diff", f"{root}/3", f"{root}/4")
    assert code == 1 and "(changed)" in err


@torch_tests
def test_export_writes_the_model_as_others_read_it(say: Say, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    root, state = tmp_path / "dcp", a_state()
    layer_norm = state["decoder.layers.mlp.linear_fc1.layer_norm_weight"]
    experts = state["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    prints = {
        "decoder.layers.1.pre_mlp_layernorm.weight": a_print(layer_norm[1]),
        "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight": a_print(experts[1, 0]),
        "embedding.word_embeddings.weight": a_print(state["embedding.word_embeddings.weight"][:7]),  # one row padding
    }
    save_dcp(root, 5, state, prints)
    code, out, _ = say("export", "--json", str(root), str(tmp_path / "out"))
    told = json.loads(out)
    assert code == 0 and (told["tensors"], told["checked"], told["files"]) == (7, 3, ["model.safetensors"])
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(read["decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"], experts[1, 0])
    assert torch.equal(read["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"], layer_norm[0])
    code, _, err = say("export", str(root), str(tmp_path / "out"))
    assert code == 1 and "nothing is overwritten" in err

    code, out, _ = say("export", "--format", "torch", "--optimizer", str(root), str(tmp_path / "all.pt"))
    assert code == 0
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert len(everything) == 21
    name = "optimizer.state.exp_avg.embedding.word_embeddings.weight"
    assert torch.equal(everything[name], state[name])


@torch_tests
def test_export_in_several_files_has_an_index(say: Say, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    root = tmp_path / "dcp"
    state = {f"w{i}": torch.full((70_000,), float(i)) for i in range(8)}
    save_dcp(root, 5, state)
    assert say("export", "--shard-gb", "0.001", str(root), str(tmp_path / "out"))[0] == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 8 * 280_000
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], state[name])


@torch_tests
def test_export_refuses_a_tensor_that_is_not_what_was_trained(say: Say, tmp_path: Path) -> None:
    """Every file's hash holds: it was written wrongly."""
    root, state = tmp_path / "dcp", a_state()
    name = "embedding.word_embeddings.weight"
    trained = a_print(state[name])
    state[name][2, 2] += 1.0
    save_dcp(root, 5, state, {name: trained})
    code, _, err = say("export", str(root), str(tmp_path / "out"))
    assert code == 1 and f"{name}: not as it was saved" in err
    assert not (tmp_path / "out" / "model.safetensors").exists()


@torch_tests
def test_reshard_says_whether_there_is_anything_to_do(say: Say, tmp_path: Path) -> None:
    root, state = tmp_path / "dcp", a_state()
    save_dcp(root, 5, state)
    code, out, _ = say("reshard", f"{root}/5")
    assert code == 0 and "There is nothing to reshard" in out
    code, out, _ = say("reshard", f"{root}/5", "--to", str(tmp_path / "copy"))
    assert code == 0 and "copied to" in out
    assert say("verify", str(tmp_path / "copy"))[0] == 0
    assert say("diff", "--exact", f"{root}/5", f"{tmp_path}/copy/5")[0] == 0
    assert say("reshard", f"{root}/5", "--to", str(tmp_path / "copy"))[0] == 1  # is there already

    del state["optimizer.state.exp_avg_sq.embedding.word_embeddings.weight"]
    save_dcp(root, 6, state)
    code, out, _ = say("reshard", f"{root}/6", "--to", str(tmp_path / "copy"))
    assert code == 1 and "embedding.word_embeddings.weight: no exp_avg_sq in the optimizer's part" in out
    assert not (tmp_path / "copy" / "iter_0000006").exists()

    bound = {
        "w": state["embedding.word_embeddings.weight"],
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0": a_state()["embedding.word_embeddings.weight"],
    }
    save_dcp(root, 7, bound)
    code, out, _ = say("reshard", f"{root}/7")
    assert code == 1 and "bound to the layout that it was saved in" in out and "fully_reshardable" in out
