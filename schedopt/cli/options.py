"""Arguments and options that several commands take, and the constraints made of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Annotated

import typer

from schedopt.constraints import Constraints, budget_bytes

Target = Annotated[str, typer.Argument(help="file.py:function or module:function; the function returns a schedopt.Workload")]
PlanPath = Annotated[Path, typer.Argument(help="a plan file", metavar="PLAN")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="an option of the function; may be repeated")]
Memory = Annotated[str | None, typer.Option("--memory", help='budget: bytes, "6GiB", or "30%" of the eager step\'s own peak')]
Strategy = Annotated[str, typer.Option("--strategy", help="auto, window, recompute or swap")]
TierName = Annotated[str | None, typer.Option("--tier", help="where swapped bytes go: file or ram")]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="seconds for the solver")]
Throttle = Annotated[str | None, typer.Option("--throttle", help='slow the link down to "500MB" per second, to stand for another')]
NoUndo = Annotated[bool, typer.Option("--no-undo", help="keep no undo copies: a step that fails after an update stays half-way")]
AllowInexact = Annotated[bool, typer.Option("--allow-inexact", help="accept a step that rounds differently from eager")]
Seed = Annotated[int, typer.Option("--seed", help="seed of torch and of the solvers")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on stdout: bytes and seconds")]


def make_constraints(
    memory: str | None,
    strategy: str,
    tier: str | None,
    time_limit: float,
    throttle: str | None,
    no_undo: bool,
    allow_inexact: bool,
    seed: int,
) -> Constraints:
    """Constraints as asked for; ValueError for nonsense."""
    return Constraints(
        memory=memory,
        strategy=strategy,
        tier=tier or "file",
        time_limit_s=time_limit,
        undo=not no_undo,
        throttle_bytes_per_s=None if throttle is None else float(throttle_bytes(throttle)),
        allow_inexact=allow_inexact,
        seed=seed,
    )


def throttle_bytes(text: str) -> int:
    """Bytes per second meant by "500MB" or "500MB/s"; ValueError for anything else, shares included."""
    try:
        if "%" not in text:
            return budget_bytes(text.removesuffix("/s"), eager_peak_bytes=1)
    except ValueError:
        pass
    raise ValueError(f'throttle {text!r} is not understood; use bytes per second, such as "500MB"')


def check_output(path: Path | None) -> None:
    """OSError at once, before any work, if a file could not be written there."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a directory, not a file", str(path))
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, "can not be written", str(path))
