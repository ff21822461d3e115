"""Pipeline schedules by CP-SAT: the whole of a small one, a stretch of time of a large one.

Variables: the start of every action. On a device no two overlap; micro-batches keep their order per stage and part.

    data:     start(b) >= start(a) + duration(a) + transfer, for every b that needs a
    bytes:    a reservoir per device: F adds when it starts, I and W take away when they end, never above the limit
    span:     minimise C with C >= end of every W - start of the first F, per device; makespan: C >= every end

A *stretch*: only actions that start in [a, b) are free. Those before stay, those after all move `shift` earlier; maximise `shift`. The order
of actions found is what counts; `pipeline_clock` gives the times.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from schedopt.solvers.pipeline_clock import Order, PipelineTables


@dataclass(frozen=True, slots=True)
class PipelineExactOptions:
    """`workers` and `seed` fix the search in tests."""

    time_limit_s: float
    workers: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PipelineExactAnswer:
    """`orders` None: nothing found. `bound` of the objective (0: none). `optimal`: proven."""

    orders: list[Order] | None
    bound: int = 0
    optimal: bool = False


class _Model:
    """Starts, data, devices and bytes for a set of free actions; what is not free has the start that it had (`fixed`)."""

    def __init__(self, tables: PipelineTables, free: list[int], horizon: int) -> None:
        self.t, self.m = tables, cp_model.CpModel()
        self.start = {x: self.m.new_int_var(0, horizon, f"s{x}") for x in free}

    def device_rows(self, device: int, mine: list[int], held: int) -> None:
        """No overlap, order of micro-batches, bytes (`held`: before the first of them)."""
        self.m.add_no_overlap(self.m.new_fixed_size_interval_var(self.start[x], self.t.time(x), f"i{x}") for x in mine)
        there = set(mine)
        for x in mine:
            if x + 1 in there and (x + 1) % self.t.m:
                self.m.add(self.start[x] + self.t.time(x) <= self.start[x + 1])
        limit = self.t.spec.limit_bytes[device]
        if limit is None or not mine:
            return
        times, changes = [0 * self.start[mine[0]]], [held]
        for x in mine:
            change = self.t.bytes[x // self.t.m]
            if change:
                times.append(self.start[x] if change > 0 else self.start[x] + self.t.time(x))
                changes.append(change)
        self.m.add_reservoir_constraint(times, changes, -sum(abs(c) for c in changes), limit)

    def orders(self, solver: cp_model.CpSolver, mine: list[list[int]]) -> list[Order]:
        """The free actions of each device by their starts."""
        return [sorted(one, key=lambda x: (solver.value(self.start[x]), x)) for one in mine]


def solve_whole(tables: PipelineTables, options: PipelineExactOptions, orders: list[Order], starts: list[int]) -> PipelineExactAnswer:
    """Best schedule within the time limit, hinted by a known one."""
    horizon = 2 * max(starts[order[-1]] + tables.time(order[-1]) for order in orders)
    model = _Model(tables, list(range(tables.count)), horizon)
    goal = model.m.new_int_var(0, horizon, "goal")
    for a, b, least in tables.arcs:
        model.m.add(model.start[a] + least <= model.start[b])
    for device, order in enumerate(orders):
        model.device_rows(device, sorted(order), 0)
        stages = tables.spec.stages_of[device]
        first = model.start[tables.number(stages[0], 0, 0)]
        for s in stages:
            x = tables.number(s, 2, tables.m - 1)
            end = model.start[x] + tables.time(x)
            model.m.add(goal >= (end - first if tables.spec.objective == "span" else end))
    model.m.minimize(goal)
    early = min(starts)
    for x, variable in model.start.items():
        model.m.add_hint(variable, starts[x] - early)
    solver = _solver(options)
    status = solver.solve(model.m)
    bound = int(solver.best_objective_bound)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return PipelineExactAnswer(None, max(0, bound))
    return PipelineExactAnswer(model.orders(solver, [sorted(order) for order in orders]), bound, status == cp_model.OPTIMAL)


def solve_stretch(
    tables: PipelineTables, options: PipelineExactOptions, orders: list[Order], starts: list[int], begin: int, end: int
) -> list[Order] | None:
    """The orders with the actions that start in [begin, end) arranged anew so that all later ones come earlier; None if that fails."""
    free = [x for order in orders for x in order if begin <= starts[x] < end]
    if not free:
        return None
    inside = set(free)
    shift_limit = end - begin
    model = _Model(tables, free, end + max(tables.duration))
    shift = model.m.new_int_var(0, shift_limit, "shift")
    for a, b, least in tables.arcs:
        if a in inside and b in inside:
            model.m.add(model.start[a] + least <= model.start[b])
        elif b in inside:
            model.m.add(model.start[b] >= starts[a] + least)
        elif a in inside:
            model.m.add(model.start[a] + least <= starts[b] - shift)
        elif starts[a] < begin and starts[b] >= end:
            model.m.add(shift <= starts[b] - starts[a] - least)
    parts: list[tuple[Order, list[int], Order]] = []
    for device, order in enumerate(orders):
        before = [x for x in order if starts[x] < begin]
        mine = [x for x in order if x in inside]
        after = [x for x in order if starts[x] >= end]
        parts.append((before, mine, after))
        model.device_rows(device, mine, sum(tables.bytes[x // tables.m] for x in before))
        ready = starts[before[-1]] + tables.time(before[-1]) if before else None
        for x in mine:
            if ready is not None:
                model.m.add(model.start[x] >= ready)
            if after:
                model.m.add(model.start[x] + tables.time(x) <= starts[after[0]] - shift)
        if not mine and after and ready is not None:
            model.m.add(shift <= starts[after[0]] - ready)
    model.m.maximize(shift)
    for x in free:
        model.m.add_hint(model.start[x], starts[x])
    model.m.add_hint(shift, 0)
    solver = _solver(options)
    if solver.solve(model.m) not in (cp_model.OPTIMAL, cp_model.FEASIBLE) or not solver.value(shift):
        return None
    arranged = model.orders(solver, [mine for _, mine, _ in parts])
    return [[*before, *middle, *after] for (before, _, after), middle in zip(parts, arranged, strict=True)]


def _solver(options: PipelineExactOptions) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, options.time_limit_s)
    solver.parameters.num_workers = options.workers
    solver.parameters.random_seed = options.seed
    return solver
