"""Rules on training logs and measurements: slow steps, spikes, replicas that differ. Pure.

"Job, not node" is the first answer to a slow step: step time is the same on every rank, so only a comparison of ranks
names one. A climb over several steps is optimisation; a jump in one step at one rank is arithmetic.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from outlast.reliability.judging.facts import HashVote, HostFault, Measured, RankSaid, Step
from outlast.reliability.judging.facts_run import Reach
from outlast.reliability.judging.scene import Scene, ids
from outlast.reliability.judging.words import Act, Finding, lost
from outlast.reliability.verdict import Kind

RUN_UP_STEPS: Final = 3
"""A climb over so many steps before the peak is a run-up."""
CLIMB_FACTOR: Final = 1.5
SPIKE_FACTOR: Final = 10.0
"""As in Megatron's own check."""
SLOWER: Final = 0.03
"""A step change above this that stays (facts on thresholds: warn above 3%, held)."""
RANK_SLOWER: Final = 0.03
WARM_UP: Final = 5


def hashes(scene: Scene) -> Iterator[Finding]:
    """Replicas that must be equal to the bit: the odd one out computes wrong numbers, where equality was promised."""
    votes = scene.seen(HashVote)
    for vote in votes:
        if not vote.deterministic or not vote.odd:
            yield Finding(
                verdict=Kind.NO_FAULT,
                action=Act.LOG,
                rule="drift",
                why="replicas differ in low bits where bitwise equality was never promised",
                evidence=ids([vote]),
            )
        elif 2 * len(vote.odd) < vote.voters:
            yield Finding(
                verdict=Kind.HARDWARE_SUSPECT,
                action=Act.SPARE,
                rule="odd_replica",
                why=f"one of {vote.voters} replicas differs: its GPU computes or holds wrong numbers; go back to "
                f"{vote.last_equal} or older",
                culprit=f"rank {vote.odd[0]}'s GPU" + (f" on {vote.node}" if vote.node else ""),
                evidence=ids([vote]),
                rejected=(lost("the first replica's word", "the majority tells which one is odd"),),
                checks={"rollback_to": vote.last_equal},
            )


def spikes(scene: Scene) -> Iterator[Finding]:
    """Loss or gradient norm that rose: with a run-up it is optimisation, in one step it may be arithmetic."""
    steps = scene.seen(Step)
    norms = [s for s in steps if s.grad_norm is not None]
    nan = [s for s in steps if any(v is not None and (v != v or abs(v) == float("inf")) for v in (s.loss, s.grad_norm))]
    if nan:
        yield Finding(
            verdict=Kind.AMBIGUOUS,
            action=Act.RESTART,
            rule="loss_is_no_number",
            why=f"loss or gradient norm is no number at train_step {nan[0].iteration}: repeat from a checkpoint",
            evidence=ids(nan),
            rejected=(lost("a node", "a global quantity names none"),),
        )
        return
    values = [s.grad_norm for s in norms if s.grad_norm is not None] or [s.loss for s in steps if s.loss is not None]
    if len(values) < 3:
        return
    usual = statistics.median(sorted(values)[: max(1, len(values) // 2)])
    peak = max(range(len(values)), key=lambda i: values[i])
    factor = SPIKE_FACTOR if norms else 2.0
    if usual <= 0 or values[peak] < factor * usual:
        return
    climb = _climb(values, peak)
    yield Finding(
        verdict=Kind.DATA_OR_OPTIMIZER if climb >= RUN_UP_STEPS else Kind.AMBIGUOUS,
        action=Act.PAGE,
        rule="run_up" if climb >= RUN_UP_STEPS else "spike",
        why=f"a climb over {climb} steps in a global quantity: optimisation or data, keep the checkpoints around it"
        if climb >= RUN_UP_STEPS
        else "a jump without a run-up: look at the ranks' own norms before the reduction",
        evidence=ids(norms or steps),
        rejected=(
            lost("a flipped bit", "a flip has no run-up") if climb >= RUN_UP_STEPS else lost("a node", "none is named"),
            lost("roll back", "a person decides what a spike is worth"),
        ),
    )


def _climb(values: Sequence[float], peak: int) -> int:
    """Over how many steps the values rose to their peak."""
    climb, at = 0, peak
    while at > 0 and values[at] > CLIMB_FACTOR * values[at - 1]:
        climb, at = climb + 1, at - 1
    return climb


def slow_job(scene: Scene) -> Iterator[Finding]:
    """Step time that rose and stays. The job's log says that; only a comparison of ranks says where."""
    steps = [s for s in scene.seen(Step) if s.step_s]
    slower = [m for m in scene.seen(Measured) if m.what == "compute" and m.change >= RANK_SLOWER]
    changed = _level_change(steps)
    batches = {s.batch for s in steps if s.batch is not None}
    if changed is None or len(batches) > 1:
        return
    rotates = any(r.rotates for r in scene.of(Reach))
    one = slower[0] if len(slower) == 1 and slower[0].others_flat and not rotates else None
    if one is not None:
        where = one.node or f"ranks {one.first_rank}-{one.last_rank}"
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.SPARE,
            rule="slow_ranks",
            why=f"steps are {changed:.0%} slower and stay so; compute time of the ranks on {where} rose by "
            f"{one.change:.1%}, that of the others did not: swap at the next checkpoint",
            culprit=where,
            evidence=ids([*steps, one]),
            rejected=(
                lost("all ranks", "collectives make step time equal; compute time is not"),
                lost("under the limit", "a step change that stays is a degraded part, however small"),
            ),
        )
    else:
        yield Finding(
            verdict=Kind.AMBIGUOUS,
            action=Act.PAGE,
            rule="slow_job",
            why=f"steps are {changed:.0%} slower and stay so; step time is equal on all ranks, so it names none: "
            "compare compute time by rank",
            evidence=ids(steps),
            rejected=(lost("a node", "no comparison of ranks"),),
        )


def _level_change(steps: Sequence[Step]) -> float | None:
    """By how much step time rose to a level that it keeps; None where it did not."""
    rows = [s.step_s for s in steps if s.step_s and s.iteration > WARM_UP]
    if len(rows) < 4:
        return None
    best = max(range(1, len(rows)), key=lambda i: statistics.median(rows[i:]) - statistics.median(rows[:i]))
    before, after = statistics.median(rows[:best]), statistics.median(rows[best:])
    change = after / before - 1 if before else 0.0
    # the last steps must still be slow: a single long step is a pause
    return change if change > SLOWER and len(rows) - best >= 2 and rows[-1] > before * (1 + SLOWER) else None


def named_rank(scene: Scene) -> Iterator[Finding]:
    """A detector that compares ranks names one."""
    slow = [s for s in scene.seen(RankSaid) if s.key == "rank_slow"]
    if slow:
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.JOB_END,
            rule="detector_names_rank",
            why="the straggler detector finds one rank far behind the next slowest",
            culprit="the rank that the detector names",
            evidence=ids(slow),
            rejected=(lost("at once", "it still trains; a drain waits for a checkpoint"),),
        )


def measured(scene: Scene) -> Iterator[Finding]:
    """Figures without any line of a machine: communication that is slower is the network's, shared by all."""
    own = scene.seen(Measured)
    if own and not scene.of(HostFault):
        yield Finding(
            verdict=Kind.AMBIGUOUS,
            action=Act.PAGE,
            rule="measured_only",
            why="measured figures alone: no line of a machine says what they come from",
            evidence=ids(own),
            rejected=(lost("a node", "figures in words convict nobody"),),
        )


def progress(scene: Scene) -> Iterator[Finding]:
    """A training log in which nothing stands out."""
    steps = scene.seen(Step)
    if steps:
        yield Finding(
            verdict=Kind.NO_FAULT,
            action=Act.NONE,
            rule="progress",
            why="the log shows ordinary steps",
            evidence=ids(steps),
        )
