"""The step that a user gets: same bits as eager, any form of batch, any shape, plans saved and used again, nothing changed by failures."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import schedopt
from schedopt.capture.selfcheck import clone_workload, run_eager_step, same_bits, step_state
from schedopt.capture.workload import Workload
from schedopt.errors import CaptureError, InexactError, InfeasibleError, PlanFileError, PlanMismatchError
from schedopt.plan_file import load_plan, save_plan
from tests.machines import TEST_MACHINE

TIGHT = schedopt.Constraints(memory="60%", tier="ram", time_limit_s=0.5)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("schedopt")] == []


def job(batch_size: int = 128, width: int = 192) -> Workload:
    """Six dense layers and dropout; large enough that 60 % of the memory needs decisions."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(width, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, nn.functional.cross_entropy, optimizer, (torch.randn(batch_size, width), torch.randint(0, 4, (batch_size,))))


def compiled(workload: Workload, **options: Any) -> Any:
    """Compile for the test machine."""
    settings: dict[str, Any] = {"constraints": TIGHT, "machine": TEST_MACHINE, "self_check": False}
    return schedopt.compile(workload, **settings | options)


def assert_same(ours: Workload, theirs: Workload) -> None:
    """Parameters, buffers and optimizer state are the same bits."""
    state, expected = step_state(ours), step_state(theirs)
    assert state.keys() == expected.keys()
    assert [name for name in state if not same_bits(state[name], expected[name])] == []


def test_three_steps_are_the_bits_of_eager() -> None:
    ours = job()
    theirs = clone_workload(ours)
    torch.manual_seed(5)
    expected = [run_eager_step(theirs) for _ in range(3)]
    torch.manual_seed(5)
    with compiled(ours) as step:
        losses = [step(*ours.batch) for _ in range(3)]
        assert step.plan.plan.solver != "plain"
        assert step.stats.peak_bytes <= step.plan.budget_bytes < step.plan.plan.eager_peak_bytes
        assert step.stats.predicted_peak_bytes == step.plan.plan.peak_bytes == step.stats.peak_bytes
        assert_same(ours, theirs)
    assert [same_bits(a, b) for a, b in zip(losses, expected, strict=True)] == [True] * 3
    assert not losses[0].requires_grad
    assert_same(ours, theirs)


def test_without_an_example_the_first_call_compiles() -> None:
    ours = job()
    step = schedopt.compile(ours.model, ours.loss_fn, ours.optimizer, machine=TEST_MACHINE, self_check=False)
    with pytest.raises(RuntimeError, match="nothing is compiled"):
        _ = step.plan
    with step:
        step(*ours.batch)
        assert step.plan.plan.solver == "plain"


@dataclass
class Pair:
    """A batch."""

    x: torch.Tensor
    y: torch.Tensor


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """A model that returns its own loss."""
        return {"loss": nn.functional.cross_entropy(self.layer(x), y)}


def test_every_form_of_batch() -> None:
    x, y = torch.randn(4, 8), torch.randint(0, 2, (4,))
    own = _Own()

    def make(model: nn.Module, loss: Any, batch: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return schedopt.compile(model, loss, optimizer, batch, machine=TEST_MACHINE, self_check=False)

    expected = nn.functional.cross_entropy(own.layer(x), y).detach()
    with make(own, None, {"x": x, "y": y}) as step:
        assert same_bits(step({"x": x, "y": y}), expected)
        assert same_bits(step(x=x, y=y), expected)
        with pytest.raises(ValueError, match="not both"):
            step(x, y=y)
        with pytest.raises(ValueError, match="needs a batch"):
            step()
    for batch in ((x, y), [x, y]):
        with make(own.layer, nn.functional.cross_entropy, batch) as step:
            assert same_bits(step(x, y), expected)
            assert same_bits(step((x, y)), expected)
            assert same_bits(step([x, y]), expected)
            assert "1 compiled" in repr(step)
    with pytest.raises(CaptureError, match="Pair"):  # the layer gets the whole batch, which it does not understand
        make(own.layer, lambda out, pair: nn.functional.cross_entropy(out, pair.y), Pair(x, y))
    forward = schedopt.compile(
        own.layer,
        None,
        torch.optim.SGD(own.parameters(), lr=0.0),
        Pair(x, y),
        forward=lambda model, pair: nn.functional.cross_entropy(model(pair.x), pair.y),
        machine=TEST_MACHINE,
    )
    with forward as step:
        assert same_bits(step(Pair(x, y)), expected)


def test_another_shape_or_flag_is_planned_once_and_remembered() -> None:
    ours = job()
    theirs = clone_workload(ours)
    batches = [ours.batch, tuple(t[:100] for t in ours.batch), ours.batch, tuple(t[:100] for t in ours.batch)]
    stages: list[str] = []
    torch.manual_seed(5)
    expected = [run_eager_step(theirs, batch) for batch in batches]
    theirs.model.eval()
    expected.append(run_eager_step(theirs))
    torch.manual_seed(5)
    with compiled(ours, progress=lambda stage, done, total: stages.append(stage) if not done else None) as step:
        losses = [step(*batch) for batch in batches]
        assert stages.count("capture") == 2
        assert step.eval() is step
        losses.append(step(*ours.batch))
        assert stages.count("capture") == 3
        step.train()
        step.prepare(ours.batch)
        assert stages.count("capture") == 3
    assert [same_bits(a, b) for a, b in zip(losses, expected, strict=True)] == [True] * 5
    theirs.model.train()
    assert_same(ours, theirs)


def test_state_that_rests_below_survives_a_change_of_shape_and_close() -> None:
    ours = job()
    theirs = clone_workload(ours)
    constraints = replace(TIGHT, memory="45%", tier="file")
    batches = [ours.batch, tuple(t[:100] for t in ours.batch), ours.batch]
    torch.manual_seed(5)
    for batch in batches:
        run_eager_step(theirs, batch)
    torch.manual_seed(5)
    with compiled(ours, constraints=constraints) as step:
        assert step.plan.plan.schedules[0].away
        for batch in batches:
            step(*batch)
            assert copy.deepcopy(ours.model.state_dict()).keys() == theirs.model.state_dict().keys()
    assert_same(ours, theirs)


def test_a_saved_plan_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    first, second = job(), job()
    with compiled(first) as step:
        step.plan.save(path)
        made = step.plan.plan
        assert "budget" in step.plan.summary()
        assert step.plan.check().ok
    assert schedopt.StepPlan.load(path).plan == made
    stages: list[str] = []
    with compiled(second, constraints=schedopt.Constraints(), plan=path, progress=lambda stage, *_: stages.append(stage)) as step:
        step(*second.batch)
        assert step.plan.plan == made
    assert set(stages) == {"capture"}
    with compiled(job(), plan=str(path)) as step:
        assert step.plan.plan == made
    with pytest.raises(PlanMismatchError, match=r"another training step: .*input"):
        compiled(job(batch_size=127), plan=path)
    with pytest.raises(PlanMismatchError, match=r"constraints allow 1000"):
        compiled(job(), plan=path, constraints=schedopt.Constraints(memory=1000))
    with pytest.raises(PlanFileError):
        compiled(job(), plan=tmp_path / "gone.json")


def test_a_plan_that_breaks_a_rule_or_is_for_a_gpu_is_refused(tmp_path: Path) -> None:
    workload, path = job(), tmp_path / "plan.json"
    made = schedopt.plan(workload, constraints=TIGHT, machine=TEST_MACHINE)
    schedule = made.plan.schedules[0]
    save_plan(replace(made.file, plan=replace(made.plan, schedules=(replace(schedule, actions=schedule.actions[:-1]),))), path)
    with pytest.raises(PlanMismatchError, match="breaks a rule"):
        compiled(workload, plan=path)
    schedopt.plan(workload, constraints=schedopt.Constraints(tier="ram"), machine="h200").save(path)
    assert load_plan(path).machine.name == "h200"
    with pytest.raises(PlanMismatchError, match="h200"):
        compiled(workload, plan=path, constraints=schedopt.Constraints())


def test_infeasible_says_what_would_do_and_changes_nothing() -> None:
    ours = job()
    before = {name: value.clone() for name, value in step_state(ours).items()}
    generator = torch.get_rng_state()
    with pytest.raises(InfeasibleError) as caught:
        compiled(ours, constraints=replace(TIGHT, memory=1000))
    assert caught.value.floor_bytes <= caught.value.least_bytes
    assert caught.value.op_name
    assert torch.get_rng_state().equal(generator)
    assert step_state(ours).keys() == before.keys()
    assert all(same_bits(value, before[name]) for name, value in step_state(ours).items())
    assert all(p.grad is None for p in ours.model.parameters())
    with compiled(ours, constraints=replace(TIGHT, memory=caught.value.least_bytes)) as step:
        step(*ours.batch)
        assert step.stats.peak_bytes <= caught.value.least_bytes


def test_a_plan_for_a_model_without_memory() -> None:
    with torch.device("meta"):
        meta = job()
    made = schedopt.plan(meta, constraints=schedopt.Constraints(memory="70%", tier="ram", time_limit_s=0.5), machine="h200")
    assert made.check().ok
    assert made.machine.name == "h200"
    assert made.plan.graph_hash == schedopt.plan(job(), machine=TEST_MACHINE).plan.graph_hash


def test_nonsense_is_refused_before_anything_happens() -> None:
    ours = job()
    for arguments in ((ours.model, None, None), (3, None, ours.optimizer), (ours, ours.loss_fn)):
        with pytest.raises(ValueError, match=r"must be|brings"):
            schedopt.compile(*arguments)
    with pytest.raises(ValueError, match="accumulate"):
        schedopt.compile(ours.model, ours.loss_fn, ours.optimizer, accumulate=0)
    with pytest.raises(ValueError, match="needs a batch"):
        schedopt.plan(ours.model, ours.loss_fn, ours.optimizer)
    with pytest.raises(ValueError, match="move it there"):
        compiled(replace(ours, batch=(ours.batch[0].to("meta"), ours.batch[1])))
    step = compiled(ours)
    step.close()
    step.close()
    with pytest.raises(RuntimeError, match="closed"):
        step(*ours.batch)


def test_self_check_runs_and_a_difference_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from schedopt.api import prepare
    from schedopt.capture.selfcheck import SelfCheck

    stages: list[str] = []
    with compiled(job(), self_check=True, progress=lambda stage, *_: stages.append(stage)):
        assert "self-check" in stages
    monkeypatch.setattr(prepare, "self_check", lambda workload: SelfCheck(False, "0.weight"))
    with pytest.raises(InexactError, match=r"0\.weight"):
        compiled(job(), self_check=True)
    with compiled(job(), self_check=True, constraints=replace(TIGHT, allow_inexact=True)) as step:
        assert not step.plan.plan.exact


def test_a_number_changed_on_a_module_is_not_frozen_into_the_old_plan() -> None:
    ours = job()
    theirs = clone_workload(ours)
    with compiled(ours) as step:
        for rate in (0.2, 0.7):
            for one in (ours, theirs):
                assert isinstance(one.model, nn.Sequential)
                one.model[-2].p = rate  # type: ignore[assignment]  # nn.Dropout holds its rate as a plain number
            torch.manual_seed(3)
            mine = step(*ours.batch)
            torch.manual_seed(3)
            assert same_bits(mine, run_eager_step(theirs))
