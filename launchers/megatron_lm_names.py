"""What outlast uses of Megatron-LM by name, and the refusal where a name is gone.

    module -> names that it must have once it is executed

Chosen because they have stood still: see `since` beside each. Positions in calls and results are not relied on, but
for the ones that are said here. A version that lacks one is refused with what it has instead, before it trains
unwatched. Pure: the module is given.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import ModuleType
from typing import Final

TESTED: Final = "core_v0.16.1"
TRAINING: Final = "megatron.training.training"
FAULT_TOLERANCE: Final = "megatron.training.ft_integration"
SAVED: Final = "megatron.training.wandb_utils"
RERUN: Final = "megatron.core.rerun_state_machine"
RANDOM: Final = "megatron.core.tensor_parallel.random"
ASYNC: Final = "megatron.training.async_utils"
REFUSED: Final = 2
"""Exit code of a rank whose program cannot be supervised."""

NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    TRAINING: (
        "train",  # v2.6
        "train_step",  # v2.6; result: loss dict first, grad norm sixth
        "load_checkpoint",  # v2.6; result: iteration first
        "save_checkpoint",  # v2.6; iteration is the first argument
        "save_checkpoint_and_time",  # v2.6
        "checkpoint_and_decide_exit",  # 0.10
        "evaluate_and_print_results",  # v2.6
        "get_args",  # v2.6
        "get_num_microbatches",  # v2.6
        "ft_integration",  # 0.11; training.py calls it as ft_integration.x(), so that a changed x is called
    ),
    FAULT_TOLERANCE: ("on_training_step_start", "on_training_step_end"),  # 0.11
    SAVED: ("on_save_checkpoint_success",),  # 0.11; called by attribute, on the last rank, once all files are there
    RERUN: ("RerunStateMachine.validate_state_dict", "RerunState.WILL_RERUN_FROM_CHECKPOINT"),  # 0.10
}
"""Without these a run cannot be supervised."""


class MegatronLmRefused(Exception):
    """This Megatron-LM, or what it was asked to do, cannot be supervised. `module` names where; '' where nowhere."""

    def __init__(self, what: str, *, module: str = "") -> None:
        super().__init__(f"{module}: {what}" if module else what)
        self.module = module


def check(module: ModuleType) -> None:
    """Raise MegatronLmRefused where a needed name is gone."""
    gone = [name for name in NEEDED[module.__name__] if not _has(module, name)]
    if not gone:
        return
    found = sorted(name for name in vars(module) if not name.startswith("_"))
    near = {name: difflib.get_close_matches(name, found, 3, 0.6) for name in gone}
    hints = "; ".join(f"{name} (found {', '.join(close)})" if close else name for name, close in near.items())
    own = [name for name in found if getattr(getattr(module, name), "__module__", "") == module.__name__]
    raise MegatronLmRefused(
        f"names that outlast hooks are gone: {hints}. {getattr(module, '__file__', 'it')} has {_list(own)}. "
        f"Expected Megatron-LM {TESTED} or one near to it; task.kind: plain supervises it without step records",
        module=module.__name__,
    )


def _has(module: ModuleType, name: str) -> bool:
    owner: object = module
    for part in name.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


def _list(names: list[str], limit: int = 40) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
