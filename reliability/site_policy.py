"""A site's own rows of the catalogue: found and checked when a run is frozen, kept with the run, compared ever after.

    cluster.policy, $OUTLAST_POLICY, /etc/outlast/policy.yaml  --checked-->  RUN_DIR/policy.yaml  -->  its supervisors

A run is judged by what it was frozen with, so that a successor judges alike; a site's file that changed meanwhile is
noted and waits for the next run. A file that cannot be used refuses the run before it exists. An edge: it reads files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from outlast.reliability.catalogue import FILES, TABLES, Catalogue, CatalogueError, load_catalogue
from outlast.reliability.findings import ConfigError, Finding
from outlast.reliability.model import Noun
from outlast.reliability.policy_check import Change, Tables, changes, check_tables
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile

ENV: Final = "OUTLAST_POLICY"
SITE_FILE: Final = Path("/etc/outlast/policy.yaml")
LIMIT_BYTES: Final = 4 << 20
_SHOWN: Final = 8


def site_file(run: RunFile) -> Path | None:
    """The file that this run is to be judged by, named by somebody or there; None: the catalogue as it is."""
    named = run.cluster.policy or os.environ.get(ENV, "")
    if named:
        return Path(named).expanduser().absolute()
    return SITE_FILE if SITE_FILE.exists() else None


def read_rows(path: Path) -> bytes:
    """The file's bytes, proven to be usable; ConfigError with everything that is wrong."""
    text = read_file(path)
    check_rows(path, parse_rows(path, text))
    return text


def read_file(path: Path) -> bytes:
    """ConfigError where it cannot be had, or is no file of rows by its size."""
    try:
        with path.open("rb") as file:
            text = file.read(LIMIT_BYTES + 1)
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise ConfigError(
            [Finding(source=str(path), text=f"the site's policy: {why}; expected rows in YAML")]
        ) from None
    if len(text) > LIMIT_BYTES:
        raise ConfigError([Finding(source=str(path), text=f"more than {LIMIT_BYTES:,} bytes; expected a few rows")])
    return text


def parse_rows(path: Path, text: bytes) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError([Finding(source=str(path), text=f"not YAML: {error}")]) from None


def check_rows(path: Path, data: object) -> tuple[Change, ...]:
    """What these rows change; ConfigError where they cannot be used."""
    built_in = tables_of(None)
    found = check_tables(data, source=str(path), known=built_in)
    if found:
        raise ConfigError(found)
    try:
        return changes(data, before=built_in, after=tables_of(load_catalogue(path), data))
    except CatalogueError as error:
        raise ConfigError([Finding(source=str(path), text=str(error))]) from None


def tables_of(site: Catalogue | None, data: object = None) -> Tables:
    """The rows by key: all of the built-in tables, and those that the site's file names."""
    built_in = load_catalogue(None)
    keys = {table: list(_keys_of(table, FILES)) for table in TABLES}
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


# ---------------------------------------------------------------- a run that exists


class RunPolicy:
    """What a frozen run is judged by, and whether the site thinks differently by now."""

    def __init__(self, run_dir: RunDir, run: RunFile) -> None:
        """ConfigError where the run's own copy cannot be used any more."""
        self._run = run
        self._source = run.cluster.policy
        self._frozen = run_dir.policy if run_dir.policy.exists() else None
        self._sha256 = ""
        self._changes: tuple[Change, ...] = ()
        if self._frozen is not None:
            text = read_file(self._frozen)
            self._sha256 = _hash(text)
            self._changes = check_rows(self._frozen, parse_rows(self._frozen, text))

    @property
    def catalogue(self) -> Catalogue:
        """The catalogue with the run's rows, all of it read: the file may go afterwards."""
        catalogue = load_catalogue(self._frozen)
        for read in (catalogue.kernel, catalogue.rank_log):
            read("")
        return catalogue

    def notes(self) -> tuple[str, ...]:
        """What is worth a line of the log. Blocks: reads the site's file."""
        said: tuple[str, ...] = ()
        if self._frozen is not None:
            rows = [f"{c.table}.{c.key} {', '.join(c.fields)}" for c in self._changes]
            more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
            shown = "; ".join(rows[:_SHOWN]) or "it changes nothing"
            said = (f"judged by the site's rows of {self._source} (sha256 {self._sha256[:12]}): {shown}{more}",)
        return (*said, *self._changed())

    def _changed(self) -> tuple[str, ...]:
        keeps = "this run keeps what it was frozen with"
        path = Path(self._source) if self._source else site_file(self._run)
        if path is None:
            return ()
        try:
            now = _hash(read_file(path))
        except ConfigError:
            return (f"the site's policy {path} cannot be read here; {keeps}",)
        if now == self._sha256:
            return ()
        was = f"is not as it was (sha256 {now[:12]})" if self._sha256 else "was not there when the run was frozen"
        return (f"the site's policy {path} {was}; {keeps}",)


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
