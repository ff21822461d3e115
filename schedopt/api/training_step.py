"""The compiled training step: one call per batch, one plan per shape of batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from schedopt.api.prepare import as_step_plan, assure_exact, captured_step, decide_captured, reuse
from schedopt.api.progress import Progress, silent
from schedopt.api.step_plan import StepPlan
from schedopt.capture.workload import Workload, batch_device, flatten_batch
from schedopt.constraints import Constraints
from schedopt.machine import Machine
from schedopt.run.runner import Runner


@dataclass(frozen=True, slots=True)
class Settings:
    """How steps are compiled: see `schedopt.compile`."""

    constraints: Constraints
    given: StepPlan | None
    machine: Machine | None
    directory: str | None
    self_check: bool | None


@dataclass(frozen=True, slots=True)
class Stats:
    """The last step: predicted beside measured. Bytes and seconds."""

    budget_bytes: int
    predicted_peak_bytes: int
    peak_bytes: int
    predicted_step_seconds: float
    step_seconds: float
    stall_seconds: float
    out_bytes: int
    in_bytes: int


@dataclass(frozen=True, slots=True)
class _Ready:
    plan: StepPlan
    runner: Runner


class TrainingStep:
    """Call it with a batch: `step(x, y)` for a tuple, `step(batch)` for a dict, dataclass or tensor, `step(**batch)` for a dict.

    Returns the detached loss. A batch of another shape, another `requires_grad` or another train/eval flag of the model is captured and
    planned once and remembered. `close()` (or leaving a `with` block) brings tensors that rest on the lower tier back to memory.
    """

    def __init__(self, workload: Workload, settings: Settings, progress: Progress = silent) -> None:
        self.workload = workload
        self.settings = settings
        self._progress = progress
        self._ready: dict[Any, _Ready] = {}
        self._last_key: Any = None
        self._first_budget: int | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"TrainingStep({type(self.workload.model).__name__}, {len(self._ready)} compiled)"

    def __call__(self, *batch: Any, **named: Any) -> torch.Tensor:
        """One training step; the loss, detached. Whatever is raised, model and optimizer are as before the step (HalfUpdatedError: not)."""
        value = self._assemble(batch, named)
        key = self.prepare(value)
        leaves, _ = flatten_batch(value)
        return self._turn(key).runner.step(leaves)[0].detach()

    def _turn(self, key: Any) -> _Ready:
        """Make `key` the last in use; tensors that rested where another program left them come home first."""
        if self._last_key is not None and self._last_key != key:
            self._ready[self._last_key].runner.bring_home()
        self._last_key = key
        return self._ready[key]

    def prepare(self, batch: Any) -> Any:
        """Compile for batches like this one, unless that was done before; the key under which it is remembered."""
        if self._closed:
            raise RuntimeError("the training step is closed")
        leaves, spec = flatten_batch(batch)
        self._check_devices(leaves)
        key = (str(spec), tuple(_leaf_key(leaf) for leaf in leaves), _model_key(self.workload.model))
        if key not in self._ready:
            if self._last_key is not None:
                self._ready[self._last_key].runner.bring_home()
            self._ready[key] = self._compile(replace(self.workload, batch=batch))
            self._last_key = key
        return key

    def _compile(self, workload: Workload) -> _Ready:
        settings, constraints = self.settings, self.settings.constraints
        captured = captured_step(workload, self._progress)
        captured = assure_exact(captured, workload, constraints, settings.self_check, self._progress)
        if settings.given is not None and not self._ready:
            program = reuse(captured, settings.given, constraints)
        else:
            if self._first_budget is not None and isinstance(constraints.memory, str) and constraints.memory.rstrip().endswith("%"):
                constraints = replace(constraints, memory=self._first_budget)
            program = decide_captured(captured, constraints, settings.machine, self._progress)
        plan = as_step_plan(program)
        if self._first_budget is None:
            self._first_budget = plan.budget_bytes
        return _Ready(plan, Runner(program, directory=settings.directory))

    def _assemble(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The batch as one value, in the form that the example has."""
        if named and batch:
            raise ValueError("give the batch by position or by name, not both")
        if not named and not batch:
            raise ValueError("a step needs a batch: step(x, y), step(batch) or step(**batch)")
        if named:
            return named
        example = self.workload.batch
        if len(batch) == 1 and not (isinstance(example, tuple | list) and len(example) == 1 and not isinstance(batch[0], tuple | list)):
            value = batch[0]
        else:
            value = batch
        if isinstance(value, tuple | list) and isinstance(example, tuple | list) and type(value) is not type(example):
            return list(value) if type(example) is list else tuple(value) if type(example) is tuple else value
        return value

    def _check_devices(self, leaves: list[Any]) -> None:
        device = batch_device(self.workload)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != device.type:
                raise ValueError(f"tensor {number} of the batch is on {leaf.device}, the model on {device}; move it there first")

    def _last(self) -> _Ready:
        if self._last_key is None:
            raise RuntimeError("nothing is compiled yet: call the step with a batch first, or pass example_batch")
        return self._ready[self._last_key]

    @property
    def plan(self) -> StepPlan:
        """The plan of the last step (before the first: of the example batch)."""
        return self._last().plan

    @property
    def stats(self) -> Stats | None:
        """Predicted beside measured for the last step; None before the first."""
        ready = self._last()
        measured, plan = ready.runner.stats, ready.plan.plan
        if measured is None:
            return None
        return Stats(
            budget_bytes=ready.plan.budget_bytes,
            predicted_peak_bytes=plan.peak_bytes,
            peak_bytes=measured.peak_bytes,
            predicted_step_seconds=plan.step_ns / 1e9,
            step_seconds=measured.step_ns / 1e9,
            stall_seconds=measured.stall_ns / 1e9,
            out_bytes=measured.bytes_out,
            in_bytes=measured.bytes_in,
        )

    def train(self, mode: bool = True) -> TrainingStep:
        """Set the model's training flag, as `model.train(mode)` does."""
        self.workload.model.train(mode)
        return self

    def eval(self) -> TrainingStep:
        """Set the model to evaluation, as `model.eval()` does."""
        return self.train(False)

    def reset(self) -> None:
        """Go on after a HalfUpdatedError, once a checkpoint has been loaded into model and optimizer."""
        for ready in self._ready.values():
            ready.runner.reset()

    def close(self) -> None:
        """Bring all tensors home, end threads, give the swap file up. Safe to call twice."""
        self._closed = True
        for ready in self._ready.values():
            ready.runner.close()

    def __enter__(self) -> TrainingStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype, str(leaf.device))
    return (type(leaf).__name__, repr(leaf))


def _model_key(model: torch.nn.Module) -> Any:
    """What a graph freezes besides shapes: train/eval flags, frozen parameters, and plain numbers and words held by modules."""
    plain = tuple(v for m in model.modules() for v in vars(m).values() if type(v) in (bool, int, float, str))
    return plain, tuple(p.requires_grad for p in model.parameters())
