"""What a user may do with model and optimizer between steps, also while their tensors rest on the lower tier."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from schedopt.capture.selfcheck import clone_workload, run_eager_step, same_bits
from schedopt.capture.workload import Workload
from schedopt.run.runner import Runner
from tests import plans
from tests.programs import Maker, differences, frozen_state, leaves_of, program_of, small_job

MAKERS: dict[str, Maker] = {
    "file": lambda graph: plans.all_away(graph, "file"),
    "ram": plans.all_away,
    "swap": lambda graph: plans.swap_everything(graph, persistent=True),
    "plain": plans.plain,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    gc.collect()


def _nothing(_: Workload) -> None:
    pass


def _load_into(workload: Workload) -> None:
    saved = {name: value + 0.25 if value.is_floating_point() else value for name, value in workload.model.state_dict().items()}
    workload.model.load_state_dict(saved)


def _load_optimizer(workload: Workload) -> None:
    state = copy.deepcopy(workload.optimizer.state_dict())
    for entries in state["state"].values():
        entries["momentum_buffer"] = entries["momentum_buffer"] * 0.5
    workload.optimizer.load_state_dict(state)


def _through_a_file(workload: Workload) -> None:
    file = io.BytesIO()
    torch.save({"model": workload.model.state_dict(), "optimizer": workload.optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file)
    workload.model.load_state_dict(loaded["model"])
    workload.optimizer.load_state_dict(loaded["optimizer"])


def _write_in_place(workload: Workload) -> None:
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter.mul_(0.5)
    workload.optimizer.param_groups[0]["lr"] = 0.02


def _replace_data(workload: Workload) -> None:
    one_storage = torch.cat([p.detach().reshape(-1) * 1.5 for p in workload.model.parameters()])
    at = 0
    for parameter in workload.model.parameters():  # flat parameters, as some libraries make them
        parameter.data = one_storage[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()


def _from_numpy(workload: Workload) -> None:
    for parameter in workload.model.parameters():
        parameter.data = torch.from_numpy(parameter.detach().numpy().copy())


CHANGES: list[Callable[[Workload], None]] = [
    _nothing,
    _load_into,
    _load_optimizer,
    _through_a_file,
    _write_in_place,
    _replace_data,
    _from_numpy,
]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_changes_between_steps_count(change: Callable[[Workload], None], maker: str) -> None:
    ours = small_job()
    theirs = clone_workload(ours)
    program = program_of(ours, MAKERS[maker])

    def train(workload: Workload, step: Callable[[], Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        for _ in range(2):
            step()
            change(workload)
            workload.model.eval()
            workload.model(workload.batch[0])
            workload.model.train()
            step()
        return frozen_state(workload)

    with Runner(program) as runner:
        mine = train(ours, lambda: runner.step(leaves_of(ours)))
    expected = train(theirs, lambda: run_eager_step(theirs))
    assert differences(mine, expected) == []
    assert differences(frozen_state(ours), expected) == []
    assert all(p.untyped_storage().resizable() for p in ours.model.parameters()) or change is _from_numpy


def test_objects_stay_the_users() -> None:
    workload = small_job()
    parameters = dict(workload.model.named_parameters())
    with Runner(program_of(workload, MAKERS["file"])) as runner:
        runner.step(leaves_of(workload))
        assert all(p is parameters[name] for name, p in workload.model.named_parameters())
        assert all(p.grad is None for p in parameters.values())
        assert set(workload.optimizer.state) == set(parameters.values())
    assert all(p is parameters[name] for name, p in workload.model.named_parameters())


def test_two_runners_take_turns() -> None:
    ours = small_job()
    theirs = clone_workload(ours)
    torch.manual_seed(7)
    with Runner(program_of(ours, MAKERS["file"])) as first, Runner(program_of(ours, MAKERS["swap"])) as second:
        for runner, other in ((first, second), (second, first), (first, second)):
            other.bring_home()
            runner.step(leaves_of(ours))
        mine = frozen_state(ours)
    torch.manual_seed(7)
    for _ in range(3):
        run_eager_step(theirs)
    assert differences(mine, frozen_state(theirs)) == []
    assert differences(frozen_state(ours), frozen_state(theirs)) == []


def test_what_does_not_fit_the_program_is_refused() -> None:
    workload = small_job()
    x, y = workload.batch
    before = frozen_state(workload)
    with Runner(program_of(workload, plans.plain)) as runner:
        for wrong in ((x[:4], y[:4]), (x.double(), y), (x.t().contiguous().t(), y)):
            with pytest.raises(ValueError, match=r"input/0 .*compile again"):
                runner.step(list(wrong))
        assert differences(frozen_state(workload), before) == []
        workload.model[0].weight.data = workload.model[0].weight.data.t()  # type: ignore[index]  # a Sequential
        with pytest.raises(ValueError, match=r"parameter/0.weight .*strides"):
            runner.step(leaves_of(workload))
    with pytest.raises(RuntimeError, match="closed"):
        runner.step(leaves_of(workload))


def test_the_users_batch_is_not_held_or_changed() -> None:
    workload = small_job()
    kept = [leaf.clone() for leaf in leaves_of(workload)]
    with Runner(program_of(workload, plans.swap_everything)) as runner:
        runner.step(leaves_of(workload))
    assert all(same_bits(a, b) for a, b in zip(kept, leaves_of(workload), strict=True))
