"""torchvision's ResNet-50 on random images, in a third of the memory that eager takes.

python examples/resnet50.py
schedopt run examples/resnet50.py:workload --memory 33% --steps 5 --compare eager
"""

from __future__ import annotations

from typing import Literal

import torch
import torchvision

import schedopt


def workload(
    batch_size: int = 32, image_size: int = 112, optimizer: Literal["sgd", "adamw"] = "sgd", num_classes: int = 1000
) -> schedopt.Workload:
    """ResNet-50 with random weights, images and labels."""
    model = torchvision.models.resnet50(num_classes=num_classes)
    batch = (torch.randn(batch_size, 3, image_size, image_size), torch.randint(0, num_classes, (batch_size,)))
    rule: torch.optim.Optimizer
    if optimizer == "sgd":
        rule = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    else:
        rule = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return schedopt.Workload(model, torch.nn.functional.cross_entropy, rule, batch, name="ResNet-50")


def main() -> None:
    """Compile, train five steps, show the plan."""
    torch.manual_seed(0)
    job = workload()
    constraints = schedopt.Constraints(memory="33%")
    with schedopt.compile(job.model, job.loss_fn, job.optimizer, job.batch, constraints=constraints) as step:
        for number in range(5):
            x, y = job.batch  # here: the next batch of your loader
            print(f"step {number}: loss {step(x, y).item():.4f}")
        print(step.plan.summary())


if __name__ == "__main__":
    main()
