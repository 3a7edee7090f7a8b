"""Options and readings that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from outlast.reliability.config import ReadRun, read_run, run_root_default
from outlast.reliability.rundir import RunDir

Command = TypeVar("Command", bound=Callable[..., Any])


def overrides(command: Command) -> Command:
    """`--set` and `--params`."""
    settings = click.option(
        "--set",
        "settings",
        metavar="NAME=VALUE",
        multiple=True,
        help="Set a parameter (lr=2e-4) or a setting of the run file (cluster.nodes=4). Wins over files.",
    )
    params = click.option(
        "--params",
        "params_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="More parameters, from a YAML file. Wins over the run file's.",
    )
    return settings(params(command))


def as_json(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="The same as data, one JSON document.")(command)


def read(path: Path, settings: Sequence[str] = (), params_file: Path | None = None) -> ReadRun:
    """The run file as it would be used, with the rules of the kinds of program."""
    from outlast.launchers import adapt

    return read_run(path, settings=settings, params_file=params_file, kinds=adapt)


class RunName(click.ParamType[str]):
    """A run's name or path, with completion of the names below the run root."""

    name = "RUN"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        from outlast.reliability.freeze import list_runs

        runs = list_runs(Path(run_root_default()[0]))
        return [CompletionItem(run_dir.name) for run_dir in runs if run_dir.name.startswith(incomplete)]


def find(word: str) -> RunDir:
    """The run directory that RUN names; ConfigError where there is none."""
    from outlast.reliability.freeze import find_run

    return find_run(word)
