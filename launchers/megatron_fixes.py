"""megatron-core 0.16.1's faults on the path of this trainer: each is mended in place, or refused by name.

    FAULTS: megatron_known.KNOWN -- upstream function, hash of its source as it was read -- and what to put around it
    mend(): for each -- version known? source as known? -- then wrap it; else MegatronRefused, naming both

A mend is right for the code it was written for and a danger for any other: so the guard comes first, and a newer
megatron-core stops here with a name instead of training on with half a mend. Holds on GPUs too, where the optimizer is
torch's own (no Apex, no Transformer Engine). CPU adaptation is elsewhere (megatron_cpu.py).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch

from outlast.launchers.megatron_cpu import cuda_here
from outlast.launchers.megatron_known import KNOWN, KNOWN_VERSION, Known

_MARK: Final = "__outlast_mended__"

Upstream = Callable[..., Any]


class MegatronRefused(Exception):
    """A fault of megatron-core that cannot be mended here. `fault` names it, `where` the function."""

    def __init__(self, what: str, *, fault: str, where: str) -> None:
        super().__init__(f"{where}: {what} (fault {fault!r})")
        self.fault = fault
        self.where = where


@dataclass(frozen=True, kw_only=True)
class Fault(Known):
    """One upstream fault and its mend. The hash is over inspect.getsource() of what is imported."""

    mend: Callable[[Upstream], Upstream]


def mend(*, leave: Iterable[str] = ()) -> tuple[str, ...]:
    """Mend all known faults but those in `leave`; the names of what was mended by this call. Twice is once.

    Raises MegatronRefused where the installed megatron-core is not the one that the mends were written for.
    """
    left = frozenset(leave)
    done = tuple(fault.name for fault in FAULTS if fault.name not in left and _mend_one(fault))
    if _GEMM not in left and _define_missing_gemm():
        done += (_GEMM,)
    return done


def _mend_one(fault: Fault) -> bool:
    owner, name = _find_owner(fault)
    upstream = getattr(owner, name)
    if getattr(upstream, _MARK, ""):
        return False
    refusal = why_unknown(fault, owner)
    if refusal:
        raise MegatronRefused(refusal, fault=fault.name, where=fault.where)
    mended = fault.mend(upstream)
    setattr(mended, _MARK, fault.name)
    setattr(owner, name, mended)
    return True


def why_unknown(fault: Fault, owner: object) -> str:
    """'' where this is the code that the mend was written for, else how it differs."""
    version = getattr(importlib.import_module("megatron.core"), "__version__", "unknown")
    found = source_digest(fault, owner)
    if version == KNOWN_VERSION and found == fault.source_sha256:
        return ""
    return (
        f"megatron-core {version} with source {found}, expected {KNOWN_VERSION} with source {fault.source_sha256}. "
        f"Install megatron-core=={KNOWN_VERSION}, or read the function anew and bring its mend up to date"
    )


def source_digest(fault: Fault, owner: object) -> str:
    """What `source_sha256` is compared with; '-' stands for a function that is gone."""
    digest = hashlib.sha256()
    for name in (fault.function.split(".")[-1], *fault.relies_on):
        function = getattr(owner, name, None)
        digest.update(inspect.getsource(function).encode() if function is not None else b"-")
    return digest.hexdigest()[:16]


def _find_owner(fault: Fault) -> tuple[Any, str]:
    owner: ModuleType | type = importlib.import_module(fault.module)
    *path, name = fault.function.split(".")
    for part in path:
        owner = getattr(owner, part, None)  # type: ignore[assignment]
    if not hasattr(owner, name):
        raise MegatronRefused("there is no such function", fault=fault.name, where=fault.where)
    return owner, name


# ---------------------------------------------------------------- one shared optimizer step


def _unshare_steps(load_state_dict: Upstream) -> Upstream:
    """distrib_optimizer.py:819 puts one tensor `step` into every parameter's state; AdamW counts each in place.

    After a restore the count runs ahead by the number of parameters a step: losses drift, nothing is said.
    """

    def load(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    return load


# ---------------------------------------------------------------- a fresh optimizer that will not load


def _prime_before_load(sharded_state_dict: Upstream) -> Upstream:
    """distrib_optimizer.py:642 asserts one common `step`; torch's AdamW has no state before its first step."""

    def sharded(self: Any, model_state: Any = None, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
        if is_loading:
            prime(self)
        return sharded_state_dict(self, model_state if model_state is not None else {}, is_loading, *args, **kwargs)

    return sharded


def prime(optimizer: Any) -> None:
    """Give a DistributedOptimizer that has not stepped yet the state that a load will overwrite."""
    inner = optimizer.optimizer
    optimizer.init_state_fn(inner, optimizer.config)
    if not isinstance(inner, torch.optim.AdamW | torch.optim.Adam):
        return  # Apex and Transformer Engine keep `step` in the group
    for group in inner.param_groups:
        for parameter in group["params"]:
            inner.state[parameter].setdefault("step", torch.tensor(0.0))


def _keep_step_in_place(set_states: Upstream) -> Upstream:
    """distrib_optimizer.py:940 copies every key of the state; `step` was left out of what was loaded (:2101)."""

    def set_all(self: Any, model_param: Any, tensors: Mapping[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        own = {"step": state["step"]} if "step" in state and "step" not in tensors else {}
        with torch.no_grad():
            set_states(self, model_param, {**tensors, **own})

    return set_all


# ---------------------------------------------------------------- padded buckets


def _gather_padded(sharded_param_state: Upstream) -> Upstream:
    """Parameters are looked up by padded positions in a buffer that was gathered without its padding.

    Wrong for every bucket but the last that ends in padding: pp > 1 with tied embeddings on dp 3, or overlap buckets on
    dp 2. Half of the weights come back as other parameters' values. Gathered with padding, the positions are right.
    """

    def sharded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _padding_counted(self.buffers):
            return sharded_param_state(self, *args, **kwargs)

    return sharded


@contextmanager
def _padding_counted(buffers: Iterable[Any]) -> Iterator[None]:
    kept: list[tuple[Any, int]] = []
    for buffer in buffers:
        for part, numel in ((buffer, buffer.numel), *((b, b.grad_data.numel()) for b in buffer.buckets)):
            kept.append((part, part.numel_unpadded))
            part.numel_unpadded = numel
    try:
        yield
    finally:
        for part, numel in kept:
            part.numel_unpadded = numel


# ---------------------------------------------------------------- a model part that is one step stale


def settle_parameters(wrapped: Any) -> None:
    """Finish the parameter gathering that overlap_param_gather leaves for the next forward pass.

    Without it the model part of a checkpoint is one step older than its optimizer part. Call it before every save.
    """
    if wrapped.ddp_config.overlap_param_gather:
        wrapped.start_param_sync(force_sync=True)


# ---------------------------------------------------------------- the persistent writer


def _refuse_persistent(init: Upstream) -> Upstream:
    """A persistent worker gets CPU tensors by shared memory, not by copy: what it writes is torn by the next step.

    And when it dies, the blocking wait for it has no end (async_utils.py polls a queue without looking at the process).
    """

    def checked_init(self: Any, persistent: bool = False) -> None:
        if persistent and not cuda_here():
            raise MegatronRefused(
                "a persistent checkpoint worker tears checkpoints of CPU tensors; use persistent=False, which forks",
                fault="persistent_worker",
                where="megatron.core.dist_checkpointing.strategies.async_utils.AsyncCallsQueue",
            )
        init(self, persistent)

    return checked_init


# ---------------------------------------------------------------- dense and expert optimizers, folded and unfolded


def _refit_chain(load_state_dict: Upstream) -> Upstream:
    """With ep > 1 experts have an optimizer of their own; with ep 1 they are in the dense one. Tensors reshard between
    the two, but the groups' settings lie under other keys: KeyError 'optimizer', or 'Expected 2 entries'."""

    def load(self: Any, state_dict: Any) -> None:
        load_state_dict(self, refit_chain(state_dict, self.chained_optimizers))

    return load


def refit_chain(loaded: Any, optimizers: list[Any]) -> Any:
    """The loaded state, cut for this chain of optimizers; the same object where it fits as it is."""
    if not isinstance(loaded, dict):
        return loaded
    parts = [loaded[i] for i in sorted(k for k in loaded if isinstance(k, int)) if "optimizer" in loaded[i]]
    saved_alone = "optimizer" in loaded
    if len(optimizers) == 1 and parts and not saved_alone:
        return {**_refit_groups(parts, optimizers[0]), "param_state": loaded["param_state"]}
    if len(optimizers) > 1 and saved_alone:
        return {
            i: {**_refit_groups([loaded], optimizer), "param_state": loaded[i]["param_state"]}
            for i, optimizer in enumerate(optimizers)
        }
    return loaded


def _refit_groups(parts: list[Any], optimizer: Any) -> dict[str, Any]:
    """One optimizer's own groups with the settings that any saved part has for the same kind of group."""
    saved = {_group_kind(g): g for part in reversed(parts) for g in part["optimizer"]["param_groups"]}
    groups = []
    for own in optimizer.optimizer.param_groups:
        found = saved.get(_group_kind(own))
        if found is None:
            raise MegatronRefused(
                f"no saved parameter group is like {_group_kind(own)}; the checkpoint has {sorted(saved)}",
                fault="chained_optimizers",
                where="megatron.core.optimizer.optimizer.ChainedOptimizer.load_state_dict",
            )
        groups.append({**found, "is_expert_parallel": own["is_expert_parallel"]})
    first = parts[0]
    return {
        "optimizer": {**first["optimizer"], "param_groups": groups},
        "param_state_sharding_type": first["param_state_sharding_type"],
    }


def _group_kind(group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Upstream's identity of a group, less `is_expert_parallel`, which is what changes with ep."""
    names = ("wd_mult", "lr_mult", "is_decoupled_lr")
    return tuple((name, group.get(name, group.get(f"pre_{name}"))) for name in names)


# ---------------------------------------------------------------- a name that is missing without Transformer Engine

_GEMM: Final = "missing_gemm"


def _define_missing_gemm() -> bool:
    """transformer/moe/moe_utils.py:1192 asks whether te_general_gemm is None; without Transformer Engine it is not
    defined at all: NameError in every expert layer."""
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if hasattr(moe_utils, "te_general_gemm"):
        return False
    moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    return True


_MENDS: Final[Mapping[str, Callable[[Upstream], Upstream]]] = {
    "shared_step": _unshare_steps,
    "fresh_optimizer": _prime_before_load,
    "step_not_loaded": _keep_step_in_place,
    "padded_buckets": _gather_padded,
    "persistent_worker": _refuse_persistent,
    "chained_optimizers": _refit_chain,
}
FAULTS: Final = tuple(Fault(**vars(known), mend=_MENDS[known.name]) for known in KNOWN)
