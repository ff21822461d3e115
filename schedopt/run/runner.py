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
from schedopt.heap import give_back, keep_heap
from schedopt.lower.codegen import generate
from schedopt.pass_manager import Program
from schedopt.passes.insert_actions import InsertActions
from schedopt.run.cpu import CpuRuntime
from schedopt.run.interrupt import HeldInterrupt
from schedopt.run.ledger import Inspector, Ledger
from schedopt.run.resting import Resting
from schedopt.run.slots import make_tier
from schedopt.run.undo import Undo


@dataclass(frozen=True, slots=True)
class StepStats:
    """What the last step really did. `tier_bytes`: size of the lower tier's file or region."""

    step_ns: int
    peak_bytes: int
    stall_ns: int
    bytes_out: int
    bytes_in: int
    tier_bytes: int


class Runner:
    """A program made ready to run. `step(leaves)` runs one training step; `close()` brings everything home.

    The first `checked_steps` steps compare every storage that is created with what the plan says. `directory`: where the swap file goes.
    TierError if there is no room for it.
    """

    def __init__(self, program: Program, *, directory: str | None = None, checked_steps: int = 1) -> None:
        assert program.plan is not None
        assert program.captured is not None
        self._program = program
        self._captured: Captured = program.captured
        self._schedule = program.plan.schedules[0]
        self._checked_left = checked_steps
        self._checked = generate(InsertActions(checked=True)(program).lowered) if checked_steps else None
        self.lowered = generate(InsertActions()(program).lowered)
        self._ledger = Ledger(program.graph, self._schedule)
        self._inspector = Inspector(program.captured)
        self._broken: str | None = None
        self._closed = False
        self.stats: StepStats | None = None
        keep_heap()
        self._tier, self._slots = make_tier(program, directory)
        try:
            self._resting = Resting(self._captured, self._schedule, self._tier, self._slots)
            with contextlib.ExitStack() as undo:
                undo.callback(self._resting.bring_home)
                self._resting.settle()
                undo.pop_all()
        except BaseException:
            self._tier.close()
            raise

    @property
    def broken(self) -> str | None:
        """The error that left the state half-way; None if it is whole."""
        return self._broken

    @property
    def budget_bytes(self) -> int:
        """Bytes that a step may use on the device."""
        return self._schedule.budget_bytes

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def step(self, leaves: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """One training step on the flattened batch; the outputs (the loss first).

        Whatever is raised, model, optimizer and generator are as before the step; HalfUpdatedError says when they could not be. A Ctrl-C
        that comes after the first lasting change is raised once the step is done.
        """
        if self._closed:
            raise RuntimeError("the runner is closed")
        if self._broken is not None:
            raise HalfUpdatedError(f"an earlier step stopped half-way ({self._broken}); load a checkpoint and call reset()")
        started = time.perf_counter_ns()
        interrupt = HeldInterrupt()
        try:
            with torch.no_grad():
                interrupt.install()
                outputs, runtime = self._run(leaves, interrupt)
        finally:
            interrupt.uninstall()
        elapsed = time.perf_counter_ns() - started
        moved = (runtime.stall_ns, runtime.bytes_out, runtime.bytes_in, self._slots.size_bytes)
        self.stats = StepStats(elapsed, self._ledger.peak, *moved)
        return outputs

    def _run(self, leaves: Sequence[Any], interrupt: HeldInterrupt) -> tuple[tuple[torch.Tensor, ...], CpuRuntime]:
        """The step from its first look at the user's tensors to its commit or undo."""
        lowered = self._checked if self._checked_left and self._checked is not None else self.lowered
        inputs, live = self._resting.begin(leaves)
        self._ledger.begin()
        undo = Undo(self._program.graph, self._schedule, self._tier, self._slots, live)
        runtime = CpuRuntime(self._program.graph, self._ledger, self._inspector, self._tier, self._slots, undo, interrupt)
        try:
            self._captured.begin_step()
            outputs = lowered.function(runtime, inputs)
            interrupt.hold()
            prepared = self._resting.prepare(undo.changed)
        except BaseException as error:
            interrupt.hold()
            inputs.clear()
            traceback.clear_frames(error.__traceback__)
            self._put_back(undo, error)
            raise
        self._resting.commit(prepared)
        self._captured.commit_step()
        self._checked_left = max(0, self._checked_left - 1)
        return outputs, runtime

    def _put_back(self, undo: Undo, error: BaseException) -> None:
        """Back to the state before the step, or say that it can not be."""
        self._broken = f"{type(error).__name__}: {error}"  # until the opposite is certain
        self._tier.drain()
        self._resting.empty()
        lost = undo.roll_back()
        self._captured.abandon_step()
        if lost:
            raise HalfUpdatedError(
                f"the step stopped after {lost[0]} and {len(lost) - 1} more were updated, and there is no undo copy of them; "
                "load a checkpoint"
            ) from error
        self._broken = None

    def reset(self) -> None:
        """Accept the present tensors as the state to go on from (after a checkpoint was loaded)."""
        self._broken = None

    def bring_home(self) -> None:
        """Give every tensor that rests on the lower tier ordinary memory, for another runner's turn; the next step takes them again."""
        if not self._closed:
            self._resting.bring_home()

    def close(self) -> None:
        """Bring every tensor back to ordinary memory, end threads, give up the file. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(give_back)
            stack.callback(self._tier.close)
            self._resting.bring_home()
