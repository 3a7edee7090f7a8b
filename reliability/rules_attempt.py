"""Rules about an attempt that died, hangs, stands in the wrong place or ended too early. Pure.

A rank's output blames a program, a checkpoint or the data; it never convicts hardware. What repeats at the same
train_step is not hardware; what repeats on the same node may be.
"""

from __future__ import annotations

from collections.abc import Iterator

from outlast.reliability.attempt import State
from outlast.reliability.evidence import (
    ECHO_CLASSES,
    RERUN_CODES,
    AttemptFacts,
    ExitFact,
    Failure,
    failure_of,
    primary_exit,
    tells_rerun,
)
from outlast.reliability.model import Node
from outlast.reliability.policy import Case, Finding, Pending
from outlast.reliability.rules_checkpoint import (
    died_so_before,
    doubtful,
    follows_the_load,
    refused,
    refuses_load,
    suspect,
    tell_doubtful,
)
from outlast.reliability.verdict import Confidence, Kind, Rejected, Scope, Verdict
from outlast.reliability.verdict_shapes import NO_HARDWARE, on_exit


def misplaced(case: Case) -> Iterator[Finding]:
    """A rank that runs where it should not is our fault, and the attempt is stopped."""
    now = case.evidence.current
    if now is None or not now.running:
        return
    planned = {p.rank: p.node for p in now.plan.ranks}
    for rank, seen in now.placed.items():
        if seen.node == planned.get(rank) and seen.node not in case.barred:
            continue
        yield Verdict(
            key=f"placement:{now.plan.attempt}",
            kind=Kind.SOFTWARE_FAULT,
            scope=Scope.RANK,
            rule="misplaced_rank",
            because=f"rank {rank} runs on {seen.node}, planned was {planned.get(rank)}"
            + (", and that node is convicted" if seen.node in case.barred else "")
            + ": a fault of outlast, the attempt is stopped",
            confidence=Confidence.HIGH,
            rank=rank,
            stops=True,
            evidence=(now.started_seq,),
        )


def dead_ranks(case: Case) -> Iterator[Finding]:
    """A rank ended by itself. Waits for the kernel's word first, then looks for the exit that began it."""
    now = case.evidence.current
    if now is None or not now.running:
        return
    first = primary_exit(now.exits)
    if first is None:
        return
    # ranks that only saw a peer go, or that only ended with a rerun: the rank that began it may be heard a little later
    follows = first.exit.error_class in ECHO_CLASSES or (
        first.exit.exit_code in RERUN_CODES and not tells_rerun(first) and not first.exit.exception
    )
    patience = case.policy.echo_s if follows else case.policy.settle_s
    due = min(f.seen_s for f in now.exits if not f.exit.asked) + patience
    if case.now_s < due:
        yield Pending(again_at_s=due, why="the kernel's word on a rank that died")
        return
    yield explain_exit(case, now, first)


def explain_exit(case: Case, now: AttemptFacts, first: ExitFact) -> Verdict:
    """The verdict on the exit that began it, most specific explanation first."""
    gone = first.exit
    if tells_rerun(first):
        return _rerun(case, now, first)
    if gone.error_class in ECHO_CLASSES:
        return _only_echoes(now, first)
    if refuses_load(first):
        return refused(case, now, first)
    if gone.exception or gone.error_class in ("app_exception", "oom_job", "data_error"):
        return _program(case, now, first)
    return _unexplained(case, now, first)


def _same(case: Case, now: AttemptFacts) -> list[Failure]:
    """Earlier attempts, newest first and without a gap, that failed in the same way at the same train_step."""
    me = failure_of(now, case.evidence)
    same: list[Failure] = []
    for past in reversed(case.evidence.past):
        if not (past.exception == me.exception and past.reached == me.reached and past.phase == me.phase):
            break
        same.append(past)
    return same


def _program(case: Case, now: AttemptFacts, first: ExitFact) -> Verdict:
    """An exception of the program's own: nobody is blamed, unless it comes back at the same place."""
    gone = first.exit
    what = gone.exception or gone.error_class
    same = _same(case, now) if gone.exception else []
    node_sets = {now.plan.nodes, *(f.nodes for f in same)}
    if len(same) + 1 >= case.policy.same_failure_limit:
        where = f"{len(node_sets)} different node sets" if len(node_sets) > 1 else "the same nodes"
        return on_exit(
            now,
            first,
            kind=Kind.DATA_OR_OPTIMIZER,
            scope=Scope.TRAIN_STEP,
            rule="same_failure_again",
            because=f"the same exception ({what}) at train_step {now.reached + 1} in {len(same) + 1} attempts "
            f"on {where}: this is data or code, restarting cannot help",
            confidence=Confidence.HIGH,
            rank=gone.rank,
            hold=True,
            rejected=(NO_HARDWARE, Rejected(alternative="chance", why="it came back at the same train_step")),
        )
    if any(follows_the_load(case, now, past) for past in same):
        return suspect(now, first, what)
    return on_exit(
        now,
        first,
        kind=Kind.APP_FAULT,
        scope=Scope.RANK,
        rule="program_exception",
        because=f"rank {gone.rank} on {gone.node} ended with {what} after train_step {now.reached}; "
        "the kernel says nothing against any node, the other ranks only followed",
        confidence=Confidence.HIGH if gone.exception else Confidence.MEDIUM,
        rank=gone.rank,
        rejected=(NO_HARDWARE, Rejected(alternative="checkpoint or data", why="not seen before at this train_step")),
    )


def _only_echoes(now: AttemptFacts, first: ExitFact) -> Verdict:
    return on_exit(
        now,
        first,
        kind=Kind.AMBIGUOUS,
        scope=Scope.EVERYTHING,
        rule="only_echoes",
        because="every rank that ended says only that another one was gone; which one began it is not known",
        confidence=Confidence.LOW,
        rejected=(NO_HARDWARE,),
    )


def _unexplained(case: Case, now: AttemptFacts, first: ExitFact) -> Verdict:
    """Killed, or ended without a word. Once is chance; again on the same node is that node."""
    gone = first.exit
    how = f"POSIX signal {gone.posix_signal}" if gone.posix_signal else f"exit code {gone.exit_code}, no exception"
    if died_so_before(case, now, first):
        return suspect(now, first, how)
    before = _deaths_in_a_row(case, gone.node)
    if before + 1 >= case.policy.suspect_after and len(now.plan.nodes) > 1:
        return _suspect_node(now, first, how, before + 1)
    return on_exit(
        now,
        first,
        kind=Kind.TRANSIENT,
        scope=Scope.RANK,
        rule="unexplained_death",
        because=f"rank {gone.rank} on {gone.node} ended with {how} and nothing says why; "
        "once is chance, nobody is blamed",
        confidence=Confidence.LOW,
        rank=gone.rank,
        rejected=(NO_HARDWARE, Rejected(alternative="program", why="no exception in any rank's output")),
    )


def _deaths_in_a_row(case: Case, node: Node) -> int:
    """Unexplained deaths and hangs on this node in the attempts just before, without another end between.

    A kill for memory is explained: by the program's need, however often it comes back to one node. So is a hang at the
    train_step at which the present attempt hangs: by the program.
    """
    count, now = 0, case.evidence.current
    for past in reversed(case.evidence.past):
        same_hang = past.hung and now is not None and now.no_progress is not None and past.reached == now.reached
        explained = bool(past.exception) or past.for_memory or same_hang
        if past.node != node or explained or not (past.posix_signal or past.hung):
            break
        count += 1
    return count


def _suspect_node(now: AttemptFacts, first: ExitFact, how: str, times: int) -> Verdict:
    gone = first.exit
    return on_exit(
        now,
        first,
        kind=Kind.HARDWARE_SUSPECT,
        scope=Scope.NODE,
        rule="same_node_again",
        because=f"rank {gone.rank} ended with {how}, the {times}. unexplained death in a row on {gone.node}: "
        "the node is left out of this run, not drained",
        node=gone.node,
        rank=gone.rank,
        convicts=True,
        rejected=(Rejected(alternative="chance", why="it keeps to one node"),),
    )


def _rerun(case: Case, now: AttemptFacts, first: ExitFact) -> Verdict:
    """Megatron's own re-run of a train_step: 16 asks for another GPU, 17 is its answer."""
    gone = first.exit
    if gone.exit_code == 16:
        return on_exit(
            now,
            first,
            kind=Kind.HARDWARE_SUSPECT,
            scope=Scope.NODE,
            rule="rerun_elsewhere",
            because=f"rank {gone.rank} on {gone.node} computed an unexpected result and the same one again (exit 16): "
            "the train_step is to be repeated on another node",
            node=gone.node,
            rank=gone.rank,
            convicts=True,
            rejected=(Rejected(alternative="drain", why="whether node or program is wrong is told by the repeat"),),
        )
    return _rerun_answer(case, now, first)


def _rerun_answer(case: Case, now: AttemptFacts, at: ExitFact) -> Verdict:
    gone = at.exit
    # the question is the attempt's before this one: an older 16 was answered, or its answer was lost
    before = case.evidence.past[-1] if case.evidence.past and case.evidence.past[-1].exit_code == 16 else None
    if gone.error_class == "instability" or "correct result" in gone.last_words.lower():
        return on_exit(
            now,
            at,
            kind=Kind.DATA_OR_OPTIMIZER,
            scope=Scope.TRAIN_STEP,
            rule="rerun_same_everywhere",
            because="the unexpected result is the same on another node (exit 17): the program or the data, no node",
            confidence=Confidence.HIGH,
            hold=True,
            rejected=(Rejected(alternative="hardware", why="two nodes agree"),),
        )
    # a second rerun speaks of the node that ran the first one, a rerun in place of its own
    culprit = (before.node if before is not None else None) if gone.error_class == "sdc_confirmed" else gone.node
    if culprit is None:
        return _rerun_of_nobody(now, at)
    spoiled = doubtful(case.evidence, culprit, at.seq)
    return on_exit(
        now,
        at,
        kind=Kind.HARDWARE_FAULT,
        scope=Scope.NODE,
        rule="rerun_differs",
        because=f"the train_step repeated gives another result (exit 17): {culprit} computes wrong numbers"
        + tell_doubtful(spoiled),
        quarantine=spoiled[0] if spoiled else -1,
        quarantine_too=spoiled[1:],
        confidence=Confidence.HIGH if before is not None else Confidence.MEDIUM,
        node=culprit,
        rank=gone.rank,
        convicts=True,
        drains=True,
        rejected=(Rejected(alternative="program", why="the same input gave two results"),),
    )


def _rerun_of_nobody(now: AttemptFacts, at: ExitFact) -> Verdict:
    return on_exit(
        now,
        at,
        kind=Kind.AMBIGUOUS,
        scope=Scope.TRAIN_STEP,
        rule="rerun_without_first",
        because="a second rerun gave another result (exit 17), but this run has seen no exit 16: the node that ran the "
        "first one is not known, and the one that repeated it is not to blame",
        confidence=Confidence.LOW,
        rejected=(NO_HARDWARE,),
    )


def hangs(case: Case) -> Iterator[Finding]:
    """No train_step for too long; the stacks were taken before this was said."""
    now = case.evidence.current
    if now is None or not now.running or now.no_progress is None:
        return
    stuck = now.no_progress
    who = f"rank {stuck.suspect} on {stuck.node}: {stuck.how}" if stuck.suspect is not None else stuck.how
    times = _deaths_in_a_row(case, stuck.node) + 1 if stuck.node is not None else 0
    convicts = times >= case.policy.suspect_after and len(now.plan.nodes) > 1
    if convicts:
        who += f"; the {times}. hang or unexplained death in a row there: the node is left out of this run, not drained"
    yield Verdict(
        key=f"hang:{now.plan.attempt}",
        kind=Kind.HARDWARE_SUSPECT if convicts else Kind.AMBIGUOUS,
        scope=Scope.RANK if stuck.suspect is not None else Scope.EVERYTHING,
        rule="same_node_again" if convicts else "no_progress",
        because=f"no train_step for {stuck.stalled_s:.1f} s (limit {stuck.limit_s:.1f} s) after {now.reached}; {who}",
        confidence=Confidence.MEDIUM if stuck.suspect is not None else Confidence.LOW,
        node=stuck.node if convicts else None,
        rank=stuck.suspect,
        convicts=convicts,
        stops=True,
        evidence=(now.no_progress_seq,),
        rejected=(NO_HARDWARE,),
    )


def replaced_agents(case: Case) -> Iterator[Finding]:
    """An agent of the attempt was replaced by a new process: its ranks went with the old one."""
    now = case.evidence.current
    if now is None or not now.running or not now.started_seq:
        return
    for node in now.plan.nodes:
        facts = case.evidence.node(node)
        if facts.present and facts.joined_seq > now.started_seq:
            yield Verdict(
                key=f"agent:{now.plan.attempt}",
                kind=Kind.INFRA_EVENT,
                scope=Scope.NODE,
                rule="agent_replaced",
                because=f"the agent on {node} was replaced while attempt {now.plan.attempt} ran: its ranks are gone",
                stops=True,
                evidence=(facts.joined_seq,),
            )


def ended_early(case: Case) -> Iterator[Finding]:
    """All ranks exited 0 before the target: exit 0 is no proof of work done."""
    now = case.evidence.current
    target = case.target_steps
    if now is None or now.state is not State.ENDED or not target or now.reached >= target:
        return
    if now.why_stopped or not now.exits or any(f.exit.exit_code != 0 or f.exit.asked for f in now.exits):
        return
    yield Verdict(
        key=f"early:{now.plan.attempt}",
        kind=Kind.AMBIGUOUS,
        scope=Scope.EVERYTHING,
        rule="ended_early",
        because=f"all ranks exited 0 at train_step {now.reached}, the target is {target}: not finished, started again",
        stops=False,
        evidence=tuple(f.seq for f in now.exits),
    )
