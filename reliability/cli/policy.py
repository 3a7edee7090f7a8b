"""`outlast policy check`: which rows of the catalogue a site's YAML changes, and what that means."""

from __future__ import annotations

from pathlib import Path

import click

from outlast.reliability.cli.common import as_json
from outlast.reliability.cli.show import print_json, visible
from outlast.reliability.site_policy import check_rows, parse_rows, read_file


@click.group(name="policy")
def policy() -> None:
    """A site's own rows of the catalogue: what XIDs, SXids and log lines mean here.

    A run takes them in by `cluster.policy` of RUN.yaml, judge and classify by --rows, replay by --policy.
    """


@policy.command()
@click.argument("site", type=click.Path(path_type=Path), metavar="SITE.yaml")
@as_json
def check(site: Path, as_json: bool) -> None:
    """Print what SITE.yaml changes in the catalogue, and what follows from it.

    Every finding is printed with its path, what was found and what was probably meant. `outlast replay --policy
    SITE.yaml` shows what it would have done to yesterday's logs.

    Exit codes: 0 it can be used, 2 it cannot.
    """
    changed = check_rows(site, parse_rows(site, read_file(site)))
    if as_json:
        print_json({"site": str(site), "changes": changed})
        return
    if not changed:
        click.echo(f"{visible(str(site))}: it changes nothing")
    for one in changed:
        click.echo(visible(f"{one.table}.{one.key}  {one.name}"))
        for line in (*one.fields, *(f"= {text}" for text in one.means), *(f"! {text}" for text in one.beware)):
            click.echo(visible(f"    {line}"))
