"""Megatron-LM's own scripts without a GPU: what they need beyond megatron.core's adaptation (megatron_cpu.py).

Asked for by OUTLAST_MEGATRON_CPU, which the adapter sets where the run file gives no GPUs: a node that has lost its
GPUs must fail and not train on its CPU. Every piece is there because core_v0.16.1 stopped without it; each says
where. As in megatron_cpu.py, only callers inside `megatron` are told of a GPU; torch itself keeps the truth.
Upstream's mistakes that hold on GPUs too are mended elsewhere (megatron_fixes.py).
"""

from __future__ import annotations

import glob
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import managers
from types import ModuleType
from typing import Any, Final

import torch
from torch.utils.data import dataloader

from outlast.launchers import megatron_cpu, reap
from outlast.launchers.after_import import after_import
from outlast.launchers.megatron_lm_names import ASYNC

CPU_ENV: Final = "OUTLAST_MEGATRON_CPU"
_TRITON_USER: Final = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
_UNTOLD: Final = ("megatron.core.dist_checkpointing.",)
"""Callers that would really use the GPU they are told of: they stage tensors in pinned memory."""
_armed = False


def arm() -> bool:
    """Arrange that `megatron` finds what it needs, as it is imported; True where that was wanted. Twice is once."""
    global _armed
    if os.environ.get(CPU_ENV, "") != "1" or megatron_cpu.cuda_here():
        return False
    _compile_nothing()
    if not _armed:
        _armed = True
        _pretend_availability()
        _leave_generator_to_training()
        _stub_triton()
        after_import("megatron.core", lambda _module: _adapt_core())
        after_import("megatron.core.datasets", _find_built_helpers)
        after_import("megatron.core.datasets.utils", _make_no_helpers)
        after_import("megatron.legacy.fused_kernels", lambda module: _put(module, "load", lambda _args: None))
        after_import(ASYNC, _fork_writers)
    return True


def _put(owner: object, name: str, value: object) -> None:
    """setattr, spelled so that the type checker lets others' modules be changed."""
    setattr(owner, name, value)


def _adapt_core() -> None:
    megatron_cpu.adapt()
    _bind_the_result_queue()
    _put(torch.cuda, "Event", _TimedEvent)
    for name in ("temperature", "power_draw", "utilization", "clock_rate"):
        _put(torch.cuda, name, lambda *_a, **_k: 0)


def _pretend_availability() -> None:
    """Where: training/initialize.py:62, "Megatron requires CUDA.", and :360, which else makes no parallel groups."""
    true_answer: Callable[[], bool] = torch.cuda.is_available
    true_count: Callable[[], int] = torch.cuda.device_count

    def is_available() -> bool:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return true_answer() or (asking.startswith("megatron.") and not asking.startswith(_UNTOLD))

    def device_count() -> int:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return true_count() or int(asking.startswith("megatron."))

    _put(torch.cuda, "is_available", is_available)
    _put(torch.cuda, "device_count", device_count)


def _compile_nothing() -> None:
    """Where: core/jit.py makes torch.compile of every fused function: a minute of C++ compiling a rank, or an error."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    config = sys.modules.get("torch._dynamo.config")
    if config is not None:
        _put(config, "disable", True)


def _leave_generator_to_training() -> None:
    """One generator plays CPU and CUDA here. A DataLoader's iterator draws its base seed from the CPU's when it is
    made: after the state was loaded in a restored run, before it was used in another. Dropout would then differ."""
    base: Any = dataloader._BaseDataLoaderIter
    init = base.__init__

    def seeded(self: Any, *args: Any, **kwargs: Any) -> None:
        before = torch.get_rng_state()
        try:
            init(self, *args, **kwargs)
        finally:
            torch.set_rng_state(before)

    base.__init__ = seeded


class _TimedEvent:
    """Where: --log-straggler measures with events."""

    def __init__(self, *_a: Any, **_k: Any) -> None:
        self._at_s = 0.0

    def record(self, *_a: Any) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, other: _TimedEvent) -> float:
        return (other._at_s - self._at_s) * 1e3

    def wait(self, *_a: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def _bind_the_result_queue() -> None:
    """The forked Manager of megatron_cpu.py would take over Megatron-LM's SIGTERM handler, and so outlive its rank
    until it is killed, which holds up the next attempt. This one dies with its rank."""
    from megatron.core.dist_checkpointing.strategies import (  # type: ignore[import-untyped]
        filesystem_async as upstream,
    )

    def results_queue() -> Any:
        if upstream._results_queue is None:
            manager = managers.SyncManager(ctx=upstream.mp.get_context("fork"))
            manager.start(reap.die_with_parent, (os.getpid(),))
            upstream._results_queue = manager.Queue()
        return upstream._results_queue

    upstream._get_write_results_queue = results_queue


# ---------------------------------------------------------------- built parts that a work tree lacks


def _find_built_helpers(package: ModuleType) -> None:
    """Where: core/datasets/helpers_cpp is C++, built in the wheel and not in a work tree."""
    if any(_built(place) for place in package.__path__):
        return
    for place in sys.path:
        folder = os.path.join(place, "megatron", "core", "datasets")
        if _built(folder):
            package.__path__ = [*package.__path__, folder]
            return


def _built(folder: str) -> bool:
    return bool(glob.glob(os.path.join(glob.escape(folder), "helpers_cpp*.so")))


def _make_no_helpers(utils: ModuleType) -> None:
    """Where: training/initialize.py calls `make` at every start."""
    build = utils.compile_helpers

    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            build()

    utils.compile_helpers = compile_helpers  # type: ignore[attr-defined]


def _fork_writers(module: ModuleType) -> None:
    """Where: --async-save is allowed with --use-persistent-ckpt-worker alone, and that worker tears CPU tensors, which
    it gets by shared memory. The queue that is there already forks a writer for each save, which is right."""
    _put(module, "init_persistent_async_worker", lambda *_a, **_k: None)


# ---------------------------------------------------------------- triton


def _stub_triton() -> None:
    """Where: training/initialize.py imports kernels that are decorated by triton at import. Nobody calls them here."""
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, _TritonFinder())


class _TritonFinder(importlib.abc.MetaPathFinder):
    """Gives the one module that wants triton a stub of it, for the time of its own import."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TRITON_USER or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _WithTriton(spec.loader)
        return spec


class _WithTriton(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        triton, language = _Stub("triton"), _Stub("triton.language")
        _put(triton, "jit", _decorator)
        _put(triton, "language", language)
        _put(triton, "__path__", [])
        sys.modules.update({"triton": triton, "triton.language": language})
        try:
            self._inner.exec_module(module)
        finally:
            for name in ("triton", "triton.language"):
                sys.modules.pop(name, None)


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _decorator(function: Any = None, **_options: Any) -> Any:
    return function if function is not None else lambda later: later
