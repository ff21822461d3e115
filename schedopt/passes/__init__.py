"""The order of the passes, in one place. `decide_*` passes write the plan, `insert_*` passes carry it out on the fx graph."""

from __future__ import annotations

from collections.abc import Callable

from schedopt.pass_manager import Pass
from schedopt.passes.decide_memory import DecideMemory
from schedopt.passes.decide_order import DecideOrder
from schedopt.passes.insert_actions import InsertActions

__all__ = ["DecideMemory", "DecideOrder", "InsertActions", "default_passes"]


def default_passes(progress: Callable[[float, str], None] | None = None) -> tuple[Pass, ...]:
    """Passes that decide a plan. `insert_actions` follows when the plan is to run (see `run.runner`)."""
    return (DecideOrder(), DecideMemory(progress))
