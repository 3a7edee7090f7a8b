"""`outlast replay`: yesterday's logs against a policy. It reads files and decides; it does nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from outlast.reliability.catalogue import CatalogueError, load_catalogue
from outlast.reliability.cli.common import as_json
from outlast.reliability.cli.replay_io import Counts, KernelFile, Names, SlurmPast, by_time
from outlast.reliability.cli.root import WRONG
from outlast.reliability.cli.show import print_json, visible
from outlast.reliability.model import Node, Noun
from outlast.reliability.policy import Policy
from outlast.reliability.replay_rows import Difference, Told, differences
from outlast.reliability.replaying import Replay, Setting
from outlast.reliability.runfile import Limits
from outlast.reliability.wording import utc

BUILT_IN = "built-in"
ACTS = ("drain", "advise", "restart", "page", "end")


class PolicyTold(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """One policy's replay."""

    policy: str
    totals: dict[str, int]
    verdicts: tuple[Told, ...]


class ReplayTold(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """What `outlast replay --json` prints."""

    signals: int
    nodes: int
    jobs: int
    from_s: float | None
    to_s: float | None
    nameless: int
    policies: tuple[PolicyTold, ...]
    differences: tuple[Difference, ...]


@click.command()
@click.option(
    "--kernel-log", "kernel_logs", multiple=True, required=True, metavar="[NODE=]FILE", help="A kernel log, any form."
)
@click.argument("more", nargs=-1, metavar="[FILE ...]")
@click.option(
    "--slurm",
    "slurm_files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="slurmctld.log, or sacct -P / --json with Start, End, NodeList: who ran where.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="SITE.yaml",
    help=f"A site's catalogue rows, or '{BUILT_IN}'. Given twice: the difference too.",
)
@click.option("--nodes", default="", metavar="LIST", help="All nodes, as n[1-64]: how many makes 'many' rests on it.")
@click.option("--spares", default=4, show_default=True, type=click.IntRange(0, 1000), help="Spare nodes of each run.")
@click.option("--drains-per-hour", type=click.IntRange(0), help="The drain budget of each run.")
@as_json
def replay(
    kernel_logs: tuple[str, ...],
    more: tuple[str, ...],
    slurm_files: tuple[Path, ...],
    policies: tuple[str, ...],
    nodes: str,
    spares: int,
    drains_per_hour: int | None,
    as_json: bool,
) -> int:
    """What a policy would have made of yesterday's logs: which nodes drained, which runs restarted, who was paged.

    \b
    outlast replay --kernel-log /var/log/cluster/kern.log.1 --slurm /var/log/slurm/slurmctld.log.1
    outlast replay --kernel-log n7=dmesg.txt --policy built-in --policy site.yaml

    Lines of one file may come from many nodes; a file whose lines name none is given as NODE=FILE. Without --slurm all
    nodes are taken for one run that trains all the time. Nothing is touched.

    Exit codes: 0 told, 2 a file or policy that cannot be used.
    """
    if len(policies) > 2:
        raise click.UsageError(f"--policy: found {len(policies)}, expected one or two")
    limits = Limits() if drains_per_hour is None else Limits(drains_per_hour=drains_per_hour)
    setting = Setting(limits=limits, spares=spares)
    try:
        told = _replay([*kernel_logs, *more], slurm_files, policies or (BUILT_IN,), nodes, setting)
    except CatalogueError as error:
        click.echo(f"outlast replay: {error}", err=True)
        return WRONG
    if as_json:
        print_json(told)
    else:
        _print(told)
    return 0


def _replay(
    logs: Sequence[str], slurm_files: Sequence[Path], policies: Sequence[str], node_list: str, setting: Setting
) -> ReplayTold:
    counts, names = Counts(), Names()
    past = SlurmPast(slurm_files, silent_s=setting.limits.agent_silent_s)
    jobs = past.jobs()
    chosen = _expand(node_list)
    names.known.update(chosen, (n for j in jobs for n in j.nodes))
    files = [KernelFile(word, names, counts) for word in logs]
    known = tuple(dict.fromkeys((*chosen, *(Node(n) for n in sorted(names.known)))))
    replays = [Replay(_policy(word, setting), setting, jobs=jobs, nodes=known) for word in policies]
    seen: set[str] = set()
    for fed in by_time([*(file.read() for file in files), past.signals()]):
        seen.add(getattr(fed.signal, "node", ""))
        for one in replays:
            one.feed(fed)
    if counts.nameless:
        click.echo(f"{counts.nameless_in}: the line names no node: give NODE=FILE ({counts.nameless} lines)", err=True)
    results = [one.finish() for one in replays]
    return ReplayTold(
        signals=counts.signals,
        nodes=len(seen | set(known)),
        jobs=len(jobs),
        from_s=counts.first_s,
        to_s=counts.last_s,
        nameless=counts.nameless,
        policies=tuple(
            PolicyTold(policy=word, totals=_totals(told), verdicts=told)
            for word, told in zip(policies, results, strict=True)
        ),
        differences=differences(*results) if len(results) == 2 else (),
    )


def _policy(word: str, setting: Setting) -> Policy:
    from outlast.reliability.cli.compose import make_policy

    return make_policy(load_catalogue(None if word == BUILT_IN else Path(word)), setting.limits)


def _expand(text: str) -> tuple[Node, ...]:
    from outlast.slurm.errors import SlurmError
    from outlast.slurm.hostlist import expand

    try:
        return expand(text)
    except SlurmError as error:
        raise click.UsageError(f"--nodes: {error}") from None


def _totals(told: Sequence[Told]) -> dict[str, int]:
    counted = Counter(act for one in told for act in one.acts)
    return {act: counted[act] for act in ACTS}


# ---------------------------------------------------------------- for a person


def _print(told: ReplayTold) -> None:
    span = f", {utc(told.from_s)} to {utc(told.to_s)}" if told.from_s is not None and told.to_s is not None else ""
    click.echo(f"{told.signals} signals of {told.nodes} nodes in {told.jobs or 'no'} jobs{span}")
    for one in told.policies:
        click.echo(f"\npolicy {visible(one.policy)}: " + ", ".join(f"{n} {act}" for act, n in one.totals.items()))
        for row in one.verdicts:
            _print_row(row)
    if len(told.policies) == 2:
        first, second = (p.policy for p in told.policies)
        click.echo(f"\nthe difference: {len(told.differences) or 'none'}")
        for change in told.differences:
            _print_difference(change, first, second)


def _print_row(row: Told) -> None:
    where = " ".join(filter(None, (row.node, row.gpu))) or "nobody blamed"
    acts = ", ".join(row.acts) or "nothing"
    click.echo(visible(f"  {utc(row.at_s)}  {row.run}  {where}  {row.kind.value} ({row.rule}): {acts}"))
    click.echo(visible(f"      {row.because}"))
    click.echo(visible(f"      would: {row.detail or 'nothing'}" + (f"   [{row.source}]" if row.source else "")))


def _print_difference(change: Difference, first: str, second: str) -> None:
    rows = (change.first, change.second)
    at = next(r for r in rows if r is not None)
    click.echo(visible(f"  {utc(at.at_s)}  {change.run}  {at.node or 'nobody blamed'}   [{change.source}]"))
    for name, row in zip((first, second), rows, strict=True):
        said = "no verdict" if row is None else f"{row.kind.value} ({row.rule}): {row.detail or 'nothing'}"
        click.echo(visible(f"      {name}: {said}"))
