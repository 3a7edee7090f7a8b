"""Rules on what ranks print: the earliest primary error, repeated train_steps, exits, signals. Pure.

A program's word blames a program; what CUDA reports of its GPU's memory or links is a suspicion of that GPU. What
comes back at the same train_step elsewhere is data or code; what follows one GPU is the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from outlast.reliability.judging.facts import Ended, RankSaid, Strike
from outlast.reliability.judging.facts_run import WriteFailed
from outlast.reliability.judging.scene import Scene, ids, nodes_of
from outlast.reliability.judging.words import Act, Finding, lost
from outlast.reliability.verdict import Kind

GPU_WORDS: Final = frozenset({"cuda_ecc", "cuda_lost", "cuda_nvlink"})
RERUN: Final = frozenset(
    {"rerun_unexpected", "rerun_transient", "rerun_elsewhere", "rerun_persistent", "rerun_same_everywhere"}
)
EXIT_ELSEWHERE, EXIT_ANSWER = 16, 17
"""Megatron's exit codes: repeat on another GPU; the answer of that repeat."""
STORAGE_KEYS: Final = frozenset({"filesystem", "filesystem_full", "filesystem_stale", "checkpoint_error"})
_SIGKILL: Final = 9


def owner_of(said: RankSaid | None) -> str:
    """The rank, and its node where that is known."""
    if said is None:
        return "the rank"
    rank = f"rank {said.rank}" if said.rank is not None else "the rank"
    return f"{rank} on {said.node}" if said.node else rank


class Rerun(NamedTuple):
    rule: str
    verdict: Kind
    action: Act
    why: str
    culprit: str | None = None
    """{} is the rank that told it."""


_DIFFERS: Final = Rerun(
    "rerun_differs",
    Kind.HARDWARE_FAULT,
    Act.SPARE,
    "the step repeated on another GPU gives another result: the GPU that was first computes wrong numbers",
    "the GPU of the first try, not the one that reports it",
)
_SAME: Final = Rerun(
    "rerun_same_everywhere",
    Kind.DATA_OR_OPTIMIZER,
    Act.STOP,
    "the same result on another GPU: it follows the state and the data, not a GPU",
)
_ELSEWHERE: Final = Rerun(
    "rerun_elsewhere",
    Kind.AMBIGUOUS,
    Act.SPARE,
    "the same unexpected result twice on one GPU (exit 16): repeat on another GPU to tell it from the data",
    "{}: its GPU or the data",
)
_TRANSIENT: Final = Rerun(
    "rerun_transient",
    Kind.HARDWARE_SUSPECT,
    Act.RESTART,
    "the repeat gives another result on the same GPU: a transient error, one strike",
    "the GPU of {}, one strike",
)
_UNANSWERED: Final = Rerun(
    "validation_failed",
    Kind.AMBIGUOUS,
    Act.STOP,
    "exit 17 without its answer: whether GPU or data is in the rerun tracker's log",
)


def reruns(scene: Scene) -> Iterator[Finding]:
    """Megatron's repeat of a train_step: another GPU tells hardware from data."""
    said = [s for s in scene.seen(RankSaid) if s.key in RERUN]
    codes = {e.exit_code for e in scene.seen(Ended)} & {EXIT_ELSEWHERE, EXIT_ANSWER}
    if not said and not codes:
        return
    told = _rerun(said, codes)
    if told is None:
        yield _strike(scene, said)
        return
    yield Finding(
        verdict=told.verdict,
        action=told.action,
        rule=told.rule,
        why=told.why,
        culprit=told.culprit.format(owner_of(said[0] if said else None)) if told.culprit else None,
        evidence=ids([*said, *scene.seen(Ended)]),
        rejected=(lost("ranks that timed out", "they waited for the rank that stopped to repeat the step"),),
        checks={"exit_code_meaning": {"16": "resume elsewhere to disambiguate"}} if told is _ELSEWHERE else {},
    )


def _rerun(said: Sequence[RankSaid], codes: set[int | None]) -> Rerun | None:
    """The most telling answer."""
    keys = {s.key for s in said}
    tried = {s.node for s in said if s.key in ("rerun_elsewhere", "rerun_unexpected") and s.node}
    if "rerun_persistent" in keys:
        return _DIFFERS
    if "rerun_same_everywhere" in keys or len(tried) > 1:
        return _SAME
    if EXIT_ELSEWHERE in codes or "rerun_elsewhere" in keys:
        return _ELSEWHERE
    if "rerun_transient" in keys:
        return _TRANSIENT
    return _UNANSWERED if EXIT_ANSWER in codes else None


def not_a_number(scene: Scene) -> Iterator[Finding]:
    """NaN in one rank's own gradients: a strike for its GPU and for the sample; a repeat of either decides."""
    said = [s for s in scene.of(RankSaid) if s.key == "local_nan"]
    if any(not s.past for s in said):
        yield _strike(scene, said)
        return
    strikes = scene.seen(Strike)
    if strikes:
        again = len({s.id or i for i, s in enumerate(scene.of(Strike))}) > 1
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.SPARE if again else Act.RESTART,
            rule="local_anomaly",
            why="an anomaly of one rank before anything was reduced over ranks: "
            + ("again" if again else "one strike"),
            culprit=f"rank {strikes[0].rank}'s GPU",
            evidence=ids(strikes),
            rejected=(lost("harmless", "clipping hid it, the weights may have moved"),),
        )


def _strike(scene: Scene, said: Sequence[RankSaid]) -> Finding:
    tries = {(s.node, s.rank, s.device, s.run, s.train_step) for s in said}
    places = {(s.node, s.rank, s.device) for s in said}
    steps = {s.train_step for s in said if s.train_step is not None}
    runs = {s.run for s in said}
    last = said[-1]
    checks: dict[str, object] = {k: v for k, v in (("rank", last.rank), ("device", last.device)) if v is not None}
    if len(tries) > 1 and len(runs) > 1 and len(places) > 1 and len(steps) == 1:
        verdict, action, why = Kind.DATA_OR_OPTIMIZER, Act.STOP, "the same train_step on another GPU: data or code"
    elif len(tries) > 1 and len(runs) > 1 and len(places) == 1 and len(steps) != 1:
        verdict, action, why = Kind.HARDWARE_SUSPECT, Act.SPARE, "again on the same GPU, at another train_step"
    else:
        verdict, action, why = Kind.AMBIGUOUS, Act.RESTART, "once: a strike for the GPU and one for the samples"
    return Finding(
        verdict=verdict,
        action=action,
        rule="not_a_number",
        why=f"NaN or Inf in the own numbers of {owner_of(last)}: {why}",
        culprit=None if verdict is Kind.DATA_OR_OPTIMIZER else f"{owner_of(last)}: its GPU or the samples",
        evidence=ids(said),
        rejected=(lost("ranks that time out afterwards", "they only wait"),),
        checks=checks,
    )


def gpu_errors(scene: Scene) -> Iterator[Finding]:
    """CUDA's report of lost memory, link or GPU: it suspects the GPU of the first rank that prints it."""
    said = [s for s in scene.seen(RankSaid) if s.key in GPU_WORDS]
    if not said:
        return
    first = said[0]
    later = [s for s in scene.seen(RankSaid) if s.run != first.run and s.id > first.id]
    again = any(s.same_nodes for s in later) or any(s.node and s.node == first.node for s in later)
    domain = first.domain
    yield Finding(
        verdict=Kind.HARDWARE_FAULT if again else Kind.HARDWARE_SUSPECT,
        action=Act.SPARE,
        rule="cuda_reports_hardware",
        why=f"CUDA reports hardware at {owner_of(first)}, before all others"
        + ("; the next job on the same nodes failed too, in another way" if again else "")
        + ("; its NVLink domain follows at once, the rest later" if domain else ""),
        culprit=f"NVLink domain {domain}" if domain else f"the node of {owner_of(first)}",
        evidence=ids([first, *said, *later]),
        rejected=(
            lost("the last reporters", "the error spreads over links and by fate; the earliest counts"),
            lost("the program's size", "memory that fails is not memory that is too small"),
        ),
        checks={"culprit_scope": "domain"} if domain else {},
    )


def job_ends(scene: Scene) -> Iterator[Finding]:
    """Ended by SIGKILL or another signal, and nothing says why."""
    killed = [e for e in scene.seen(Ended) if e.how == "signal"]
    own = [s for s in scene.seen(RankSaid) if not s.echo]
    if not killed or own or any(e.how == "oom" for e in scene.seen(Ended)):
        return
    wide = scene.everywhere or len(nodes_of(killed)) > 2
    number = killed[0].posix_signal
    yield Finding(
        verdict=Kind.SOFTWARE_FAULT if wide else Kind.TRANSIENT,
        action=Act.STOP if wide else Act.RESTART,
        rule="killed_from_outside" if wide else "unexplained_death",
        why=f"ended by signal {number} without a record of the kernel"
        + (", on any node: somebody else's automation kills it" if wide else "; once is chance"),
        culprit="another automation that kills jobs" if wide else None,
        evidence=ids(killed),
        rejected=(lost("one node after the other", "it happens wherever the job runs"),) if wide else (),
    )


def program_errors(scene: Scene) -> Iterator[Finding]:
    """The program's own error, by its kind."""
    own = [s for s in scene.seen(RankSaid) if not s.echo and s.key not in STORAGE_KEYS and s.action != "ignore"]
    # the net's errors are weighed with both ends in view (rules_collective.py)
    own = [s for s in own if s.class_ not in ("nccl_net_error", "straggler", "progress")]
    if not own or any(True for _ in scene.seen(WriteFailed)):
        return
    first = own[0]
    runs = {s.run for s in own if s.run and s.text == first.text}
    if first.key == "interrupted":
        verdict, action, why = Kind.OPERATOR_ACTION, Act.NONE, "a person interrupted it"
    elif first.action == "stop_job":
        verdict, action, why = Kind.APP_FAULT, Act.STOP, "deterministic: a restart ends in the same way"
    elif len(runs) > 2:
        verdict, action, why = Kind.APP_FAULT, Act.STOP, "the same error in every try: restarting cannot help"
    elif first.class_ == "nccl_internal":
        verdict, action, why = Kind.SOFTWARE_FAULT, Act.RESTART, "an error inside the library"
    else:
        verdict, action, why = Kind.APP_FAULT, Act.RESTART, "the program's own error"
    yield Finding(
        verdict=verdict,
        action=action,
        rule="first_primary_error",
        why=f"{owner_of(first)}: {why}; the other ranks only followed",
        culprit=None if first.key == "interrupted" else "the program",
        evidence=ids(own),
        rejected=(lost("hardware", "no line of a kernel, and what ranks print blames programs"),),
    )


def task_exits(scene: Scene) -> Iterator[Finding]:
    """Only an exit code is known."""
    ends = [e for e in scene.seen(Ended) if e.how == "exit" and e.exit_code not in (0, None)]
    if ends:
        yield Finding(
            verdict=Kind.APP_FAULT,
            action=Act.RESTART,
            rule="exit_code",
            why=f"a task ended with code {ends[0].exit_code}, and nothing blames a node",
            culprit="the program",
            evidence=ids(ends),
            rejected=(lost("a node", "an exit code names none"),),
        )
