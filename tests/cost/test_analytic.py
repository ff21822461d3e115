"""Formulas against numbers worked out by hand, and what must hold for any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from schedopt.capture import Captured, capture
from schedopt.compat import make_fx
from schedopt.cost import estimate, load_machine
from schedopt.cost.analytic import flops_per_s
from schedopt.cost.flops import flops
from schedopt.graph import Graph
from schedopt.machine import Machine
from tests.cost.graphs import CPU, small_mlp, traced


def _work(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> int:
    captured = traced(function, *tensors)
    return sum(flops(n) for n in captured.gm.graph.nodes if n.op == "call_function")


def test_matrix_products() -> None:
    assert _work(torch.mm, torch.ones(3, 5), torch.ones(5, 7)) == 2 * 3 * 5 * 7
    assert _work(torch.bmm, torch.ones(2, 3, 5), torch.ones(2, 5, 7)) == 2 * 2 * 3 * 5 * 7
    assert _work(torch.mv, torch.ones(3, 5), torch.ones(5)) == 2 * 3 * 5
    assert _work(torch.dot, torch.ones(5), torch.ones(5)) == 2 * 5


def test_convolution() -> None:
    images, weight = torch.ones(2, 3, 8, 8), torch.ones(6, 3, 3, 3)
    assert _work(lambda x, w: F.conv2d(x, w, padding=1), images, weight) == 2 * 2 * 6 * 8 * 8 * 3 * 3 * 3


def test_grouped_convolution_counts_its_own_channels_only() -> None:
    images, weight = torch.ones(2, 6, 8, 8), torch.ones(6, 1, 3, 3)
    assert _work(lambda x, w: F.conv2d(x, w, padding=1, groups=6), images, weight) == 2 * 2 * 6 * 8 * 8 * 3 * 3


def test_attention_on_the_cpu() -> None:
    query = torch.ones(2, 4, 16, 8)

    def attend(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]
        return out

    gm = make_fx(attend, tracing_mode="fake")(query)
    assert sum(flops(n) for n in gm.graph.nodes if n.op == "call_function") == 2 * (2 * 2 * 4 * 16 * 16 * 8)


def test_elementwise_is_bound_by_bytes() -> None:
    graph = estimate(traced(torch.relu, torch.ones(1000, 1000)), CPU)
    assert graph.ops[0].time_ns == 1000 + round(8e6 / 2e10 * 1e9)
    assert graph.ops[0].workspace_bytes == 0


def test_large_product_is_bound_by_flops() -> None:
    graph = estimate(traced(torch.mm, torch.ones(1000, 1000), torch.ones(1000, 1000)), CPU)
    assert graph.ops[0].time_ns == 1000 + round(2e9 / 1e11 * 1e9)
    half = torch.ones(1000, 1000, dtype=torch.bfloat16)
    assert estimate(traced(torch.mm, half, half), CPU).ops[0].time_ns == 1000 + round(2e9 / 2e11 * 1e9)


def test_expanded_tensor_counts_once() -> None:
    one = torch.ones(1, 1000).expand(1000, 1000)
    graph = estimate(traced(torch.relu, one), CPU)
    full = estimate(traced(torch.relu, torch.ones(1000, 1000)), CPU)
    assert graph.ops[0].time_ns < full.ops[0].time_ns


def test_table_lookup_does_not_read_the_table() -> None:
    ids = torch.zeros(4, dtype=torch.int64)
    small, large = (estimate(traced(lambda w, i: F.embedding(i, w), torch.ones(rows, 64), ids), CPU) for rows in (100, 100_000))
    assert small.ops[0].time_ns == large.ops[0].time_ns


def test_tensor_float_32_only_where_torch_uses_it() -> None:
    device = load_machine("h200").devices[0]
    rates = dict(device.flops_per_s)
    assert flops_per_s(device, torch.float32) == rates["float32"]
    assert flops_per_s(device, torch.float32, convolution=True) == rates["tfloat32"]
    assert flops_per_s(device, torch.float64) == rates["float32"] / 2
    assert flops_per_s(load_machine("t4").devices[0], torch.bfloat16) == 0.7 * 8.1e12


@pytest.mark.parametrize(("optimizer", "temporaries"), [("SGD", 1), ("AdamW", 2)])
def test_update_is_bound_by_bytes(optimizer: str, temporaries: int) -> None:
    captured = capture(small_mlp(optimizer))
    graph = estimate(captured, load_machine("t4"))
    update = next(o for o in graph.ops if o.target == f"optimizer.{optimizer}" and graph.storages[o.writes[0]].size_bytes == 4 * 16 * 32)
    assert update.workspace_bytes == temporaries * 4 * 16 * 32
    assert update.time_ns > 0


def _scaled(machine: Machine, factor: float) -> Machine:
    device = machine.devices[0]
    rates = tuple((name, rate * factor) for name, rate in device.flops_per_s)
    return replace(machine, devices=(replace(device, flops_per_s=rates, memory_bytes_per_s=device.memory_bytes_per_s * factor),))


@settings(max_examples=25, deadline=None)
@given(st.floats(1.0, 100.0))
def test_a_faster_machine_is_never_slower(factor: float) -> None:
    captured = _mlp()
    slow, fast = estimate(captured, CPU), estimate(captured, _scaled(CPU, factor))
    assert all(a.time_ns >= b.time_ns >= CPU.devices[0].launch_ns for a, b in zip(slow.ops, fast.ops, strict=True))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 40))
def test_a_larger_product_never_costs_less(m: int, k: int, n: int, more: int) -> None:
    small, large = (estimate(traced(torch.mm, torch.ones(m + x, k), torch.ones(k, n + x)), CPU) for x in (0, more))
    assert small.ops[0].time_ns <= large.ops[0].time_ns


def test_only_costs_change() -> None:
    captured = _mlp()
    graph: Graph = estimate(captured, CPU)
    assert graph.hash() == captured.graph.hash()
    assert [replace(o, time_ns=0, workspace_bytes=0) for o in graph.ops] == list(captured.graph.ops)


def _mlp() -> Captured:
    return capture(small_mlp())
