"""Decides what is kept, swapped or recomputed when the step does not fit: asks the solver that the strategy names, writes the plan."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from schedopt.errors import InfeasibleError
from schedopt.pass_manager import Program
from schedopt.passes.decide_order import problem_of, tier_of
from schedopt.passes.explain import explain
from schedopt.plan import Decision, Plan, Schedule
from schedopt.solvers import auto, window
from schedopt.solvers.bound import floor, lower_bound
from schedopt.solvers.expand import expand, profile
from schedopt.solvers.greedy import GreedyOptions, greedy
from schedopt.solvers.problem import Problem, captured_order, eager_peak, early_order

_KINDS = {"auto": (True, True), "swap": (True, False), "recompute": (False, True), "window": (True, False)}
_known: OrderedDict[object, list[auto.Found]] = OrderedDict()  # plans of this process, offered again to larger budgets
_KNOWN_PROBLEMS = 16
_BISECTION_S = 20.0


@dataclass(frozen=True, slots=True)
class DecideMemory:
    """Pass: writes a plan under the budget. `progress(share, what)` is called while the solver works; `workers` is for CP-SAT."""

    progress: Callable[[float, str], None] | None = None
    workers: int = 2
    name: str = "decide_memory"

    def __call__(self, program: Program) -> Program:
        """Nothing to do if a plan fits already; InfeasibleError says what would do."""
        if program.plan is not None:
            return program
        started = time.perf_counter()
        swap, recompute = _KINDS[program.constraints.strategy]
        orders = (early_order(program.graph), captured_order(program.graph))
        problems = [problem_of(program, order, may_swap=swap, may_recompute=recompute) for order in dict.fromkeys(orders)]
        made = self._window(program, problems) if program.constraints.strategy == "window" else self._auto(program, problems)
        return replace(program, plan=replace(made, solve_seconds=time.perf_counter() - started))

    def _auto(self, program: Program, problems: list[Problem]) -> Plan:
        device, tier = program.machine.devices[0].name, tier_of(program)
        options = auto.AutoOptions(tier, device, program.constraints.time_limit_s, program.constraints.seed, self.workers)
        key = (program.graph, problems[0].link, problems[0].undo, problems[0].may_swap, problems[0].may_recompute, tier, device)
        known = [f for f in _known.get(key, []) if f.problem.budget_bytes <= problems[0].budget_bytes]
        answer = auto.solve(problems, options, known, self.progress)
        if answer.best is None:
            raise infeasible(problems[0], _greedy_fits)
        best = answer.best
        _known.setdefault(key, []).append(best)
        _known.move_to_end(key)
        while len(_known) > _KNOWN_PROBLEMS:
            _known.popitem(last=False)
        schedule = replace(best.realised.schedule, budget_bytes=problems[0].budget_bytes)
        return _plan(program, schedule, best.solver, answer.bound_ns, explain(best.problem, schedule))

    def _window(self, program: Program, problems: list[Problem]) -> Plan:
        device, tier = program.machine.devices[0].name, tier_of(program)
        answer = window.solve(problems[0], tier, device)
        if answer.schedule is None:
            stuck = program.graph.ops[problems[0].order[answer.stuck]]
            error = infeasible(problems[0], _window_fits)
            raise InfeasibleError(
                f"the window method does not fit op {stuck.name} into {problems[0].budget_bytes} bytes; {error}",
                budget_bytes=error.budget_bytes,
                least_bytes=error.least_bytes,
                floor_bytes=error.floor_bytes,
                op_name=error.op_name,
            )
        return _plan(program, answer.schedule, "window", lower_bound(problems[0]).step_ns, explain(problems[0], answer.schedule))


def _plan(program: Program, schedule: Schedule, solver: str, bound_ns: int | None, decisions: tuple[Decision, ...]) -> Plan:
    graph = program.graph
    return Plan(
        graph_hash=graph.hash(),
        machine_name=program.machine.name,
        strategy=program.constraints.strategy,
        solver=solver,
        schedules=(schedule,),
        decisions=decisions,
        undo=program.constraints.undo,
        eager_peak_bytes=eager_peak(graph),
        eager_ns=sum(op.time_ns for op in graph.ops),
        bound_ns=bound_ns,
        exact=graph.exact,
        notes=graph.notes,
    )


def infeasible(problem: Problem, fits: Callable[[Problem], bool]) -> InfeasibleError:
    """Why nothing fits: the floor and its op, and by bisection the least budget that does (within 1 %)."""
    floor_bytes, op_name = floor(problem)
    low, high = max(floor_bytes - 1, problem.budget_bytes), max(profile(problem, expand(problem, {})), default=0)
    give_up = time.perf_counter() + _BISECTION_S
    while high - low > max(1, high // 100) and time.perf_counter() < give_up:
        middle = (low + high) // 2
        if fits(replace(problem, budget_bytes=middle)):
            high = middle
        else:
            low = middle
    text = (
        f"no plan fits {problem.budget_bytes} bytes. A budget of {high} bytes does ({100 * high / eager_peak(problem.graph):.1f} % of the "
        f"eager peak); nothing below {floor_bytes} bytes ever can, because of {op_name}"
    )
    return InfeasibleError(text, budget_bytes=problem.budget_bytes, least_bytes=high, floor_bytes=floor_bytes, op_name=op_name)


def _greedy_fits(problem: Problem) -> bool:
    """Whether greedy or, where swaps are allowed, the window method gets under the problem's budget."""
    for linger in (6, 0):
        answer = greedy(replace(problem, linger=linger), GreedyOptions(problem.budget_bytes))
        if answer.fits:
            return True
    return problem.may_swap and _window_fits(problem)


def _window_fits(problem: Problem) -> bool:
    return window.solve(problem, "", "").schedule is not None
