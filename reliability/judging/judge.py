"""A case to its answer: facts are read, rules are asked in order, the first that speaks wins. Pure.

    case -> read.py: facts -> Scene -> rules in order -> Answer, with what the later rules would have said as rejected

The order is the policy: a will first, then the suite's own doing, drills and old news, what reaches many, hardware,
then what ends jobs, then programs, and at the end what is merely slow, odd, listed or told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from outlast.reliability.judging import (
    rules_collective,
    rules_compared,
    rules_exporter,
    rules_gpu,
    rules_host,
    rules_program,
    rules_queue,
    rules_ranks,
    rules_saves,
    rules_slurm,
    rules_steps,
    rules_suite,
)
from outlast.reliability.judging.case import Case
from outlast.reliability.judging.facts import Fact
from outlast.reliability.judging.facts_run import Blind
from outlast.reliability.judging.read import read_facts
from outlast.reliability.judging.scene import Scene
from outlast.reliability.judging.tools import Tools
from outlast.reliability.judging.words import Answer, Because, Finding
from outlast.reliability.verdict import Rejected

Rule = Callable[[Scene], Iterable[Finding]]

RULES: Final[tuple[Rule, ...]] = (
    # the suite's own doing, and lists that must be read before anybody acts on them
    rules_suite.own_doings,
    rules_slurm.names,
    # a will; drills; old news
    rules_slurm.wills,
    rules_gpu.drills,
    rules_gpu.old_lines,
    rules_exporter.stale_gauge,
    # what reaches many before what is one node's
    rules_gpu.many_nodes,
    rules_gpu.hardware,
    rules_gpu.damaged_driver,
    rules_host.broken_parts,
    rules_gpu.firmware_and_hangs,
    rules_gpu.asked_recovery,
    rules_gpu.contained,
    # what the scheduler and the storage did to the job
    rules_compared.partition_down,
    rules_compared.leaks,
    rules_compared.stuck_saves,
    rules_compared.shrinks,
    rules_queue.missing_gpus,
    rules_slurm.launches,
    rules_slurm.kill_failed,
    rules_slurm.memory,
    rules_slurm.ends,
    rules_slurm.refusals,
    rules_queue.unknown_jobs,
    rules_queue.lost_nodes,
    rules_saves.writes,
    rules_saves.incomplete,
    rules_saves.loads,
    rules_saves.resumes,
    rules_saves.compared,
    rules_host.shared_files,
    rules_host.out_of_memory,
    # ranks: wrong numbers, what CUDA says of its GPU, repeats, then the program's own errors
    rules_steps.hashes,
    rules_ranks.reruns,
    rules_ranks.not_a_number,
    rules_ranks.gpu_errors,
    rules_compared.changes,
    rules_suite.no_progress,
    rules_collective.desynchronised,
    rules_program.program_faults,
    rules_ranks.program_errors,
    rules_collective.missing_rank,
    rules_collective.paths,
    rules_collective.waits,
    rules_ranks.job_ends,
    # degraded, not broken
    rules_host.processors,
    rules_gpu.remapped,
    rules_host.ports,
    rules_host.slowed,
    rules_exporter.diagnosed,
    rules_queue.checkers,
    rules_exporter.tools_hung,
    rules_exporter.hot_gpus,
    rules_exporter.starved_gpu,
    rules_exporter.clocks,
    rules_steps.named_rank,
    rules_compared.slow_in_class,
    rules_compared.pair_tests,
    rules_compared.pauses,
    rules_compared.communication,
    rules_compared.offenders,
    rules_steps.slow_job,
    rules_steps.spikes,
    # monitors, and lines that need nothing
    rules_exporter.raised_gauge,
    rules_exporter.mismatched,
    rules_host.corrected,
    rules_gpu.harmless,
    rules_exporter.series_lost,
    rules_ranks.task_exits,
    rules_suite.blind,
    rules_steps.measured,
    rules_steps.progress,
    rules_exporter.pages,
    rules_slurm.live_over_accounting,
    rules_queue.job_state,
    rules_slurm.listings,
    rules_suite.words_only,
)

MAX_REJECTED: Final = 6
_FALLBACKS: Final = frozenset(
    {"words_only", "empty", "ordinary_lines", "progress", "listing", "nothing_to_do", "exporter_page"}
)


def judge_case(case: Case, tools: Tools) -> Answer:
    """The answer to one case."""
    return answer(case, read_facts(case, tools), tools)


def answer(case: Case, facts: tuple[Fact, ...], tools: Tools) -> Answer:
    """The answer that these facts support. Facts may come from text or be told as signals."""
    findings = judge(Scene(case=case, facts=facts, meaning=tools.catalogue.xid))
    chief, others = findings[0], findings[1:]
    checks = dict(chief.checks)
    if any(isinstance(f, Blind) for f in facts):
        checks["gap_reported"] = True
    return Answer(
        id=case.id,
        verdict=str(chief.verdict),
        culprit=chief.culprit,
        action=chief.action,
        because=Because(
            rule=chief.rule,
            text=chief.why,
            evidence=tuple(f"e{i}" for i in chief.evidence),
            rejected=(*chief.rejected, *_also(chief, others))[:MAX_REJECTED],
        ),
        checks=checks,
    )


def judge(scene: Scene) -> list[Finding]:
    """What the rules say, the winner first."""
    return [finding for rule in RULES for finding in rule(scene)]


def _also(chief: Finding, others: Iterable[Finding]) -> tuple[Rejected, ...]:
    """Later rules that would have said something else."""
    return tuple(
        Rejected(alternative=f"{f.verdict}: {f.why}", why=f"{chief.rule} outranks {f.rule}")
        for f in others
        if f.rule not in _FALLBACKS and (f.verdict, f.action) != (chief.verdict, chief.action)
    )
