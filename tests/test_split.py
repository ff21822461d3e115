"""A layer whose parameter, gradient and optimizer state do not fit together: its update is made in parts on the lower tier."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import schedopt
from schedopt.capture.split import UpdatePart
from schedopt.capture.workload import Workload
from schedopt.check import check
from schedopt.errors import PlanMismatchError
from schedopt.plan import ActionKind, Fate
from tests.test_exactness import assert_same, call, eager_run, state_of

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
}


def large_layer(optimizer: str) -> Workload:
    """One layer holds nearly all parameters; an odd number of elements, so that the last part is a short one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1021, 1601), nn.ReLU(), nn.Linear(1601, 8))
    batch = (torch.randn(4, 1021), torch.randint(0, 8, (4,)))
    return Workload(model, nn.functional.cross_entropy, OPTIMIZERS[optimizer](model.parameters()), batch)


def parts_of(plan: schedopt.StepPlan) -> int:
    """Storages that are parts of others."""
    return sum(s.parent is not None for s in plan.graph.storages)


@pytest.mark.parametrize(("optimizer", "tier"), [*((name, "ram") for name in sorted(OPTIMIZERS)), ("sgd", "file"), ("adamw", "file")])
def test_equals_eager_below_the_working_set_of_the_update(optimizer: str, tier: str) -> None:
    ours = large_layer(optimizer)
    theirs = copy.deepcopy(ours)
    expected = eager_run(theirs)
    constraints = schedopt.Constraints(memory="40%", tier=tier, time_limit_s=1)
    with schedopt.compile(ours, constraints=constraints, self_check=False) as step:
        assert parts_of(step.plan) >= 10
        torch.manual_seed(7)
        for loss, state in expected:
            assert float(call(step, ours.batch)) == loss
            assert_same(state_of(ours), state)
        assert step.stats is not None
        assert step.stats.peak_bytes == step.plan.plan.peak_bytes
    assert_same(state_of(ours), state)


def test_state_can_be_loaded_between_steps() -> None:
    ours, theirs = large_layer("adamw"), large_layer("adamw")
    saved = copy.deepcopy((ours.model.state_dict(), ours.optimizer.state_dict()))
    with schedopt.compile(ours, constraints=schedopt.Constraints(memory="40%", tier="file", time_limit_s=1)) as step:
        assert parts_of(step.plan)
        call(step, ours.batch)
        ours.model.load_state_dict(saved[0])
        ours.optimizer.load_state_dict(saved[1])
        for _, _state in eager_run(theirs):
            call(step, ours.batch)
        assert_same(
            {k: v for k, v in state_of(ours).items() if k != "generator"}, {k: v for k, v in state_of(theirs).items() if k != "generator"}
        )


def test_a_failed_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = large_layer("sgd")
    with schedopt.compile(ours, constraints=schedopt.Constraints(memory="45%", tier="ram", time_limit_s=1)) as step:
        call(step, ours.batch)
        before = copy.deepcopy(state_of(ours))
        calls = 0
        plain = UpdatePart.__call__

        def failing(self: UpdatePart, *args: torch.Tensor) -> None:
            nonlocal calls
            calls += 1
            if calls == 7:
                raise RuntimeError("seventh part")
            plain(self, *args)

        with monkeypatch.context() as patched:
            patched.setattr(UpdatePart, "__call__", failing)
            with pytest.raises(RuntimeError, match="seventh part"):
                call(step, ours.batch)
        assert_same(state_of(ours), before)
        call(step, ours.batch)


def test_a_saved_plan_splits_again_and_refuses_another_model(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    first = large_layer("adamw")
    plan = schedopt.plan(first, constraints=schedopt.Constraints(memory="40%", tier="ram", time_limit_s=1))
    plan.save(path)
    assert Fate.SPLIT in {d.fate for d in plan.plan.decisions}
    ours, theirs = large_layer("adamw"), large_layer("adamw")
    with schedopt.compile(ours, plan=path) as step:
        for _, _state in eager_run(theirs):
            call(step, ours.batch)
        assert_same(
            {k: v for k, v in state_of(ours).items() if k != "generator"}, {k: v for k, v in state_of(theirs).items() if k != "generator"}
        )
    model = nn.Linear(1021, 8)
    other = Workload(model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters()), ours.batch)
    with pytest.raises(PlanMismatchError, match="another training step"):
        schedopt.compile(other, plan=path)


def test_parts_that_are_not_whole_pages_are_refused() -> None:
    plan = schedopt.plan(large_layer("sgd"), constraints=schedopt.Constraints(memory="40%", tier="ram", time_limit_s=1))
    second = next(s for s in plan.graph.storages if s.parent is not None and s.start_bytes)
    storages = tuple(replace(s, start_bytes=s.start_bytes + 8) if s == second else s for s in plan.graph.storages)
    graph = replace(plan.graph, storages=storages)
    forged = schedopt.StepPlan(replace(plan.file, graph=graph, plan=replace(plan.plan, graph_hash=graph.hash())))
    with pytest.raises(PlanMismatchError, match="another training step"):
        schedopt.compile(large_layer("sgd"), plan=forged)


def test_checker_wants_parts_and_parents_away() -> None:
    plan = schedopt.plan(large_layer("sgd"), constraints=schedopt.Constraints(memory="45%", tier="ram", time_limit_s=1))
    part = next(s for s in plan.graph.storages if s.parent is not None)
    schedule = plan.plan.schedules[0]
    here = replace(schedule, away=tuple(s for s in schedule.away if s != part.parent))
    report = check(plan.graph, replace(plan.plan, schedules=(here,)), plan.machine)
    assert "split" in {v.rule for v in report.violations}
    swapped_in = {a.subject for a in schedule.actions if a.kind is ActionKind.SWAP_IN}
    assert part.id in swapped_in


def test_large_updates_stay_whole_where_that_fits() -> None:
    plan = schedopt.plan(large_layer("sgd"), constraints=schedopt.Constraints(memory="100%", tier="ram", time_limit_s=1))
    assert not parts_of(plan)
