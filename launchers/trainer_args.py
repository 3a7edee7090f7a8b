"""What the trainer is asked: the command line as one frozen value, and what makes it impossible. Pure.

Refusals come before any import of torch, so that a wrong layout costs a moment, not a start-up.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from outlast.launchers.trainer_order import microbatches


class TrainerError(Exception):
    """The trainer cannot do what it was asked. The message says what to change."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The defaults are a GPT of 0.25 M parameters whose step is short on two CPU cores."""

    data_dir: Path
    """Where the tokenised corpus is built, once, and read."""
    checkpoint_dir: Path | None = None
    restore_dir: Path | None = None
    """One checkpoint, iter_0000010; None begins from the seed."""
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Virtual pipeline stages: model chunks a pipeline stage holds."""
    cp: int = 1
    ep: int = 1
    train_steps: int = 60
    """The train_step to end at, counted from the run's beginning, not from the restore."""
    global_batch: int = 8
    micro_batch: int = 2
    layers: int = 2
    hidden: int = 96
    heads: int = 4
    seq: int = 32
    experts: int = 0
    """0: dense."""
    lr: float = 3e-3
    seed: int = 1234
    save_every: int = 0
    """0: only when asked to stop."""
    save_follows: bool = False
    """Under a supervisor: save as often as it asks for while training; --save-every until it does."""
    local_dir: str = ""
    """A directory of each node's own for local checkpoints; %n is the node's name. '' : none."""
    local_every: int = 0
    """Local checkpoints between the others, in train_steps."""
    dropout: float = 0.0
    overlap: bool = False
    """Overlap gradient reduction and parameter gathering with compute, in small buckets."""
    save_on_term: bool = False
    no_fingerprints: bool = False
    """Neither store fingerprints with a save nor compare them after a restore."""
    timeout_s: float = 600.0
    """How long a collective may wait for the other ranks."""
    data_bytes: int = 2_000_000


def parse_settings(argv: Sequence[str]) -> Settings:
    """Settings from the command line; exits with usage on a wrong one, as argparse does."""
    parser = argparse.ArgumentParser(prog="outlast-trainer", description="The reference trainer: a small real GPT.")
    for field in fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        if field.name == "data_dir":
            parser.add_argument(flag, type=Path, required=True)
        elif field.type == "bool":
            parser.add_argument(flag, action="store_true")
        else:
            kind = {"int": int, "float": float, "str": str, "Path | None": Path}[str(field.type)]
            parser.add_argument(flag, type=kind, default=field.default)
    return Settings(**vars(parser.parse_args(list(argv))))


def why_not(settings: Settings, world_size: int) -> str:
    """'' where these settings can run on so many ranks, else what to change."""
    s = settings
    if s.cp != 1:
        return (
            f"cp {s.cp}: megatron-core's own attention refuses context parallel (it needs Transformer Engine); use cp 1"
        )
    model_ranks = s.tp * s.pp
    if min(s.tp, s.pp, s.vpp, s.ep, s.layers, s.seq, s.micro_batch, s.global_batch, s.train_steps) < 1:
        return "sizes and counts must be at least 1"
    if world_size % model_ranks:
        return f"tp {s.tp} x pp {s.pp} = {model_ranks} does not divide the {world_size} ranks"
    dp = world_size // model_ranks
    checks = (
        (not (s.experts and s.tp > 1) or s.seq % s.tp == 0, f"seq {s.seq} does not divide over tp {s.tp}"),
        (s.heads % s.tp == 0, f"{s.heads} heads do not divide over tp {s.tp}"),
        (s.hidden % s.heads == 0, f"hidden {s.hidden} does not divide over {s.heads} heads"),
        (s.layers % (s.pp * s.vpp) == 0, f"{s.layers} layers do not divide over pp {s.pp} x vpp {s.vpp}"),
        (s.vpp == 1 or s.pp > 1, f"vpp {s.vpp} without pipeline stages: give --pp"),
        (s.ep == 1 or s.experts > 0, f"ep {s.ep} without experts: give --experts"),
        (s.experts % s.ep == 0, f"{s.experts} experts do not divide over ep {s.ep}"),
        # experts are not split over tp here (megatron's expert_tensor_parallel_size 1), so ep divides tp x dp
        ((s.tp * dp) % s.ep == 0, f"ep {s.ep} does not divide tp x dp = {s.tp * dp}"),
        (not s.save_every or s.checkpoint_dir is not None, "--save-every without --checkpoint-dir"),
        (not s.local_every or bool(s.local_dir), "--local-every without --local-dir"),
        (s.experts == 0 or s.experts >= 2, "experts: give 0 (dense) or at least 2, the router picks two"),
    )
    for holds, otherwise in checks:
        if not holds:
            return otherwise
    try:
        count = microbatches(global_batch=s.global_batch, micro_batch=s.micro_batch, dp=dp)
    except ValueError as error:
        return str(error)
    if s.vpp > 1 and count % s.pp:
        return (
            f"{count} microbatches a replica do not divide over pp {s.pp}: Megatron's interleaved schedule needs that"
        )
    return ""
