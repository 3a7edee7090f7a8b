"""A case's lines to facts: each line by the readers that its source allows. Pure.

    lines -> (line reader of monitors/) -> read_gpu | read_exporter | read_ranks | read_slurm | read_saves | read_notes

A line counts as the kernel's by where it was read: hardware words in a rank's output are a program's, and in a note
they are hearsay. A paste without sources is read as the logs that its lines look like.
"""

from __future__ import annotations

from collections.abc import Iterator

from outlast.reliability.classify import Reader, Reading
from outlast.reliability.judging.case import Case, Line
from outlast.reliability.judging.facts import Fact
from outlast.reliability.judging.facts_run import Blind, Harmless, Note
from outlast.reliability.judging.read_exporter import read_samples
from outlast.reliability.judging.read_gpu import (
    is_kernel_kind,
    read_diag_table,
    read_kernel,
    read_looks,
    read_power,
)
from outlast.reliability.judging.read_notes import read_notes
from outlast.reliability.judging.read_ranks import read_ends, read_measured, read_missing, read_rank_line, read_step
from outlast.reliability.judging.read_saves import read_saves, read_storage
from outlast.reliability.judging.read_slurm import read_names, read_slurm_line, read_transcript
from outlast.reliability.judging.sources import Src
from outlast.reliability.judging.tools import Tools


def read_facts(case: Case, tools: Tools) -> tuple[Fact, ...]:
    """All facts of a case, in the order of its lines."""
    facts: list[Fact] = []
    reader = tools.reader()
    for lines in case.items:
        names = list(read_names(lines, tools)) if case.whole else []
        if names:
            facts += names
            continue
        facts += read_diag_table(lines)
        facts += read_saves(lines)
        if lines[0].label.kind in (Src.SLURM, Src.TEXT):
            facts += read_transcript(lines, tools)
        for line in lines:
            facts += read_line(line, reader, tools)
    if case.cut:
        facts.append(Blind(id=len(case.lines), why=f"only the first {len(case.lines)} lines were read"))
    return tuple(sorted(facts, key=lambda f: f.id))


def read_line(line: Line, reader: Reader, tools: Tools) -> Iterator[Fact]:
    """The facts of one line; a Note where nothing is recognised."""
    reading = reader.read(line.text) if line.text.strip() else None
    found = [*_machine(line, reading, tools), *read_notes(line)]
    if found:
        yield from found
    elif _ordinary(line, reading, tools):
        yield Harmless(id=line.id, at_s=line.at_s)
    else:
        yield Note(id=line.id, at_s=line.at_s, text=line.text[:400], kind=line.label.kind)


def _ordinary(line: Line, reading: Reading | None, tools: Tools) -> bool:
    """Known and harmless, or the kernel's own line of which no reader knows more."""
    if line.label.kind in (Src.NOTE, Src.PERSON, Src.SUITE):
        return False
    if reading is None:
        return line.label.kind is Src.KERNEL
    rows = tools.catalogue.rank_log if reading.table == "rank_log" else tools.catalogue.kernel
    row = rows(reading.key)
    return row is not None and row.class_ in ("benign", "progress") and reading.key != "program_text"


def _machine(line: Line, reading: Reading | None, tools: Tools) -> Iterator[Fact]:
    kind = line.label.kind
    # a note that names its node tells what was found on it; other words cannot bear witness for a machine
    if kind in (Src.NOTE, Src.PERSON, Src.SUITE):
        if kind is not Src.SUITE:
            yield from read_looks(line)
        if kind is Src.NOTE:
            yield from read_storage(line)
            yield from read_missing(line)
            yield from read_power(line)
        return
    kernel = reading is not None and is_kernel_kind(reading, tools.catalogue)
    if reading is not None and kernel and kind is not Src.RANK:
        yield from read_kernel(line, reading, tools)
    yield from read_samples(line)
    yield from read_rank_line(line, None if kernel else reading, tools)
    yield from read_slurm_line(line, reading, tools)
    yield from read_ends(line)
    yield from read_step(line)
    yield from read_storage(line)
    yield from read_measured(line)
    if kind is not Src.RANK:
        yield from read_looks(line)
        yield from read_power(line)
