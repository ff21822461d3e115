"""What can not be captured is refused by name and line, and the attempt leaves nothing behind."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from schedopt.capture import Workload, capture
from schedopt.capture.selfcheck import same_bits, step_state
from schedopt.errors import CaptureError


class Body(nn.Module):
    """Batch norm, then whatever a test wants."""

    def __init__(self, middle: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)
        self.count = 0
        self.seen: list[int] = []
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two layers with the middle between."""
        out: torch.Tensor = self.head(self.middle(self, self.norm(x)))
        return out


def workload(middle: Callable[[Any, torch.Tensor], torch.Tensor], **options: Any) -> Workload:
    torch.manual_seed(0)
    model = Body(middle)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, F.cross_entropy, optimizer, (torch.randn(8, 4), torch.randint(0, 4, (8,))), **options)


def by_item(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def by_branch(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def by_mask(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x + x[x > 0].sum()


def by_numpy(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(np.tanh(x.detach().numpy()))


def by_counter(body: Any, x: torch.Tensor) -> torch.Tensor:
    body.count += 1
    out: torch.Tensor = x * body.count
    return out


def by_list(body: Any, x: torch.Tensor) -> torch.Tensor:
    body.seen.append(len(body.seen))
    return x * len(body.seen)


def by_new_attribute(body: Any, x: torch.Tensor) -> torch.Tensor:
    body.fresh = getattr(body, "fresh", 0) + 1
    out: torch.Tensor = x * body.fresh
    return out


def by_random(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def by_numpy_random(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.rand())


def by_error(_: Any, x: torch.Tensor) -> torch.Tensor:
    raise KeyError("the user's own mistake")


REFUSED = [
    (by_item, "test_refusals.py", "torch.where"),
    (by_branch, "test_refusals.py", "torch.where"),
    (by_mask, "test_refusals.py", "masking"),
    (by_numpy, "test_refusals.py", "numpy"),
    (by_counter, "Body.count", "buffer"),
    (by_list, "Body.seen", "buffer"),
    (by_new_attribute, "Body.fresh", "buffer"),
    (by_random, "Python's random", "draw with torch"),
    (by_numpy_random, "numpy.random", "draw with torch"),
    (by_error, "test_refusals.py", "own mistake"),
]


@pytest.mark.parametrize(("middle", "place", "way_out"), REFUSED, ids=[f.__name__ for f, _, _ in REFUSED])
def test_refused_and_unchanged(middle: Callable[[Any, torch.Tensor], torch.Tensor], place: str, way_out: str) -> None:
    job = workload(middle)
    model: Any = job.model
    before = {name: value.clone() for name, value in step_state(job).items()}
    attributes = {name: copy.copy(module.__dict__) for name, module in model.named_modules()}
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    with pytest.raises(CaptureError) as caught:
        capture(job)
    assert place in str(caught.value)
    assert way_out in str(caught.value)
    after = step_state(job)
    assert after.keys() == before.keys()
    assert all(same_bits(value, before[name]) for name, value in after.items())
    assert not job.optimizer.state
    assert (model.count, model.seen) == (0, [])
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, module in model.named_modules():
        assert module.__dict__.keys() == attributes[name].keys()
        assert len(module._forward_hooks) == 0
    assert same_bits(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(np.random.get_state()) == states[2]


def plain(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def test_module_path_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Body(by_item)))
    job = Workload(model, F.cross_entropy, torch.optim.SGD(model.parameters()), (torch.randn(8, 4), torch.randint(0, 4, (8,))))
    with pytest.raises(CaptureError, match=r"module '1\.0'"):
        capture(job)


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    job = Workload(model, F.cross_entropy, torch.optim.SGD(model.parameters()), (torch.arange(8), torch.randint(0, 4, (8,))))
    with pytest.raises(CaptureError, match="sparse=False"):
        capture(job)


@pytest.mark.parametrize("build", [lambda p: torch.optim.LBFGS(p), lambda p: torch.optim.Rprop(p)])
def test_optimizers_that_can_not_be_split(build: Callable[[Any], torch.optim.Optimizer]) -> None:
    job = workload(plain)
    model = job.model
    with pytest.raises(CaptureError, match=r"torch\.optim\.AdamW"):
        capture(Workload(model, job.loss_fn, build(model.parameters()), job.batch))


class Careful(torch.optim.SGD):
    """A subclass with its own step."""

    def step(self, closure: Any = None) -> Any:
        """Something else."""


def test_unknown_subclass() -> None:
    job = workload(plain)
    with pytest.raises(CaptureError, match="Careful"):
        capture(Workload(job.model, job.loss_fn, Careful(job.model.parameters()), job.batch))


def test_foreign_parameter() -> None:
    job = workload(plain)
    optimizer = torch.optim.SGD([*job.model.parameters(), nn.Parameter(torch.zeros(3))])
    with pytest.raises(CaptureError, match="the model does not"):
        capture(Workload(job.model, job.loss_fn, optimizer, job.batch))


def test_hooks_that_would_not_be_called() -> None:
    job = workload(plain)
    handle = job.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="step hooks"):
        capture(job)
    handle.remove()
    weight: Any = job.model.get_parameter("head.weight")
    weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(CaptureError, match=r"head\.weight"):
        capture(job)


def test_loss_must_be_one_number() -> None:
    job = workload(plain)
    model, optimizer, batch = job.model, job.optimizer, job.batch
    with pytest.raises(CaptureError, match="reduce it"):
        capture(Workload(model, lambda out, _: out, optimizer, batch))
    with pytest.raises(CaptureError, match="no loss"):
        capture(Workload(model, lambda *_: "nothing", optimizer, batch))
    with pytest.raises(CaptureError, match="detached"):
        capture(Workload(model, lambda out, _: out.detach().sum(), optimizer, batch))


def test_accumulate_must_divide() -> None:
    with pytest.raises(CaptureError, match="divide"):
        capture(workload(plain, accumulate=3))


def test_opaque_batch() -> None:
    job = workload(plain)
    with pytest.raises(CaptureError, match="can not see"):
        capture(Workload(job.model, lambda *_: None, job.optimizer, (job.batch[0], object())))


def test_nothing_to_train() -> None:
    job = workload(plain)
    job.model.requires_grad_(False)
    with pytest.raises(CaptureError, match="nothing can be trained"):
        capture(job)
