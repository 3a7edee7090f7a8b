"""Megatron-LM imported once a node, before ranks are forked: a restart then costs no imports.

Named as a preload by the adapter where the run has no GPUs. With GPUs it is left out: whether every import of
Megatron-LM and of what it finds installed leaves the driver alone cannot be known here, and a process that has
touched it cannot fork ranks that use it. A user who knows names modules with task.preload.
The hooks are in place before the import, as in a rank. A script that is not there, or has no megatron beside it, is
no error here: the rank will say so.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Final

import msgspec
import yaml

from outlast.launchers import megatron_lm, megatron_lm_cpu
from outlast.launchers.megatron_lm_names import TRAINING
from outlast.launchers.node_env import TREE_ENV
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile

_MORE: Final = (
    "megatron.core.models.gpt",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
)


def preload() -> None:
    """Called by the warm process. Raises what the import raises: it is then logged, and ranks import for themselves."""
    folder = _script_folder()
    if folder is None or not (folder / "megatron" / "training").is_dir():
        return
    os.environ[megatron_lm_cpu.CPU_ENV] = "1"
    sys.path.insert(0, str(folder))
    try:
        megatron_lm.hook_imports()
        megatron_lm_cpu.arm()
        for name in (TRAINING, *_MORE):
            importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))  # each rank puts it first anew, as a fresh interpreter would


def _script_folder() -> Path | None:
    """The directory of the run's script, from the run file that this node's agent works for."""
    root = os.environ.get(TREE_ENV, "").rsplit(":", 3)[0]
    if not root:
        return None
    raw = yaml.safe_load(RunDir(root=Path(root)).run_file.read_bytes())
    task = msgspec.convert(raw, RunFile).task
    return Path(task.workdir or os.getcwd(), task.script).absolute().parent if task.script else None
