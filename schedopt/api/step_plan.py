"""The handle on a plan that a user gets: look at it, check it, save it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from schedopt.check import Report
from schedopt.constraints import Constraints
from schedopt.export import text
from schedopt.export.figures import budget, replay
from schedopt.graph import Graph
from schedopt.machine import Machine
from schedopt.plan import Plan
from schedopt.plan_file import PlanFile, load_plan, save_plan


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A plan with the graph, machine and constraints it was made for."""

    file: PlanFile

    def __repr__(self) -> str:
        return f"StepPlan({self.plan!r})"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepPlan:
        """Read a plan file; PlanFileError says what is wrong with it."""
        return cls(load_plan(path))

    @property
    def plan(self) -> Plan:
        """The decisions."""
        return self.file.plan

    @property
    def graph(self) -> Graph:
        """The step as plain data, with costs."""
        return self.file.graph

    @property
    def machine(self) -> Machine:
        """The machine that the plan was made for."""
        return self.file.machine

    @property
    def constraints(self) -> Constraints:
        """What was demanded."""
        return self.file.constraints

    @property
    def budget_bytes(self) -> int:
        """The byte budget of the device."""
        return budget(self.plan)

    def summary(self) -> str:
        """The summary table as text: budget, peak, step, bound, gap, what is swapped, recomputed, resting."""
        return text.summary(self.file)

    def check(self) -> Report:
        """Replay the plan independently of what made it: broken rules, peak, step time."""
        return replay(self.file)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, at once or not at all; PlanFileError if it can not be written."""
        save_plan(self.file, path)
