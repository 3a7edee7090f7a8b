"""`outlast report` and `outlast explain`: which run, which form; the words are reliability/report_text.py's."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from outlast.reliability.cli.common import RunName, as_json, find
from outlast.reliability.cli.root import WRONG
from outlast.reliability.cli.show import print_json


@click.command()
@click.argument("run", type=RunName())
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write the page here [default: report.html in the run directory].",
)
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@as_json
def report(run: str, output: Path | None, show: bool, as_json: bool) -> int:
    """Where each second of a run went, its incidents and its loss curve.

    Prints a summary and writes a self-contained page. Works while the run goes on, and without its supervisor.

    Exit codes: 0 written, 2 no such run, 75 the log or the page's place cannot be used.
    """
    from outlast.reliability.report import read_view, write_report
    from outlast.reliability.report_text import report_json, report_text

    run_dir = find(run)
    view = read_view(run_dir.root)
    if as_json:
        print_json(report_json(view))
        return 0
    page = write_report(run_dir.root, view)
    if output is not None:
        output.write_bytes(page.read_bytes())
        page = output
    click.echo(report_text(view))
    click.echo(f"page: {page}")
    if show:
        webbrowser.open(page.absolute().as_uri())
    return 0


@click.command()
@click.argument("incident", metavar="RUN/NUMBER")
@as_json
def explain(incident: str, as_json: bool) -> int:
    """One incident in full: evidence, rule, what was rejected, action, cost, how to undo it.

    \b
    outlast explain lm-7b-0007/3

    Exit codes: 0 shown, 2 no such run or incident.
    """
    from outlast.reliability.report import read_view
    from outlast.reliability.report_text import explain_text, report_json

    word, slash, number = incident.rpartition("/")
    if not slash or not number.isdecimal():
        raise click.UsageError(f"found {incident!r}, expected RUN/NUMBER, such as lm-7b-0007/3")
    view = read_view(find(word).root)
    text = explain_text(view, int(number))
    if text is None:
        known = f"expected 1 to {len(view.incidents)}" if view.incidents else "it has had none so far"
        click.echo(f"{word}: no incident {number}; {known}", err=True)
        return WRONG
    if as_json:
        print_json(next(one for one in report_json(view).incidents if one.number == int(number)))
    else:
        click.echo(text)
    return 0
