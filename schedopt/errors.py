"""Every error schedopt raises on purpose.

SchedoptError
├── CaptureError            the training step can not be captured (names module, line, way out)
├── TargetError             a command-line TARGET or its options can not be used
├── PlanFileError           a plan file can not be read: version, unknown field, broken JSON
├── PlanMismatchError       a plan belongs to another graph, or breaks a rule of the checker
├── InfeasibleError         no plan fits the constraints; carries the least budget and the op that forbids less
├── SolverTimeoutError      the solver found nothing in its time; nothing is proven
├── InexactError            the result would differ from eager and the user did not allow it
└── StepError               a step failed while it ran
    ├── BudgetError         an allocation would exceed the budget; raised before it happens
    ├── TierError           the lower tier failed: disk full, file gone, short read
    └── HalfUpdatedError    the step died after an update and could not be rolled back; the state is half-way
"""

from __future__ import annotations


class SchedoptError(Exception):
    """Base class of all errors that schedopt raises on purpose."""


class CaptureError(SchedoptError):
    """The training step can not be captured as one graph."""


class TargetError(SchedoptError):
    """A command-line target or one of its options can not be used."""


class PlanFileError(SchedoptError):
    """A plan file can not be read."""


class PlanMismatchError(SchedoptError):
    """A plan does not belong to this graph or machine, or the checker refuses it."""


class InfeasibleError(SchedoptError):
    """No plan fits the budget.

    `least_bytes` is the smallest budget known to do, `floor_bytes` the working set of `op_name`, below which nothing does.
    """

    def __init__(self, message: str, *, budget_bytes: int, least_bytes: int, floor_bytes: int, op_name: str) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.floor_bytes = floor_bytes
        self.op_name = op_name


class SolverTimeoutError(SchedoptError):
    """The solver's time ran out before it found any plan; a longer limit may help."""


class InexactError(SchedoptError):
    """The scheduled step would not equal the eager step and the user did not allow that."""


class StepError(SchedoptError):
    """A step failed while it ran; model and optimizer are as before unless the subclass says otherwise."""


class BudgetError(StepError):
    """An allocation would exceed the budget; raised before the allocation."""

    def __init__(self, message: str, *, op_name: str, storage_name: str, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(message)
        self.op_name = op_name
        self.storage_name = storage_name
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class TierError(StepError):
    """The lower tier failed (disk full, short read or write)."""


class HalfUpdatedError(StepError):
    """The step died after the first update and no undo copy was kept: parameters are half-way; load a checkpoint."""
