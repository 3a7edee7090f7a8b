"""Fingerprints of real ranks: equal in every layout, and a restore that gives other values is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.prints import FILE, read_prints

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

TP2 = ("--tp", "2")
MOE = ("--experts", "4")
RESTORED = re.compile(r"restored train_step 3 .*, (\d+) tensors as saved")


class Attempts:
    """Three train_steps, saved by `save`; restored and at once ended by `restore`."""

    def __init__(self, fork_ranks: Any, folder: Path) -> None:
        self._fork_ranks = fork_ranks
        self.folder = folder

    def save(self, name: str, *argv: str, ranks: int, **how: Any) -> Path:
        place = self.folder / name
        words = (*argv, "--train-steps", "3", "--save-every", "3", "--checkpoint-dir", str(place))
        self._fork_ranks(*words, ranks=ranks, **how).checked()
        return place / "iter_0000003"

    def restore(self, path: Path, *argv: str, ranks: int, **how: Any) -> Any:
        return self._fork_ranks(*argv, "--train-steps", "3", "--restore-dir", str(path), ranks=ranks, **how)


@pytest.fixture(scope="module")
def attempts(fork_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Attempts:
    return Attempts(fork_ranks, tmp_path_factory.mktemp("prints"))


@pytest.fixture(scope="module")
def dense(attempts: Attempts) -> Path:
    return attempts.save("dense", *TP2, ranks=4)


@pytest.fixture(scope="module")
def experts(attempts: Attempts) -> Path:
    return attempts.save("experts", *MOE, "--ep", "2", ranks=2)


def compared(result: Any) -> int:
    found = RESTORED.search(result.checked().ranks[-1].output)
    assert found, result.ranks[-1].output
    return int(found[1])


def test_every_weight_and_moment_has_one(dense: Path) -> None:
    prints = read_prints(dense)
    assert prints is not None and prints.train_step == 3 and prints.left_out == {}
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    assert prints.tensors[name].shape == prints.tensors[f"{name}:exp_avg_sq"].shape == (128, 32)
    assert prints.tensors[f"{name}:step"].shape == ()
    assert prints.tensors["embedding.word_embeddings.weight"].shape == (256, 32)
    weights = {label for label in prints.tensors if ":" not in label}
    assert len(prints.tensors) == 4 * len(weights)  # fp32: the main parameter is the weight


@pytest.mark.parametrize(
    ("argv", "ranks"),
    [(TP2, 4), ((), 1), (("--tp", "4"), 4), (("--pp", "2"), 2), ((*TP2, "--pp", "2"), 4), (("--overlap",), 2)],
    ids=str,
)
def test_a_restore_into_any_layout_is_what_was_saved(
    attempts: Attempts, dense: Path, argv: tuple[str, ...], ranks: int
) -> None:
    prints = read_prints(dense)
    assert prints is not None
    assert compared(attempts.restore(dense, *argv, ranks=ranks)) == len(prints.tensors)


@pytest.mark.parametrize(
    ("argv", "ranks"), [(("--ep", "2"), 2), ((), 1), (("--ep", "4"), 4), (("--pp", "2"), 2), (TP2, 2)], ids=str
)
def test_experts_restore_into_any_layout(attempts: Attempts, experts: Path, argv: tuple[str, ...], ranks: int) -> None:
    prints = read_prints(experts)
    assert prints is not None
    assert "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight:exp_avg" in prints.tensors
    assert compared(attempts.restore(experts, *MOE, *argv, ranks=ranks)) == len(prints.tensors)


def test_every_fingerprint_is_found_again_in_what_is_exported(dense: Path, experts: Path, tmp_path: Path) -> None:
    """The stored names and the live names meet: each tensor but the counters of the optimizer is checked."""
    from outlast.checkpoint.exporting import export_safetensors
    from outlast.checkpoint.tensors import Tensors

    for place in (dense, experts):
        prints = read_prints(place)
        assert prints is not None
        out = tmp_path / place.parent.name
        done = export_safetensors(Tensors(place), out, optimizer=True, on_tensor=lambda _name: None)
        counters = sum(label.endswith(":step") for label in prints.tensors)
        # the main parameter is stored besides the weight, and has the weight's fingerprint
        assert done.checked == done.tensors == len(prints.tensors)
        assert done.tensors == 4 * counters


def test_padded_buckets_are_refused_by_name(attempts: Attempts) -> None:
    """Upstream's own mapping, the mend left out: values of other parameters come back, and nothing else says so."""
    leave = ("padded_buckets",)
    torn = attempts.save("torn", "--overlap", ranks=2, leave=leave)
    refused = attempts.restore(torn, "--overlap", ranks=2, leave=leave)
    assert refused.codes == [1, 1]
    for rank in refused.ranks:
        assert "NotAsSaved: checkpoint iter_0000003: after the restore" in rank.output
        assert re.search(r"decoder\.layers\.\S+:exp_avg: fingerprint [0-9a-f]{16}, saved with", rank.output)
        assert "outlast doctor" in rank.output
    # into one rank, mended: it was torn when it was written
    assert "NotAsSaved" in attempts.restore(torn, ranks=1).ranks[0].output
    blind = attempts.restore(torn, "--overlap", "--no-fingerprints", ranks=2, leave=leave).checked()
    assert "tensors as saved" not in blind.ranks[-1].output


def _change(change: Callable[[Any], None]) -> Callable[[], None]:
    """In each rank: `change(training's trainee)` behind the restore, before the comparison."""

    def before() -> None:
        from outlast.launchers import trainer_state

        compare = trainer_state.check_after_restore

        def changed(live: Any, path: Path) -> int:
            change(live)
            return compare(live, path)

        trainer_state.check_after_restore = changed  # type: ignore[assignment]

    return before


def _flip_on_the_last_rank(live: Any) -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == dist.get_world_size() - 1:
        weight = next(p for p, place in live._placed.items() if place.name == "decoder.final_layernorm.weight")
        weight.data.view(torch.int32)[5] ^= 1


def _swap_moments(live: Any) -> None:
    optimizer = live._optimizer.chained_optimizers[0].optimizer
    for state in optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def _count_a_step(live: Any) -> None:
    for state in live._optimizer.chained_optimizers[0].optimizer.state.values():
        state["step"] += 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_flip_on_the_last_rank, r"1 of \d+ tensors .* decoder\.final_layernorm\.weight: fingerprint"),
        (_swap_moments, r"decoder\.final_layernorm\.bias:exp_avg: fingerprint"),
        (_count_a_step, r"decoder\.final_layernorm\.bias:step: fingerprint"),
    ],
)
def test_one_wrong_copy_is_seen_on_every_rank(
    attempts: Attempts, dense: Path, change: Callable[[Any], None], words: str
) -> None:
    refused = attempts.restore(dense, *TP2, ranks=4, before=_change(change))
    assert refused.codes == [1] * 4
    for rank in refused.ranks:
        assert re.search(words, rank.output), rank.output[-2000:]


def test_without_fingerprints_it_says_so_and_with_broken_ones_it_refuses(
    attempts: Attempts,
) -> None:
    plain = attempts.save("plain", "--no-fingerprints", ranks=1)
    assert not (plain / FILE).exists()
    told = attempts.restore(plain, ranks=2).checked()
    assert "not compared with fingerprints" in told.ranks[-1].output
    broken = attempts.save("broken", ranks=1)
    file = broken / FILE
    text = json.loads(file.read_text())
    text["prints"]["train_step"] = 4
    file.write_text(json.dumps(text))
    refused = attempts.restore(broken, ranks=2)
    assert refused.codes == [1, 1]
    for rank in refused.ranks:
        assert "NotWhole: checkpoint iter_0000003: fingerprints.json: xxh3_128" in rank.output
