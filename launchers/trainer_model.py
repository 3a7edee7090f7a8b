"""The thing that is trained: a megatron-core GPT, its data-parallel wrapper and its distributed optimizer.

Built from megatron.core alone (no Transformer Engine, no Apex), in fp32, the same on CPU and GPU. Weights are drawn on
the CPU from the seed, so that tp does not change them; each pipeline stage draws its own, so pp does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import tee
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.distributed import (  # type: ignore[import-untyped]
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # type: ignore[import-untyped]
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # type: ignore[import-untyped]
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # type: ignore[import-untyped]
from megatron.core.pipeline_parallel import get_forward_backward_func  # type: ignore[import-untyped]
from megatron.core.transformer import TransformerConfig  # type: ignore[import-untyped]
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # type: ignore[import-untyped]

from outlast.launchers.trainer_args import Settings
from outlast.launchers.trainer_data import VOCABULARY
from outlast.launchers.trainer_order import microbatches
from outlast.launchers.trainer_world import World

_OVERLAP_BUCKET: Final = 20_000
"""Elements a bucket with --overlap: small, so that even a small model has several and the overlap is real."""


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """Model and optimizer of this rank."""

    modules: list[Any]
    """The bare GPTModel, or one a virtual pipeline stage: what a checkpoint names its tensors after."""
    wrapped: list[Any]
    """The same in Megatron's DistributedDataParallel."""
    optimizer: Any
    overlap: bool


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    loss: float | None
    """Mean over the global batch, summed in float64; None on ranks outside the last pipeline stage."""
    grad_norm: float | None


def build_trainee(settings: Settings, world: World) -> Trainee:
    """Model, wrapper and optimizer, with weights from the seed."""
    config = _model_config(settings)
    torch.manual_seed(settings.seed)
    modules = [_build_chunk(settings, world, config, number) for number in range(settings.vpp)]
    wrapped = [
        DistributedDataParallel(config, _wrapper_config(settings), module, disable_bucketing=number > 0)
        for number, module in enumerate(modules)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.lr,
            weight_decay=0.01,
            clip_grad=1.0,
            use_distributed_optimizer=True,
            overlap_param_gather=settings.overlap,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if settings.overlap:
        each = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = each if settings.vpp > 1 else each[0]
    return Trainee(modules=modules, wrapped=wrapped, optimizer=optimizer, overlap=settings.overlap)


def _build_chunk(settings: Settings, world: World, config: Any, number: int) -> Any:
    """One virtual pipeline stage; all of this rank's model where there are none."""
    return GPTModel(
        config,
        _layer_spec(settings, config),
        vocab_size=VOCABULARY,
        max_sequence_length=settings.seq,
        pre_process=world.is_first_stage and number == 0,
        post_process=world.is_last_stage and number == settings.vpp - 1,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        vp_stage=number if settings.vpp > 1 else None,
    ).to(world.device)


class SequenceNorm(torch.nn.LayerNorm):
    """Layer norm over a part of the sequence. Megatron's own for torch refuses sequence parallel, but all it takes is
    the mark by which finalize_model_grads adds up these weights' gradients over tp."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


def _layer_spec(settings: Settings, config: Any) -> Any:
    layer = get_gpt_layer_local_spec(num_experts=settings.experts or None, moe_grouped_gemm=False)
    if not config.sequence_parallel:
        return layer
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceNorm
    here = settings.layers // (settings.pp * settings.vpp)
    return TransformerBlockSubmodules(layer_specs=[layer] * here, layer_norm=SequenceNorm)


def _expert_config(settings: Settings) -> dict[str, Any]:
    return {
        "num_moe_experts": settings.experts,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_grouped_gemm": False,
        "add_bias_linear": False,
        "expert_tensor_parallel_size": 1,
        # moe_layer.py:380 refuses tp without it
        "sequence_parallel": settings.tp > 1,
    }


def _model_config(settings: Settings) -> Any:
    # the fused kernels need Apex or Transformer Engine
    unfused = dict.fromkeys(
        (
            "gradient_accumulation_fusion",
            "masked_softmax_fusion",
            "bias_activation_fusion",
            "bias_dropout_fusion",
            "persist_layer_norm",
        ),
        False,
    )
    return TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_attention_heads=settings.heads,
        tensor_model_parallel_size=settings.tp,
        pipeline_model_parallel_size=settings.pp,
        virtual_pipeline_model_parallel_size=settings.vpp if settings.vpp > 1 else None,
        context_parallel_size=settings.cp,
        expert_model_parallel_size=settings.ep,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        hidden_dropout=settings.dropout,
        attention_dropout=settings.dropout,
        attention_softmax_in_fp32=True,
        batch_p2p_comm=False,
        # between two stages that interleave, Megatron needs both directions at once
        overlap_p2p_comm=settings.vpp > 1,
        **unfused,
        **(_expert_config(settings) if settings.experts else {}),
    )


def _wrapper_config(settings: Settings) -> Any:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=settings.overlap,
        overlap_param_gather=settings.overlap,
        bucket_size=_OVERLAP_BUCKET if settings.overlap else None,
    )


def train_one_step(
    trainee: Trainee,
    settings: Settings,
    world: World,
    batches: Iterator[torch.Tensor],
    before_update: Callable[[], None],
) -> StepOutcome:
    """Forward, backward and update over this rank's microbatches, each [micro_batch, seq + 1] tokens on the device.

    before_update is called when all that is left is the update: until then, weights and moments are as they were.
    """
    for chunk in trainee.wrapped:
        chunk.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    count = microbatches(global_batch=settings.global_batch, micro_batch=settings.micro_batch, dp=world.dp)
    sums = get_forward_backward_func()(
        forward_step_func=partial(_forward, mask=_causal_mask(settings.seq, world.device)),
        data_iterator=list(tee(batches, settings.vpp)) if settings.vpp > 1 else batches,
        model=trainee.wrapped if settings.vpp > 1 else trainee.wrapped[0],
        num_microbatches=count,
        seq_length=settings.seq,
        micro_batch_size=settings.micro_batch,
        decoder_seq_length=settings.seq,
        forward_only=False,
    )
    loss = _global_mean(sums, settings, world) if world.is_last_stage else None
    before_update()
    _, grad_norm, _ = trainee.optimizer.step()
    return StepOutcome(loss=loss, grad_norm=None if grad_norm is None else float(grad_norm))


def _forward(batches: Iterator[torch.Tensor], model: Any, *, mask: torch.Tensor) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    return model(inputs, positions, mask, labels=labels), _token_loss


def _token_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is differentiated (the microbatch's mean) and what is recorded (its sum, in float64)."""
    return losses.float().mean(), losses.detach().double().sum()


def _global_mean(sums: Sequence[torch.Tensor], settings: Settings, world: World) -> float:
    total = torch.stack(tuple(sums)).sum()
    dist.all_reduce(total, group=world.dp_group)
    return float(total) / (settings.global_batch * settings.seq)


def _causal_mask(seq: int, device: torch.device) -> torch.Tensor:
    """[1, 1, seq, seq], True where attention may not look."""
    return torch.ones(seq, seq, dtype=torch.bool, device=device).triu(1)[None, None]
