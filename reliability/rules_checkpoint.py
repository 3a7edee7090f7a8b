"""Rules about the checkpoint that an attempt began from: refused, not as saved, damaged, or the cause of what follows.

    does not verify                      set aside, the one before it is used
    a rank refuses to load it            the same; where the one before is "not as saved" too, a person is called
    the same failure after the same load on different nodes      the same
    a node that computed or kept wrong numbers is convicted      every checkpoint that it had a hand in since the first
                                                                 suspicion is set aside with it

Pure. None of these blames a node for what moves with a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outlast.reliability.evidence import AttemptFacts, Evidence, ExitFact, Failure
from outlast.reliability.model import Node
from outlast.reliability.policy import Case, Finding
from outlast.reliability.verdict import Confidence, Kind, Rejected, Scope, Verdict
from outlast.reliability.verdict_shapes import NO_HARDWARE, on_exit

NOT_AS_SAVED: Final = "NotAsSaved"
"""Whole by every hash, but the values that came out of it are not the ones that went in."""
CHECKPOINT_ERRORS: Final = (
    "CheckpointError",
    "NotWhole",
    "NotCommitted",
    NOT_AS_SAVED,
    "CheckpointingException",
    "CheckpointException",
)
SUSPICIONS: Final = frozenset({48, 63, 64, 92, 94, 95, 140})
"""XIDs that tell of a GPU whose memory goes wrong, some of them long before it is convicted."""
SPOILS: Final = frozenset({95})
"""XIDs after which any number of that node may be wrong, saved ones too: errors that were not contained."""
_CHANCE: Final = (9, 15)
"""POSIX signals that anybody may send."""


def error_name(exception: str) -> str:
    return exception.split(":")[0].rsplit(".", 1)[-1]


def bad_checkpoints(case: Case) -> Iterator[Finding]:
    """A committed checkpoint that does not verify is set aside; the one before it is used."""
    for fact in case.evidence.bad_checkpoints:
        bad = fact.checkpoint
        yield Verdict(
            key=f"checkpoint:{fact.seq}",
            kind=Kind.CHECKPOINT_UNUSABLE,
            scope=Scope.CHECKPOINT,
            rule="does_not_verify",
            because=f"the checkpoint of train_step {bad.train_step} does not verify: {bad.why}; nothing is deleted",
            confidence=Confidence.HIGH,
            quarantine=bad.train_step,
            evidence=(fact.seq,),
            rejected=(Rejected(alternative="any node", why="found by its hashes before a rank was started"),),
        )


def refuses_load(first: ExitFact) -> bool:
    """Whether this exit says that the checkpoint cannot be used."""
    return first.exit.phase == "load" and error_name(first.exit.exception) in CHECKPOINT_ERRORS


def refused(case: Case, now: AttemptFacts, first: ExitFact) -> Verdict:
    step, gone = now.plan.restore_step, first.exit
    if error_name(gone.exception) == NOT_AS_SAVED:
        return _not_as_saved(case, now, first)
    return on_exit(
        now,
        first,
        kind=Kind.CHECKPOINT_UNUSABLE,
        scope=Scope.CHECKPOINT,
        rule="load_refused",
        because=f"rank {gone.rank} could not load the checkpoint of train_step {step}: {gone.exception}",
        confidence=Confidence.HIGH,
        rank=gone.rank,
        quarantine=step if step > 0 else -1,
        rejected=(NO_HARDWARE,),
    )


def _not_as_saved(case: Case, now: AttemptFacts, first: ExitFact) -> Verdict:
    """Once, the checkpoint; when the one before it is not as saved either, it is how they are written or read."""
    step, past = now.plan.restore_step, case.evidence.past[-1:]
    again = [f for f in past if error_name(f.exception) == NOT_AS_SAVED and f.restore_step != step]
    before = f", as that of {again[0].restore_step} before it" if again else ""
    return on_exit(
        now,
        first,
        kind=Kind.SOFTWARE_FAULT if again else Kind.CHECKPOINT_UNUSABLE,
        scope=Scope.EVERYTHING if again else Scope.CHECKPOINT,
        rule="not_as_saved_again" if again else "not_as_saved",
        because=f"what was restored from the checkpoint of train_step {step} is not what was saved{before}: "
        + ("it is how they are written or read, see `outlast doctor`" if again else first.exit.exception),
        confidence=Confidence.HIGH,
        hold=bool(again),
        quarantine=-1 if again or step <= 0 else step,
        rejected=(
            NO_HARDWARE,
            Rejected(alternative=f"node {first.exit.node}", why="all ranks compare one sum over all of them"),
        ),
    )


def suspect(now: AttemptFacts, first: ExitFact, what: str) -> Verdict:
    """The same failure moved to other nodes with the checkpoint."""
    step = now.plan.restore_step
    return on_exit(
        now,
        first,
        kind=Kind.CHECKPOINT_UNUSABLE,
        scope=Scope.CHECKPOINT,
        rule="same_failure_after_same_restore",
        because=f"{what} again within {now.reached - step} train_steps of restoring {step}, on different nodes: "
        "the checkpoint is suspect and set aside",
        quarantine=step,
        rejected=(NO_HARDWARE, Rejected(alternative="node", why="it moved with the checkpoint, not with the node")),
    )


def follows_the_load(case: Case, now: AttemptFacts, past: Failure) -> bool:
    """Whether both attempts failed soon after the same restore, on different nodes."""
    step = now.plan.restore_step
    near = max(now.reached, past.reached) - step <= case.policy.near_restore_steps
    return 0 < step == past.restore_step and near and past.nodes != now.plan.nodes


def died_so_before(case: Case, now: AttemptFacts, first: ExitFact) -> bool:
    """Without an exception, but by the same signal or exit code, after the same load, on another node."""
    gone, past = first.exit, case.evidence.past[-1] if case.evidence.past else None
    if past is None or past.exception or past.hung or past.node == gone.node or gone.posix_signal in _CHANCE:
        return False
    same = (past.posix_signal, past.exit_code) == (gone.posix_signal, gone.exit_code)
    return same and follows_the_load(case, now, past)


def doubtful(evidence: Evidence, node: Node, told: int) -> tuple[int, ...]:
    """Train_steps of the checkpoints that this node had a hand in since the first suspicion of it, newest first.

    `told`: log number of what convicts it. A train_step that was saved again without the node is not doubtful.
    """
    early = [f.seq for f in evidence.node(node).xids if f.xid.code in SUSPICIONS]
    since = min([told, *early])
    newest = {fact.train_step: fact for fact in evidence.saving.saves}
    return tuple(sorted((s for s, f in newest.items() if f.seq > since and node in f.nodes), reverse=True))


def tell_doubtful(steps: tuple[int, ...]) -> str:
    """A half sentence for the verdict; '' where there is none."""
    if not steps:
        return ""
    shown = ", ".join(map(str, sorted(steps)[:8])) + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")
    return f"; checkpoints that it had a hand in since the first suspicion are set aside: {shown}"
