"""The demo's proof: losses beside the undisturbed run's, and every sample consumed once, in order."""

from __future__ import annotations

import json
from pathlib import Path

from outlast.reliability.history import RunView
from outlast.reliability.model import Noun

TOLERANCE = 1e-5
"""Relative; another number of replicas sums gradients in another order."""


class Comparison(Noun, frozen=True, kw_only=True):
    target: int
    identical_until_step: int
    """Losses are bit-identical to the reference's up to this train_step."""
    same_layout_until_step: int
    """The last train_step before the layout changed; the target where it never did."""
    max_relative_loss_difference: float
    """Over all train_steps."""
    steps_compared: int
    samples_once: bool
    samples: int
    samples_problem: str = ""

    @property
    def right(self) -> bool:
        return (
            self.steps_compared == self.target
            and self.identical_until_step >= self.same_layout_until_step
            and self.max_relative_loss_difference <= TOLERANCE
            and self.samples_once
        )


def compare(reference: RunView, broken: RunView, folder: Path, *, global_batch: int) -> Comparison:
    """`broken` against `reference`, over the train_steps that counted in the end."""
    wanted = {s.train_step: s.loss for s in reference.steps}
    found = {s.train_step: s.loss for s in broken.steps}
    identical = 0
    for train_step in range(1, reference.target + 1):
        if train_step not in found or found[train_step] != wanted.get(train_step):
            break
        identical = train_step
    differences = [
        abs(loss - other) / max(abs(other), 1e-300)
        for step, loss in found.items()
        if loss is not None and (other := wanted.get(step)) is not None
    ]
    samples, problem = check_samples(folder, broken, global_batch)
    return Comparison(
        target=reference.target,
        identical_until_step=identical,
        same_layout_until_step=_same_layout_until(broken, reference.target),
        max_relative_loss_difference=max(differences, default=float("inf")),
        steps_compared=len(differences),
        samples_once=not problem,
        samples=samples,
        samples_problem=problem,
    )


def _same_layout_until(view: RunView, target: int) -> int:
    first = view.attempts[0].plan.layout if view.attempts else None
    for attempt in view.attempts:
        if attempt.plan.layout != first:
            return attempt.plan.restore_step
    return target


def check_samples(folder: Path, view: RunView, global_batch: int) -> tuple[int, str]:
    """Samples that the final lineage consumed, and '' or what is wrong: each once, in the order of the train_steps.

    Read from what the ranks themselves wrote down, not from the supervisor's log. `view.steps` is the lineage; of a
    train_step that several attempts did, the last one counts.
    """
    consumed = _read(folder)
    done = 0
    for train_step in sorted(s.train_step for s in view.steps):
        attempt = max((a for a, step in consumed if step == train_step), default=0)
        found = sorted(consumed.get((attempt, train_step), []))
        wanted = list(range((train_step - 1) * global_batch, train_step * global_batch))
        if found != wanted:
            return done, f"train_step {train_step} consumed samples {found}, expected {wanted}"
        done += len(found)
    return done, ""


def _read(folder: Path) -> dict[tuple[int, int], list[int]]:
    """(attempt, train_step) -> samples of all replicas. A line that a killed rank left unfinished is passed over."""
    consumed: dict[tuple[int, int], list[int]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            consumed.setdefault((line["attempt"], line["train_step"]), []).extend(line["samples"])
    return consumed
