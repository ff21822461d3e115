"""The plain graph beside the fx graph: ops, storages, names, phases, identity."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from schedopt.capture import Captured, Workload, capture
from schedopt.capture.captured import node_info
from schedopt.capture.workload import flatten_batch, unflatten_batch
from schedopt.errors import CaptureError
from schedopt.graph import Phase, StorageKind
from tests.models import MODELS

ROOT = pathlib.Path(__file__).parents[2]


def named(captured: Captured) -> dict[str, Any]:
    return {s.name: s for s in captured.graph.storages}


@pytest.mark.parametrize("name", ["mlp32", "resnet50", "odd", "gpt2"])
def test_rules_of_the_graph(name: str) -> None:
    captured = capture(MODELS[name]())
    graph = captured.graph
    assert [o.id for o in graph.ops] == list(range(len(graph.ops)))
    assert [s.id for s in graph.storages] == list(range(len(graph.storages)))
    alive = {s.id for s in graph.storages if s.external}
    for op in graph.ops:
        assert not {*op.reads} & {*op.writes} | {*op.reads} & {*op.creates} | {*op.writes} & {*op.creates}
        assert {*op.reads, *op.writes} <= alive, op
        assert not {*op.creates} & alive
        alive |= {*op.creates}
        assert op.signature
    assert alive == {s.id for s in graph.storages}
    placeholders = [n.name for n in captured.gm.graph.nodes if n.op == "placeholder"]
    assert placeholders == [e.node for e in captured.externals]
    ops = [node_info(n).op for n in captured.gm.graph.nodes if n.op == "call_function"]
    assert [i for i in ops if i is not None] == list(range(len(graph.ops)))
    assert [graph.storages[s].kind for s in graph.outputs] == [StorageKind.OUTPUT]


def test_phases_modules_sources() -> None:
    captured = capture(MODELS["resnet50"]())
    ops = captured.graph.ops
    order = [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE]
    assert [o.phase for o in ops] == sorted((o.phase for o in ops), key=order.index)
    updates = [o for o in ops if o.phase is Phase.UPDATE]
    assert len(updates) == len(list(MODELS["resnet50"]().model.parameters()))
    convolutions = [o for o in ops if o.target == "aten.convolution.default"]
    backwards = [o for o in ops if o.target == "aten.convolution_backward.default"]
    assert [o.module for o in convolutions] == [o.module for o in reversed(backwards)]
    assert {"conv1", "layer1.0.conv1", "layer4.1.conv3"} <= {o.module for o in convolutions}
    assert all(o.source.startswith("resnet.py:") for o in (*convolutions, *backwards))


def test_labels_survive_dead_code() -> None:
    """Nodes that nobody needs vanish; the labels of the others stay right."""

    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Much for nothing."""
            for _ in range(20):
                x.exp()
            out: torch.Tensor = self.inner(x)
            for _ in range(20):
                out.exp()
            return out.tanh()

    model = nn.Sequential(Wasteful(), Wasteful())
    job = Workload(model, lambda out, _: out.square().sum(), torch.optim.SGD(model.parameters()), torch.randn(2, 4))
    captured = capture(job)
    assert not any(o.target == "aten.exp.default" for o in captured.graph.ops)
    where = {o.target: o.module for o in captured.graph.ops if o.phase is Phase.FORWARD and o.module.startswith("1")}
    assert where["aten.addmm.default"] == "1.inner"
    assert where["aten.tanh.default"] == "1"
    assert {o.module for o in captured.graph.ops if o.target == "aten.tanh_backward.default"} == {"0", "1"}


def test_names_and_kinds() -> None:
    captured = capture(MODELS["odd"]())
    storages = named(captured)
    assert storages["first.weight"].kind is StorageKind.PARAMETER
    assert storages["first.weight/exp_avg"].kind is StorageKind.OPTIMIZER_STATE
    assert storages["first.weight/max_exp_avg_sq"].size_bytes == storages["first.weight"].size_bytes
    assert storages["norm.running_mean"].kind is StorageKind.BUFFER
    assert "second.weight" not in storages  # tied
    assert not any(name.startswith(("unused.weight/", "frozen.weight/")) for name in storages)
    assert {"input0", "input1"} <= storages.keys()
    gradients = {s.id for s in captured.graph.storages if s.kind is StorageKind.GRADIENT}
    updates = [o for o in captured.graph.ops if o.phase is Phase.UPDATE]
    assert all(len(gradients & {*o.reads}) == 1 for o in updates)


class Shared(nn.Module):
    """Two parameters and a buffer that are views of one storage, and a tensor constant."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(40)
        self.left = nn.Parameter(flat[:16].view(4, 4))
        self.right = nn.Parameter(flat[16:32].view(4, 4))
        self.register_buffer("rest", flat[36:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both halves."""
        out: torch.Tensor = x @ self.left @ self.right.t() + self.rest  # type: ignore[operator]  # a buffer
        return out + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_views_of_one_storage() -> None:
    model = Shared()
    job = Workload(model, lambda out, _: out.square().sum(), torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 4))
    captured = capture(job)
    slots = {e.slot[:2]: e.storage for e in captured.externals}
    assert slots["parameter", "left"] == slots["parameter", "right"] == slots["buffer", "rest"]
    assert captured.graph.storages[slots["parameter", "left"]].size_bytes == 160
    constants = [e for e in captured.externals if e.slot[0] == "constant"]
    assert len(constants) == 1
    assert captured.lookup(constants[0].slot).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_views_are_no_ops() -> None:
    model = nn.Linear(4, 4)

    def loss_fn(out: torch.Tensor, _: Any) -> torch.Tensor:
        return out.t().contiguous().contiguous().view(2, 8).expand(3, 2, 8).detach().sum() + out.reshape(-1)[2:5].sum()

    captured = capture(Workload(model, loss_fn, torch.optim.SGD(model.parameters()), torch.randn(4, 4)))
    targets = {o.target.split(".")[1] for o in captured.graph.ops}
    assert not targets & {"t", "view", "expand", "detach", "alias", "slice", "contiguous", "transpose", "_unsafe_view"}
    views = [n for n in captured.gm.graph.nodes if n.op == "call_function" and node_info(n).view]
    assert views
    assert not any("detach" in str(n.target) or "alias" in str(n.target) for n in views)


SCRIPT = """
import torch
from torch import nn
from schedopt.capture import Workload, capture

def graph_hash(rows, momentum):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.ReLU(True), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return capture(Workload(model, nn.CrossEntropyLoss(), optimizer, (torch.randn(rows, 4), torch.zeros(rows).long()))).graph.hash()
"""


def test_hash_is_stable_and_tells_steps_apart() -> None:
    here: dict[str, Any] = {}
    exec(SCRIPT, here)
    graph_hash = here["graph_hash"]
    env = {**os.environ, "PYTHONHASHSEED": "5"}
    code = SCRIPT + "print(graph_hash(4, 0.9))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == graph_hash(4, 0.9)
    assert len({graph_hash(4, 0.9), graph_hash(2, 0.9), graph_hash(4, 0.0)}) == 3


def test_adopt_moves_the_live_tensor() -> None:
    job = MODELS["mlp32"]()
    captured = capture(job)
    parameter = job.model.get_parameter("0.weight")
    elsewhere = parameter.detach().clone()
    captured.adopt(("parameter", "0.weight"), elsewhere)
    assert job.model.get_parameter("0.weight") is parameter
    assert parameter.data_ptr() == elsewhere.data_ptr()


def test_written_tensor_in_a_list_is_refused() -> None:
    class Stash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.kept = [torch.ones(4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Changes what capture does not know."""
            out: torch.Tensor = self.head(x) * self.kept[0].mul_(2)
            return out

    model = Stash()
    with pytest.raises(CaptureError, match="register_buffer"):
        capture(Workload(model, lambda out, _: out.sum(), torch.optim.SGD(model.parameters()), torch.randn(2, 4)))
    assert model.kept[0].tolist() == [1.0] * 4


class Stateful(nn.Module):
    """A plain tensor that each step replaces; `grow`: by one of another shape."""

    def __init__(self, *, grow: bool, read: bool) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.last = torch.zeros(2, 4)
        self.grow, self.read = grow, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Remembers its output."""
        out: torch.Tensor = self.head(x) + (self.last.sum() if self.read else 0)
        self.last = out.detach()[:1] if self.grow else out.detach()
        return out


def test_replaced_plain_tensor() -> None:
    model = Stateful(grow=False, read=True)
    job = Workload(model, lambda out, _: out.sum(), torch.optim.SGD(model.parameters()), torch.randn(2, 4))
    captured = capture(job)
    assert model.last.tolist() == torch.zeros(2, 4).tolist()
    args = [job.batch if e.slot[0] == "input" else captured.lookup(e.slot) for e in captured.externals]
    expected = model.head(job.batch).detach()
    with torch.no_grad():
        captured.gm(*args)
    assert torch.equal(model.last, expected)


def test_plain_tensor_of_another_shape() -> None:
    def job(model: nn.Module) -> Workload:
        return Workload(model, lambda out, _: out.sum(), torch.optim.SGD(model.parameters()), torch.randn(2, 4))

    with pytest.raises(CaptureError, match="another shape"):
        capture(job(Stateful(grow=True, read=True)))
    capture(job(Stateful(grow=True, read=False)))


@dataclass(frozen=True)
class Sample:
    """A frozen dataclass batch."""

    image: torch.Tensor
    label: int = 3


def test_batches_round_trip() -> None:
    x = torch.randn(2)
    for batch in (x, (x, [x, 1]), {"b": x, "a": None}, Sample(x), {"s": [Sample(x, 4), x]}):
        leaves, spec = flatten_batch(batch)
        again = unflatten_batch(leaves, spec)
        assert type(again) is type(batch)
        assert repr(again) == repr(batch)
    assert str(flatten_batch(Sample(x))[1]) == str(flatten_batch(Sample(x + 1))[1]) != str(flatten_batch({"image": x, "label": 3})[1])


def test_loss_from_the_model() -> None:
    class Own(nn.Module):
        def __init__(self, wrap: Any) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)
            self.wrap = wrap

        def forward(self, x: torch.Tensor) -> Any:
            """A loss in some wrapping."""
            return self.wrap(self.head(x).square().mean())

    for wrap in (lambda v: v, lambda v: v.reshape(1), lambda v: {"loss": v}, lambda v: (v, None)):
        for batch in (torch.randn(3, 4), (torch.randn(3, 4),), {"x": torch.randn(3, 4)}):
            model = Own(wrap)
            captured = capture(Workload(model, None, torch.optim.SGD(model.parameters()), batch))
            output = next(n for n in captured.gm.graph.nodes if n.op == "output")
            assert output.args[0][0].meta["val"].shape == ()


def test_functional_loss_has_no_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    captured = capture(Workload(model, F.mse_loss, torch.optim.SGD(model.parameters()), (torch.randn(2, 4), torch.randn(2, 4))))
    (loss,) = [o for o in captured.graph.ops if o.target == "aten.mse_loss.default"]
    assert loss.module == ""
    assert [o.module for o in captured.graph.ops if o.target == "aten.addmm.default"] == ["0"]
