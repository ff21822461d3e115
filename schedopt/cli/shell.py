"""What all commands share: consoles, errors without traceback, exit codes, JSON on stdout."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console

from schedopt.errors import InfeasibleError, SchedoptError, TargetError

P = ParamSpec("P")
R = TypeVar("R")

FAILED, USAGE, INTERRUPTED = 1, 2, 130
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
_debug = [False]


def set_debug(debug: bool) -> None:
    """Show tracebacks and log what passes do."""
    _debug[0] = debug
    if debug:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose foreseen errors become one message on stderr (with --json also an object on stdout) and an exit code:
    2 for arguments that make no sense, 1 for the rest, 130 for Ctrl-C."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (SchedoptError, ValueError, OSError) as error:
            if _debug[0]:
                raise
            _report(error, as_json=bool(kwargs.get("as_json")))
            usage = isinstance(error, TargetError) or (isinstance(error, ValueError) and not isinstance(error, SchedoptError))
            raise typer.Exit(USAGE if usage else FAILED) from error
        except KeyboardInterrupt as error:
            err.print("interrupted", style="red")
            raise typer.Exit(INTERRUPTED) from error

    return run


def print_json(value: Any) -> None:
    """One JSON object on stdout, and nothing else."""
    typer.echo(json.dumps(value, ensure_ascii=False, allow_nan=False, default=str))


def _report(error: Exception, *, as_json: bool) -> None:
    kind = type(error).__name__
    name = kind.removesuffix("Error").lower() if isinstance(error, InfeasibleError) else "error"
    err.print(f"[bold red]{name}:[/] ", end="")
    err.print(str(error), markup=False)
    if as_json:
        details = {}
        if isinstance(error, InfeasibleError):
            details = {
                "budget_bytes": error.budget_bytes,
                "least_bytes": error.least_bytes,
                "floor_bytes": error.floor_bytes,
                "op_name": error.op_name,
            }
        print_json({"error": {"type": kind, "message": str(error)} | details})
