"""The command line: `schedopt plan`, `run`, `check`, `show`, `export`, `machine`, `solve`."""

from __future__ import annotations

from typing import Annotated

import typer

from schedopt.cli import file_commands, machine_commands, solve_commands
from schedopt.cli.plan_command import plan
from schedopt.cli.run_command import run
from schedopt.cli.shell import set_debug

app = typer.Typer(
    name="schedopt",
    help="Trains PyTorch models under a memory budget: plan, run, check, show and export schedules.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(plan)
app.command()(run)
app.command()(file_commands.check)
app.command()(file_commands.show)
app.command()(file_commands.export)
app.add_typer(machine_commands.app, name="machine")
app.add_typer(solve_commands.app, name="solve")


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="show tracebacks, and what passes do")] = False) -> None:
    """Trains PyTorch models under a memory budget."""
    set_debug(debug)


def main() -> None:
    """Entry point. Exit codes: 0 ok, 1 failed or broken rules, 2 wrong usage, 130 interrupted."""
    app()
