"""While an attempt trains: how often it saves follows what its saves cost. An edge; the arithmetic is saving.py's.

The number goes into a file of the attempt that the reference trainer reads; a change of less than a fifth is none.
Megatron-LM's scripts read no such file: they get the number at each attempt's start.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from outlast.reliability.attempt import State
from outlast.reliability.saving import next_interval

if TYPE_CHECKING:
    from outlast.reliability.supervisor import Supervisor

LOOK_S: Final = 30.0
ENOUGH_STEPS: Final = 8
"""Train_steps of an attempt before their time is believed."""
CHANGE: Final = 0.2


class Pacing:
    """What the present attempt was told."""

    def __init__(self, loop: Supervisor) -> None:
        self.loop = loop
        self.looked_mono_s = loop.parts.clock.mono_s()

    def look(self) -> None:
        loop, run = self.loop, self.loop.parts.run
        now, mono_s = loop.state.evidence.current, loop.parts.clock.mono_s()
        if not run.checkpoint.auto or run.task.kind != "reference" or mono_s < self.looked_mono_s + LOOK_S:
            return
        self.looked_mono_s = mono_s
        if now is None or now.state is not State.TRAINING or len(now.step_times_s) < ENOUGH_STEPS:
            return
        steps, because = next_interval(loop.state.evidence, run)
        path = loop.parts.run_dir.save_every(now.plan.attempt)
        told = _read(path) or now.plan.save_every or run.checkpoint.every_steps
        if steps and abs(steps - told) > CHANGE * told:
            part = path.with_suffix(".part")
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(f"{steps}\n")
            os.replace(part, path)
            loop.note(f"from now on a checkpoint every {steps} train_steps (it was {told}): {because}")


def _read(path: os.PathLike[str]) -> int:
    try:
        with open(path, encoding="ascii") as file:
            text = file.read(20).strip()
    except (OSError, UnicodeDecodeError):
        return 0
    return int(text) if text.isdecimal() else 0
