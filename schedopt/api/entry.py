"""`schedopt.compile` and `schedopt.plan`: the two functions a user calls. Torch is imported when one of them is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from schedopt.api.progress import Progress, silent
from schedopt.api.step_plan import StepPlan
from schedopt.constraints import Constraints
from schedopt.machine import Machine

if TYPE_CHECKING:
    import torch

    from schedopt.api.training_step import TrainingStep
    from schedopt.capture.workload import Workload


def compile(
    model: torch.nn.Module | Workload,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    example_batch: Any = None,
    *,
    constraints: Constraints | None = None,
    plan: str | os.PathLike[str] | StepPlan | None = None,
    machine: Machine | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    forward: Callable[[torch.nn.Module, Any], Any] | None = None,
    directory: str | os.PathLike[str] | None = None,
    self_check: bool | None = None,
    progress: Progress = silent,
) -> TrainingStep:
    """A training step that keeps to `constraints`: call it with a batch, get the loss; parameters, buffers and optimizer are updated.

    `model` may be a Workload, which then brings loss, optimizer, batch and options along. Without `example_batch` the first call
    compiles. `plan` (a file or a StepPlan) is used instead of solving; it must belong to this very step and machine kind. `machine`: costs
    come from its figures instead of being measured. `directory`: where the swap file goes. `self_check`: compare graph and eager on
    copies, bit for bit; None does it if the copies fit in memory. How a loss comes from a batch: see `Workload`.

    Raises CaptureError, InfeasibleError, SolverTimeoutError, InexactError, PlanFileError, PlanMismatchError, TierError; model and
    optimizer are then as they were. ValueError for arguments that make no sense.
    """
    from schedopt.api.training_step import Settings, TrainingStep

    workload = _workload(model, loss_fn, optimizer, example_batch, accumulate, clip_grad_norm, autocast, forward)
    given = StepPlan.load(plan) if isinstance(plan, str | os.PathLike) else plan
    settings = Settings(constraints or Constraints(), given, machine, None if directory is None else os.fspath(directory), self_check)
    step = TrainingStep(workload, settings, progress)
    if workload.batch is not None:
        step.prepare(workload.batch)
    return step


def plan(
    model: torch.nn.Module | Workload,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    example_batch: Any = None,
    *,
    constraints: Constraints | None = None,
    machine: str | os.PathLike[str] | Machine | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    forward: Callable[[torch.nn.Module, Any], Any] | None = None,
    progress: Progress = silent,
) -> StepPlan:
    """Decide without running. Arguments as for `compile`.

    `machine`: None measures the ops here; a name such as "h200", a JSON file or a Machine takes costs from figures, and then the model
    may be on the meta device or made of fake tensors: nothing is allocated. Raises as `compile` does, TargetError for an unknown machine.
    """
    from schedopt.api.prepare import as_machine, as_step_plan, decide

    workload = _workload(model, loss_fn, optimizer, example_batch, accumulate, clip_grad_norm, autocast, forward)
    if workload.batch is None:
        raise ValueError("plan needs a batch: pass example_batch")
    return as_step_plan(decide(workload, constraints or Constraints(), as_machine(machine), progress))


def _workload(
    model: torch.nn.Module | Workload,
    loss_fn: Callable[..., Any] | None,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    accumulate: int,
    clip_grad_norm: float | None,
    autocast: torch.dtype | None,
    forward: Callable[[torch.nn.Module, Any], Any] | None,
) -> Workload:
    import torch

    from schedopt.capture.workload import Workload

    if isinstance(model, Workload):
        given = (loss_fn, optimizer, batch, clip_grad_norm, autocast, forward)
        if any(x is not None for x in given) or accumulate != 1:
            raise ValueError("a Workload brings loss, optimizer, batch and options along; give them there, not here")
        return model
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model must be a torch.nn.Module or a schedopt.Workload, not {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, not {accumulate}")
    return Workload(model, loss_fn, optimizer, batch, forward, accumulate, clip_grad_norm, autocast)
