"""The reference trainer: a small real megatron.core GPT on real text. `main(argv)`, or `python -m` this module.

    join ranks -> open corpus -> build -> restore -> [ fault? step -> stop asked? -> save -> record ] ... -> finish

Runs under torchrun, alone, or in a process that was forked after `preload()`; one code path for CPU and GPU. It is a
program to be supervised, and knows its supervisor only by the step recorder and by a file that asks it to stop.
Importing this module is cheap; everything heavy is imported by `preload()`.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outlast.launchers.recorder import STOP_FILE_ENV, Recorder, current
from outlast.launchers.trainer_args import Settings, TrainerError, parse_settings, why_not
from outlast.launchers.trainer_env import read_rank_env
from outlast.launchers.trainer_faults import Fault, inject, parse_faults
from outlast.launchers.trainer_order import microbatches, rank_ordinals, sample_at
from outlast.launchers.trainer_pace import open_pace
from outlast.launchers.trainer_samples import SampleLog

if TYPE_CHECKING:
    import torch

    from outlast.checkpoint.writer import Saver
    from outlast.launchers.trainer_data import Corpus
    from outlast.launchers.trainer_model import StepOutcome, Trainee
    from outlast.launchers.trainer_state import Progress, RunFacts, Saving
    from outlast.launchers.trainer_world import World

FAULT_ENV: Final = "OUTLAST_FAULT"
SAMPLE_LOG_ENV: Final = "OUTLAST_SAMPLE_LOG"


def preload() -> None:
    """Import what a rank needs, once, in a process that will be forked: no thread is started, no device opened."""
    # numpy's BLAS would start a thread per core at import, and threads do not survive a fork
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # asks the driver's library how many GPUs there are, instead of opening one
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with warnings.catch_warnings():
        _quiet_upstream()
        from outlast.launchers import megatron_cpu, trainer_model, trainer_state  # noqa: F401

        megatron_cpu.adapt()


def _quiet_upstream() -> None:
    """Dozens of lines a rank about Apex, deprecations inside torch and the like would bury a rank's own last words."""
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")


def main(argv: Sequence[str] | None = None) -> int:
    """Train to the last train_step, or until asked to stop; 0 for both."""
    settings = parse_settings(sys.argv[1:] if argv is None else argv)
    recorder = current()
    recorder.phase("init")
    try:
        run(settings, os.environ, recorder)
    except TrainerError as error:
        sys.stderr.write(f"outlast-trainer: {error}\n")
        return 2
    return 0


def run(settings: Settings, env: Mapping[str, str], recorder: Recorder, *, leave: Sequence[str] = ()) -> Training:
    """One attempt. `leave` names upstream faults that are not to be mended: for the tests that show them."""
    rank_env = read_rank_env(env)
    refusal = why_not(settings, rank_env.world_size)
    if refusal:
        raise TrainerError(refusal)
    faults = parse_faults(env.get(FAULT_ENV, ""))
    preload()
    _quiet_upstream()
    from outlast.launchers import megatron_fixes, trainer_world

    megatron_fixes.mend(leave=leave)
    with _term_as_flag(settings.save_on_term) as term:
        world = trainer_world.join(rank_env, settings)
        training = Training(settings, env, world, recorder, term=term, faults=faults)
        training.run()
        trainer_world.leave()
    recorder.phase("idle")
    return training


@contextmanager
def _term_as_flag(wanted: bool) -> Iterator[list[int]]:
    """A list that SIGTERM appends to, where wanted; else SIGTERM ends the process as it does by default."""
    seen: list[int] = []
    if not wanted:
        yield seen
        return
    before = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGTERM, before)


class Training:
    """One attempt's parts, and the loop over them."""

    def __init__(
        self,
        settings: Settings,
        env: Mapping[str, str],
        world: World,
        recorder: Recorder,
        *,
        term: list[int],
        faults: tuple[Fault, ...],
    ) -> None:
        from outlast.launchers import trainer_data, trainer_model, trainer_state, trainer_tiers

        self.settings = settings
        self._place = trainer_tiers.open_place(settings, env)
        self._local_steps: set[int] = set()
        """Saves on their way to the nodes alone."""
        self.world = world
        self.recorder = recorder
        self._term = term
        self._phase = "init"
        self._faults = faults
        self._stop_file = env.get(STOP_FILE_ENV, "")
        self._pace = open_pace(env, world.env.attempt, wanted=settings.save_follows)
        self._every = settings.save_every
        self.corpus: Corpus = trainer_data.open_corpus(
            settings.data_dir, seq=settings.seq, max_bytes=settings.data_bytes
        )
        trainer_state.agree_on_data(self.corpus.identity, world)
        self.facts: RunFacts = trainer_state.describe_run(settings, self.corpus.identity)
        self.trainee: Trainee = trainer_model.build_trainee(settings, world)
        self.progress: Progress = trainer_state.Progress()
        self._sample_log = _open_sample_log(env, world)
        self._saver = _open_saver(settings, self._on_durable)
        self._saving: Saving | None = None
        """The last save, while its copy may go on beside a train_step."""
        self._prepared = False
        self._rest_s = 0.0
        """For how long this train_step's update had to wait for it."""
        self._prints = None if settings.no_fingerprints else trainer_state.watch_prints(self.trainee)

    def run(self) -> None:
        """Restore, train to the end or to the stop, and see the last save durable."""
        self._restore()
        if self.settings.restore_dir is not None:
            self._prepare_saves()
        self._enter("compile")
        stop = False
        while self.progress.train_step < self.settings.train_steps and not stop:
            stop = self._step()
        self._finish()

    def _restore(self) -> None:
        from outlast.launchers import trainer_state, trainer_tiers

        if self.settings.restore_dir is None:
            return
        self._enter("load")
        started_s = time.monotonic()
        path, bring = trainer_tiers.settle_restore(self.settings.restore_dir, self._place, self.world)
        self.progress = trainer_state.load_state(path, self.trainee, self.world, self.facts, self._prints, bring)
        took_s = time.monotonic() - started_s
        count = self._prints.compared if self._prints else 0
        compared = f"{count} tensors as saved" if count else "not compared with fingerprints"
        where = f"from {self.settings.restore_dir} in {took_s:.2f} s"
        self._say(f"restored train_step {self.progress.train_step} {where}, {compared}")

    def _step(self) -> bool:
        """One train_step and what belongs to its end; True where the run has been asked to stop after it."""
        from outlast.launchers import trainer_model, trainer_state

        train_step, before = self.progress.train_step + 1, self.progress
        self.recorder.step_started(train_step)
        started_s = time.monotonic()
        inject(self._faults, rank=self.world.env.rank, train_step=train_step)
        self._rest_s = 0.0
        outcome = trainer_model.train_one_step(
            self.trainee, self.settings, self.world, self._batches(train_step, before.samples), self._end_copy
        )
        self.progress = trainer_state.advance(before, self.settings.global_batch)
        stop = self._stop_agreed()
        step_s = time.monotonic() - started_s
        self._prepare_saves()
        if self._saver is not None:
            self._saver.poll()
        due = self._due(stop)
        self._record(outcome, before, closed=not due)  # before its save: no checkpoint of a step that nobody knows of
        hold_s = self._save(self._saver, local=due == "local") if self._saver is not None and due else 0.0
        self._enter("train")
        self._tell(outcome, step_s, self._rest_s + hold_s)
        return stop

    def _batches(self, train_step: int, consumed: int) -> Iterator[torch.Tensor]:
        """This rank's microbatches, [micro_batch, seq + 1] each, read as they are asked for."""
        import torch

        s, world, read = self.settings, self.world, []
        for microbatch in range(microbatches(global_batch=s.global_batch, micro_batch=s.micro_batch, dp=world.dp)):
            ordinals = rank_ordinals(
                consumed, microbatch=microbatch, micro_batch=s.micro_batch, dp=world.dp, dp_rank=world.dp_rank
            )
            rows = [sample_at(o, seed=s.seed, samples=self.corpus.samples) for o in ordinals]
            read += list(zip(ordinals, rows, strict=True))
            batch = torch.stack([torch.from_numpy(self.corpus.tokens(row)) for row in rows]).to(world.device)
            if microbatch == s.global_batch // (s.micro_batch * world.dp) - 1 and self._sample_log:
                self._sample_log.write(train_step, world.dp_rank, [o for o, _ in read], [r for _, r in read])
            yield batch

    def _stop_agreed(self) -> bool:
        """Whether any rank has seen the stop file or SIGTERM, and how often to save. All ranks get the same answer."""
        if not self._stop_file and not self.settings.save_on_term and not self.settings.save_follows:
            return False
        import torch
        import torch.distributed as dist

        # one rank looks for the file: on a network file system the others may see it a train_step later
        file_seen = self.world.env.rank == 0 and bool(self._stop_file) and os.path.exists(self._stop_file)
        seen = bool(self._term) or file_seen
        every = self._pace.look() if self.world.env.rank == 0 else 0
        said = torch.tensor([int(seen), every], dtype=torch.int64, device=self.world.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        stop, every = map(int, said.tolist())
        if every and every != self._every:
            self._say(f"a save every {every} train_steps from now on, it was {self._every}")
            self._every = every
        return bool(stop)

    def _due(self, stop: bool) -> str:
        """Whether this train_step is saved: '' no, 'local' on the nodes alone, 'full' in the checkpoint directory."""
        if self._saver is None:
            return ""
        step, every, local_every = self.progress.train_step, self._every, self.settings.local_every
        if stop or (every and (step >= self.settings.train_steps or step % every == 0)):
            return "full"
        return "local" if self._place is not None and local_every and step % local_every == 0 else ""

    def _save(self, saver: Saver, *, local: bool) -> float:
        """Start a save of the train_step just recorded; returns for how long that held the loop."""
        from outlast.launchers import trainer_state

        spread = None
        if local and self._place is not None:
            spread = self._place.spread(self.progress.train_step)
            self._local_steps.add(self.progress.train_step)
        self._enter("save")
        restored = self.settings.restore_dir
        self._saving = trainer_state.save_state(
            saver,
            self.trainee,
            self.world,
            self.progress,
            self.facts,
            parents=(restored.name,) if restored else (),
            prints=self._prints,
            root=self.settings.checkpoint_dir or Path(),
            spread=spread,
        )
        self.recorder.step_closed(self._saving.hold_s)
        return self._saving.hold_s

    def _prepare_saves(self) -> None:
        """Staging memory and a plan, before a save has to wait for them: once there are moments, so after a restore or
        the first train_step, which is slow anyway."""
        from outlast.launchers import trainer_state

        if self._saver is not None and not self._prepared:
            self._prepared = True
            trainer_state.prepare_saves(self._saver, self.trainee, self.world)

    def _end_copy(self) -> None:
        """Before the state changes: what is left of the copy of the last save."""
        if self._saving is not None:
            self._rest_s = self._saving.finish()
            self._saving = None

    def _record(self, outcome: StepOutcome, before: Progress, *, closed: bool) -> None:
        s, train_step = self.settings, self.progress.train_step
        if outcome.loss is not None and not math.isfinite(outcome.loss):
            raise FloatingPointError(f"train_step {train_step}: loss is {outcome.loss}, samples {before.samples} on")
        self.recorder.step_done(
            train_step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            samples_from=before.samples,
            samples_to=self.progress.samples,
            tokens=s.global_batch * s.seq,
            save_s=self._rest_s,
            closed=closed,
        )

    def _tell(self, outcome: StepOutcome, step_s: float, save_s: float) -> None:
        self._say(
            f"train_step {self.progress.train_step}/{self.settings.train_steps} | loss {outcome.loss or 0.0:.4f} | "
            f"grad norm {outcome.grad_norm or 0.0:.3f} | {step_s * 1e3:.0f} ms"
            + (f" | save {save_s * 1e3:.0f} ms" if save_s else "")
        )

    def _finish(self) -> None:
        from outlast.launchers import megatron_fixes

        for chunk in self.trainee.wrapped:
            megatron_fixes.settle_parameters(chunk)
        if self._saver is not None:
            self._enter("save")
            self._end_copy()
            self._saver.finish()
            self._saver.close()

    def _enter(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self.recorder.phase(phase)

    def _on_durable(self, train_step: int, hold_s: float, durable_s: float) -> None:
        if train_step in self._local_steps:
            self._local_steps.discard(train_step)
            self._say(f"local checkpoint {train_step} on its nodes ({durable_s:.2f} s)")
            return
        self.recorder.checkpoint_durable(train_step, durable_s)
        self._say(f"checkpoint {train_step} durable ({durable_s:.2f} s)")

    def _say(self, line: str) -> None:
        """Print on the last rank: the one that holds the loss in every layout."""
        if self.world.env.is_last:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def _open_sample_log(env: Mapping[str, str], world: World) -> SampleLog | None:
    folder = env.get(SAMPLE_LOG_ENV, "")
    if not folder or not world.speaks_for_replica:
        return None
    return SampleLog(Path(folder), world.env.rank, world.env.attempt)


def _open_saver(settings: Settings, on_durable: object) -> Saver | None:
    from outlast.checkpoint.writer import Saver

    if settings.checkpoint_dir is None:
        return None
    return Saver(settings.checkpoint_dir, on_durable=on_durable, timeout_s=settings.timeout_s)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
