"""Decides the order for a job that fits: eager order, some updates early so that the peak is lower than eager's. No swap, no recompute."""

from __future__ import annotations

from dataclasses import dataclass, replace

from schedopt.constraints import budget_bytes
from schedopt.graph import Graph
from schedopt.machine import Machine
from schedopt.pass_manager import Program
from schedopt.plan import Plan
from schedopt.solvers.expand import expand, profile
from schedopt.solvers.problem import Problem, captured_order, eager_peak, early_order, lazy_order, order_profile
from schedopt.solvers.realise import Realised, realise

_CHEAP = 1.005  # of the time of all ops


@dataclass(frozen=True, slots=True)
class DecideOrder:
    """Pass: writes the plain plan if the step fits the budget so; otherwise leaves the decision to `decide_memory`."""

    name: str = "decide_order"

    def __call__(self, program: Program) -> Program:
        """Choose the least peak among the orders that cost next to nothing (early updates need undo copies); if none of those fits the
        budget, the fastest that does."""
        fitting: list[tuple[int, int, int]] = []
        found: list[tuple[Problem, Realised]] = []
        for order in dict.fromkeys(_orders(program.graph)):
            problem = replace(problem_of(program, order), copies=False)
            expansion = expand(problem, {})
            realised = realise(problem, expansion, tier_of(program), program.machine.devices[0].name)
            if realised is not None:
                peak = max(profile(problem, expansion), default=0)
                fitting.append((0 if realised.step_ns <= _CHEAP * problem.compute_ns else realised.step_ns, peak, len(found)))
                found.append((problem, realised))
        if not found:
            return program
        problem, realised = found[min(fitting)[2]]
        plan = Plan(
            graph_hash=program.graph.hash(),
            machine_name=program.machine.name,
            strategy=program.constraints.strategy,
            solver="plain",
            schedules=(realised.schedule,),
            undo=program.constraints.undo,
            eager_peak_bytes=eager_peak(program.graph),
            eager_ns=problem.compute_ns,
            bound_ns=problem.compute_ns,
            exact=program.graph.exact,
            notes=("the step fits the budget: nothing is swapped or recomputed", *program.graph.notes),
        )
        return replace(program, plan=plan)


def tier_of(program: Program) -> str:
    """The lower tier of the machine that the constraints mean: "ram" is page-locked host memory where the device is a GPU."""
    wanted = program.constraints.tier
    names = {tier.name for tier in program.machine.tiers}
    if wanted == "ram" and wanted not in names and "pinned" in names:
        return "pinned"
    if wanted not in names:
        raise ValueError(f"machine {program.machine.name} has no tier {wanted!r}; it has {', '.join(sorted(names))}")
    return wanted


def budget_of(program: Program) -> int:
    """Bytes of the budget; the device's memory where the user set none."""
    device: int = program.machine.devices[0].memory_bytes
    memory = program.constraints.memory
    return device if memory is None else budget_bytes(memory, eager_peak_bytes=eager_peak(program.graph))


def problem_of(program: Program, order: tuple[int, ...], *, may_swap: bool = True, may_recompute: bool = True) -> Problem:
    """The program's scheduling problem for one order of its ops."""
    machine: Machine = program.machine
    link = machine.link(machine.devices[0].name, tier_of(program))
    return Problem(program.graph, order, budget_of(program), link, program.constraints.undo, may_swap, may_recompute)


def _orders(graph: Graph) -> list[tuple[int, ...]]:
    """Updates at the end, as late as the least peak and some larger ones allow, as early as they can."""
    early = early_order(graph)
    least, most = max(order_profile(graph, early), default=0), eager_peak(graph)
    limits = [most - (most - least) * share // 8 for share in range(1, 9)]
    return [captured_order(graph), *(lazy_order(graph, limit) for limit in limits), early]
