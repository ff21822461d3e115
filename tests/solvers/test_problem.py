"""Orders, recipes and memory profiles."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedopt.graph import Graph, Op, Phase, Recompute, Storage, StorageKind, expected_versions
from schedopt.machine import Link
from schedopt.solvers.expand import expand, profile
from schedopt.solvers.problem import Problem, captured_order, eager_peak, early_order, lazy_order, order_profile
from tests.graphs import MIB, chain_graph, random_graph

LINK = Link("cpu", "file", 1e9, 1e9, 1000)
K = StorageKind


def problem(graph: Graph) -> Problem:
    """Of the captured order, with room for everything."""
    return Problem(graph, captured_order(graph), 1 << 40, LINK, True)


def respects_versions(graph: Graph, order: tuple[int, ...]) -> bool:
    """Whether every op meets all that it touches at the version it needs."""
    needed, version = expected_versions(graph), [0] * len(graph.storages)
    made = {s.id for s in graph.storages if s.external}
    for op in order:
        one = graph.ops[op]
        if any(version[s] != v or s not in made for s, v in needed[op].items()):
            return False
        made.update(one.creates)
        for s in one.writes:
            version[s] += 1
    return sorted(order) == list(range(len(graph.ops)))


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_orders_keep_every_version(seed: int) -> None:
    graph = random_graph(seed)
    early = early_order(graph)
    least = max(order_profile(graph, early))
    lazy = lazy_order(graph, least)
    assert respects_versions(graph, early)
    assert respects_versions(graph, lazy)
    assert max(order_profile(graph, early)) <= eager_peak(graph)


def test_updates_run_early_or_late() -> None:
    graph = _two_layers()
    assert early_order(graph) == (0, 1, 2, 4, 3, 5)  # the update of w2 (op 4) right after its gradient (op 2)
    assert lazy_order(graph, 1 << 40) == captured_order(graph)  # room for all: every update at the end
    assert max(order_profile(graph, early_order(graph))) <= eager_peak(graph)


def test_clipping_keeps_updates_behind_the_norm() -> None:
    graph = _two_layers(clipped=True)
    order = early_order(graph)
    norm = next(op.id for op in graph.ops if op.target == "norm")
    assert all(order.index(op.id) > order.index(norm) for op in graph.ops if op.phase is Phase.UPDATE)


def _two_layers(clipped: bool = False) -> Graph:
    storages = [Storage(i, f"w{i}", K.PARAMETER, MIB) for i in (0, 1)] + [Storage(2, "x", K.INPUT, MIB), Storage(3, "a", K.ACTIVATION, MIB)]
    storages += [Storage(i, f"g{i}", K.GRADIENT, MIB) for i in (4, 5, 6)] + [
        Storage(7, "loss", K.OUTPUT, 4),
        Storage(8, "norm", K.GRADIENT, 4),
    ]
    ops = [
        Op(0, "f1", "mm", Phase.FORWARD, reads=(0, 2), creates=(3,)),
        Op(1, "f2", "mm", Phase.FORWARD, reads=(1, 3), creates=(7, 4)),
        Op(2, "b2", "mm", Phase.BACKWARD, reads=(1, 3, 4), creates=(5,)),
        Op(3, "b1", "mm", Phase.BACKWARD, reads=(0, 2, 4), creates=(6,)),
    ]
    if clipped:
        ops.append(Op(4, "n", "norm", Phase.BACKWARD, reads=(5, 6), creates=(8,)))
    extra = (8,) if clipped else ()
    for w, g in ((1, 5), (0, 6)):
        ops.append(Op(len(ops), f"u{w}", "sgd", Phase.UPDATE, reads=(g, *extra), writes=(w,), recompute=Recompute.BARRED, reason="update"))
    return Graph("two layers", tuple(ops), tuple(storages), (7,))


def test_profile_of_nothing_chosen_is_the_order_profile() -> None:
    for seed in range(20):
        graph = random_graph(seed)
        mine = Problem(graph, early_order(graph), 1 << 40, LINK, False)
        assert profile(mine, expand(mine, {})) == order_profile(graph, mine.order)


def test_eager_peak_of_a_chain() -> None:
    # at the first backward op: input, three activations, the incoming and the outgoing gradient, the loss
    assert eager_peak(chain_graph(3)) == 6 * MIB + 4


def test_recipe_holds_in_place_writers_up_to_the_version() -> None:
    graph = _in_place(Recompute.STATISTICS, Recompute.IN_PLACE)
    mine = problem(graph)
    assert mine.recipe(2, 0) == (0,)
    assert mine.recipe(2, 1) == (0, 1)
    assert mine.recompute_ns(2, 1) == 30
    assert mine.recipe(0, 0) is None  # nobody creates an input


@pytest.mark.parametrize(("creator", "writer"), [(Recompute.BARRED, Recompute.IN_PLACE), (Recompute.PURE, Recompute.BARRED)])
def test_no_recipe_through_a_barred_op(creator: Recompute, writer: Recompute) -> None:
    assert problem(_in_place(creator, writer)).recipe(2, 1) is None


def _in_place(creator: Recompute, writer: Recompute) -> Graph:
    storages = (Storage(0, "x", K.INPUT, MIB), Storage(1, "mean", K.BUFFER, 64), Storage(2, "a", K.ACTIVATION, MIB))
    ops = (
        Op(0, "bn", "bn", Phase.FORWARD, reads=(0,), writes=(1,), creates=(2,), recompute=creator, time_ns=20),
        Op(1, "relu_", "relu_", Phase.FORWARD, writes=(2,), recompute=writer, time_ns=10),
    )
    return Graph("in place", ops, storages, (2,))
