"""Megatron-LM's own saves become checkpoints that outlast believes: which save it is, and when its files are all there.

    save_checkpoint(iteration, ...)        every rank   remember what is true now; rank 0 makes room; count beside it
    on_save_checkpoint_success(path, ...)  last rank    final, also an asynchronous one: commit (megatron_lm_commit.py)

An asynchronous save is final some train_steps later, when `args` says other things: so they are taken at its begin.
Saves to other places (non-persistent ones) are Megatron-LM's own affair.
"""

from __future__ import annotations

import functools
import os
import sys
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from outlast import __version__
from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.manifest import SCHEMA, Manifest
from outlast.checkpoint.names import name_step
from outlast.checkpoint.prints import Prints
from outlast.checkpoint.store import Store
from outlast.launchers import megatron_lm_commit, megatron_lm_end, recorder
from outlast.launchers.megatron_lm_prints import LmPrints
from outlast.launchers.megatron_lm_rerun import RESTORE_DIR_ENV
from outlast.reliability.model import Layout

if TYPE_CHECKING:
    from outlast.checkpoint.live_prints import Counting

KEPT: Final = 8
"""Begun saves that are remembered; more than this are never in flight."""


@dataclass(frozen=True)
class Begun:
    """A save of this rank's, as it was when it began."""

    manifest: Manifest
    counting: Counting | None
    prints: Future[Prints | None]
    """There once Megatron-LM's own save has returned."""


class Saves:
    """What was begun on this rank."""

    def __init__(self, training: ModuleType) -> None:
        self._training = training
        self._begun: dict[int, Begun] = {}
        self._prints = LmPrints()

    def begin(self, iteration: int, *, persistent: bool, model: Any = None, optimizer: Any = None) -> Begun | None:
        """Before Megatron-LM touches a file. Its own collectives keep the other ranks' files behind rank 0's step."""
        megatron_lm_end.end_if_told()
        args = self._training.get_args()
        if not persistent or not args.save:
            return None
        counting = None if model is None else self._prints.begin(args, iteration, model, optimizer)
        begun = self._begun[iteration] = Begun(_describe(args, iteration), counting, Future())
        for old in sorted(self._begun)[:-KEPT]:
            del self._begun[old]
        if os.environ.get("RANK", "0") == "0":
            _make_room(Path(args.save), iteration)
        return begun

    def count(self, begun: Begun | None) -> None:
        """After Megatron-LM's save, before the state changes."""
        if begun is not None:
            begun.prints.set_result(self._prints.finish(begun.counting))

    def success(self, checkpoint_path: str, save_dir: str, iteration: int) -> None:
        """On the last rank: the files of this save are complete."""
        begun = self._begun.pop(iteration, None)
        directory = Path(checkpoint_path).absolute()
        if begun is None or Path(save_dir).absolute() != directory.parent:
            return
        durable = recorder.current().checkpoint_durable
        save = megatron_lm_commit.Save(directory=directory, manifest=begun.manifest, prints=begun.prints)
        megatron_lm_commit.start(save, durable)

    def restored(self, model: Any, optimizer: Any) -> None:
        """After a restore that outlast has asked for. Raises NotAsSaved on all ranks where it gave other values."""
        directory = os.environ.get(RESTORE_DIR_ENV, "")
        if not directory:
            return
        compared = self._prints.check(self._training.get_args(), Path(directory), model, optimizer)
        if compared and os.environ.get("RANK", "0") == "0":
            sys.stdout.write(f"outlast: restored {Path(directory).name}: {compared} tensors as saved\n")


def hook(training: ModuleType, saved: ModuleType) -> None:
    """Follow the saves of these modules; their names were checked."""
    saves = Saves(training)
    save, load, success = training.save_checkpoint, training.load_checkpoint, saved.on_save_checkpoint_success

    @functools.wraps(save)
    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        persistent = not kwargs.get("non_persistent_ckpt", False)
        model, optimizer = (*args, kwargs.get("model"), kwargs.get("optimizer"))[:2]
        begun = saves.begin(int(iteration), persistent=persistent, model=model, optimizer=optimizer)
        try:
            result = save(iteration, *args, **kwargs)
        except BaseException:
            if begun is not None:
                begun.prints.set_result(None)
            raise
        saves.count(begun)
        return result

    @functools.wraps(success)
    def on_save_checkpoint_success(
        checkpoint_path: str, tracker_filename: str, save_dir: str, iteration: int, *args: Any, **kwargs: Any
    ) -> Any:
        saves.success(checkpoint_path, save_dir, int(iteration))
        return success(checkpoint_path, tracker_filename, save_dir, iteration, *args, **kwargs)

    @functools.wraps(load)
    def load_checkpoint(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(model, optimizer, *args, **kwargs)
        saves.restored(model, optimizer)
        return result

    training.load_checkpoint = load_checkpoint  # type: ignore[attr-defined]
    training.save_checkpoint = save_checkpoint  # type: ignore[attr-defined]
    saved.on_save_checkpoint_success = on_save_checkpoint_success  # type: ignore[attr-defined]


def _describe(args: Any, iteration: int) -> Manifest:
    restored = os.environ.get(RESTORE_DIR_ENV, "")
    return Manifest(
        schema=SCHEMA,
        train_step=iteration,
        samples=int(args.consumed_train_samples),
        layout=Layout(
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            cp=getattr(args, "context_parallel_size", 1),
            ep=getattr(args, "expert_model_parallel_size", 1),
            dp=args.data_parallel_size,
        ),
        files={},
        parents=(Path(restored).name,) if restored else (),
        made_by=f"Megatron-LM, committed by outlast {__version__}",
    )


def _make_room(root: Path, iteration: int) -> None:
    """Megatron-LM writes into a directory that is there, whatever lies in it; a committed one must stay whole."""
    try:
        moved = Store(root).set_aside(iteration) if (root / name_step(iteration)).exists() else None
    except CheckpointError as e:
        raise CheckpointError(f"cannot save train_step {iteration}: an older save cannot be set aside: {e}") from e
    if moved is not None:
        sys.stderr.write(f"outlast: a save of train_step {iteration} was there already; moved to {moved}\n")
