"""The decide passes: every plan passes the checker, every constraint can be met and can be impossible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedopt.check import check
from schedopt.constraints import STRATEGIES, Constraints
from schedopt.errors import InfeasibleError
from schedopt.graph import Graph, Phase, Recompute, StorageKind
from schedopt.pass_manager import Program, run_passes
from schedopt.passes import DecideMemory, DecideOrder
from schedopt.plan import ActionKind, Fate, Plan
from schedopt.solvers.problem import eager_peak
from tests.graphs import MIB, GraphBuilder, chain_graph, random_graph
from tests.machines import TEST_MACHINE

COPIES = {ActionKind.SWAP_IN, ActionKind.SWAP_OUT}


def decide(graph: Graph, machine: Any = TEST_MACHINE, **constraints: Any) -> Plan:
    """Plan of the two decide passes; the pass manager lets the checker replay it."""
    constraints.setdefault("time_limit_s", 0.05)
    wanted = Constraints(**constraints)
    program = Program(graph, machine.throttled(wanted.throttle_bytes_per_s), wanted)
    plan = run_passes(program, (DecideOrder(), DecideMemory(workers=1))).plan
    assert plan is not None
    return plan


def kinds(plan: Plan) -> set[ActionKind]:
    """Kinds of action in the plan."""
    return {action.kind for action in plan.schedules[0].actions}


@given(seed=st.integers(0, 100_000), share=st.integers(20, 100), strategy=st.sampled_from(STRATEGIES), undo=st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_plan_passes_the_checker(seed: int, share: int, strategy: str, undo: bool) -> None:
    graph = random_graph(seed, 3 + seed % 5)
    budget, floor_bytes = eager_peak(graph) * share // 100, 0
    try:
        plan = decide(graph, memory=budget, strategy=strategy, undo=undo)
    except InfeasibleError as error:
        budget, floor_bytes = error.least_bytes, error.floor_bytes
        plan = decide(graph, memory=budget, strategy=strategy, undo=undo)
    report = check(graph, plan, TEST_MACHINE)
    assert report.ok
    assert floor_bytes <= report.peak_bytes == plan.peak_bytes <= budget == plan.schedules[0].budget_bytes
    assert plan.bound_ns is not None
    assert plan.bound_ns <= plan.step_ns


def test_a_job_that_fits_gets_the_plain_plan() -> None:
    graph = random_graph(5, 6)
    plan = decide(graph, memory="100%", undo=False)
    assert plan.solver == "plain"
    assert not kinds(plan) & (COPIES | {ActionKind.RECOMPUTE})
    assert plan.step_ns == plan.eager_ns == plan.bound_ns
    assert plan.decisions == ()


@pytest.mark.parametrize("op_ns", [1000, 10**9])
def test_early_updates_lower_the_peak_of_the_plain_plan_where_they_cost_little(op_ns: int) -> None:
    build = GraphBuilder("wide")
    x = build.storage(StorageKind.INPUT, MIB)
    weights = [build.storage(StorageKind.PARAMETER, 8 * MIB) for _ in range(4)]
    graph = _backward_of(build, x, weights, op_ns)
    plan = decide(graph, memory="100%")
    assert plan.solver == "plain"
    assert plan.eager_peak_bytes == eager_peak(graph)
    assert plan.step_ns <= 1.005 * plan.eager_ns
    assert plan.peak_bytes < plan.eager_peak_bytes or op_ns == 1000
    free = decide(graph, memory="100%", undo=False)
    assert free.peak_bytes < free.eager_peak_bytes
    assert free.step_ns == free.eager_ns
    tight = decide(graph, memory=free.peak_bytes)  # the copies are dear, but nothing else fits
    assert tight.peak_bytes <= free.peak_bytes


def _backward_of(build: GraphBuilder, x: int, weights: list[int], op_ns: int) -> Graph:
    loss, grad = build.storage(StorageKind.OUTPUT, 4), build.storage(StorageKind.GRADIENT, MIB)
    build.op(Phase.FORWARD, op_ns, reads=(x, *weights), creates=(loss, grad))
    gradients = [build.storage(StorageKind.GRADIENT, 8 * MIB) for _ in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        build.op(Phase.BACKWARD, op_ns, reads=(grad, x, weight), creates=(gradient,))
    for weight, gradient in zip(weights, gradients, strict=True):
        build.op(Phase.UPDATE, op_ns, reads=(gradient,), writes=(weight,), recompute=Recompute.BARRED)
    return build.graph(loss)


def test_no_limit_means_the_memory_of_the_device() -> None:
    plan = decide(chain_graph(4))
    assert plan.schedules[0].budget_bytes == TEST_MACHINE.devices[0].memory_bytes
    small = replace(TEST_MACHINE, devices=(replace(TEST_MACHINE.devices[0], memory_bytes=5 * MIB),))
    assert decide(chain_graph(8), small).peak_bytes <= 5 * MIB


@pytest.mark.parametrize("strategy", ["auto", "swap", "recompute"])
def test_infeasible_says_what_would_do(strategy: str) -> None:
    graph = chain_graph(8)
    with pytest.raises(InfeasibleError) as caught:
        decide(graph, memory=2 * MIB, strategy=strategy)
    error = caught.value
    assert error.op_name in str(error)
    assert str(error.least_bytes) in str(error)
    assert error.floor_bytes == 4 * MIB  # input, activation and two gradients of a backward op
    plan = decide(graph, memory=error.least_bytes, strategy=strategy)
    assert plan.peak_bytes <= error.least_bytes


def test_a_plan_made_before_serves_the_same_step_captured_again() -> None:
    thorough = decide(random_graph(3, 7), memory="50%", time_limit_s=0.6)
    hasty = decide(random_graph(3, 7), memory="55%", time_limit_s=0.001)
    assert hasty.step_ns <= thorough.step_ns


def test_window_infeasible_names_the_op() -> None:
    with pytest.raises(InfeasibleError, match="window method"):
        decide(chain_graph(8), memory=2 * MIB, strategy="window")


def test_swap_does_not_recompute_and_recompute_does_not_swap() -> None:
    graph = chain_graph(10)
    assert ActionKind.RECOMPUTE not in kinds(decide(graph, memory="60%", strategy="swap"))
    assert not kinds(decide(graph, memory="60%", strategy="recompute")) & COPIES
    assert ActionKind.RECOMPUTE not in kinds(decide(graph, memory="60%", strategy="window"))


def test_a_slow_link_turns_swaps_into_recomputes() -> None:
    graph = chain_graph(10)
    assert ActionKind.RECOMPUTE not in kinds(decide(graph, memory="60%", time_limit_s=1))
    assert not kinds(decide(graph, memory="60%", throttle_bytes_per_s=1e6, time_limit_s=1)) & COPIES


def test_throttle_slows_the_step_of_swap() -> None:
    graph = chain_graph(10)
    fast = decide(graph, memory="60%", strategy="swap")
    assert fast.bound_ns is not None
    slow = decide(graph, memory="60%", strategy="swap", throttle_bytes_per_s=1e8)
    assert slow.bound_ns is not None
    assert slow.bound_ns > fast.bound_ns
    assert slow.step_ns > fast.step_ns


def test_tier_of_the_constraints() -> None:
    graph = chain_graph(10)
    assert decide(graph, memory="60%", tier="ram").schedules[0].tier == "ram"
    gpu = replace(
        TEST_MACHINE, tiers=(replace(TEST_MACHINE.tiers[0], name="pinned"),), links=(replace(TEST_MACHINE.links[0], tier="pinned"),)
    )
    assert decide(graph, gpu, memory="60%", tier="ram").schedules[0].tier == "pinned"
    with pytest.raises(ValueError, match="no tier 'file'"):
        decide(graph, gpu, memory="60%", tier="file")


def test_undo_copies_only_where_asked_for() -> None:
    graph = random_graph(4, 7)
    with_undo, without = (decide(graph, memory="90%", undo=undo) for undo in (True, False))
    assert ActionKind.SAVE in kinds(with_undo)
    assert ActionKind.SAVE not in kinds(without)
    assert without.schedules[0].snapshot == ()


def test_decisions_name_every_return_with_a_reason() -> None:
    graph = random_graph(9, 8)
    plan = decide(graph, memory="55%")
    returns = [a.subject for a in plan.schedules[0].actions if a.kind is ActionKind.SWAP_IN]
    copied = [d.storage for d in plan.decisions if d.fate in (Fate.SWAP, Fate.REST)]
    assert sorted(copied) == sorted(returns)
    assert all("frees" in d.why for d in plan.decisions)
    assert {d.storage for d in plan.decisions if d.fate is Fate.REST} == set(plan.schedules[0].away)


def test_progress_is_told() -> None:
    told: list[tuple[float, str]] = []
    program = Program(chain_graph(10), TEST_MACHINE, Constraints(memory="55%", time_limit_s=0.2))
    run_passes(program, (DecideOrder(), DecideMemory(lambda share, what: told.append((share, what)), workers=1)))
    assert told
    assert all(0 <= share <= 1.5 for share, _ in told)
