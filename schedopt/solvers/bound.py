"""A lower bound of the step time under a budget, by a linear program.

Model. For every gap g of a movable storage, x_g is the part swapped and r_g the part recomputed, x_g + r_g <= 1; o_s is the part of
storage s that is copied out. T is the step time.

    memory, for every op p outside the update:   forced(p) + sum over gaps g around p of size_g (1 - x_g - r_g) <= budget
    one copy out at least:                       o_s >= x_g for every gap g of s
    compute:                                     T >= time of all ops + sum r_g c_g + sum tax_g x_g + sum tax_s o_s
    copies out, copies in:                       T >= sum out_s o_s,  T >= sum in_g x_g   (one row for both if the link is shared)

Why no plan is faster: forced(p) is what op p touches, creates and works with, and what can never move. A storage that is not there
at p must come back before its next use, by a copy or by its recipe; c_g counts an op's time only in equal parts over all storages that it
makes, so that one run never counts twice. Updates may run anywhere, so only gaps between other ops enter (those keep the captured order);
what a recompute itself needs is left out, copies overlap perfectly, undo copies are free. What outlives the step may have its copy on the
tier already, so its o_s counts only for the gap over the step's boundary, and only if it is written. Split storages always rest there. All of it can only make T smaller
than a real plan's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from ortools.linear_solver import pywraplp

from schedopt.graph import Op, Phase
from schedopt.solvers.problem import Problem

_ROWS = 400  # memory rows at most; leaving some out only lowers the bound


@dataclass(frozen=True, slots=True)
class LooseGap:
    """A gap of the relaxation: free at op positions [first, last] (two ranges for the one over the step's boundary)."""

    storage: int
    spans: tuple[tuple[int, int], ...]
    number: int  # number of the use before it among the uses outside the update, -1 for the step's boundary
    leaves: bool  # its copy out counts
    recompute_ns: float | None


@dataclass(frozen=True, slots=True)
class Bound:
    """`step_ns` is proven; None if the program proves that no plan fits at all."""

    step_ns: int | None


def lower_bound(problem: Problem, time_limit_s: float = 20.0) -> Bound:
    """Solve the relaxation. With no row over the budget the bound is the plain compute time."""
    ops = [op for op in problem.graph.ops if op.phase is not Phase.UPDATE]
    gaps = loose_gaps(problem)
    rows = _rows(problem, ops, gaps)
    if not rows:
        return Bound(problem.compute_ns)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    solver.SetTimeLimit(round(time_limit_s * 1000))
    total = solver.NumVar(problem.compute_ns, solver.infinity(), "T")
    swap = [solver.NumVar(g.number < 0 and g.storage in problem.split, problem.may_swap, f"x{i}") for i, g in enumerate(gaps)]
    again = [solver.NumVar(0, 1 if problem.may_recompute and g.recompute_ns is not None else 0, f"r{i}") for i, g in enumerate(gaps)]
    out = {s: solver.NumVar(0, 1, f"o{s}") for s in sorted({g.storage for g in gaps if g.leaves})}
    for gap, x, r in zip(gaps, swap, again, strict=True):
        solver.Add(x + r <= 1)
        if gap.leaves:
            solver.Add(out[gap.storage] >= x)
    for over, members in rows:
        row = solver.Constraint(float(over), solver.infinity())
        for i in members:
            row.SetCoefficient(swap[i], float(problem.sizes[gaps[i].storage]))
            row.SetCoefficient(again[i], float(problem.sizes[gaps[i].storage]))
    sizes, link = problem.sizes, problem.link
    compute = solver.Sum([g.recompute_ns * r for g, r in zip(gaps, again, strict=True) if g.recompute_ns])
    tax_in = solver.Sum([link.tax_ns(sizes[g.storage]) * x for g, x in zip(gaps, swap, strict=True)])
    tax_out = solver.Sum([link.tax_ns(sizes[s]) * o for s, o in out.items()])
    solver.Add(total >= problem.compute_ns + compute + tax_in + tax_out)
    load_out = solver.Sum([link.out_ns(sizes[s]) * o for s, o in out.items()])
    load_in = solver.Sum([link.in_ns(sizes[g.storage]) * x for g, x in zip(gaps, swap, strict=True)])
    for load in (load_out, load_in) if link.duplex else (load_out + load_in,):
        solver.Add(total >= load)
    solver.Minimize(total)
    status = solver.Solve()
    if status == pywraplp.Solver.INFEASIBLE:
        return Bound(None)
    if status != pywraplp.Solver.OPTIMAL:
        return Bound(problem.compute_ns)
    return Bound(max(problem.compute_ns, int(total.solution_value() * (1 - 1e-7))))


def loose_gaps(problem: Problem) -> list[LooseGap]:
    """Gaps between uses outside the update; positions count ops outside the update in captured order."""
    ops = [op for op in problem.graph.ops if op.phase is not Phase.UPDATE]
    uses: dict[int, list[int]] = {}
    for position, op in enumerate(ops):
        for s in dict.fromkeys((*op.reads, *op.writes, *op.creates)):
            uses.setdefault(s, []).append(position)
    found: list[LooseGap] = []
    for storage in problem.graph.storages:
        s, mine = storage.id, uses.get(storage.id, [])
        if not problem.movable[s]:
            continue
        for number, (before, after) in enumerate(pairwise(mine)):
            if after > before + 1:
                version = problem.needed[ops[after].id].get(s, 0)
                found.append(LooseGap(s, ((before + 1, after - 1),), number, not storage.persistent, _share(problem, s, version)))
        if storage.persistent and (mine or problem.writers[s]):
            first, last = (mine[0], mine[-1]) if mine else (len(ops), -1)
            updated = bool(problem.writers[s])
            head = ((0, first - 1),) if first > 0 else ()
            tail = ((last + 1, len(ops) - 1),) if mine and not updated and last + 1 < len(ops) else ()
            if head or tail:
                found.append(LooseGap(s, head + tail, -1, updated, None))
    return found


def _share(problem: Problem, storage: int, version: int) -> float | None:
    recipe = problem.recipe(storage, version)
    if recipe is None:
        return None
    ops = (problem.graph.ops[op] for op in recipe)
    return sum(op.time_ns / max(1, len({*op.creates, *op.writes})) for op in ops)


def _rows(problem: Problem, ops: list[Op], gaps: list[LooseGap]) -> list[tuple[int, list[int]]]:
    """(bytes that must go, gaps around) for ops that do not fit with everything kept: for each of `_ROWS` stretches the worst one."""
    stays = sum(s.size_bytes for s in problem.graph.storages if s.external and not problem.movable[s.id])
    change = [0] * (len(ops) + 1)
    for gap in gaps:
        for first, last in gap.spans:
            change[first] += problem.sizes[gap.storage]
            change[last + 1] -= problem.sizes[gap.storage]
    worst: dict[int, tuple[int, int]] = {}
    for position, (op, kept) in enumerate(zip(ops, accumulate(change), strict=False)):
        touched = {*op.reads, *op.writes, *op.creates}
        moving = sum(problem.sizes[s] for s in touched if problem.movable[s] or not problem.graph.storages[s].external)
        over = stays + op.workspace_bytes + moving + kept - problem.budget_bytes
        if over > 0:
            stretch = position * _ROWS // len(ops)
            worst[stretch] = max(worst.get(stretch, (0, 0)), (over, position))
    around = {position: [i for i, g in enumerate(gaps) if any(a <= position <= b for a, b in g.spans)] for _, position in worst.values()}
    return [(over, around[position]) for over, position in worst.values()]


def floor(problem: Problem) -> tuple[int, str]:
    """Bytes below which no plan can do, and the op that forces them: what can never move, and one op's working set."""
    fixed = sum(s.size_bytes for s in problem.graph.storages if s.external and not problem.movable[s.id])
    fixed += sum(problem.sizes[s] for s in problem.snapshot)
    worst, name = fixed, "the storages that can not move"
    for op in problem.graph.ops:
        touched = {*op.reads, *op.writes, *op.creates}
        moving = sum(problem.sizes[s] for s in touched if problem.movable[s] or not problem.graph.storages[s].external)
        if fixed + moving + op.workspace_bytes > worst:
            worst, name = fixed + moving + op.workspace_bytes, f"{op.name} ({op.target}{', module ' + op.module if op.module else ''})"
    return worst, name
