"""Choices by CP-SAT: which gaps to swap, which to recompute.

Booleans x_g (swap) and r_g (recompute) per gap of an expansion without any choice, x_g + r_g <= 1.

    memory, at every step over the target:  sum of size_g (x_g + r_g) over gaps around it >= what is too much
    inputs of a recompute:                  y_{g,h} >= r_g + x_h - 1 (one more copy in), >= r_g + r_h - 1 (its recipe once more),
                                            for a gap h of an input around the end of g
    links:                                  stall >= copies out that must be over by step p - clock(p), for the steps p over the target;
                                            the same backwards for copies in
    minimise                                sum c_g r_g + w sum (out_g + in_g) x_g + stalls + sum of the y's costs

The clock has no stalls in it and recomputed inputs take no memory: a model of the choice, not of the schedule. `realise` and the clock
judge its answers, greedy repairs those that do not fit. Warm start: the greedy choices. Times in microseconds, bytes in KiB rounded so
that the memory rows stay on the safe side.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from ortools.sat.python import cp_model

from schedopt.solvers.candidates import Candidate, candidates
from schedopt.solvers.expand import Choices, expand, profile
from schedopt.solvers.problem import Problem

_ROWS = 400  # memory rows at most


@dataclass(frozen=True, slots=True)
class ExactOptions:
    """`workers` and `seed` fix the search in tests."""

    target_bytes: int
    time_limit_s: float
    swap_weight: float = 0.05
    workers: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ExactAnswer:
    """`status` as CP-SAT names it; `objective_us` and `bound_us` of the model above; empty choices if it found none."""

    status: str
    choices: Choices
    objective_us: float = 0.0
    bound_us: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class _Variables:
    model: cp_model.CpModel
    gaps: list[Candidate]
    swap: list[cp_model.IntVar] = field(default_factory=list)
    again: list[cp_model.IntVar] = field(default_factory=list)
    cost: list[tuple[cp_model.IntVar, int]] = field(default_factory=list)

    def extract(self, solver: cp_model.CpSolver) -> Choices:
        """The gaps that are filled in the answer."""
        chosen: Choices = {}
        for gap, x, r in zip(self.gaps, self.swap, self.again, strict=True):
            if solver.boolean_value(x):
                chosen[gap.gap] = "swap"
            elif solver.boolean_value(r):
                chosen[gap.gap] = "recompute"
        return chosen


def solve(problem: Problem, options: ExactOptions, hint: Choices) -> ExactAnswer:
    """Best choices of the model within the time limit."""
    expansion = expand(problem, {})
    used = np.array(profile(problem, expansion), dtype=np.int64)
    times = np.array([problem.graph.ops[op].time_ns for op, _ in expansion.steps], dtype=np.int64)
    clock = np.concatenate([[0], np.cumsum(times)])
    v = _Variables(cp_model.CpModel(), candidates(problem, expansion, clock, {}))
    _choices(problem, options, v)
    rows = _worst_steps(used - options.target_bytes)
    around = {step: [i for i, g in enumerate(v.gaps) if any(a <= step <= b for a, b in g.spans)] for step in rows}
    _memory(problem, v, around, {step: int(used[step]) - options.target_bytes for step in rows})
    _inputs(problem, v)
    _links(problem, v, around, clock)
    v.model.minimize(sum(weight * variable for variable, weight in v.cost))
    for gap, x, r in zip(v.gaps, v.swap, v.again, strict=True):
        v.model.add_hint(x, hint.get(gap.gap) == "swap")
        v.model.add_hint(r, hint.get(gap.gap) == "recompute")
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = options.time_limit_s
    solver.parameters.num_workers = options.workers
    solver.parameters.random_seed = options.seed
    status = solver.solve(v.model)
    name = solver.status_name(status)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ExactAnswer(name, {}, seconds=solver.wall_time)
    return ExactAnswer(name, v.extract(solver), solver.objective_value, solver.best_objective_bound, solver.wall_time)


def _worst_steps(over: np.ndarray) -> list[int]:
    """Steps that are over the target, at most `_ROWS`: the worst of each stretch (greedy's repair deals with those between)."""
    worst: dict[int, int] = {}
    for step in map(int, np.flatnonzero(over > 0)):
        stretch = step * _ROWS // len(over)
        worst[stretch] = step if stretch not in worst or over[step] > over[worst[stretch]] else worst[stretch]
    return list(worst.values())


def _choices(problem: Problem, options: ExactOptions, v: _Variables) -> None:
    """x_g + r_g <= 1, each only where allowed; their own costs."""
    for i, gap in enumerate(v.gaps):
        s, number = gap.gap
        x, r = v.model.new_bool_var(f"x{i}"), v.model.new_bool_var(f"r{i}")
        v.swap.append(x)
        v.again.append(r)
        v.model.add_at_most_one(x, r)
        out, back = problem.link.out_ns(problem.sizes[s]) if gap.modified else 0, problem.link.in_ns(problem.sizes[s])
        tax = problem.link.tax_ns(problem.sizes[s]) * (2 if gap.modified else 1)
        weight = tax + options.swap_weight * (out + back) + gap.exposed_ns(out, back)
        v.cost.append((x, max(1, round(weight / 1000))))
        recompute = problem.recompute_ns(s, gap.need_version) if number >= 0 and problem.may_recompute else None
        if recompute is None:
            v.model.add(r == 0)
        else:
            v.cost.append((r, max(1, round(recompute / 1000))))
        if not problem.may_swap:
            v.model.add(x == 0)


def _memory(problem: Problem, v: _Variables, around: dict[int, list[int]], over: dict[int, int]) -> None:
    """sum size_g (x_g + r_g) >= what is too much, at every step that is over; rows that others imply are left out."""
    last: tuple[int, frozenset[int]] | None = None
    for step, members in around.items():
        key = (over[step], frozenset(members))
        if last is not None and last[0] >= key[0] and last[1] <= key[1]:
            continue
        last = key
        sizes = [problem.sizes[v.gaps[i].gap[0]] // 1024 for i in members]
        terms = [size * (v.swap[i] + v.again[i]) for size, i in zip(sizes, members, strict=True)]
        need = -(-over[step] // 1024)
        if sum(sizes) < need:
            need = sum(sizes)  # greedy's repair and the floor deal with what no choice can do
        v.model.add(sum(terms) >= need)


def _inputs(problem: Problem, v: _Variables) -> None:
    """What a recompute needs and is itself away costs once more."""
    by_storage: dict[int, list[int]] = {}
    for i, gap in enumerate(v.gaps):
        by_storage.setdefault(gap.gap[0], []).append(i)
    for i, gap in enumerate(v.gaps):
        recipe = problem.recipe(gap.gap[0], gap.need_version) if gap.gap[1] >= 0 else None
        if recipe is None:
            continue
        end = gap.spans[0][1]
        inputs = {u for op in recipe for u in problem.graph.ops[op].reads}
        for j in (j for u in inputs for j in by_storage.get(u, ())):
            if not any(a <= end <= b for a, b in v.gaps[j].spans):
                continue
            u = v.gaps[j].gap[0]
            fetch = v.model.new_bool_var(f"fetch{i}_{j}")
            v.model.add_bool_or(v.again[i].negated(), v.swap[j].negated(), fetch)
            v.cost.append((fetch, max(1, problem.link.in_ns(problem.sizes[u]) // 1000)))
            twice = problem.recompute_ns(u, v.gaps[j].need_version)
            if twice is not None and v.gaps[j].gap[1] >= 0:
                both = v.model.new_bool_var(f"both{i}_{j}")
                v.model.add_bool_or(v.again[i].negated(), v.again[j].negated(), both)
                v.cost.append((both, max(1, twice // 1000)))


def _links(problem: Problem, v: _Variables, around: dict[int, list[int]], clock: np.ndarray) -> None:
    """stall >= copies that the memory row at p counts on - the time there is for them, outwards before p and inwards after it."""
    total = int(clock[-1]) // 1000
    stalls = [v.model.new_int_var(0, 100 * total + 10**9, name) for name in ("stall_out", "stall_in")]
    steps = list(around)
    for step in steps[:: max(1, len(steps) // 40)]:
        inner = [i for i in around[step] if v.gaps[i].gap[1] >= 0]
        out = [(problem.link.out_ns(problem.sizes[v.gaps[i].gap[0]]) // 1000) * v.swap[i] for i in inner]
        back = [(problem.link.in_ns(problem.sizes[v.gaps[i].gap[0]]) // 1000) * v.swap[i] for i in inner]
        v.model.add(stalls[0] >= sum(out) - int(clock[step]) // 1000)
        v.model.add(stalls[1] >= sum(back) - (total - int(clock[step]) // 1000))
    v.cost += [(stall, 1) for stall in stalls]
