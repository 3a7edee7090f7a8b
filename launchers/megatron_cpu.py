"""megatron-core without a GPU: what it asks of CUDA is answered by the CPU. Does nothing where CUDA is available.

    megatron.core --asks--> torch.cuda.current_device, device="cuda", .cuda(), streams, the CUDA generator
                              |  adapt()
                              v
                            the CPU device, CPU tensors, streams that do nothing, the CPU generator

It is not an emulation: `torch.cuda.is_available()` stays False, and what is not listed here still fails as torch
makes it fail. Every piece exists because a run of megatron-core 0.16.1 stopped there without it; each says where.
It lies apart from the trainer, so that one code path serves both kinds of device and this file alone knows of the
difference. Upstream's own mistakes are not mended here but in megatron_fixes.py: they hold on GPUs too.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

_CPU: Final = torch.device("cpu")
_FACTORIES: Final = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "zeros_like", "empty_like")
_done = False


def cuda_here() -> bool:
    """Whether this process may use a GPU. A CPU build answers without touching a driver, which a fork would break."""
    return torch.version.cuda is not None and torch.cuda.is_available()


def adapt() -> bool:
    """Let megatron.core run on the CPU; True where that was needed. Twice is once.

    Imports parts of megatron.core. May be called before a fork: it starts no thread and opens no device.
    """
    global _done
    if cuda_here():
        return False
    if not _done:
        _answer_device_questions()
        _keep_tensors_here()
        _name_tensors_as_megatron_expects()
        _make_streams_idle()
        _share_one_generator()
        _give_gloo_its_split_sizes()
        _fork_the_result_queue()
        _done = True
    return True


def _put(owner: object, name: str, value: object) -> None:
    """setattr, spelled so that the type checker lets torch be changed."""
    setattr(owner, name, value)


def _answer_device_questions() -> None:
    """Where: distributed/param_and_grad_buffer.py:800, and every all-reduce of a scalar."""
    _put(torch.cuda, "current_device", lambda: _CPU)
    for name in ("synchronize", "empty_cache", "set_device"):
        _put(torch.cuda, name, lambda *_a, **_k: None)


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _keep_tensors_here() -> None:
    """Where: optimizer.py:485, clip_grads.py:103 and others say device="cuda"; language_module.py:244 says .cuda()."""

    def redirected(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            return make(*args, **kwargs)

        return made

    for name in _FACTORIES:
        _put(torch, name, redirected(getattr(torch, name)))
    _put(torch.Tensor, "cuda", lambda self, *_a, **_k: self)
    _put(torch.nn.Module, "cuda", lambda self, *_a, **_k: self)


def _name_tensors_as_megatron_expects() -> None:
    """Where: distrib_optimizer.py:361 and :582, clip_grads.py:167 compare Tensor.type() with 'torch.cuda.FloatTensor'.

    Only callers inside megatron.core get that name; everyone else gets the true one.
    """
    true_type = torch.Tensor.type

    def told_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        said = true_type(self, *args, **kwargs)
        asks_for_name = isinstance(said, str) and said.startswith("torch.") and not said.startswith("torch.cuda.")
        if asks_for_name and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core."):
            return "torch.cuda." + said.removeprefix("torch.")
        return said

    _put(torch.Tensor, "type", told_type)


class _IdleStream:
    """A stream on which everything has already happened, as is true on the CPU."""

    cuda_stream = 0

    def __init__(self, *_a: Any, **_k: Any) -> None: ...

    def wait_stream(self, _other: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: _IdleEvent | None = None) -> _IdleEvent:
        return event or _IdleEvent()


class _IdleEvent:
    def __init__(self, *_a: Any, **_k: Any) -> None: ...

    def record(self, *_a: Any) -> None: ...

    def wait(self, *_a: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def _make_streams_idle() -> None:
    """Where: transformer/moe/token_dispatcher.py:445 makes a stream and records events on it."""
    stream = _IdleStream()
    _put(torch.cuda, "Stream", _IdleStream)
    _put(torch.cuda, "Event", _IdleEvent)
    for name in ("current_stream", "default_stream"):
        _put(torch.cuda, name, lambda *_a, **_k: stream)
    _put(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    _put(torch.Tensor, "record_stream", lambda self, _stream: None)


def _share_one_generator() -> None:
    """Where: tensor_parallel/random.py:235 asks for the CUDA generator. Its part is played by the CPU's default one."""
    from megatron.core.tensor_parallel import random as upstream  # type: ignore[import-untyped]

    _put(torch.cuda, "get_rng_state", lambda *_a, **_k: torch.get_rng_state())
    _put(torch.cuda, "set_rng_state", lambda state, *_a, **_k: torch.set_rng_state(state))
    _put(torch.cuda, "manual_seed", torch.manual_seed)
    upstream._get_cuda_rng_state = lambda *_a, **_k: torch.get_rng_state()
    upstream._set_cuda_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
    upstream.CudaRNGStatesTracker.fork = _fork_generator


@contextlib.contextmanager
def _fork_generator(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """As upstream's CudaRNGStatesTracker.fork, less its check that the CPU generator stood still meanwhile."""
    if name not in self.states_:
        raise KeyError(f"generator state {name!r} was never added; there are {sorted(self.states_)}")
    outer_name, outer = self._current_state_name, torch.get_rng_state()
    if outer_name != "default-rng":
        self.states_[outer_name] = outer
    torch.set_rng_state(self.states_[name])
    self._current_state_name = name
    try:
        yield
    finally:
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outer if outer_name == "default-rng" else self.states_[outer_name])
        self._current_state_name = outer_name


def _give_gloo_its_split_sizes() -> None:
    """Where: token_dispatcher.py:876. `maybe_move_tensor_to_cpu` turns split sizes into numbers only on the way from a
    GPU; gloo's all_to_all then gets tensors and raises TypeError."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher  # type: ignore[import-untyped]

    def as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = as_numbers


def _fork_the_result_queue() -> None:
    """Where: dist_checkpointing/strategies/filesystem_async.py:51 spawns a Manager, to keep a CUDA context out of it.

    Spawning re-imports everything, about 6 s a rank. There is no context here, so a forked Manager serves as well.
    """
    from megatron.core.dist_checkpointing.strategies import (  # type: ignore[import-untyped]
        filesystem_async as upstream,
    )

    def results_queue() -> Any:
        if upstream._results_queue is None:
            upstream._results_queue = upstream.mp.get_context("fork").Manager().Queue()
        return upstream._results_queue

    upstream._get_write_results_queue = results_queue
