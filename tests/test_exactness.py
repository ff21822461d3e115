"""The product's promise: the scheduled step equals the eager step bit for bit, for every model under every kind of plan.

Three steps each; loss, parameters, buffers, optimizer state and the generator's state are compared byte by byte.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import schedopt
from schedopt.capture.selfcheck import run_eager_step
from schedopt.capture.workload import Workload
from schedopt.errors import InfeasibleError
from tests.machines import TEST_MACHINE
from tests.models import MODELS

STEPS = 3


def state_of(workload: Workload) -> dict[str, Any]:
    """Everything a step may change, as plain tensors by name."""
    model, optimizer = workload.model, workload.optimizer
    state: dict[str, Any] = {f"model/{name}": value for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            state[f"optimizer/{names[id(parameter)]}/{key}"] = value
    state["generator"] = torch.get_rng_state()
    return state


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Bit for bit, not within a tolerance; NaN equals NaN of the same bits."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if not isinstance(value, torch.Tensor):
            assert ours[name] == value, name
            continue
        assert ours[name].dtype == value.dtype, name
        assert ours[name].stride() == value.stride(), name
        same = torch.equal(ours[name].contiguous().reshape(-1).view(torch.uint8), value.contiguous().reshape(-1).view(torch.uint8))
        assert same, f"{name} differs"


def eager_run(workload: Workload) -> Iterator[tuple[float, dict[str, Any]]]:
    """Loss and state after each eager step."""
    torch.manual_seed(7)
    for _ in range(STEPS):
        loss = run_eager_step(workload)
        yield float(loss), copy.deepcopy(state_of(workload))


def call(step: Any, batch: Any) -> torch.Tensor:
    """As a user's training loop would."""
    result: torch.Tensor = step(*batch) if isinstance(batch, tuple | list) else step(batch)
    return result


def cases() -> Iterator[Any]:
    """Every model at a low budget under auto, four of them under every strategy; all the rest is slow."""
    for name in sorted(MODELS):
        for strategy in ("auto", "swap", "recompute", "window"):
            for share in ("high", "low"):
                quick = share == "low" and strategy in ("auto", "window") and (strategy == "auto" or name in ("resnet50", "odd", "gpt2"))
                quick = quick or (name == "odd" and share == "high")
                yield pytest.param(name, strategy, share, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "strategy", "share"), list(cases()))
def test_scheduled_step_equals_eager(name: str, strategy: str, share: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ours = MODELS[name]()
    theirs = copy.deepcopy(ours)
    memory: int | str = "80%" if share == "high" else "45%"
    try:
        step = compile_workload(ours, memory, strategy)
    except InfeasibleError as error:
        step = compile_workload(ours, error.least_bytes, strategy)
    with step:
        torch.manual_seed(7)
        mine = [(float(call(step, ours.batch)), copy.deepcopy(state_of(ours))) for _ in range(STEPS)]
    for (loss, state), (their_loss, their_state) in zip(mine, eager_run(theirs), strict=True):
        assert loss == their_loss
        assert_same(state, their_state)
    assert_same(state_of(ours) | {"generator": 0}, state_of(theirs) | {"generator": 0})  # also after close


def compile_workload(workload: Workload, memory: int | str, strategy: str) -> schedopt.TrainingStep:
    """`schedopt.compile` with the workload's own options."""
    return schedopt.compile(
        workload.model,
        workload.loss_fn,
        workload.optimizer,
        workload.batch,
        constraints=schedopt.Constraints(memory=memory, strategy=strategy, time_limit_s=0.5, tier="file" if strategy == "swap" else "ram"),
        accumulate=workload.accumulate,
        clip_grad_norm=workload.clip_grad_norm,
        autocast=workload.autocast,
        forward=workload.forward,
        machine=TEST_MACHINE,
        self_check=False,
    )
