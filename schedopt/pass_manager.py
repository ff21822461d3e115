"""Runs passes over a program; times, logs and verifies after each of them, so that no pass has to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from schedopt.check import Report, check
from schedopt.constraints import Constraints
from schedopt.errors import PlanMismatchError
from schedopt.graph import Graph
from schedopt.machine import Machine
from schedopt.plan import Plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Program:
    """What passes work on. `captured` is the `capture.Captured` of the step (None when only the plain graph is at hand: planning for a
    machine that is not here, or from a file); `lowered` the rewritten `fx.GraphModule` once an insert pass has made it."""

    graph: Graph
    machine: Machine
    constraints: Constraints
    plan: Plan | None = None
    captured: Any = None
    lowered: Any = None


class Pass(Protocol):
    """A frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """Short name for logs."""

    def __call__(self, program: Program) -> Program:
        """Return the changed program; the argument stays as it was."""


def run_passes(program: Program, passes: Sequence[Pass], progress: Callable[[str], None] | None = None) -> Program:
    """Run `passes` in order. After each one the plan, if there is one, is replayed by the checker; a broken rule raises
    PlanMismatchError. The checker's peak and step time are written into the plan. `progress` is called with each pass's name."""
    for one in passes:
        if progress is not None:
            progress(one.name)
        started = time.perf_counter()
        program = one(program)
        report = verify(program)
        logger.info("pass %s: %.3f s%s", one.name, time.perf_counter() - started, f", {report}" if report else "")
        if report is not None and program.plan is not None:
            program = replace(program, plan=replace(program.plan, peak_bytes=report.peak_bytes, step_ns=report.step_ns))
    return program


def verify(program: Program) -> Report | None:
    """Replay the program's plan; None without a plan. PlanMismatchError names the first broken rules."""
    if program.plan is None:
        return None
    report = check(program.graph, program.plan, program.machine)
    if not report.ok:
        raise PlanMismatchError("the plan breaks a rule:\n" + "\n".join(str(v) for v in report.violations[:5]))
    return report
