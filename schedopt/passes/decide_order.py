"""Decides the order for a job that fits: eager order, each update as late as the least peak allows. No swap, no recompute."""

from __future__ import annotations

from dataclasses import dataclass, replace

from schedopt.constraints import budget_bytes
from schedopt.graph import Graph
from schedopt.machine import Machine
from schedopt.pass_manager import Program
from schedopt.plan import Plan
from schedopt.solvers.expand import expand, profile
from schedopt.solvers.problem import Problem, captured_order, eager_peak, early_order, lazy_order, order_profile
from schedopt.solvers.realise import realise


@dataclass(frozen=True, slots=True)
class DecideOrder:
    """Pass: writes the plain plan if the step fits the budget so; otherwise leaves the decision to `decide_memory`."""

    name: str = "decide_order"

    def __call__(self, program: Program) -> Program:
        """Choose the order with the least peak; among equals the one whose updates come last."""
        tried = [replace(problem_of(program, order), copies=False) for order in _orders(program.graph)]
        plain = [(max(profile(one, expand(one, {})), default=0), number) for number, one in enumerate(tried)]
        peak, number = min(plain)
        problem = tried[number]
        if peak > problem.budget_bytes:
            return program
        expansion = expand(problem, {})
        realised = realise(problem, expansion, tier_of(program), program.machine.devices[0].name)
        assert realised is not None
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
    if (throttle := program.constraints.throttle_bytes_per_s) is not None:
        out, back = min(link.out_bytes_per_s, throttle), min(link.in_bytes_per_s, throttle)
        link = replace(link, out_bytes_per_s=out, in_bytes_per_s=back, blocking=False)  # the slower link is a thread's work again
    return Problem(program.graph, order, budget_of(program), link, program.constraints.undo, may_swap, may_recompute)


def _orders(graph: Graph) -> list[tuple[int, ...]]:
    """Updates at the end, as late as the least peak allows, as early as they can; undo copies decide with."""
    early = early_order(graph)
    least = max(order_profile(graph, early), default=0)
    return [captured_order(graph), lazy_order(graph, least), early]
