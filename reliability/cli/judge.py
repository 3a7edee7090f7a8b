"""`outlast judge`: whose fault a case was, and what to do about it; the parts are judge_io.py's."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from outlast.reliability.cli.root import WRONG


@click.command()
@click.argument("cases", metavar="CASES.jsonl", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--rows", type=click.Path(path_type=Path), metavar="FILE", help="A site's catalogue rows, over ours.")
def judge(cases: Path, rows: Path | None) -> int:
    """Whose fault each case was, and what to do: one JSON line a case.

    A case is {"id", "input", "context"}: input is one text, or a list of {"t", "source", "text"} in order. Printed are
    id, verdict, culprit, action, because (rule, evidence by line, what was rejected and why) and checks. Free text is
    a note: it convicts nobody. CASES.jsonl may be - for standard input.

    Exit codes: 0 judged, 2 a case or a row cannot be read, 75 the file cannot be read.
    """
    from outlast.reliability.catalogue import CatalogueError
    from outlast.reliability.cli.judge_io import run_judge
    from outlast.reliability.judging.case import CaseError

    try:
        if str(cases) == "-":
            run_judge(sys.stdin.buffer, sys.stdout.buffer, where="standard input", site=rows)
        else:
            with cases.open("rb") as source:
                run_judge(source, sys.stdout.buffer, where=str(cases), site=rows)
    except (CaseError, CatalogueError) as error:
        click.echo(str(error), err=True)
        return WRONG
    return 0
