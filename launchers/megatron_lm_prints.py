"""Fingerprints of Megatron-LM's own saves and restores: taken of its live model and optimizer, no file of it touched.

    save_checkpoint(..., model, optimizer)   all ranks: one number a tensor, counted beside it, stored at its commit
    load_checkpoint(model, optimizer)        all ranks: compared with what lies beside the checkpoint

A run must not fail for want of a number: what cannot be counted on any one rank is counted on none, and told once. What
was counted and differs ends the attempt by name (NotAsSaved). Not covered: models that are DTensors (PyTorch's and
Megatron's FSDP), saves to other places than --save, and what checkpoint/placing.py leaves out by name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.prints import NotAsSaved, Prints

if TYPE_CHECKING:
    from outlast.checkpoint.live_prints import Counting
    from outlast.checkpoint.model_prints import ModelPrints

GLOBALS = "megatron.training.global_vars"


class LmPrints:
    """Of one rank. All is collective over all ranks."""

    def __init__(self) -> None:
        self._live: ModelPrints | None = None
        self._of: tuple[Any, Any] = (None, None)
        self._told = False

    def begin(self, args: Any, iteration: int, model: Any, optimizer: Any) -> Counting | None:
        """Count in a thread: the state must not change before finish(). None on all ranks where one cannot."""
        live = self._open(args, model, optimizer)
        return None if live is None else live.begin(iteration)

    def finish(self, counting: Counting | None) -> Prints | None:
        """Wait, and add up. None on all ranks where one could not."""
        if counting is None:
            return None
        why = ""
        try:
            counting.wait()
        except Exception as e:  # noqa: BLE001 -- as in _open
            why = f"{type(e).__name__}: {e}"
        if self._refuse(why) or self._live is None:
            return None
        try:
            return self._live.finish(counting)
        except CheckpointError as e:  # on all ranks alike: it is what they told each other
            self._tell(str(e))
            return None

    def check(self, args: Any, directory: Path, model: Any, optimizer: Any) -> int:
        """How many tensors are as they were saved. Raises NotAsSaved or NotWhole on all ranks alike."""
        live = self._open(args, model, optimizer)
        if live is None:
            return 0
        from outlast.checkpoint.live_prints import check_after_restore

        live.with_state = not (getattr(args, "no_load_optim", False) or getattr(args, "finetune", False))
        try:
            return check_after_restore(live, directory)
        except (NotAsSaved, NotWhole):
            raise
        except CheckpointError as e:
            self._tell(str(e))
            return 0
        finally:
            live.with_state = True

    def _open(self, args: Any, model: Any, optimizer: Any) -> ModelPrints | None:
        """The same answer on all ranks."""
        why = ""
        try:
            if self._live is None or self._of[0] is not model or self._of[1] is not optimizer:
                self._live, self._of = _make(args, model, optimizer), (model, optimizer)
            self._live.look()  # what it raises it raises here, before the other ranks wait for it
        except Exception as e:  # noqa: BLE001 -- whatever it is, it is worth no training run
            self._live, why = None, f"{type(e).__name__}: {e}"
        return None if self._refuse(why) else self._live

    def _refuse(self, why: str) -> bool:
        """Whether any rank has a reason to. Collective."""
        unable = _count_ranks(bool(why))
        if unable:
            self._tell(why or f"{unable} other ranks cannot")
        return bool(unable)

    def _tell(self, why: str) -> None:
        if not self._told:
            self._told = True
            sys.stderr.write(f"outlast: no fingerprints of this model: {why}\n")


def _make(args: Any, model: Any, optimizer: Any) -> ModelPrints:
    from outlast.checkpoint.model_prints import ModelPrints

    padded = getattr(args, "padded_vocab_size", None)
    return ModelPrints(model, optimizer, vocabulary=_find_vocabulary(), padded=padded)


def _find_vocabulary() -> int | None:
    """Of the tokenizer that the run uses; None where there is none."""
    try:
        return int(sys.modules[GLOBALS].get_tokenizer().vocab_size)
    except (KeyError, AttributeError, AssertionError, TypeError, ValueError):
        return None


def _count_ranks(unable: bool) -> int:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    count = torch.tensor([int(unable)], dtype=torch.int64, device=device)
    dist.all_reduce(count)
    return int(count.item())
