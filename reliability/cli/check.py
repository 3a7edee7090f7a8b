"""`outlast check` in the help. app.py hands the real call to the node gate before this could be imported."""

from __future__ import annotations

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False)
@click.pass_context
def check(ctx: click.Context) -> int:
    """Test this node: the gate before an attempt, and Slurm's health check."""
    from outlast.monitors.gate import main

    return main(ctx.args)
