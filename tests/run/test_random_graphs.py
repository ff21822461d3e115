"""Random training steps under random mixtures of keeping, swapping and rebuilding."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from schedopt.capture.workload import Workload
from tests import plans
from tests.programs import Maker, assert_exact

# name -> (number of arguments, function of 4x4 tensors to a 4x4 tensor)
OPS: dict[str, tuple[int, Any]] = {
    "sin": (1, torch.sin),
    "add": (2, torch.add),
    "mul": (2, torch.mul),
    "matmul": (2, lambda a, b: a @ b / 4),
    "transpose": (1, lambda a: a.t()),
    "relu_": (1, lambda a: a.clone().relu_()),
    "dropout": (1, lambda a: nn.functional.dropout(a, 0.4)),
    "softmax": (1, lambda a: a.softmax(0)),
    "window": (1, lambda a: a.reshape(-1).as_strided((4, 4), (3, 1))),
    "expand": (1, lambda a: a[1:2].expand(4, -1)),
    "rows": (1, lambda a: torch.cat([a[2:], a[:2]])),
    "norm": (1, lambda a: nn.functional.batch_norm(a, None, None, training=True)),
    "half": (1, lambda a: a.bfloat16().cos().float()),
    "write": (2, lambda a, b: a.clone().index_add_(0, torch.tensor([0, 2]), b[:2])),
    "where": (2, lambda a, b: torch.where(a > b, a, b * 0.5)),
}

STEPS = st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=10)
MAKERS: list[Maker] = [
    plans.plain,
    plans.early_update,
    plans.swap_everything,
    lambda graph: plans.swap_everything(graph, "file", persistent=True),
    plans.all_away,
    plans.recompute_everything,
]


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))


@given(STEPS, st.sampled_from(range(len(MAKERS))))
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_step(steps: list[tuple[str, int, int]], maker: int) -> None:
    torch.manual_seed(1)
    model = _Two()

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        values: list[torch.Tensor] = [module.a * x, module.b + x]
        for name, first, second in steps:
            count, function = OPS[name]
            values.append(function(*[values[i % len(values)] for i in (first, second)[:count]]))
        return (values[-1] * values[0]).sum() + values[1].mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    assert_exact(Workload(model, None, optimizer, torch.randn(4, 4), forward=forward), MAKERS[maker], steps=2)
