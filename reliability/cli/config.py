"""`outlast config check` and `outlast config schema`."""

from __future__ import annotations

from pathlib import Path

import click

from outlast.reliability.cli.common import as_json, overrides
from outlast.reliability.cli.root import DONE, WRONG
from outlast.reliability.cli.show import print_json, print_table
from outlast.reliability.findings import ConfigError


@click.group(name="config")
def config() -> None:
    """Check a RUN.yaml, or print its JSON Schema for editors.

    Exit codes: 0 it can be used, 2 it cannot.
    """


@config.command()
@click.argument("run_file", type=click.Path(path_type=Path), metavar="RUN.yaml")
@overrides
@click.option("--all", "everything", is_flag=True, help="Show settings that are at their defaults too.")
@as_json
def check(run_file: Path, settings: tuple[str, ...], params_file: Path | None, everything: bool, as_json: bool) -> int:
    """Print what would be used, and from where. Nothing is started.

    Every finding is printed with its path, what was found, what was expected and, where it can be told, what was
    meant; with --json as {"findings": [{"source", "path", "text"}]}.

    Exit codes: 0 it can be used, 2 it cannot.
    """
    from outlast.reliability.cli.common import read
    from outlast.reliability.config_checks import describe

    try:
        got = read(run_file, settings, params_file)
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"findings": error.findings})
        return WRONG
    if as_json:
        print_json({"run": got.run, "used": got.used, "findings": []})
        return DONE
    used = [one for one in got.used if everything or one.source != "default"]
    print_table(("SETTING", "VALUE", "FROM"), [(one.path, _show(one.path, one.value), one.source) for one in used])
    left = len(got.used) - len(used)
    click.echo()
    for line in describe(got.run):
        click.echo(line)
    if left:
        click.echo(f"{left} more settings are at their defaults: --all shows them")
    return DONE


def _show(path: str, value: object) -> str:
    from outlast.reliability.durations import render_duration

    if path.endswith("_s") and isinstance(value, float):
        return render_duration(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if value != "" else "''"


@config.command()
def schema() -> None:
    """Print the JSON Schema of what RUN.yaml may hold.

    \b
    For editors with the YAML language server, as the file's first line:
      # yaml-language-server: $schema=outlast-run.schema.json
    """
    from outlast.reliability.config_schema import run_schema

    print_json(run_schema())
