"""Faults in a rank at an exact train_step, put in by name as outlast's own hooks are. Preloaded by the tests' runs.

MLM_FAULT=kill:rank=1:step=7               SIGKILL of this rank, once a run, when the save before it is committed
          flip:rank=1:step=7               the same, and the restore after it gives one wrong bit on this rank, once
          term:rank=1:step=7               SIGTERM of this rank alone, as a scheduler sends it before a deadline
          xid:rank=0:step=7                an XID line in the node's kernel log; the rank goes on, only slowly
          hold:rank=1:step=7               the rank waits for the stop file
          persistent|transient|correct:rank=0:step=7   a suspicious result, for the rerun machine
MLM_FAULT_DIR                              where `once` is remembered and the kernel logs lie
MLM_TRACE=1                                the order of calls that outlast relies on, into MLM_FAULT_DIR/trace-RANK
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from outlast.launchers.after_import import after_import

XID_LINE = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
WAIT_S = 40.0
COMMIT_S = 10.0
_slow: list[float] = []
_RESULTS = {"persistent": "PERSISTENT_ERROR", "transient": "TRANSIENT_ERROR", "correct": "CORRECT_RESULT"}


def _due(step: int) -> str:
    """The fault that falls due in this rank now; '' where none does. Each once a run."""
    kind, *rest = os.environ.get("MLM_FAULT", "").split(":")
    wanted = dict(word.split("=") for word in rest)
    if not kind or os.environ["RANK"] != wanted["rank"] or step != int(wanted["step"]):
        return ""
    once = Path(os.environ["MLM_FAULT_DIR"], "done")
    try:
        once.touch(exist_ok=False)
    except FileExistsError:
        return ""
    return kind


def _step_now() -> int:
    args = sys.modules["megatron.training.global_vars"].get_args()
    return int(args.curr_iteration) + 1


def _await_commit() -> None:
    """Steps are short here: a busy machine may not have committed the last save yet, beside training."""
    args = sys.modules["megatron.training.global_vars"].get_args()
    saved = int(args.curr_iteration) // args.save_interval * args.save_interval
    marker = Path(args.save, f"iter_{saved:07d}", "COMMITTED")
    until = time.monotonic() + COMMIT_S
    while saved and not getattr(args, "async_save", False) and not marker.exists() and time.monotonic() < until:
        time.sleep(0.01)


def _strike(kind: str) -> None:
    if kind in ("kill", "flip"):
        _await_commit()
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "xid":
        with open(Path(os.environ["MLM_FAULT_DIR"], f"{os.environ['OUTLAST_NODE']}.kmsg"), "a") as log:
            log.write(XID_LINE)
        _slow.append(0.25)
    elif kind == "hold":
        until = time.monotonic() + WAIT_S
        while not os.path.exists(os.environ["OUTLAST_STOP_FILE"]) and time.monotonic() < until:
            time.sleep(0.02)


def _hook_steps(module: Any) -> None:
    began = module.on_training_step_start

    def on_training_step_start() -> None:
        began()
        if not os.environ.get("MLM_FAULT", "").startswith(tuple(_RESULTS)):
            _strike(_due(_step_now()))
            time.sleep(sum(_slow))

    module.on_training_step_start = on_training_step_start


def _hook_injector(module: Any) -> None:
    injector = module.RerunErrorInjector

    def maybe_inject(self: Any) -> bool:
        kind = os.environ.get("MLM_FAULT", "")
        if not kind.startswith(tuple(_RESULTS)) or not _due(_step_now()):
            return False
        self.injected_error_type = module.RerunDiagnostic[_RESULTS[kind.split(":")[0]]]
        return True

    injector.maybe_inject = maybe_inject


def _hook_load(module: Any) -> None:
    """At the end of a load: on one rank one bit is not what was loaded."""
    loaded = module.on_checkpoint_loaded

    def on_checkpoint_loaded(*args: Any, **kwargs: Any) -> Any:
        fault, _, where = os.environ.get("MLM_FAULT", "").partition(":")
        folder = Path(os.environ.get("MLM_FAULT_DIR", "."))
        if fault == "flip" and where.startswith(f"rank={os.environ['RANK']}:") and (folder / "done").exists():
            frame: Any = sys._getframe()
            while frame.f_code.co_name != "load_checkpoint" or "model" not in frame.f_locals:
                frame = frame.f_back
            model = frame.f_locals["model"]
            with suppress(FileExistsError):
                (folder / "flipped").touch(exist_ok=False)
                parameter = next((model[0] if isinstance(model, list) else model).parameters())
                parameter.data.view(-1).view(torch.uint8)[0] ^= 1
        return loaded(*args, **kwargs)

    module.on_checkpoint_loaded = on_checkpoint_loaded


_TRACED = {
    "megatron.training.training": (
        "load_checkpoint train train_step training_log maybe_finalize_async_save post_training_step_callbacks "
        "checkpoint_and_decide_exit save_checkpoint_and_time save_checkpoint"
    ),
    "megatron.training.ft_integration": (
        "on_training_step_start on_training_step_end on_checkpointing_start on_checkpointing_end on_checkpoint_loaded"
    ),
    "megatron.training.wandb_utils": "on_save_checkpoint_success",
}


def _trace(module: Any) -> None:
    for name in _TRACED[module.__name__].split():
        if hasattr(module, name):
            setattr(module, name, _traced(name, getattr(module, name)))


def _traced(name: str, call: Any) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("MLM_TRACE"):
            with open(Path(os.environ["MLM_FAULT_DIR"], f"trace-{os.environ['RANK']}"), "a") as file:
                file.write(f"{os.environ['OUTLAST_ATTEMPT']} {name}\n")
        return call(*args, **kwargs)

    return noted


for _name in _TRACED:
    after_import(_name, _trace)
after_import("megatron.training.ft_integration", _hook_steps)
after_import("megatron.training.ft_integration", _hook_load)
after_import("megatron.core.rerun_state_machine", _hook_injector)
