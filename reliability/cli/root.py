"""`outlast --help`, and what every command shares: exit codes, errors as one readable line, late imports.

A command's module is imported when the command is called; its line in the help stands here, so that help and shell
completion import nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import click

DONE, FAILED, WRONG, HELD, UNFIT, AGAIN, STOPPED = 0, 1, 2, 3, 4, 75, 130

_EPILOG: Final = """\b
Exit codes
   0  done or healthy
   1  the run failed or was cancelled, or a check found a fault
   2  wrong use or configuration
   3  held: a person is needed (see `outlast status`, then `outlast continue`)
   4  the environment is unfit (`outlast doctor` tells)
  75  try again: Slurm or the file system did not answer, or another supervisor is alive
 130  stopped by Ctrl-C

\b
RUN is a run's name below the run root, such as lm-7b-0007, or the path of its directory.
The run root is runs/, or what OUTLAST_RUN_ROOT names.

\b
First steps
  outlast demo                        a training run that loses nodes, on this machine
  outlast config check RUN.yaml       what would be used, and from where
  outlast doctor RUN.yaml             whether this place is fit for it
  outlast submit RUN.yaml             start it under Slurm
"""


class Entry(NamedTuple):
    """One command: where it is and its line in the help."""

    module: str
    name: str
    help: str
    hidden: bool = False


COMMANDS: Final = {
    "demo": Entry("demo", "demo", "Break a small real training run on purpose and watch it end with the right result."),
    "submit": Entry("submit", "submit", "Check RUN.yaml, freeze it and submit it to Slurm."),
    "run": Entry(
        "run", "run", "Supervise a run here: inside a batch script, on a head node, or on this machine alone."
    ),
    "agent": Entry("run", "agent", "Hold one node's ranks (started by the supervisor).", hidden=True),
    "stop": Entry("ask", "stop", "Save and end a run. It is not queued again."),
    "continue": Entry("ask", "go_on", "Let a held run go on."),
    "status": Entry("status", "status", "Where runs stand: state, train_step, loss, nodes, last incident."),
    "report": Entry("report", "report", "Where each second of a run went, its incidents and its loss curve."),
    "explain": Entry("report", "explain", "One incident in full: evidence, rule, action, cost, how to undo it."),
    "replay": Entry(
        "replay", "replay", "Yesterday's logs against a policy: what it would have drained, restarted, paged."
    ),
    "policy": Entry("policy", "policy", "Check a site's catalogue rows: what they change, and what that means."),
    "ckpt": Entry("ckpt", "ckpt", "The checkpoints of a run: list, verify, compare, keep, remove, export."),
    "doctor": Entry("doctor", "doctor", "Whether this place is fit: Slurm's settings, rights, file system, packages."),
    "config": Entry("config", "config", "Check a RUN.yaml, or print its JSON Schema for editors."),
    "check": Entry("check", "check", "Test this node: the gate before an attempt, and Slurm's health check."),
    "classify": Entry("classify", "classify", "What each line of a log is: class, and what it alone would justify."),
    "judge": Entry("judge", "judge", "Whose fault a case was and what to do about it, with the reasons."),
    "testbed": Entry("testbed", "testbed", "A real Slurm cluster in one directory of this machine, for trying things."),
}


class LateGroup(click.Group):
    """A group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, entry in COMMANDS.items() if not entry.hidden]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = getattr(importlib.import_module(f"outlast.reliability.cli.{entry.module}"), entry.name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            ctx.fail(f"no such command: {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


def _version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        import outlast

        click.echo(f"outlast {outlast.__version__}")
        ctx.exit(DONE)


@click.command(
    cls=LateGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option(
    "--version", is_flag=True, callback=_version, expose_value=False, is_eager=True, help="Show the version and exit."
)
def cli() -> None:
    """Keeps a Megatron run on a Slurm cluster training through broken hardware, and shows where every second went."""


def start(argv: Sequence[str]) -> int:
    """Run the command line; its exit code. Known errors become one message, unknown ones stay tracebacks."""
    try:
        outcome = cli.main(args=list(argv), prog_name="outlast", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        return STOPPED
    except click.ClickException as error:
        error.show()
        return WRONG
    except SystemExit:
        if type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):  # click's mark of a closed pipe
            return DONE  # `outlast report | head`: the reader has what it wanted
        raise
    except Exception as error:
        code = _explain(error)
        if code is None:
            raise
        return code
    return outcome if isinstance(outcome, int) else DONE


def _explain(error: Exception) -> int | None:
    """Print what an expected error says; its exit code, or None for one that is a fault of ours."""
    from outlast.reliability.findings import ConfigError
    from outlast.reliability.ports import PortError

    if isinstance(error, ConfigError):
        click.echo(str(error), err=True)
        return WRONG
    if isinstance(error, PortError):
        click.echo(f"outlast: {error}" + ("; try again" if error.again else ""), err=True)
        return AGAIN if error.again else FAILED
    if isinstance(error, OSError) and error.filename is not None:
        click.echo(f"outlast: {error.filename}: {error.strerror}", err=True)
        return AGAIN
    return None
