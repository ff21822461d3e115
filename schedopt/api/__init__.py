"""What a user calls."""

from schedopt.api.entry import compile, plan
from schedopt.api.step_plan import StepPlan

__all__ = ["StepPlan", "compile", "plan"]
