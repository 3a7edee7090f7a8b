"""Fingerprints of whichever Megatron optimizer there is: its labels and numbers, and what is left out by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

EMBEDDING = "embedding.word_embeddings.weight"


def make_model() -> Any:
    import torch

    torch.manual_seed(1)
    model: Any = torch.nn.Module()
    model.embedding = torch.nn.Module()
    model.embedding.word_embeddings = torch.nn.Embedding(8, 4)
    model.final = torch.nn.Linear(4, 3)
    model.share_embeddings_and_output_weights = False
    return model


def wrap(model: Any) -> list[Any]:
    """As Megatron-LM has it: a list of chunks, each in two wrappers."""
    import torch

    inner, outer = torch.nn.Module(), torch.nn.Module()
    inner.module = model
    outer.module = inner
    return [outer]


def step(model: Any, mains: list[Any]) -> Any:
    import torch

    optimizer = torch.optim.AdamW(mains, lr=0.1)
    for main in mains:
        main.grad = torch.ones_like(main)
    optimizer.step()
    return optimizer


def plain(model: Any) -> Any:
    """Megatron's FP32Optimizer, as far as is looked at."""
    return SimpleNamespace(optimizer=step(model, list(model.parameters())))


def mixed(model: Any) -> Any:
    """Its Float16OptimizerWithFloat16Params in a chain: weights in 16 bits, the optimizer has copies in 32."""
    import torch

    mains = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.bfloat16()
    optimizer = step(model, mains)
    one = SimpleNamespace(optimizer=optimizer, float16_groups=[list(model.parameters())])
    one.fp32_from_float16_groups = [mains]
    return SimpleNamespace(chained_optimizers=[one])


def in_ranks(run_ranks: Any, body: Any, world_size: int = 2) -> Any:
    """With Megatron's groups: data parallel alone."""

    def with_groups(rank: int) -> Any:
        from megatron.core import parallel_state

        from outlast.launchers import megatron_cpu

        megatron_cpu.adapt()
        parallel_state.initialize_model_parallel()
        return body(rank)

    return run_ranks(world_size, with_groups)


def expect(name: str, tensor: Any) -> tuple[str, str]:
    from outlast.checkpoint.fingerprint import part_of, whole
    from outlast.checkpoint.raw_bits import raw_bits

    return name, f"{part_of(raw_bits(tensor.detach().reshape(-1)), whole(tensor.shape)).total:016x}"


def test_every_number_of_a_plain_and_of_a_mixed_optimizer(run_ranks: Any) -> None:
    def body(rank: int) -> None:
        from outlast.checkpoint.model_prints import ModelPrints

        for make in (plain, mixed):
            model = make_model()
            optimizer = make(model)
            live = ModelPrints(wrap(model), optimizer, vocabulary=8, padded=8)
            taken = live.take(7)
            assert taken.train_step == 7 and taken.left_out == {}
            inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
            mains = inner.param_groups[0]["params"]
            expected = {}
            for (name, parameter), main in zip(model.named_parameters(), mains, strict=True):
                state = {**inner.state[main], **({"main": main} if main is not parameter else {})}
                expected |= dict([expect(name, parameter)])
                expected |= dict(expect(f"{name}:{key}", tensor) for key, tensor in state.items())
            assert {name: one.fingerprint for name, one in taken.tensors.items()} == expected
            assert live.check(taken, "here") == len(expected)

    in_ranks(run_ranks, body).value()


def test_a_wrong_copy_of_a_moment_on_one_rank_is_seen_and_the_weights_alone_may_be_compared(run_ranks: Any) -> None:
    def body(rank: int) -> tuple[str, int]:
        from outlast.checkpoint.model_prints import ModelPrints
        from outlast.checkpoint.prints import NotAsSaved

        model = make_model()
        optimizer = plain(model)
        live = ModelPrints(model, optimizer, vocabulary=8, padded=8)
        taken = live.take(1)
        if rank == 1:
            optimizer.optimizer.state[model.final.bias]["exp_avg"][2] += 1
        with pytest.raises(NotAsSaved) as e:
            live.check(taken, "here")
        live.with_state = False
        return str(e.value), live.check(taken, "here")

    ranks = in_ranks(run_ranks, body)
    assert ranks.value(0) == ranks.value(1)
    assert "1 of 12 tensors" in ranks.value()[0] and "final.bias:exp_avg: fingerprint" in ranks.value()[0]
    assert ranks.value()[1] == 3


def test_an_embedding_whose_padding_is_not_known_is_left_out(run_ranks: Any) -> None:
    def body(rank: int) -> Any:
        from outlast.checkpoint.model_prints import ModelPrints

        model = make_model()
        taken = ModelPrints(model, plain(model), vocabulary=None, padded=8).take(1)
        known = ModelPrints(model, plain(model), vocabulary=6, padded=8).take(1)
        return taken.left_out, sorted(n for n in taken.tensors if ":" not in n), known.tensors[EMBEDDING].shape

    left_out, names, shape = in_ranks(run_ranks, body).value()
    assert left_out == {EMBEDDING: "how many of its rows are padding is not known"}
    assert names == ["final.bias", "final.weight"] and shape == (6, 4)


def test_what_one_rank_cannot_count_is_counted_on_none_and_no_save_fails(
    run_ranks: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(rank: int) -> Any:
        from outlast.launchers.megatron_lm_prints import LmPrints

        class Broken(dict):  # type: ignore[type-arg]
            def get(self, *_args: Any) -> Any:
                raise KeyError("no such state")

        args, model = SimpleNamespace(padded_vocab_size=None), make_model()
        optimizer = plain(model)
        prints = LmPrints()
        first = prints.finish(prints.begin(args, 1, model, optimizer))
        if rank == 1:
            optimizer.optimizer.state = Broken()
        second = prints.finish(prints.begin(args, 2, model, optimizer))
        again = prints.finish(prints.begin(args, 3, model, optimizer))
        return first is not None, second, again, prints.check(args, Path("nowhere"), model, optimizer)

    assert in_ranks(run_ranks, body).values == {rank: (True, None, None, 0) for rank in (0, 1)}
    said = capfd.readouterr().err
    assert said.count("outlast: no fingerprints of this model: KeyError: 'no such state'") == 1
    assert said.count("outlast: no fingerprints of this model: 1 other ranks cannot") == 1
