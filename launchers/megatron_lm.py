"""Megatron-LM's own scripts under supervision: everything that is put around them before they run, by arm().

    rank.py --arm()--> after_import(megatron.training.training, ...)     steps, phases, saves  megatron_lm_steps, _saves
                       after_import(megatron.core.rerun_state_machine)   the rerun's question  megatron_lm_rerun
                       without GPUs: the CPU adaptation                                        megatron_lm_cpu
                       a thread that ends the rank when no save is wanted                      megatron_lm_end

No file of theirs is touched: names are hooked right after their module was executed (megatron_lm_names.py lists them).
The script's own directory comes first on its path, so that its megatron is the one that is hooked. Where a name is
gone the rank refuses by name with exit code 2, before it trains unwatched.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Final

from outlast.checkpoint.names import TRACKER, name_step
from outlast.launchers import (
    megatron_lm_cpu,
    megatron_lm_end,
    megatron_lm_rerun,
    megatron_lm_saves,
    megatron_lm_steps,
    recorder,
)
from outlast.launchers.after_import import Hook, after_import
from outlast.launchers.megatron_lm_names import (
    FAULT_TOLERANCE,
    NEEDED,
    RANDOM,
    REFUSED,
    RERUN,
    SAVED,
    TRAINING,
    MegatronLmRefused,
    check,
)

_OPTIMIZER_FLAG: Final = "--use-distributed-optimizer"

_hooked = False


def arm() -> None:
    """In a rank, before its script runs."""
    recorder.current().phase("init")
    place_restore(sys.argv)
    hook_imports()
    if megatron_lm_cpu.arm():
        megatron_lm_rerun.bear_node_name()
    megatron_lm_end.watch()


def hook_imports() -> None:
    """Arrange the hooks; also in the process that ranks are forked from. Twice is once."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    after_import(TRAINING, _or_refuse(_hook_training))
    after_import(RERUN, _or_refuse(_hook_rerun))
    after_import(RANDOM, megatron_lm_rerun.hook_tracker)


def _hook_training(training: ModuleType) -> None:
    fault_tolerance, saved = sys.modules.get(FAULT_TOLERANCE), sys.modules.get(SAVED)
    for name, module in ((FAULT_TOLERANCE, fault_tolerance), (SAVED, saved)):
        if module is None:
            raise MegatronLmRefused(f"{TRAINING} does not import it; expected {', '.join(NEEDED[name])}", module=name)
    assert fault_tolerance is not None and saved is not None, "checked above"
    for module in (training, fault_tolerance, saved):
        check(module)
    megatron_lm_steps.hook(training, fault_tolerance)
    megatron_lm_saves.hook(training, saved)
    _note_answers(training)
    _mend()


def _note_answers(training: ModuleType) -> None:
    train_step: Callable[..., object] = training.train_step

    def noted(*args: object, **kwargs: object) -> object:
        result = train_step(*args, **kwargs)
        megatron_lm_rerun.note_answer(result)
        return result

    training.train_step = noted  # type: ignore[attr-defined]


def _hook_rerun(rerun: ModuleType) -> None:
    check(rerun)
    megatron_lm_rerun.hook(rerun)


def _or_refuse(hook: Hook) -> Hook:
    """An import's error would end the program with exit code 1; this is no error of the program's."""

    def guarded(module: ModuleType) -> None:
        try:
            hook(module)
        except MegatronLmRefused:
            after_import(module.__name__, guarded)  # refused in the process that ranks are forked from: they try anew
            traceback.print_exc()
            sys.stderr.flush()
            raise SystemExit(REFUSED) from None

    return guarded


def _mend() -> None:
    """Upstream's faults that its restores meet, each where the source is the one that the mend was written for."""
    from outlast.launchers import megatron_fixes

    unknown: dict[str, str] = {}
    names = {fault.name for fault in megatron_fixes.FAULTS}
    for name in names:
        try:
            megatron_fixes.mend(leave=names - {name})
        except megatron_fixes.MegatronRefused as refused:
            unknown[refused.fault] = str(refused)
    if not unknown:
        return
    if _loses_without_mends() and {"shared_step", "fresh_optimizer"} & unknown.keys():
        raise MegatronLmRefused(
            "a restored run would drift: " + "; ".join(unknown.values()) + f"; or train without {_OPTIMIZER_FLAG}"
        )
    for why in unknown.values():
        sys.stderr.write(f"outlast: not mended: {why}\n")


def _loses_without_mends() -> bool:
    """The mended faults show with torch's own AdamW alone; Transformer Engine's and Apex's have none of them."""
    optimizer = sys.modules.get("megatron.core.optimizer")
    return bool(getattr(optimizer, "USING_PYTORCH_OPTIMIZER", True)) and _OPTIMIZER_FLAG in sys.argv


# ---------------------------------------------------------------- a restore under another name


def place_restore(argv: list[str]) -> None:
    """Megatron-LM finds a checkpoint by its number alone; one that lies under another name gets a link that has it."""
    place = os.environ.get(megatron_lm_rerun.RESTORE_DIR_ENV, "")
    step = os.environ.get(megatron_lm_steps.RESTORE_STEP_ENV, "")
    if not place or not step.isdigit() or Path(place).name == name_step(int(step)) or "--load" not in argv[:-1]:
        return
    root = Path(tempfile.mkdtemp(prefix="outlast-restore-"))
    (root / name_step(int(step))).symlink_to(place)
    (root / TRACKER).write_text(step, encoding="ascii")
    argv[argv.index("--load") + 1] = str(root)
