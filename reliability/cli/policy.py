"""`outlast policy check`: which rows of the catalogue a site's YAML changes, and what that means."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import click

from outlast.reliability.catalogue import FILES, TABLES, Catalogue, CatalogueError, load_catalogue
from outlast.reliability.cli.common import as_json
from outlast.reliability.cli.show import print_json, visible
from outlast.reliability.findings import ConfigError, Finding
from outlast.reliability.model import Noun
from outlast.reliability.policy_check import Tables, changes, check_tables

_TABLE_BYTES = 4 << 20


@click.group(name="policy")
def policy() -> None:
    """A site's own rows of the catalogue: what XIDs, SXids and log lines mean here."""


@policy.command()
@click.argument("site", type=click.Path(path_type=Path), metavar="SITE.yaml")
@as_json
def check(site: Path, as_json: bool) -> None:
    """Print what SITE.yaml changes in the catalogue, and what follows from it.

    Every finding is printed with its path, what was found and what was probably meant. `outlast replay --policy
    SITE.yaml` shows what it would have done to yesterday's logs.

    Exit codes: 0 it can be used, 2 it cannot.
    """
    data = _read(site)
    built_in = _tables(None, FILES)
    found = check_tables(data, source=str(site), known=built_in)
    if found:
        raise ConfigError(found)
    try:
        changed = changes(data, before=built_in, after=_tables(load_catalogue(site), FILES, data))
    except CatalogueError as error:
        raise ConfigError([Finding(source=str(site), text=str(error))]) from None
    if as_json:
        print_json({"site": str(site), "changes": changed})
        return
    if not changed:
        click.echo(f"{visible(str(site))}: it changes nothing")
    for one in changed:
        click.echo(visible(f"{one.table}.{one.key}  {one.name}"))
        for line in (*one.fields, *(f"= {text}" for text in one.means), *(f"! {text}" for text in one.beware)):
            click.echo(visible(f"    {line}"))


def _read(path: Path) -> object:
    import yaml

    try:
        with path.open("rb") as file:
            return yaml.safe_load(file.read(_TABLE_BYTES))
    except OSError as error:
        raise ConfigError([Finding(source=str(path), text=error.strerror or "cannot be read")]) from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError([Finding(source=str(path), text=f"not YAML: {error}")]) from None


def _tables(site: Catalogue | None, files: Path, data: object = None) -> Tables:
    """The rows by key: all of the built-in tables, or those that the site's file names."""
    built_in = load_catalogue(None)
    keys = {table: list(_keys_of(table, files)) for table in TABLES}
    if isinstance(data, dict):
        keys = {table: [*keys[table], *(k for k in data.get(table, {}) if k not in keys[table])] for table in TABLES}
    chosen = site or built_in
    look: dict[str, Callable[[Any], Noun | None]] = {
        "sxids": chosen.sxid,
        "kernel": chosen.kernel,
        "rank_log": chosen.rank_log,
    }
    tables = {name: {k: row for k in keys[name] if (row := find(k)) is not None} for name, find in look.items()}
    return {"xids": chosen.xids, **tables}


@lru_cache
def _keys_of(table: str, files: Path) -> tuple[object, ...]:
    import yaml

    name = {"xids": "xid.yaml", "sxids": "sxid.yaml", "kernel": "kernel.yaml", "rank_log": "rank_log.yaml"}[table]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(yaml.load((files / name).read_bytes(), Loader=loader)[table])
