"""`outlast classify`: what single lines are; the parts are classify_io.py's."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from outlast.reliability.cli.root import WRONG


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), default="-")
@click.option("--block", is_flag=True, help="Take all of the input as one event.")
@click.option("--known", is_flag=True, help="Leave out lines that no rule knows.")
@click.option("--rows", type=click.Path(path_type=Path), metavar="FILE", help="A site's catalogue rows, over ours.")
def classify(file: Path, block: bool, known: bool, rows: Path | None) -> int:
    """What each line is: kernel, GPU tools, Slurm, ranks. One JSON line out for each line in.

    Printed are kind, code, node, gpu, class, action and because. The action is what the line alone would justify;
    history, scope and policy are `outlast judge`'s. FILE is standard input where it is left out.

    Exit codes: 0 read, 2 a row cannot be used, 75 the file cannot be read.
    """
    from outlast.reliability.catalogue import CatalogueError
    from outlast.reliability.cli.classify_io import run_classify

    try:
        if str(file) == "-":
            run_classify(sys.stdin.buffer, sys.stdout.buffer, block=block, every=not known, site=rows)
        else:
            with file.open("rb") as source:
                run_classify(source, sys.stdout.buffer, block=block, every=not known, site=rows)
    except CatalogueError as error:
        click.echo(str(error), err=True)
        return WRONG
    return 0
