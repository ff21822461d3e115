"""Decides what is kept, swapped or recomputed when the step does not fit: asks the solver that the strategy names, writes the plan."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from schedopt.errors import InfeasibleError
from schedopt.pass_manager import Program
from schedopt.passes.decide_order import problem_of, tier_of
from schedopt.plan import Decision, Fate, Plan, Schedule
from schedopt.solvers import auto, window
from schedopt.solvers.bound import floor, lower_bound
from schedopt.solvers.expand import Choices
from schedopt.solvers.greedy import GreedyOptions, greedy
from schedopt.solvers.problem import Problem, captured_order, eager_peak, early_order
from schedopt.solvers.realise import realise

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
            raise infeasible(problems, tier, device)
        best = answer.best
        _known.setdefault(key, []).append(best)
        _known.move_to_end(key)
        while len(_known) > _KNOWN_PROBLEMS:
            _known.popitem(last=False)
        schedule = replace(best.realised.schedule, budget_bytes=problems[0].budget_bytes)
        return _plan(program, schedule, best.solver, answer.bound_ns, explain(best.problem, best.choices))

    def _window(self, program: Program, problems: list[Problem]) -> Plan:
        device, tier = program.machine.devices[0].name, tier_of(program)
        answer = window.solve(problems[0], tier, device)
        if answer.schedule is None:
            stuck = program.graph.ops[problems[0].order[answer.stuck]]
            error = infeasible(problems, tier, device)
            raise InfeasibleError(
                f"the window method does not fit op {stuck.name} into {problems[0].budget_bytes} bytes; {error}",
                budget_bytes=error.budget_bytes,
                least_bytes=error.least_bytes,
                floor_bytes=error.floor_bytes,
                op_name=error.op_name,
            )
        return _plan(program, answer.schedule, "window", lower_bound(problems[0]).step_ns, ())


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


def explain(problem: Problem, choices: Choices) -> tuple[Decision, ...]:
    """Every filled gap as a decision with its reason: the bytes it frees, how long, and what both ways back would cost."""
    graph = problem.graph
    decisions = []
    for (s, number), how in sorted(choices.items()):
        uses, size = problem.uses[s], problem.sizes[s]
        before = problem.order[uses[number]] if number >= 0 else -1
        after = problem.order[uses[number + 1]] if number + 1 < len(uses) else -1
        fate = Fate.REST if number < 0 else Fate.SWAP if how == "swap" else Fate.RECOMPUTE
        copy_us = (problem.link.out_ns(size) + problem.link.in_ns(size)) / 1000
        version = problem.needed[after].get(s, 0) if after >= 0 else 0
        again = problem.recompute_ns(s, version)
        other = "can not be recomputed" if again is None else f"recompute would take {again / 1000:.0f} us of compute"
        if fate is Fate.RECOMPUTE:
            text = f"frees {size} bytes; running it again takes {(again or 0) / 1000:.0f} us, copying {copy_us:.0f} us of both links"
        elif fate is Fate.REST:
            text = f"rests on the lower tier between steps, frees {size} bytes outside its uses; copies take {copy_us:.0f} us of the links"
        else:
            idle = sum(graph.ops[op].time_ns for op in problem.order[uses[number] + 1 : uses[number + 1]]) / 1000
            text = f"frees {size} bytes for {idle:.0f} us of compute; copies take {copy_us:.0f} us of the links; {other}"
        decisions.append(Decision(s, fate, before, after, text))
    return tuple(decisions)


def infeasible(problems: list[Problem], tier: str, device: str) -> InfeasibleError:
    """Why nothing fits: the floor and its op, and the least budget that greedy can serve, by bisection."""
    problem = problems[0]
    floor_bytes, op_name = floor(problem)
    low, high = max(floor_bytes, problem.budget_bytes), eager_peak(problem.graph)
    give_up = time.perf_counter() + _BISECTION_S
    while high - low > max(1, high // 100) and time.perf_counter() < give_up:
        middle = (low + high) // 2
        if _fits(replace(problem, budget_bytes=middle), tier, device):
            high = middle
        else:
            low = middle
    text = (
        f"no plan fits {problem.budget_bytes} bytes. A budget of {high} bytes does ({100 * high / eager_peak(problem.graph):.1f} % of the "
        f"eager peak); nothing below {floor_bytes} bytes ever can, because of {op_name}"
    )
    return InfeasibleError(text, budget_bytes=problem.budget_bytes, least_bytes=high, floor_bytes=floor_bytes, op_name=op_name)


def _fits(problem: Problem, tier: str, device: str) -> bool:
    answer = greedy(problem, GreedyOptions(problem.budget_bytes))
    return answer.fits and realise(problem, answer.expansion, tier, device, rounds=1) is not None
