"""Schedules PyTorch training under a memory budget.

`compile` makes a training step that keeps to `Constraints`, `plan` decides without running. Torch is imported when it is needed first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedopt.api.entry import compile, plan
from schedopt.api.step_plan import StepPlan
from schedopt.constraints import Constraints
from schedopt.errors import SchedoptError
from schedopt.machine import Machine

if TYPE_CHECKING:
    from schedopt.api.training_step import TrainingStep
    from schedopt.capture.workload import Workload

__version__ = "0.1.0"
__all__ = ["Constraints", "Machine", "SchedoptError", "StepPlan", "TrainingStep", "Workload", "__version__", "compile", "plan"]


def __getattr__(name: str) -> Any:
    """The classes that need torch, imported on first use."""
    if name == "Workload":
        from schedopt.capture.workload import Workload

        return Workload
    if name == "TrainingStep":
        from schedopt.api.training_step import TrainingStep

        return TrainingStep
    raise AttributeError(f"module 'schedopt' has no attribute {name!r}")
