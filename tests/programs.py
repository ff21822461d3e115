"""Small programs ready to run, and what tests compare: scheduled against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from schedopt.capture.build import capture
from schedopt.capture.selfcheck import clone_workload, run_eager_step, same_bits, step_state
from schedopt.capture.workload import Workload, flatten_batch
from schedopt.constraints import Constraints
from schedopt.graph import Graph
from schedopt.pass_manager import Program
from schedopt.plan import Plan
from schedopt.run.runner import Runner
from tests.machines import TEST_MACHINE

Maker = Callable[[Graph], Plan]


def program_of(workload: Workload, maker: Maker, constraints: Constraints | None = None) -> Program:
    """Captured and planned by hand."""
    captured = capture(workload)
    return Program(captured.graph, TEST_MACHINE, constraints or Constraints(), maker(captured.graph), captured)


def leaves_of(workload: Workload) -> list[Any]:
    """The flattened batch."""
    return flatten_batch(workload.batch)[0]


def frozen_state(workload: Workload) -> dict[str, torch.Tensor]:
    """A copy of everything a step may change, the generator's state included."""
    return {name: value.clone() for name, value in step_state(workload).items()} | {"generator": torch.get_rng_state()}


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is missing or not the same bits and strides."""
    wrong = list(ours.keys() ^ theirs.keys())
    return wrong + [n for n in ours.keys() & theirs.keys() if not same_bits(ours[n], theirs[n]) or ours[n].stride() != theirs[n].stride()]


def assert_exact(workload: Workload, maker: Maker, steps: int = 3, directory: str | None = None) -> Plan:
    """Run `steps` steps both ways from the same state; losses, state and generator are the same bits, the peak is the predicted one."""
    theirs = clone_workload(workload)
    program = program_of(workload, maker)
    assert program.plan is not None
    torch.manual_seed(7)
    with Runner(program, directory=directory) as runner:
        losses = [runner.step(leaves_of(workload))[0].clone() for _ in range(steps)]
        assert runner.stats is not None
        assert runner.stats.peak_bytes == program.plan.peak_bytes
        ours = frozen_state(workload)
    torch.manual_seed(7)
    expected = [run_eager_step(theirs) for _ in range(steps)]
    assert [same_bits(a, b) for a, b in zip(losses, expected, strict=True)] == [True] * steps
    assert differences(ours, frozen_state(theirs)) == []
    assert differences(frozen_state(workload), frozen_state(theirs)) == []  # the same again after close
    return program.plan


def small_job(*, width: int = 8, optimizer: str = "sgd") -> Workload:
    """Dense layers, batch norm, in-place ReLU and dropout."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Linear(width, width), nn.Dropout(0.3)]
    model = nn.Sequential(*layers, nn.Linear(width, 3))
    rule: torch.optim.Optimizer
    if optimizer == "sgd":
        rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        rule = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Workload(model, nn.functional.cross_entropy, rule, (torch.randn(6, width), torch.randint(0, 3, (6,))))
