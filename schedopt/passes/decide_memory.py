"""Decides what is kept, swapped or recomputed when the step does not fit: asks the solver that the strategy names, writes the plan."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from schedopt.capture.split import large_updates, split
from schedopt.errors import InfeasibleError
from schedopt.graph import Graph
from schedopt.pass_manager import Program
from schedopt.passes.decide_order import budget_of, problem_of, tier_of
from schedopt.passes.explain import explain
from schedopt.plan import Plan, Schedule
from schedopt.solvers import auto, window
from schedopt.solvers.bound import floor
from schedopt.solvers.expand import expand, profile
from schedopt.solvers.problem import Problem, captured_order, eager_peak, early_order, one_each

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
        variants = [program, *(_divided(program) if swap else ())]
        problems: list[Problem] = []
        for one in variants:
            orders = dict.fromkeys((early_order(one.graph), captured_order(one.graph)))
            made = [problem_of(one, order, may_swap=swap, may_recompute=recompute) for order in orders]
            problems += [replace(problem, budget_bytes=budget_of(program)) for problem in made]
        plan, graph = self._window(program, problems) if program.constraints.strategy == "window" else self._auto(program, problems)
        program = next(one for one in variants if one.graph == graph)  # not `is`: a plan made earlier has its own
        return replace(program, plan=replace(plan, solve_seconds=time.perf_counter() - started))

    def _auto(self, program: Program, problems: list[Problem]) -> tuple[Plan, Graph]:
        device, tier = program.machine.devices[0].name, tier_of(program)
        options = auto.AutoOptions(tier, device, program.constraints.time_limit_s, program.constraints.seed, self.workers)
        key = (program.graph, problems[0].link, problems[0].undo, problems[0].may_swap, problems[0].may_recompute, tier, device)
        known = [f for f in _known.get(key, []) if f.problem.budget_bytes <= problems[0].budget_bytes]
        answer = auto.solve(problems, options, known, self.progress)
        if answer.best is None:
            raise infeasible(problems, _greedy_fits)
        best = answer.best
        _known.setdefault(key, []).append(best)
        _known.move_to_end(key)
        while len(_known) > _KNOWN_PROBLEMS:
            _known.popitem(last=False)
        schedule = replace(best.realised.schedule, budget_bytes=problems[0].budget_bytes)
        return _plan(program, best.problem, schedule, best.solver, answer.bound_ns), best.problem.graph

    def _window(self, program: Program, problems: list[Problem]) -> tuple[Plan, Graph]:
        """With large updates whole if that fits, else in parts."""
        device, tier = program.machine.devices[0].name, tier_of(program)
        for problem in one_each(problems):
            answer = window.solve(problem, tier, device)
            if answer.schedule is not None:
                break
        else:
            stuck = problem.graph.ops[problem.order[answer.stuck]]
            error = infeasible(problems, _window_fits)
            raise InfeasibleError(
                f"the window method does not fit op {stuck.name} into {problem.budget_bytes} bytes; {error}",
                budget_bytes=error.budget_bytes,
                least_bytes=error.least_bytes,
                floor_bytes=error.floor_bytes,
                op_name=error.op_name,
            )
        return _plan(program, problem, answer.schedule, "window", auto.bound_of(problems)), problem.graph


def _divided(program: Program) -> list[Program]:
    """The program with large updates in parts, if there are any (see `capture.split`)."""
    if program.captured is None:
        return []
    cuts = large_updates(program.captured, eager_peak(program.graph))
    captured = split(program.captured, cuts) if cuts else None
    return [] if captured is None else [replace(program, graph=captured.graph, captured=captured)]


def _plan(program: Program, problem: Problem, schedule: Schedule, solver: str, bound_ns: int | None) -> Plan:
    graph = problem.graph
    return Plan(
        graph_hash=graph.hash(),
        machine_name=program.machine.name,
        strategy=program.constraints.strategy,
        solver=solver,
        schedules=(schedule,),
        decisions=explain(problem, schedule),
        undo=program.constraints.undo,
        eager_peak_bytes=eager_peak(program.graph),
        eager_ns=sum(op.time_ns for op in program.graph.ops),
        bound_ns=bound_ns,
        exact=graph.exact,
        notes=graph.notes,
    )


def infeasible(problems: list[Problem], fits: Callable[[Problem], bool]) -> InfeasibleError:
    """Why nothing fits: the floor and its op, and by bisection the least budget that does (within 1 %)."""
    problem = min(one_each(problems), key=floor)
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
        f"no plan fits {problem.budget_bytes} bytes. A budget of {high} bytes does ({100 * high / eager_peak(problems[0].graph):.1f} % of the "
        f"eager peak); nothing below {floor_bytes} bytes {'can' if problem.split else 'ever can'}, because of {op_name}"
    )
    return InfeasibleError(text, budget_bytes=problem.budget_bytes, least_bytes=high, floor_bytes=floor_bytes, op_name=op_name)


def _greedy_fits(problem: Problem) -> bool:
    """Whether greedy or, where swaps are allowed, the window method gets under the problem's budget."""
    return auto.least_greedy(problem).fits or (problem.may_swap and _window_fits(problem))


def _window_fits(problem: Problem) -> bool:
    return window.solve(problem, "", "").schedule is not None
