"""The effects table tells the truth: every op of the test models is run for real, its inputs compared before and after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from schedopt.capture import Captured, Workload, capture
from schedopt.capture.captured import node_info
from schedopt.capture.effects import recompute_args
from schedopt.capture.selfcheck import same_bits
from schedopt.capture.update import UpdateRule
from schedopt.graph import Op, Recompute
from tests.models import MODELS

WORKSPACE_LAST = "aten.mkldnn_rnn_layer.default"  # has padding that nobody writes or reads
UNINITIALISED = ("aten.empty", "aten.new_empty")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


class Auditor(fx.Interpreter):
    """Runs the graph and compares what each op does with what its `Op` says."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured.gm)
        self.ops = captured.graph.ops

    def run_node(self, n: fx.Node) -> Any:
        """As usual, with an audit of calls."""
        if n.op != "call_function":
            return super().run_node(n)
        info = node_info(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        inputs = {name: self.env[name] for name in n.all_input_nodes}
        before = {node: bytes_of(value) for node, value in inputs.items() if isinstance(value, torch.Tensor)}
        generator = torch.get_rng_state()
        result = super().run_node(n)
        drew = not same_bits(generator, torch.get_rng_state())
        changed = {s for node, old in before.items() if not same_bits(bytes_of(inputs[node]), old) for s in node_info(node).storages}
        owned = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves(list(inputs.values())) if isinstance(t, torch.Tensor)}
        values = [x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, torch.Tensor) and x.numel()]
        if info.op is None:
            assert info.view
            assert not changed, n.format_node()
            assert not drew
            assert all(v.untyped_storage().data_ptr() in owned for v in values), f"{n.format_node()} is no view"
            return result
        op = self.ops[info.op]
        self._audit(n, op, changed, drew)
        if op.recompute is Recompute.PURE and not op.target.startswith(UNINITIALISED):
            again = self.call_function(n.target, args, kwargs)
            known = slice(3) if op.target == WORKSPACE_LAST else slice(None)
            assert_equal(again[known] if isinstance(again, tuple) else again, result[known] if isinstance(result, tuple) else result, n)
        if op.recompute is Recompute.STATISTICS:
            self._audit_statistics(n, result, before)
        return result

    def _audit(self, n: fx.Node, op: Op, changed: set[int | None], drew: bool) -> None:
        assert changed <= set(op.writes), f"{n.format_node()} changes {changed}, the table says {op.writes}"
        assert drew <= (op.recompute is Recompute.RANDOM), n.format_node()
        if isinstance(n.target, UpdateRule):
            assert op.recompute is Recompute.BARRED

    def _audit_statistics(self, n: fx.Node, result: Any, before: dict[fx.Node, torch.Tensor]) -> None:
        again_args, again_kwargs = recompute_args(n)
        loaded: list[Any] = [self.map_nodes_to_values(a, n) for a in (again_args, again_kwargs)]
        kept = {node: bytes_of(self.env[node]) for node in before}
        assert_equal(self.call_function(n.target, *loaded), result, n)
        assert all(same_bits(bytes_of(self.env[node]), old) for node, old in kept.items())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all bytes of the tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).clone()


def assert_equal(again: Any, first: Any, n: fx.Node) -> None:
    """Bit for bit."""
    for a, b in zip(pytree.tree_leaves(again), pytree.tree_leaves(first), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.stride() == b.stride(), n.format_node()
            assert same_bits(a, b), f"{n.format_node()} differs when run again"


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that places a tensor in its storage; the strides of dimensions of size one do not matter."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    return tensor.shape, strides, tensor.storage_offset(), tensor.dtype


def inputs_of(captured: Captured, workload: Workload) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(workload.batch if isinstance(workload.batch, tuple | dict) else vars(workload.batch))
    return [leaves[e.slot[1]] if e.slot[0] == "input" else captured.lookup(e.slot) for e in captured.externals]


@pytest.mark.parametrize("name", MODELS)
def test_table_tells_the_truth(name: str) -> None:
    workload = MODELS[name]()
    captured = capture(workload)
    captured.begin_step()
    args = inputs_of(captured, workload)
    for external, value in zip(captured.externals, args, strict=True):
        assert (external.shape, external.stride, external.dtype) == (tuple(value.shape), value.stride(), value.dtype)
    with torch.no_grad():
        Auditor(captured).run(*args)


@pytest.mark.parametrize("name", ["resnet50", "gpt2", "odd", "lstm", "convnext", "densenet"])
def test_fake_values_are_exact(name: str) -> None:
    """Shape, strides, offset and storage size of every value are those of the real run."""
    workload = MODELS[name]()
    captured = capture(workload)
    captured.begin_step()

    class Compare(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            info = None if n.op == "output" else node_info(n)
            values = result if isinstance(result, tuple | list) else [result]
            for value, storage in zip(values, info.storages if info else (), strict=False):
                if isinstance(value, torch.Tensor) and storage is not None and n.op != "placeholder":
                    external = captured.graph.storages[storage].external
                    assert external or value.untyped_storage().nbytes() == captured.graph.storages[storage].size_bytes, n.format_node()
            if isinstance(result, torch.Tensor):
                assert geometry(result) == geometry(n.meta["val"]), n.format_node()
            return result

    with torch.no_grad():
        Compare(captured.gm).run(*inputs_of(captured, workload))


def test_classes_of_known_ops() -> None:
    classes: dict[str, set[Recompute]] = {}
    for name in ("resnet50", "vgg16", "vit", "odd"):
        for op in capture(MODELS[name]()).graph.ops:
            classes.setdefault(op.target, set()).add(op.recompute)
            assert op.reason or op.recompute is not Recompute.BARRED
    assert classes["aten.native_batch_norm.default"] == {Recompute.STATISTICS}
    assert classes["aten.relu_.default"] == {Recompute.IN_PLACE}
    assert classes["aten.bernoulli_.float"] == {Recompute.RANDOM}
    assert classes["aten.convolution.default"] == {Recompute.PURE}
    assert classes["optimizer.SGD"] == {Recompute.BARRED}
    assert Recompute.BARRED in classes["aten.add_.Tensor"]  # num_batches_tracked
