"""The search: against brute force, against the window method, and over budgets."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from schedopt.check import Report, check
from schedopt.graph import Graph
from schedopt.machine import Device, Link, Machine, Tier
from schedopt.plan import ActionKind, Plan, Schedule
from schedopt.solvers import auto, exact, window
from schedopt.solvers.candidates import candidates
from schedopt.solvers.expand import Choices, ImpossibleChoice, expand, profile
from schedopt.solvers.greedy import GreedyOptions, greedy
from schedopt.solvers.problem import Problem, captured_order, eager_peak, early_order
from schedopt.solvers.realise import realise
from tests.graphs import chain_graph, random_graph

LINK = Link("cpu", "file", 1e9, 1.2e9, 10_000, tax_ns_per_byte=0.05)
MACHINE = Machine("toy", (Device("cpu", "cpu", 1 << 40, 1e10, (), 0),), (Tier("file", 1 << 40),), (LINK,), "test")


def problems(graph: Graph, share: float, link: Link = LINK) -> list[Problem]:
    """Updates early, updates late."""
    budget = round(eager_peak(graph) * share)
    return [Problem(graph, order, budget, link, True) for order in (early_order(graph), captured_order(graph))]


def options(seconds: float) -> auto.AutoOptions:
    """One worker, fixed seed."""
    return auto.AutoOptions("file", "cpu", seconds, seed=1, workers=1)


def replay(graph: Graph, schedule: Schedule, budget: int) -> Report:
    """What the checker says of it."""
    return check(graph, Plan(graph.hash(), "toy", "auto", "test", (replace(schedule, budget_bytes=budget),)), MACHINE)


def brute_force(problem: Problem) -> int | None:
    """Least step time over every combination of choices."""
    expansion = expand(problem, {})
    clock = np.zeros(len(expansion.steps) + 1, dtype=np.int64)
    gaps = [c.gap for c in candidates(problem, expansion, clock, {})]
    assert 3 ** len(gaps) <= 3000, "too many for brute force"
    best: int | None = None
    for hows in itertools.product((None, "swap", "recompute"), repeat=len(gaps)):
        choices: Choices = {gap: how for gap, how in zip(gaps, hows, strict=True) if how is not None}
        try:
            realised = realise(problem, expand(problem, choices), "file", "cpu")
        except ImpossibleChoice:
            continue
        if realised is not None and (best is None or realised.step_ns < best):
            best = realised.step_ns
    return best


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6, 0.5])
@pytest.mark.parametrize("bytes_per_s", [2e8, 1e9, 1e10])
def test_as_good_as_brute_force_on_small_chains(share: float, bytes_per_s: float) -> None:
    link = replace(LINK, out_bytes_per_s=bytes_per_s, in_bytes_per_s=bytes_per_s)
    both = problems(chain_graph(5), share, link)
    wanted = brute_force(both[1])
    found = auto.solve(both, options(0.5)).best
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.step_ns <= wanted * 1.005


@pytest.mark.parametrize("seed", range(6))
def test_a_larger_budget_is_never_slower(seed: int) -> None:
    graph = random_graph(seed, 4)
    known: list[auto.Found] = []
    steps: list[int] = []
    for share in (0.5, 0.57, 0.66, 0.78, 0.9, 1.0):
        best = auto.solve(problems(graph, share), options(0.15), known).best
        if best is not None:
            known.append(best)
            steps.append(best.step_ns)
    assert len(steps) >= 2
    assert all(larger <= smaller for smaller, larger in pairwise(steps)), steps


@pytest.mark.parametrize("seed", range(6))
def test_the_ladder_alone_is_monotone_in_any_order(seed: int) -> None:
    graph = random_graph(100 + seed, 4)
    steps = []
    for share in (1.0, 0.62, 0.9, 0.5, 0.75):
        search = auto.Search(problems(graph, share), options(1000.0), time.perf_counter(), lambda _share, _what: None)
        search.ladder()
        if search.best is not None:
            steps.append((share, search.best.step_ns))
    steps.sort()
    assert all(larger[1] <= smaller[1] for smaller, larger in pairwise(steps)), steps


@pytest.mark.parametrize("seed", range(8))
def test_never_slower_than_the_window_method(seed: int) -> None:
    graph = random_graph(200 + seed, 5)
    both = problems(graph, 0.6)
    control = window.solve(both[0], "file", "cpu").schedule
    best = auto.solve(both, options(0.1)).best
    if control is None:
        return
    assert best is not None
    budget = both[0].budget_bytes
    assert replay(graph, best.realised.schedule, budget).step_ns <= replay(graph, control, budget).step_ns


def test_the_same_seed_gives_the_same_plan() -> None:
    both = problems(random_graph(3, 4), 0.55)
    answers = [greedy(both[0], GreedyOptions(both[0].budget_bytes, noise=0.5, seed=7)) for _ in range(2)]
    assert answers[0].choices == answers[1].choices
    first, second = (realise(both[0], a.expansion, "file", "cpu") for a in answers)
    assert first == second


@pytest.mark.parametrize("seed", range(10))
def test_our_clock_agrees_with_the_checker(seed: int) -> None:
    graph = random_graph(300 + seed, 5)
    for problem in problems(graph, 0.6):
        answer = greedy(problem, GreedyOptions(problem.budget_bytes))
        realised = realise(problem, answer.expansion, "file", "cpu") if answer.fits else None
        if realised is not None:
            report = replay(graph, realised.schedule, problem.budget_bytes)
            assert report.ok, report.violations
            assert report.step_ns == realised.step_ns


def test_links_in_one_direction_only_share_their_time() -> None:
    both = problems(chain_graph(8), 0.5, replace(LINK, duplex=False))
    best = auto.solve(both, options(0.1)).best
    assert best is not None
    machine = replace(MACHINE, links=(replace(LINK, duplex=False),))
    plan = Plan(both[0].graph.hash(), "toy", "auto", "test", (best.realised.schedule,))
    assert check(both[0].graph, plan, machine).step_ns == best.step_ns


def test_cp_sat_model_is_solved_and_covers_what_is_too_much() -> None:
    problem = problems(chain_graph(6), 0.6)[0]
    hint = greedy(problem, GreedyOptions(problem.budget_bytes))
    answer = exact.solve(problem, exact.ExactOptions(problem.budget_bytes, 10.0, workers=1), hint.choices)
    assert answer.status == "OPTIMAL"
    assert answer.objective_us == pytest.approx(answer.bound_us)
    assert max(profile(problem, expand(problem, dict.fromkeys(answer.choices, "swap")))) <= problem.budget_bytes


def test_cp_sat_chooses_what_is_cheap() -> None:
    fast, slow = replace(LINK, out_bytes_per_s=1e11, in_bytes_per_s=1e11), replace(LINK, out_bytes_per_s=1e6, in_bytes_per_s=1e6)
    for link, expected in ((fast, {"swap"}), (slow, {"recompute"})):
        problem = problems(chain_graph(6), 0.7, link)[0]
        answer = exact.solve(problem, exact.ExactOptions(problem.budget_bytes, 10.0, workers=1), {})
        assert set(answer.choices.values()) == expected


def test_window_waits_only_under_pressure_and_drops_unmodified_storages_for_free() -> None:
    problem = problems(random_graph(11, 5), 0.7)[0]
    schedule = window.solve(problem, "file", "cpu").schedule
    assert schedule is not None
    kinds = [a.kind for a in schedule.actions]
    assert ActionKind.RECOMPUTE not in kinds
    assert kinds.count(ActionKind.SWAP_OUT) < kinds.count(ActionKind.SWAP_IN)  # a parameter that was only read has its copy already
    assert replay(problem.graph, schedule, problem.budget_bytes).ok
