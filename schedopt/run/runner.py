"""Runs a lowered program step by step on the CPU under its budget, and leaves nothing half done."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from schedopt.capture.captured import Captured
from schedopt.errors import HalfUpdatedError
from schedopt.lower.codegen import generate
from schedopt.pass_manager import Program
from schedopt.passes.insert_actions import InsertActions
from schedopt.run.cpu import CpuRuntime
from schedopt.run.interrupt import HeldInterrupt
from schedopt.run.resting import Resting
from schedopt.run.slots import make_tier


@dataclass(frozen=True, slots=True)
class StepStats:
    """What the last step really did."""

    step_ns: int
    peak_bytes: int
    stall_ns: int
    bytes_out: int
    bytes_in: int


class Runner:
    """A program made ready to run. `step(leaves)` runs one training step; `close()` brings everything home.

    The first `checked_steps` steps compare every tensor that is created with what the plan says.
    """

    def __init__(self, program: Program, *, directory: str | None = None, checked_steps: int = 1) -> None:
        assert program.plan is not None
        assert program.captured is not None
        self.program = program
        self.captured: Captured = program.captured
        self.schedule = program.plan.schedules[0]
        self._checked_left = checked_steps
        self._checked = generate(InsertActions(checked=True)(program).lowered) if checked_steps else None
        self.lowered = generate(InsertActions()(program).lowered)
        self.tier, self.slots = make_tier(program, directory)
        self.resting = Resting(self.captured, self.schedule, self.tier, self.slots)
        self.stats: StepStats | None = None
        self._broken: str | None = None
        self._closed = False

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def step(self, leaves: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """One training step on the flattened batch; the outputs (the loss first).

        Whatever is raised, model, optimizer and generator are as before the step; HalfUpdatedError says when they could not be.
        """
        if self._closed:
            raise RuntimeError("the runner is closed")
        if self._broken is not None:
            raise HalfUpdatedError(f"an earlier step stopped half-way ({self._broken}); load a checkpoint and call reset()")
        started = time.perf_counter_ns()
        with torch.no_grad():
            inputs = self.resting.begin(leaves)
            interrupt = HeldInterrupt()
            runtime = CpuRuntime(self.program, self.tier, self.slots, self.resting, interrupt)
            lowered = self._checked if self._checked_left and self._checked is not None else self.lowered
            try:
                self.captured.begin_step()
                outputs = lowered.function(runtime, inputs)
                interrupt.hold()
            except BaseException as error:
                inputs.clear()
                traceback.clear_frames(error.__traceback__)
                self._undo(runtime, interrupt, error)
                raise
            self.resting.commit(runtime.changed)
            self.captured.commit_step()
        self._checked_left = max(0, self._checked_left - 1)
        elapsed = time.perf_counter_ns() - started
        self.stats = StepStats(elapsed, runtime.peak, runtime.stall_ns, runtime.bytes_out, runtime.bytes_in)
        interrupt.let_go()
        return outputs

    def _undo(self, runtime: CpuRuntime, interrupt: HeldInterrupt, error: BaseException) -> None:
        """Back to the state before the step, or say that it can not be."""
        interrupt.hold()
        try:
            lost = runtime.roll_back()
            self.captured.abandon_step()
        finally:
            interrupt.release()
        if lost:
            self._broken = f"{type(error).__name__}: {error}"
            raise HalfUpdatedError(
                f"the step stopped after {lost[0]} and {len(lost) - 1} more were updated, and no undo copy was kept (undo=False); "
                "load a checkpoint"
            ) from error

    def reset(self) -> None:
        """Accept the present tensors as the state to go on from (after a checkpoint was loaded)."""
        self._broken = None

    def bring_home(self) -> None:
        """Give every tensor that rests on the lower tier ordinary memory, for another runner's turn; the next step takes them again."""
        if not self._closed:
            self.resting.close()

    def close(self) -> None:
        """Bring every tensor back to ordinary memory, end threads, give up the file. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self.tier.close)
            self.resting.close()
