"""Generated code: one straight-line function, no interpreter, nothing kept longer than the plan says."""

from __future__ import annotations

import ast
import gc
import statistics
import time
import weakref
from typing import Any

import pytest
import torch
from torch import fx

from schedopt.capture.captured import node_info
from schedopt.lower.codegen import generate
from schedopt.passes.insert_actions import InsertActions
from tests import plans
from tests.programs import Maker, program_of, small_job


class Silent:
    """A runtime that does nothing but note what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *(a for a in args if isinstance(a, int))))


@pytest.mark.parametrize("maker", [plans.plain, plans.swap_everything, plans.recompute_everything, plans.all_away])
def test_one_function_of_assignments_and_calls(maker: Maker) -> None:
    lowered = generate(InsertActions()(program_of(small_job(), maker)).lowered)
    (function,) = ast.parse(lowered.source).body
    assert isinstance(function, ast.FunctionDef)
    assert {type(line) for line in function.body} == {ast.Assign, ast.Expr, ast.Return}
    assert repr(lowered) == f"Lowered({lowered.source.count(chr(10))} lines)"


def test_source_reads_like_the_plan() -> None:
    graph = fx.Graph()
    graph.placeholder("rt")
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.add.Scalar, (x, float("inf")), {"alpha": 2})
    z = graph.call_function(torch.ops.aten.cat.default, ([y, x], 0))
    graph.output((z,))
    lowered = generate(fx.GraphModule(torch.nn.Module(), graph))
    assert lowered.source == (
        "def step(RT, INPUTS):\n"
        "    [x] = INPUTS\n"
        "    INPUTS.clear()\n"
        "    add_scalar = K1_aten_add_Scalar(x, K0_constant, alpha=2)\n"
        "    cat_default = K2_aten_cat_default([add_scalar, x], 0)\n"
        "    add_scalar = None\n"
        "    return (cat_default, )\n"
    )
    (result,) = lowered.function(Silent(), [torch.ones(1)])
    assert result.tolist() == [float("inf"), 1.0]


def test_names_of_values_and_of_our_own_do_not_meet() -> None:
    graph = fx.Graph()
    graph.placeholder("rt")
    taken = [graph.placeholder(name) for name in ("inputs", "inputs_", "step", "K0_constant")]
    graph.output(tuple(graph.call_function(torch.ops.aten.neg.default, (node,)) for node in taken))
    lowered = generate(fx.GraphModule(torch.nn.Module(), graph))
    results = lowered.function(Silent(), [torch.full((), i) for i in range(4)])
    assert [int(r) for r in results] == [0, -1, -2, -3]


def test_released_tensors_are_gone_at_once_with_all_their_aliases() -> None:
    program = program_of(small_job(), plans.plain)
    alive: dict[int, weakref.ref[Any]] = {}
    wrong: list[int] = []

    class Watching(Silent):
        def verify(self, op: int, value: Any) -> None:
            tensors = value if isinstance(value, tuple | list) else [value]
            for tensor, s in zip(tensors, storages[op], strict=True):
                if s in program.graph.ops[op].creates and isinstance(tensor, torch.Tensor):
                    alive[s] = weakref.ref(tensor.untyped_storage())

        def release(self, storage: int) -> None:
            reference = alive.get(storage)
            if reference is not None and reference() is not None:
                wrong.append(storage)

    infos = [node_info(n) for n in program.captured.gm.graph.nodes if n.op == "call_function"]
    storages = {i.op: i.storages for i in infos if i.op is not None}
    lowered = generate(InsertActions(checked=True)(program).lowered)
    inputs = [e.slot for e in program.captured.externals]
    tensors = [
        torch.randn(6, 8) if slot == ("input", 0) else torch.zeros(6, dtype=torch.int64) if slot[0] == "input" else None for slot in inputs
    ]
    live = [t if t is not None else program.captured.lookup(slot).detach() for t, slot in zip(tensors, inputs, strict=True)]
    gc.disable()
    try:
        with torch.no_grad():
            program.captured.begin_step()
            lowered.function(Watching(), live)
    finally:
        gc.enable()
    assert live == []
    assert len(alive) > 10
    assert wrong == []


def test_a_call_costs_less_than_two_microseconds() -> None:
    """What the generated code adds to each op, next to the same calls written by hand."""
    graph = fx.Graph()
    graph.placeholder("rt")
    first = node = graph.placeholder("x")
    for _ in range(300):
        node = graph.call_function(torch.ops.aten.neg.default, (node,))
    graph.output((node,))
    lowered = generate(fx.GraphModule(torch.nn.Module(), graph))
    assert first.users
    neg, x = torch.ops.aten.neg.default, torch.ones(1)

    def by_hand() -> torch.Tensor:
        y = x
        for _ in range(300):
            y = neg(y)
        return y

    def seconds(call: Any) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    silent: Any = Silent()
    ours = statistics.median(seconds(lambda: lowered.function(silent, [x])) for _ in range(30))
    theirs = statistics.median(seconds(by_hand) for _ in range(30))
    assert ours - theirs < 300 * 2e-6
