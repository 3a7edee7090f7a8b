"""`outlast doctor`: is this place fit for a run? Every finding says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outlast.reliability.cli.common import as_json, overrides, read
from outlast.reliability.cli.root import UNFIT
from outlast.reliability.cli.show import print_json, visible
from outlast.reliability.config import run_root_default

if TYPE_CHECKING:
    from outlast.reliability.cli.site_checks import Row
    from outlast.reliability.runfile import RunFile


@click.command()
@click.argument("run_file", type=click.Path(path_type=Path), metavar="[RUN.yaml]", required=False)
@overrides
@as_json
def doctor(run_file: Path | None, settings: tuple[str, ...], params_file: Path | None, as_json: bool) -> int:
    """Whether this place is fit: Slurm's settings, rights, the shared file system, packages, Megatron's faults.

    With RUN.yaml it looks at what that run needs, without it at what runs need in general. Nothing is changed.

    Exit codes: 0 fit (notes and warnings may stand), 2 RUN.yaml cannot be used, 4 unfit.
    """
    from outlast.reliability.cli.site_checks import Grade, look

    run = read(run_file, settings, params_file).run if run_file else None
    root = Path(run.run_root if run else run_root_default()[0]).absolute()
    wants_slurm = run is None or run.cluster.kind == "slurm"
    slurm = _look_at_slurm(required=run is not None) if wants_slurm else ()
    rows = [*slurm, *look(run, root), *_look_at_megatron(run.task.kind if run else ""), *_look_at_script(run)]
    unfit = any(row.grade is Grade.UNFIT for row in rows)
    if as_json:
        print_json({"fit": not unfit, "findings": rows})
    else:
        _print(rows)
        click.echo("\nunfit: see above what to do" if unfit else "\nfit")
    return UNFIT if unfit else 0


def _look_at_slurm(*, required: bool) -> Iterable[Row]:
    """Slurm's findings as rows. Without a run file no Slurm here is only a note: there is the local cluster."""
    from outlast.reliability.cli.site_checks import Grade, Row
    from outlast.slurm.fitness import inspect_site

    grades = {"ok": Grade.OK, "warning": Grade.WARNING, "bad": Grade.UNFIT}
    for one in inspect_site():
        absent = one.name == "slurm" and not required
        grade = Grade.NOTE if absent else grades[one.level]
        yield Row(subject=one.name, grade=grade, found=one.found, do=one.advice)


def _look_at_megatron(kind: str) -> Iterable[Row]:
    """The faults that were found in megatron-core, and which of them the installed one has."""
    from outlast.launchers.megatron_known import KNOWN_VERSION, Presence, look_at_installed
    from outlast.reliability.cli.site_checks import Grade, Row

    if kind == "plain":
        return
    for seen in look_at_installed() or ():
        fault, subject = seen.fault, f"{seen.fault.package.partition('-')[0]} {seen.fault.name}"
        if fault.guarded and seen.presence is not Presence.PRESENT:
            found = f"{fault.answer}; whether {seen.version} still has it nobody has read: {fault.does}"
            yield Row(subject=subject, grade=Grade.NOTE, found=found, do="")
        elif seen.is_mended:
            yield Row(subject=subject, grade=Grade.OK, found=f"{fault.answer}; {seen.version} itself: {fault.does}")
        elif seen.presence is Presence.PRESENT:
            do = f"its mend is for {KNOWN_VERSION} alone: install megatron-core=={KNOWN_VERSION}"
            yield Row(subject=subject, grade=Grade.WARNING, found=f"{seen.version}: {fault.does}", do=do)
        else:
            what = "is gone" if seen.presence is Presence.GONE else f"has another source ({seen.digest})"
            found = f"{seen.version}: {fault.where} {what} than was read; in {KNOWN_VERSION}: {fault.does}"
            do = f"nobody has read that source: install megatron-core=={KNOWN_VERSION}, which is mended"
            yield Row(subject=subject, grade=Grade.WARNING, found=found, do=do)


def _look_at_script(run: RunFile | None) -> Iterable[Row]:
    """What the Megatron-LM of this run's script does without a word."""
    from outlast.launchers.megatron_known import turns_async_off
    from outlast.reliability.cli.site_checks import Grade, Row

    if run is None or run.task.kind != "megatron_lm" or not run.task.script:
        return
    silent = turns_async_off(Path(run.task.workdir or ".") / run.task.script)
    if silent:
        does = "this Megatron-LM turns --async-save off, with a warning on one rank, and saves synchronously"
        answer = "refused where it is asked for without --use-persistent-ckpt-worker"
        yield Row(subject="megatron_lm silent_async", grade=Grade.OK, found=f"{answer}; {does}")
    elif silent is None:
        found = "no megatron/training/arguments.py beside the script: whether it turns --async-save off is not known"
        yield Row(subject="megatron_lm silent_async", grade=Grade.NOTE, found=found)


def _print(rows: Iterable[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "note": "cyan", "warning": "yellow", "unfit": "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in rows:
        found = Text(visible(row.found))
        if row.do:
            found.append(f"\n-> {visible(row.do)}", style="dim")
        table.add_row(Text(visible(row.subject)), Text(row.grade, style=colours[row.grade]), found)
    Console(highlight=False, soft_wrap=False).print(table)
