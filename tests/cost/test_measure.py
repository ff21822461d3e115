"""Measured costs: workspace of known ops, made-up arguments, nothing live is touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx

from schedopt.capture import capture
from schedopt.capture.captured import Captured, node_info
from schedopt.capture.selfcheck import step_state
from schedopt.cost.arguments import real_arguments
from schedopt.cost.cache import CostCache
from schedopt.cost.measure import cost_key, measure, run_times_ns, workspace_bytes
from tests.cost.graphs import CPU, annotated, small_mlp, traced
from tests.models import MODELS

CONTEXT = {"test": 1}


def test_workspace_of_an_op_that_holds_a_temporary() -> None:
    def two_temporaries(x: torch.Tensor) -> torch.Tensor:
        first = x + 1
        second = first + 1
        return (first * second).sum()

    x = torch.ones(1000)
    assert workspace_bytes(two_temporaries, (x,), {}) == 3 * 4000  # first, second and their product; the sum is one of 4 bytes more
    assert workspace_bytes(torch.relu, (x,), {}) == 0
    assert workspace_bytes(torch.Tensor.relu_, (x,), {}) == 0
    assert workspace_bytes(lambda t: (t, t.view(10, 100), torch.relu(t)), (x,), {}) == 0


def test_workspace_counts_what_is_alive_together_only() -> None:
    def one_after_the_other(x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for _ in range(5):
            total += (x + 1).sum()
        return total

    assert workspace_bytes(one_after_the_other, (torch.ones(1000),), {}) < 4000 + 100


def test_cold_runs_take_longer_than_nothing() -> None:
    times = run_times_ns(torch.mm, (torch.ones(64, 64), torch.ones(64, 64)), {}, torch.zeros(1 << 20, dtype=torch.uint8))
    assert len(times) >= 2
    assert min(times) > 0


def test_arguments_have_the_exact_geometry() -> None:
    captured = traced(lambda x: torch.relu(x), torch.ones(4, 6).t()[1:, ::2])
    node = next(n for n in captured.gm.graph.nodes if n.op == "call_function")
    (made,), _ = real_arguments(node)
    fake = node.args[0].meta["val"]
    assert (made.shape, made.stride(), made.storage_offset(), made.dtype) == (fake.shape, fake.stride(), fake.storage_offset(), fake.dtype)
    assert made.untyped_storage().nbytes() == fake.untyped_storage().nbytes()
    assert 0.1 <= float(made.min()) <= float(made.max()) < 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.bool])
def test_arguments_of_every_dtype(dtype: torch.dtype) -> None:
    captured = traced(lambda x: x.clone(), torch.ones(70_001, dtype=dtype))
    node = next(n for n in captured.gm.graph.nodes if n.op == "call_function")
    (made,), _ = real_arguments(node)
    assert made.dtype is dtype
    assert made.numel() == 70_001
    if not (dtype.is_floating_point or dtype.is_complex):
        assert bool((made == (1 if dtype is torch.bool else 0)).all())


def test_arguments_that_share_a_storage_share_one() -> None:
    graph = fx.Graph()
    whole = graph.placeholder("whole")
    part = graph.call_function(torch.ops.aten.slice.Tensor, (whole, 0, 2))
    both = graph.call_function(torch.ops.aten.add_.Tensor, (part, whole))
    base = torch.ones(8)
    whole.meta["val"], part.meta["val"] = base, base[2:]
    (left, right), _ = real_arguments(both)
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    assert left.data_ptr() != right.data_ptr()
    assert left.untyped_storage().data_ptr() != base.data_ptr()


@pytest.mark.parametrize("name", ["vgg16", "gpt2", "odd", "lstm", "autocast"])
def test_every_op_of_a_model_is_measured(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    workload = MODELS[name]()
    captured = capture(workload)
    state = {key: value.clone() for key, value in step_state(workload).items()}
    generator = torch.get_rng_state()
    seen: list[tuple[int, int]] = []
    graph = measure(captured, CPU, progress=lambda done, total: seen.append((done, total)), cache=CostCache(tmp_path, CONTEXT))
    ours = [record for record in caplog.records if record.name.startswith("schedopt")]
    assert not ours, "an op did not run on made-up values"
    assert all(op.time_ns > 0 and op.workspace_bytes >= 0 for op in graph.ops)
    assert [replace(o, time_ns=0, workspace_bytes=0) for o in graph.ops] == list(captured.graph.ops)
    assert [d for d, _ in seen] == list(range(1, seen[0][1] + 1))
    assert torch.equal(generator, torch.get_rng_state())
    after = step_state(workload)
    assert after.keys() == state.keys()
    assert all(torch.equal(value, after[key]) for key, value in state.items())


def test_second_time_everything_comes_from_the_cache(tmp_path: Path) -> None:
    captured = capture(small_mlp())
    first = measure(captured, CPU, cache=CostCache(tmp_path, CONTEXT))

    def refuse(done: int, total: int) -> None:
        raise AssertionError("measured again")

    assert measure(captured, CPU, cache=CostCache(tmp_path, CONTEXT), progress=refuse) == first


def test_larger_products_are_measured_slower(tmp_path: Path) -> None:
    small, large = (traced(torch.mm, torch.ones(n, n), torch.ones(n, n)) for n in (16, 512))
    cache = CostCache(tmp_path, CONTEXT)
    assert measure(small, CPU, cache=cache).ops[0].time_ns < measure(large, CPU, cache=cache).ops[0].time_ns


def test_op_that_refuses_made_up_values_is_estimated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    graph = measure(_refusing(), CPU, cache=CostCache(tmp_path, CONTEXT))
    assert "is estimated" in caplog.text
    assert graph.ops[0].time_ns == 1000 + round((8 + 4) / 2e10 * 1e9)


def _refusing() -> Captured:
    """A step of one op that checks its values."""

    def check(x: torch.Tensor) -> torch.Tensor:
        if float(x[0]) < 1:
            raise RuntimeError("values below one")
        return x.sum()

    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(check, (x,))
    graph.output(y)
    x.meta["val"], y.meta["val"] = torch.ones(2), torch.ones(())
    return annotated(fx.GraphModule(torch.nn.Module(), graph))


def test_update_options_choose_the_key() -> None:
    keys = set()
    for optimizer in ("SGD", "AdamW"):
        captured = capture(small_mlp(optimizer))
        for node in captured.gm.graph.nodes:
            if node.op == "call_function" and (number := node_info(node).op) is not None:
                op = captured.graph.ops[number]
                if op.target.startswith("optimizer."):
                    keys.add(cost_key(node, op).rpartition(" [")[2])
    assert len(keys) == 2
    assert all("lr" not in key for key in keys)
