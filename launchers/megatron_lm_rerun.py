"""Megatron's rerun of a suspicious train_step over restarts: who asks, where it is asked again, and when it is over.

    exit 16   saved with a question: "this result came out twice on this GPU; what does another one say?"
    restore   on another node: the step is computed once more and compared        -> exit 17 with the answer
    restore   of the same checkpoint again: the question is still in it           -> asked for ever, without `answered`

Upstream keeps the question in the checkpoint and leaves it to a person to restore an older one after the answer.
Here the answer is marked beside the files (no file that a reader knows), and an answered checkpoint is restored
without its question: the step is simply done. A checkpoint that was saved in the middle of a rerun in place (a
transient error, exit 17) holds no question that could be resumed; restored as it is, the machine would trip over it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

RESTORE_DIR_ENV: Final = "OUTLAST_RESTORE_DIR"
NODE_ENV: Final = "OUTLAST_NODE"
ANSWERED: Final = "rerun_answered"
_EXIT_CODE: Final = 4
"""Place of the exit code in train_step's result, 0.10 to 0.19."""
_ANSWER: Final = 17


def hook(rerun: ModuleType) -> None:
    """Restore a question only where it is one and has no answer yet."""
    machine, asks = rerun.RerunStateMachine, rerun.RerunState.WILL_RERUN_FROM_CHECKPOINT
    validate = machine.validate_state_dict

    def validate_state_dict(self: Any, state_dict: Any) -> bool:
        if not validate(self, state_dict):
            return False
        why = ""
        if state_dict.get("state") != asks:
            why = "it was saved in the middle of a rerun"
        elif is_answered():
            why = "its question has been answered"
        if why:
            sys.stderr.write(f"outlast: the rerun state of this checkpoint is left out: {why}\n")
        return not why

    machine.validate_state_dict = validate_state_dict


def hook_tracker(random: ModuleType) -> None:
    """Keep what the rerun machine saved of Megatron's generators as it was saved.

    core/tensor_parallel/random.py:215 takes the given dict for its own and writes into it, so that the machine's
    second rewind rewinds nothing. With dropout, the checkpoint of exit 16 then holds other generators than the step
    began with: the next node computes another result, and a node that computes well is called broken.
    """
    tracker = getattr(random, "CudaRNGStatesTracker", None)
    if tracker is None:
        return
    set_states = tracker.set_states

    def set_copied(self: Any, states: Any) -> None:
        set_states(self, dict(states))

    tracker.set_states = set_copied


def note_answer(result: Any) -> None:
    """Where train_step ends the program with an answer, mark the checkpoint that it restored. On every rank alike."""
    try:
        answered = result[_EXIT_CODE] == _ANSWER
    except (TypeError, IndexError):
        return
    place = os.environ.get(RESTORE_DIR_ENV, "")
    if answered and place:
        try:
            (Path(place) / ANSWERED).touch()
        except OSError as e:
            sys.stderr.write(f"outlast: {place}: the answered rerun cannot be marked: {e.strerror}\n")


def is_answered() -> bool:
    place = os.environ.get(RESTORE_DIR_ENV, "")
    return bool(place) and (Path(place) / ANSWERED).exists()


def bear_node_name() -> None:
    """Let Megatron see the node of the run where several "nodes" are on this machine: it tells GPUs apart by it."""
    node = os.environ.get(NODE_ENV, "")
    if not node:
        return
    true_uname: Callable[[], os.uname_result] = os.uname

    def uname() -> os.uname_result:
        true = true_uname()
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
            return true
        return os.uname_result((true.sysname, node, true.release, true.version, true.machine))

    os.uname = uname
