"""The bound is below every plan; the floor is below every budget that does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from schedopt.machine import Link
from schedopt.solvers.bound import floor, lower_bound
from schedopt.solvers.problem import Problem, captured_order, eager_peak
from tests.graphs import MIB, chain_graph, random_graph, with_times

FAST = Link("cpu", "file", 4e9, 4e9, 1000)
SLOW = Link("cpu", "file", 1e8, 1e8, 1000)


def chain(share: float, link: Link, num_layers: int = 8) -> Problem:
    """A chain under a share of its eager peak."""
    graph = chain_graph(num_layers)
    return Problem(graph, captured_order(graph), round(eager_peak(graph) * share), link, True)


def test_no_pressure_is_the_compute_time() -> None:
    problem = chain(1.0, SLOW)
    assert lower_bound(problem).step_ns == problem.compute_ns


def test_a_slow_link_and_no_recompute_is_bound_by_the_link() -> None:
    graph = with_times(chain_graph(8), 1000)
    problem = Problem(graph, captured_order(graph), eager_peak(graph) - 3 * MIB, SLOW, True, may_recompute=False)
    bound = lower_bound(problem).step_ns
    assert bound is not None
    assert bound >= 3 * SLOW.out_ns(MIB) * 0.999  # three activations must go at least once


def test_no_link_and_recompute_costs_compute() -> None:
    problem = replace(chain(1.0, SLOW), budget_bytes=chain(1.0, SLOW).budget_bytes - 3 * MIB, may_swap=False)
    bound = lower_bound(problem).step_ns
    assert bound is not None
    assert bound >= problem.compute_ns + 3_000_000 * 0.999  # three ops of one millisecond again


def test_copies_tax_compute() -> None:
    taxed = replace(FAST, tax_ns_per_byte=0.1)
    free, dear = (lower_bound(replace(chain(0.6, link), may_recompute=False)).step_ns for link in (FAST, taxed))
    assert free is not None
    assert dear is not None
    assert dear > free


def test_below_the_floor_nothing_fits() -> None:
    problem = chain(1.0, FAST)
    least, name = floor(problem)
    assert lower_bound(replace(problem, budget_bytes=least)).step_ns is not None
    assert lower_bound(replace(problem, budget_bytes=least - 1)).step_ns is None
    assert name.startswith("op")


@given(st.integers(0, 10_000), st.floats(0.3, 1.0))
@settings(max_examples=30, deadline=None)
def test_more_memory_and_more_freedom_never_raise_the_bound(seed: int, share: float) -> None:
    graph = random_graph(seed)
    tight = Problem(graph, captured_order(graph), round(eager_peak(graph) * share), FAST, True)
    wide = replace(tight, budget_bytes=round(tight.budget_bytes * 1.2))
    bounds = [lower_bound(p).step_ns for p in (wide, tight, replace(tight, may_swap=False))]
    for smaller, larger in pairwise(bounds):
        assert larger is None or (smaller is not None and smaller <= larger * 1.000001)
