"""The captured graph, called as it is, equals eager bit for bit: loss, parameters, buffers, optimizer state, generator."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from schedopt.capture import Workload, capture
from schedopt.capture.selfcheck import clone_workload, run_eager_step, run_graph_step, same_bits, self_check, step_state
from schedopt.errors import CaptureError
from tests.models import MODELS


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def assert_same(a: Workload, b: Workload) -> None:
    ours, theirs = step_state(a), step_state(b)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert same_bits(ours[name], value), name
        assert ours[name].stride() == value.stride(), name


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    result = self_check(MODELS[name](), steps=3)
    assert result.ok, result.difference


def small(build: Callable[[Any], torch.optim.Optimizer], **options: Any) -> Workload:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return Workload(model, F.cross_entropy, build(model), (torch.randn(5, 6), torch.randint(0, 3, (5,))), **options)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd_decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1, maximize=True),
    "sgd_momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False),
    "sgd_dampening": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.3),
    "sgd_fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "sgd_fused_dampening": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.01),
    "adam_foreach": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True, foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True, fused=True),
    "adamw_tensor_lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2), fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.1),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "groups": lambda m: torch.optim.SGD([{"params": m[0].parameters(), "lr": 0.5}, {"params": m[2].parameters(), "momentum": 0.9}], lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    result = self_check(small(OPTIMIZERS[name]), steps=6)
    assert result.ok, result.difference


@pytest.mark.parametrize("name", ["sgd_dampening", "adamw_fused"])
def test_scheduler_state_dict_and_unused_state(name: str) -> None:
    """Learning rate changes between steps, state dicts are taken and loaded back half-way, on both sides."""
    graph = small(OPTIMIZERS[name])
    eager = clone_workload(graph)
    captured = capture(graph)
    assert not graph.optimizer.state
    schedulers = [torch.optim.lr_scheduler.StepLR(w.optimizer, 1, 0.5) for w in (graph, eager)]
    saved: list[Any] = []
    for number in range(4):
        assert same_bits(run_graph_step(captured, graph.batch), run_eager_step(eager))
        for scheduler in schedulers:
            scheduler.step()
        if number == 1:
            saved = [w.optimizer.state_dict() for w in (graph, eager)]
            saved = [torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, s) for s in saved]
        if number == 2:
            for w, state in zip((graph, eager), saved, strict=True):
                w.optimizer.load_state_dict(state)
    assert_same(graph, eager)
    ours, theirs = (w.optimizer.state_dict() for w in (graph, eager))
    assert ours["param_groups"] == theirs["param_groups"]
    assert [list(s) for s in ours["state"].values()] == [list(s) for s in theirs["state"].values()]


def test_state_loaded_before_the_first_step_wins() -> None:
    source = small(OPTIMIZERS["sgd_momentum"])
    run_eager_step(source)
    graph = small(OPTIMIZERS["sgd_momentum"])
    eager = clone_workload(graph)
    captured = capture(graph)
    captured.begin_step()
    captured.lookup(("state", "0.weight", "momentum_buffer"))
    for w in (graph, eager):
        w.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
    assert same_bits(run_graph_step(captured, graph.batch), run_eager_step(eager))
    assert_same(graph, eager)


def test_state_stays_private_until_commit() -> None:
    job = small(OPTIMIZERS["adam"])
    captured = capture(job)
    captured.begin_step()
    slot = ("state", "2.bias", "exp_avg")
    prepared = captured.lookup(slot)
    captured.abandon_step()
    assert not job.optimizer.state
    captured.begin_step()
    captured.commit_step()
    assert job.optimizer.state[job.model.get_parameter("2.bias")]["exp_avg"] is prepared


def test_gradient_hooks_on_parameters() -> None:
    job = small(OPTIMIZERS["sgd"])
    before = clone_workload(job)
    for w in (job, before):
        weight: Any = w.model.get_parameter("0.weight")
        weight.register_hook(lambda g: g * 0.5)
    captured = capture(job)
    for _ in range(2):
        assert same_bits(run_graph_step(captured, job.batch), run_eager_step(before))
    assert_same(job, before)


class Averaged(nn.Module):
    """Replaces a buffer by a new tensor in every forward pass, writes a plain tensor attribute in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(4))
        self.head = nn.Linear(4, 4)
        self.scale = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Centred by the old and the new mean."""
        old = self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        self.scale.mul_(1.01)
        out: torch.Tensor = self.head(x - self.mean) * old.exp() * self.scale
        return out


@pytest.mark.parametrize("accumulate", [1, 2])
def test_reassigned_buffers_and_plain_tensors(accumulate: int) -> None:
    model = Averaged()
    loss_fn = nn.CrossEntropyLoss(weight=torch.rand(4))
    job = Workload(model, loss_fn, OPTIMIZERS["sgd"](model), (torch.randn(4, 4), torch.randint(0, 4, (4,))), accumulate=accumulate)
    result = self_check(job, steps=3)
    assert result.ok, result.difference
    eager = clone_workload(job)
    captured = capture(job)
    for _ in range(3):
        run_graph_step(captured, job.batch)
        run_eager_step(eager)
    ours, theirs = job.model, eager.model
    assert isinstance(ours, Averaged)
    assert isinstance(theirs, Averaged)
    assert same_bits(ours.scale, theirs.scale)
    assert float(ours.scale[0]) > 1.02


@dataclass
class Inner:
    """Part of a batch."""

    x: torch.Tensor
    flag: bool = True


BATCHES: dict[str, Callable[[torch.Tensor], tuple[Any, Callable[[nn.Module, Any], torch.Tensor]]]] = {
    "tensor": lambda x: (x, lambda m, b: m(b).square().mean()),
    "nested dataclass": lambda x: ({"a": [Inner(x)]}, lambda m, b: m(b["a"][0].x).square().mean() if b["a"][0].flag else m(x).sum()),
    "mapping": lambda x: (UserDict({"x": x}), lambda m, b: m(b["x"]).square().mean()),
    "expanded": lambda x: ((x[:1].expand(5, 6), x.t()), lambda m, b: m(b[0] + b[1].t()).square().mean()),
    "same tensor twice": lambda x: ((x, x), lambda m, b: m(b[0] * b[1]).square().mean()),
    "overlapping views": lambda x: ((x.view(-1)[:24].view(4, 6), x.view(-1)[2:26].view(4, 6)), lambda m, b: m(b[0] * b[1]).square().mean()),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str) -> None:
    job = small(OPTIMIZERS["adam"])
    batch, forward = BATCHES[name](torch.randn(5, 6))
    job = Workload(job.model, None, job.optimizer, batch, forward=forward)
    result = self_check(job)
    assert result.ok, result.difference
    captured = capture(job)
    assert sum(e.slot[0] == "input" for e in captured.externals) == len([x for x in captured.externals if x.slot[0] == "input"]) > 0
    assert not any(e.slot[0] == "constant" for e in captured.externals)


def test_channels_last_parameters_and_gradients() -> None:
    """Autograd copies a gradient into the layout of its parameter; so do we, and the momentum buffer has it too."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(2, 4, 8, 8)
    model(x)
    model[2].to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = Workload(model, F.cross_entropy, optimizer, (x, torch.tensor([0, 1])), clip_grad_norm=0.1)
    eager = clone_workload(job)
    captured = capture(job)
    for _ in range(3):
        assert same_bits(run_graph_step(captured, job.batch), run_eager_step(eager))
    assert_same(job, eager)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_with_dropout(reentrant: bool) -> None:
    first, second = nn.Linear(6, 8), nn.Linear(8, 3)
    model = nn.ModuleList([first, second])

    def forward(m: Any, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        hidden = torch.utils.checkpoint.checkpoint(lambda v: F.dropout(m[0](v), 0.5), x, use_reentrant=reentrant)
        return F.cross_entropy(m[1](hidden), batch[1])

    batch = (torch.randn(5, 6), torch.randint(0, 3, (5,)))
    result = self_check(Workload(model, None, OPTIMIZERS["sgd"](model), batch, forward=forward), steps=3)
    assert result.ok, result.difference


def test_under_no_grad_and_eval() -> None:
    job = MODELS["resnet50"]()
    job.model.eval()
    with torch.no_grad():
        captured = capture(job)
    assert not any("num_batches_tracked" in captured.graph.storages[s].name for o in captured.graph.ops for s in o.writes)
    result = self_check(job)
    assert result.ok, result.difference


def test_self_check_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small(OPTIMIZERS["sgd"])
    kept = F.cross_entropy

    def shifted(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = kept(*args, **kwargs)
        return loss if type(loss) is torch.Tensor else loss * 1.0001

    result = self_check(Workload(job.model, shifted, job.optimizer, job.batch))
    assert not result.ok
    assert "loss" in result.difference


def test_meta_and_fake_models_are_planned_not_run() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 16, 1 << 16), nn.ReLU(), nn.Linear(1 << 16, 4))
    batch = (torch.empty(2, 1 << 16, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta"))
    captured = capture(Workload(model, F.cross_entropy, torch.optim.AdamW(model.parameters()), batch))
    total = sum(s.size_bytes for s in captured.graph.storages if s.persistent)
    assert total > 3 * 4 * (1 << 32)
    with pytest.raises(CaptureError, match="planned, not run"):
        captured.lookup(("parameter", "0.weight"))


def test_loss_is_not_nan_by_accident() -> None:
    job = MODELS["odd"]()
    assert math.isfinite(float(run_eager_step(job)))
