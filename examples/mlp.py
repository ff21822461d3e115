"""A stack of 32 dense layers, trained in 30 % of the memory that eager takes.

python examples/mlp.py
schedopt run examples/mlp.py:workload --memory 30% --set batch_size=512
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

import schedopt


def workload(
    batch_size: int = 1024, width: int = 512, num_layers: int = 32, optimizer: Literal["sgd", "adamw"] = "sgd"
) -> schedopt.Workload:
    """Dense layers with ReLU, classification of random vectors."""
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    batch = (torch.randn(batch_size, width), torch.randint(0, 10, (batch_size,)))
    rule: torch.optim.Optimizer
    if optimizer == "sgd":
        rule = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    else:
        rule = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return schedopt.Workload(model, nn.functional.cross_entropy, rule, batch, name="MLP")


def main() -> None:
    """Compile, train ten steps, show the plan."""
    torch.manual_seed(0)
    job = workload()
    with schedopt.compile(job, constraints=schedopt.Constraints(memory="30%")) as step:
        for number in range(10):
            loss = step(*job.batch)
            print(f"step {number}: loss {loss.item():.4f}")
        print(step.plan.summary())
        print(step.stats)


if __name__ == "__main__":
    main()
