"""The best pipeline schedule in the time given: schedules known by name, simulation with many rules and then with changes to the best of
them, CP-SAT on the whole if it is small, and on stretches of time again and again. Every answer has a lower bound."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from schedopt.pipeline import PipelineSchedule, PipelineSpec
from schedopt.solvers.pipeline_clock import Order, PipelineTables, as_schedule, fits, lower_bound, objective, start_times
from schedopt.solvers.pipeline_exact import PipelineExactOptions, solve_stretch, solve_whole
from schedopt.solvers.pipeline_fixed import fixed_orders
from schedopt.solvers.pipeline_greedy import Rules, simulate

_SMALL = 400  # actions that CP-SAT is given as a whole
_STRETCH = 160  # actions that it arranges anew at once
_FILLS = (0.0, 0.25, 0.5, 0.75, 1.0)
_PATIENCE = (0.0, 0.1, 0.3, 0.6, 1.0)


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """`time_limit_s` for all together; `workers` and `seed` for CP-SAT."""

    time_limit_s: float = 60.0
    workers: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PipelineAnswer:
    """`schedule` None: no schedule found within the bytes (`status` says whether that is proven). `value`: the objective; `named`: what the
    schedules known by name would take, those that fit."""

    status: str  # "optimal", "feasible", "infeasible", "unknown"
    schedule: PipelineSchedule | None
    value: int
    bound: int
    named: tuple[tuple[str, int], ...]
    seconds: float

    @property
    def gap(self) -> float | None:
        """Relative distance of the objective from the bound."""
        return self.value / self.bound - 1.0 if self.schedule is not None and self.bound else None


def solve_pipeline(
    spec: PipelineSpec, options: PipelineOptions | None = None, progress: Callable[[float, str], None] | None = None
) -> PipelineAnswer:
    """See the module. `progress(share of the time used, what is done)`."""
    return _Search(spec, options or PipelineOptions(), progress or (lambda _share, _what: None)).run()


class _Search:
    def __init__(self, spec: PipelineSpec, options: PipelineOptions, tell: Callable[[float, str], None]) -> None:
        self.t, self.o, self.tell = PipelineTables(spec), options, tell
        self.started = time.perf_counter()
        self.bound = lower_bound(self.t)
        self.best: tuple[int, list[Order], list[int], str] | None = None
        self.named: list[tuple[str, int]] = []
        self.rules: tuple[int, Rules] | None = None  # the best so far, and what it gave
        self.random = random.Random(options.seed)

    def left(self) -> float:
        """Seconds left."""
        return self.o.time_limit_s - (time.perf_counter() - self.started)

    def offer(self, orders: list[Order] | None, method: str) -> int | None:
        """Take it if it is right and better; its objective."""
        if orders is None or not fits(self.t, orders):
            return None
        starts = start_times(self.t, orders)
        if starts is None:
            return None
        value = objective(self.t, orders, starts)
        if self.best is None or value < self.best[0]:
            self.best = (value, orders, starts, method)
        return value

    def run(self) -> PipelineAnswer:
        """All methods one after the other."""
        stuck = self._too_little()
        if stuck:
            return PipelineAnswer("infeasible", None, 0, self.bound, (), time.perf_counter() - self.started)
        for name, orders in fixed_orders(self.t).items():
            value = self.offer(orders, name)
            if value is not None:
                self.named.append((name, value))
        self._rules()
        optimal = False
        if self.best is not None and self.best[0] > self.bound and self.t.count <= _SMALL:
            self.tell(1 - self.left() / self.o.time_limit_s, "CP-SAT")
            answer = solve_whole(self.t, self._exact(self.left() * 0.6), self.best[1], self.best[2])
            self.offer(answer.orders, "cp-sat")
            self.bound = max(self.bound, answer.bound)
            optimal = answer.optimal
        if not optimal:
            self._tune(self.o.time_limit_s * 0.4)
            self._stretches()
        return self._answer(optimal)

    def _answer(self, optimal: bool) -> PipelineAnswer:
        seconds = time.perf_counter() - self.started
        if self.best is None:
            return PipelineAnswer("unknown", None, 0, self.bound, (), seconds)
        value, orders, starts, method = self.best
        early = min(starts[order[0]] for order in orders)
        schedule = as_schedule(self.t, orders, [start - early for start in starts], method)
        status = "optimal" if optimal or value <= self.bound else "feasible"
        return PipelineAnswer(status, schedule, value, min(self.bound, value), tuple(self.named), seconds)

    def _too_little(self) -> bool:
        """Whether a device can not even hold one micro-batch of each of its stages."""
        pairs = zip(self.t.spec.stages_of, self.t.spec.limit_bytes, strict=True)
        return any(limit is not None and sum(self.t.spec.stages[s].forward_bytes for s in stages) > limit for stages, limit in pairs)

    def _exact(self, seconds: float) -> PipelineExactOptions:
        return PipelineExactOptions(seconds, self.o.workers, self.random.randrange(2**31))

    def _rules(self) -> None:
        """Simulation under all rules, for a third of the time at most."""
        for rules in self._variants():
            if self.left() < self.o.time_limit_s * 0.7 and self.best is not None:
                return
            if self.best is not None and self.best[0] <= self.bound:
                return
            self._try(rules)

    def _try(self, rules: Rules) -> None:
        self.tell(1 - self.left() / self.o.time_limit_s, "simulation")
        value = self.offer(simulate(self.t, rules), "simulation")
        if value is not None and (self.rules is None or value <= self.rules[0]):
            self.rules = (value, rules)

    def _tune(self, until_s: float) -> None:
        """Change the best rules a little, again and again."""
        count, pick = len(self.t.spec.stages), self.random
        while self.left() > until_s and self.best is not None and self.best[0] > self.bound and self.rules is not None:
            rules = self.rules[1]
            caps = list(rules.cap or (2 * (count - s) for s in range(count)))
            first, step = pick.randrange(count), pick.choice((-2, -1, 1, 2))
            for s in range(first, min(count, first + pick.choice((1, 1, 2, 4, count)))):
                caps[s] = max(1, caps[s] + step)
            fill = pick.choice((rules.fill, rules.fill, pick.random()))
            patience = pick.choice((rules.patience, rules.patience, pick.random()))
            self._try(replace(rules, cap=tuple(caps), fill=fill, patience=patience))

    def _variants(self) -> Iterator[Rules]:
        count = len(self.t.spec.stages)
        caps: list[tuple[int, ...] | None] = [None]
        caps += [tuple(max(1, round(factor * (count - s)) + more) for s in range(count)) for factor in (2, 1, 1.5) for more in (0, -1, 1)]
        deeps = (True, False) if self.t.spec.num_devices < count else (True,)
        for cap, deep, fill, patience in itertools.product(caps, deeps, _FILLS, _PATIENCE):
            yield Rules(fill, patience, cap, deep_first=deep)

    def _stretches(self) -> None:
        """Stretches of time, wandering through the schedule; wider ones where narrow ones find nothing."""
        width, failed = _STRETCH, 0
        while self.left() > 0.1 and self.best is not None and self.best[0] > self.bound and failed < 60:
            self.tell(1 - self.left() / self.o.time_limit_s, "stretches")
            value, orders, starts, _ = self.best
            line = sorted(starts)
            first = self.random.randrange(max(1, len(line) - width // 2))
            end = line[min(first + width, len(line) - 1)] + 1
            arranged = solve_stretch(self.t, self._exact(min(3.0, self.left())), orders, starts, line[first], end)
            found = self.offer(arranged, "stretches")
            failed = 0 if found is not None and found < value else failed + 1
            width = _STRETCH if failed < 20 else 2 * _STRETCH
