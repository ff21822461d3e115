"""Whatever goes wrong in a step, and wherever: model, optimizer and generator are as before, or the step says that they are not."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from schedopt.constraints import Constraints
from schedopt.errors import BudgetError, HalfUpdatedError, StepError, TierError
from schedopt.graph import Graph
from schedopt.pass_manager import Program
from schedopt.plan import Plan
from schedopt.run.ledger import Ledger
from schedopt.run.runner import Runner
from schedopt.run.tier import FileTier
from tests import plans
from tests.programs import Maker, assert_exact, differences, frozen_state, leaves_of, program_of, small_job

MAKERS: dict[str, Maker] = {
    "early update": lambda graph: plans.early_update(graph, "file"),
    "away": lambda graph: plans.all_away(graph, "file"),
    "swap": plans.swap_everything,
    "recompute": plans.recompute_everything,
}


class Injected(Exception):
    """Raised by the tests inside a step."""


ACTIONS = ("<schedopt step>", "cpu.py", "ledger.py", "undo.py", "tier.py")
EVERYWHERE = (*ACTIONS, "runner.py", "resting.py", "interrupt.py")


@contextmanager
def at_line(number: int, action: Callable[[], None], files: tuple[str, ...] = ACTIONS) -> Iterator[list[int]]:
    """Do something at the `number`-th line that this thread runs in `files`; yields a list with the number of lines seen so far."""
    seen = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        folder, name = os.path.split(frame.f_code.co_filename)
        if name not in files or (folder and not folder.endswith("schedopt/run")):
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == number:
                action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


def _fail() -> None:
    raise Injected


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def _lines_of_a_step(runner: Runner, leaves: list[Any], files: tuple[str, ...] = ACTIONS) -> int:
    with at_line(-1, _fail, files) as seen:
        runner.step(leaves)
    return seen[0]


def _open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    torch.set_num_threads(1)
    gc.collect()
    at_start = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell start with Ctrl-C ignored
    files, handler = _open_files(), signal.getsignal(signal.SIGINT)
    yield
    gc.collect()
    assert [t.name for t in threading.enumerate() if t.name.startswith("schedopt")] == []
    assert _open_files() <= files
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, at_start)


def _sample(lines: int, count: int) -> list[int]:
    """Some of all lines, and some near the end, where the updates are."""
    return sorted({*random.Random(lines).sample(range(1, lines + 1), count), *(lines - back for back in (10, 25, 50))})


@pytest.mark.parametrize("maker", MAKERS)
def test_an_exception_anywhere_leaves_no_trace(maker: str) -> None:
    workload = small_job()
    leaves = leaves_of(workload)
    with Runner(program_of(workload, MAKERS[maker]), checked_steps=0) as runner:
        lines = _lines_of_a_step(runner, leaves)
        for number in _sample(lines, 8):
            before = frozen_state(workload)
            with at_line(number, _fail) as seen, suppress(Injected, HalfUpdatedError):
                runner.step(leaves)
            if seen[0] < number:  # a wait that was not needed this time
                continue
            if runner.broken is None:
                assert differences(frozen_state(workload), before) == [], f"line {number} of {lines}"
                continue
            assert maker in ("swap", "recompute"), "an undo copy was there"
            assert differences(frozen_state(workload), before) != []
            with pytest.raises(HalfUpdatedError, match="earlier step"):
                runner.step(leaves)
            runner.reset()
        runner.step(leaves)


@pytest.mark.parametrize("maker", MAKERS)
def test_ctrl_c_anywhere_is_before_or_after_the_step(maker: str) -> None:
    workload = small_job()
    leaves = leaves_of(workload)
    with Runner(program_of(workload, MAKERS[maker]), checked_steps=0) as runner:
        lines = _lines_of_a_step(runner, leaves, EVERYWHERE)
        outcomes = set()
        for number in _sample(lines, 10):
            before = frozen_state(workload)
            raised = False
            with at_line(number, _interrupt, EVERYWHERE) as seen:
                try:
                    runner.step(leaves)
                except KeyboardInterrupt:
                    raised = True
            assert raised or seen[0] < number, "Ctrl-C was swallowed"
            interrupted = frozen_state(workload)
            undone = differences(interrupted, before) == []
            if not undone:
                _put(workload, before)
                runner.step(leaves)
                assert differences(frozen_state(workload), interrupted) == [], f"line {number} of {lines}: neither before nor after"
            outcomes.add(undone)
        assert outcomes == {True, False}


def _put(workload: Any, state: dict[str, torch.Tensor]) -> None:
    """Set everything to an earlier state, in place."""
    torch.set_rng_state(state["generator"])
    with torch.no_grad():
        for name, value in {**dict(workload.model.named_parameters()), **dict(workload.model.named_buffers())}.items():
            value.copy_(state[name])
        names = {id(p): name for name, p in workload.model.named_parameters()}
        for parameter, entries in workload.optimizer.state.items():
            for key, value in entries.items():
                value.copy_(state[f"{names[id(parameter)]}/{key}"])


def test_two_ctrl_c_do_not_tear_the_undo_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = small_job()
    before = frozen_state(workload)
    with Runner(program_of(workload, plans.swap_everything)) as runner:
        monkeypatch.setattr(Ledger, "take", lambda *_: _interrupt())
        original = torch.set_rng_state

        def set_state(state: torch.Tensor) -> None:
            _interrupt()  # in the middle of the undo
            original(state)

        monkeypatch.setattr(torch, "set_rng_state", set_state)
        with pytest.raises(KeyboardInterrupt):
            runner.step(leaves_of(workload))
        monkeypatch.undo()
        assert differences(frozen_state(workload), before) == []
        runner.step(leaves_of(workload))


def test_without_undo_the_state_is_declared_half_way() -> None:
    workload = small_job()
    program = program_of(workload, lambda graph: plans.early_update(graph, undo=False))
    with Runner(program, checked_steps=0) as runner:
        lines = _lines_of_a_step(runner, leaves_of(workload))
        with at_line(int(lines * 0.9), _fail), pytest.raises(HalfUpdatedError, match="load a checkpoint") as caught:
            runner.step(leaves_of(workload))
        assert isinstance(caught.value.__cause__, Injected)
        with pytest.raises(HalfUpdatedError, match="earlier step"):
            runner.step(leaves_of(workload))
        runner.reset()
        runner.step(leaves_of(workload))


def _tight(program: Program, share: float) -> Program:
    assert program.plan is not None
    schedule = program.plan.schedules[0]
    budget = int(schedule.budget_bytes * share)
    return replace(program, plan=replace(program.plan, schedules=(replace(schedule, budget_bytes=budget),)))


@pytest.mark.parametrize("maker", [plans.plain, plans.swap_everything, plans.all_away])
def test_budget_is_enforced_before_the_allocation(maker: Maker) -> None:
    workload = small_job()
    before = frozen_state(workload)
    with Runner(_tight(program_of(workload, maker), 0.999)) as runner:
        with pytest.raises(BudgetError) as caught:
            runner.step(leaves_of(workload))
        error = caught.value
        assert error.needed_bytes > error.budget_bytes == runner.budget_bytes
        assert error.op_name in str(error)
        assert error.storage_name in str(error)
        assert differences(frozen_state(workload), before) == []
    with Runner(_tight(program_of(workload, plans.plain), 0.01)) as runner, pytest.raises(BudgetError, match="start"):
        runner.step(leaves_of(workload))


def test_a_plan_with_wrong_sizes_is_noticed() -> None:
    workload = small_job()

    def wrong(graph: Graph) -> Graph:
        shrunk = [replace(s, size_bytes=s.size_bytes // 2) if not s.external and s.size_bytes > 64 else s for s in graph.storages]
        return replace(graph, storages=tuple(shrunk))

    program = program_of(workload, plans.plain)
    captured = replace(program.captured, graph=wrong(program.graph))
    before = frozen_state(workload)
    with Runner(replace(program, graph=captured.graph, captured=captured)) as runner:
        with pytest.raises(StepError, match="the plan counts"):
            runner.step(leaves_of(workload))
        assert differences(frozen_state(workload), before) == []


def test_no_room_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = small_job()
    before = frozen_state(workload)
    program = program_of(workload, lambda graph: plans.all_away(graph, "file"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(TierError, match="tier_bytes allows 100"):
        Runner(replace(program, constraints=Constraints(tier_bytes=100)))
    with pytest.raises(TierError, match="check the directory"):
        Runner(program, directory=str(tmp_path / "missing"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierError, match="use tier='ram'"):
        Runner(program, directory=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert differences(frozen_state(workload), before) == []


@pytest.mark.parametrize("way", ["_read", "_write"])
@pytest.mark.parametrize("maker", ["early update", "away"])
def test_a_tier_that_breaks_in_the_middle(maker: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = small_job()
    with Runner(program_of(workload, MAKERS[maker])) as runner:
        runner.step(leaves_of(workload))
        before = frozen_state(workload)
        original, calls = getattr(FileTier, way), [0]

        def broken(self: FileTier, offset: int, data: Any) -> None:
            calls[0] += 1
            if calls[0] == 4:
                raise OSError(5, "Input/output error")
            original(self, offset, data)

        monkeypatch.setattr(FileTier, way, broken)
        if (maker, way) == ("early update", "_read"):  # undo copies are not read in a step that succeeds
            runner.step(leaves_of(workload))
            return
        with pytest.raises(TierError, match="Input/output error"):
            runner.step(leaves_of(workload))
        assert differences(frozen_state(workload), before) == []
        runner.step(leaves_of(workload))


def test_runner_that_can_not_start_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = small_job()
    before = frozen_state(workload)
    program = program_of(workload, MAKERS["away"])
    original, calls = FileTier._write, [0]

    def broken(self: FileTier, offset: int, data: Any) -> None:
        calls[0] += 1
        if calls[0] == 5:
            raise OSError(5, "Input/output error")
        original(self, offset, data)

    monkeypatch.setattr(FileTier, "_write", broken)
    with pytest.raises(TierError):
        Runner(program)
    assert differences(frozen_state(workload), before) == []
    assert all(p.untyped_storage().resizable() for p in workload.model.parameters())


def test_a_failed_first_step_and_a_retry_equal_eager() -> None:
    """Optimizer state that did not exist before the failed step is as if it had never been made."""
    workload = small_job()

    def failing(graph: Graph) -> Plan:
        return plans.early_update(graph)

    program = program_of(workload, failing)
    with Runner(program, checked_steps=0) as runner:
        for number in (300, 400, 500):
            torch.manual_seed(7)
            with at_line(number, _fail), pytest.raises(Injected):
                runner.step(leaves_of(workload))
            assert workload.optimizer.state == {}
    assert_exact(workload, failing)
