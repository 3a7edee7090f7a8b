"""Megatron-LM's train_steps, phases and the wish to stop, told through functions that it calls by name.

    train { on_training_step_start, train_step, on_training_step_end, [evaluate], checkpoint_and_decide_exit {[save]} }
            step_started            loss, norm  step_done,                        step_closed, with the save's time
                                                stop file -> their signal

A step is told before it is saved and closed once its save is over, as in the reference trainer. The losses are what
train_step gives, not what the log says: the second line after every start is the mean of the first two. Nothing here
raises into training but a restore that did not take place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from outlast.checkpoint.errors import CheckpointError
from outlast.launchers import recorder

RESTORE_STEP_ENV: Final = "OUTLAST_RESTORE_STEP"
_LOSS: Final = "lm loss"
_SHOULD_EXIT: Final = 3
_GRAD_NORM: Final = 5
"""Places in train_step's result, 0.10 to 0.19."""

Call = Callable[..., Any]


@dataclass
class Steps:
    """The step in flight. The only state here."""

    training: ModuleType
    train_step: int = 0
    """1-based, of the step in flight or just finished; 0 before the first."""
    loss: float | None = None
    grad_norm: float | None = None
    samples_from: int = -1
    samples_to: int = -1
    tokens: int = 0
    pending: bool = False
    """Finished and not told yet."""
    told: bool = False
    """Told and not closed yet."""
    save_s: float = 0.0

    def begin(self) -> None:
        """A train_step begins."""
        self.close()
        with _harmless():
            args = self.training.get_args()
            self.train_step = _iteration(args, self.train_step) + 1
            self.samples_from = int(args.consumed_train_samples)
            batch = args.micro_batch_size * args.data_parallel_size * self.training.get_num_microbatches()
            self.samples_to = self.samples_from + int(batch)
            self.tokens = int(batch) * int(getattr(args, "seq_length", 0))
        self.loss = self.grad_norm = None
        recorder.current().step_started(self.train_step)

    def take(self, result: Any) -> None:
        """train_step's result. Where it ends the program (the rerun machine's verdict) the step was not done."""
        with _harmless():
            self.pending = not result[_SHOULD_EXIT]
            losses = result[0]
            value = losses.get(_LOSS, next(iter(losses.values()), None)) if losses else None
            self.loss = None if value is None else float(value)
            norm = result[_GRAD_NORM]
            self.grad_norm = None if norm is None else float(norm)

    def end(self) -> None:
        """After the step: tell it, and pass a wish to stop on, so that all ranks save at the end of this very step."""
        self.tell()
        with _harmless():
            if recorder.stop_asked():
                raise_their_signal(self.training.get_args())

    def tell(self) -> None:
        """Record the finished step, once."""
        if not self.pending:
            return
        recorder.current().step_done(
            self.train_step,
            loss=self.loss,
            grad_norm=self.grad_norm,
            samples_from=self.samples_from,
            samples_to=self.samples_to,
            tokens=self.tokens,
            closed=False,
        )
        self.pending, self.told, self.save_s = False, True, 0.0

    def close(self) -> None:
        """The told step is over with all that belongs to it, once."""
        self.tell()
        if self.told:
            recorder.current().step_closed(self.save_s)
        self.told, self.save_s = False, 0.0


def hook(training: ModuleType, fault_tolerance: ModuleType) -> None:
    """Put the recorder around the functions of these two modules; their names were checked."""
    steps = Steps(training)
    fault_tolerance.on_training_step_start = _before(fault_tolerance.on_training_step_start, steps.begin)  # type: ignore[attr-defined]
    fault_tolerance.on_training_step_end = _before(fault_tolerance.on_training_step_end, steps.end)  # type: ignore[attr-defined]
    _put(training, "train_step", lambda call: _taking(call, steps.take))
    _put(training, "checkpoint_and_decide_exit", lambda call: _after(call, steps.close))
    _put(training, "evaluate_and_print_results", lambda call: _in_phase(call, "eval"))
    _put(training, "save_checkpoint_and_time", lambda call: _timed(_in_phase(call, "save"), steps))
    _put(training, "save_checkpoint", lambda call: _in_phase(call, "save"))
    _put(training, "load_checkpoint", _checked_load)
    _put(training, "train", lambda call: _from_phase(call, "compile"))


def raise_their_signal(args: Any) -> None:
    """Send ourselves the signal that --exit-signal-handler listens to; not where nobody listens."""
    chosen = getattr(args, "exit_signal", signal.SIGTERM)
    number = getattr(chosen, "value", chosen)
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        os.kill(os.getpid(), number)


def _iteration(args: Any, told: int) -> int:
    """How many steps are done. `curr_iteration` is set in each, from v0.9 on; without it we count."""
    current = getattr(args, "curr_iteration", None)
    return int(current) if current is not None else max(told, int(getattr(args, "iteration", 0) or 0))


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """What we want to know is not worth a training run."""
    with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError, ValueError, OSError, RuntimeError):
        yield


def _put(module: ModuleType, name: str, wrap: Callable[[Call], Call]) -> None:
    call = getattr(module, name)
    setattr(module, name, functools.wraps(call)(wrap(call)))


def _before(call: Call, first: Callable[[], None]) -> Call:
    @functools.wraps(call)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return call(*args, **kwargs)

    return both


def _after(call: Call, then: Callable[[], None]) -> Call:
    def both(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        then()
        return result

    return both


def _taking(call: Call, take: Callable[[Any], None]) -> Call:
    def taken(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        take(result)
        return result

    return taken


def _from_phase(call: Call, phase: str) -> Call:
    def entered(*args: Any, **kwargs: Any) -> Any:
        recorder.current().phase(phase)
        return call(*args, **kwargs)

    return entered


def _in_phase(call: Call, phase: str) -> Call:
    def held(*args: Any, **kwargs: Any) -> Any:
        recorder.current().phase(phase)
        result = call(*args, **kwargs)
        recorder.current().phase("train")
        return result

    return held


def _timed(call: Call, steps: Steps) -> Call:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began_s = time.monotonic()
        result = call(*args, **kwargs)
        steps.save_s += time.monotonic() - began_s
        return result

    return timed


def _checked_load(call: Call) -> Call:
    """A restore that was asked for and did not take place must not become a training from the beginning."""

    def load(*args: Any, **kwargs: Any) -> Any:
        asked = os.environ.get(RESTORE_STEP_ENV, "")
        recorder.current().phase("load")
        try:
            result = call(*args, **kwargs)
        except SystemExit as end:
            # --exit-on-missing-checkpoint ends with exit code 0, which would look like a finished run
            if asked and not end.code:
                raise CheckpointError(f"Megatron-LM found no checkpoint of train_step {asked} to load") from end
            raise
        if asked and int(result[0]) != int(asked):
            raise CheckpointError(f"Megatron-LM loaded iteration {result[0]}, train_step {asked} was asked for")
        return result

    return load
