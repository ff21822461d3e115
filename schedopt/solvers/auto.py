"""Keep, swap or recompute for every gap: a portfolio of greedy answers, CP-SAT, and large-neighbourhood search, judged by the clock.

1. Ladder: greedy for fixed targets ("rungs") at and below the budget, several weights of a copy, updates early or late.
2. CP-SAT (`exact`) proposes choices, warm-started by the best so far; greedy repairs them where they do not fit.
3. LNS: take the choices in a window of steps back, preferably one with a stall, and let greedy with noise fill it again.
4. The window method (`window`) is tried as well, so that no answer is slower than it.

Among plans the one with the least score is wanted: predicted step time plus a small price for every copied nanosecond, since copies take
memory bandwidth that the clock does not see. The bound comes from `bound`.

Larger budgets are never slower, as far as these three go:

* Rungs are powers of 0.85 of the eager peak, the same for every budget. A rung's answers are made for the rung's own bytes, and carried up
  from the lowest rung: the next one replaces it only if its step is not slower. So what the ladder gives can not get slower with the
  budget. This holds as long as the whole ladder is gone through, that is if it takes less than half of the time limit.
* Plans given before for smaller budgets of the same problem (`known`) are a limit too: no slower plan is taken.
* The improvements (2, 3) replace the carried plan only by plans that are not slower than it.

What improvements find for a smaller budget after the larger one has been answered is not known then; asked again, the larger one gets it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from schedopt.graph import Phase
from schedopt.plan import ActionKind
from schedopt.solvers import exact, window
from schedopt.solvers.bound import floor, lower_bound
from schedopt.solvers.expand import Choices, Expansion, ImpossibleChoice, expand, profile
from schedopt.solvers.greedy import GreedyAnswer, GreedyOptions, greedy
from schedopt.solvers.problem import Problem, eager_peak, one_each
from schedopt.solvers.realise import Realised, clock, realise

_RUNG = 0.85
_VARIANTS = (  # weight of a copy, positions that inputs of recomputes linger, whether swaps are allowed, whether recomputes are
    (0.03, 0, True, False),
    (0.03, 6, True, True),
    (0.3, 6, True, True),
    (0.3, 0, True, False),
    (0.1, 40, True, True),
    (0.1, 0, True, True),
    (0.1, 4, False, True),
)
_LINGERS = (0, 1, 2, 4, 12, 40)
_COPY_PRICE = 0.02
_GOOD = 1.002


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """Names for the schedule, limits of the search. The search ends after `time_limit_s`, but not before it has found a plan."""

    tier: str
    device: str
    time_limit_s: float
    seed: int = 0
    workers: int = 2


@dataclass(frozen=True, slots=True)
class Found:
    """One plan that fits: its problem (order, and the bytes it was made for), choices, steps, actions, score. Without steps: not made from
    choices."""

    problem: Problem
    choices: Choices
    expansion: Expansion | None
    realised: Realised
    score: float
    solver: str

    @property
    def step_ns(self) -> int:
        """Predicted step time."""
        return self.realised.step_ns


@dataclass(frozen=True, slots=True)
class AutoAnswer:
    """`best` is None if nothing fits; `bound_ns` proven, None if it proves that nothing can fit."""

    best: Found | None
    bound_ns: int | None
    seconds: float


def solve(
    problems: list[Problem],
    options: AutoOptions,
    known: list[Found] | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> AutoAnswer:
    """Best plan found for any of the `problems`: the same step in several orders, and with large updates whole (first) or in parts.
    `known`: plans of smaller budgets.

    `progress(share of the time used, what is done)`.
    """
    started = time.perf_counter()
    tell = progress or (lambda _share, _what: None)
    search = Search(problems, options, started, tell)
    search.ladder()
    search.at_budget()
    for found in sorted(known or (), key=lambda f: (f.step_ns, f.score)):
        search.take_if_faster(found)
    tell(1 - search.left() / options.time_limit_s, "bound")
    bound = bound_of(problems)
    if search.best is not None and bound is not None and search.best.step_ns > bound * _GOOD:
        search.delay()
        search.propose()
        search.improve(bound)
        search.delay()
    search.try_window()
    return AutoAnswer(search.best, bound, time.perf_counter() - started)


def least_greedy(problem: Problem) -> GreedyAnswer:
    """Greedy with nothing else in mind than to fit: what it says of a budget decides whether that is called feasible."""
    answer = greedy(replace(problem, linger=6), GreedyOptions(problem.budget_bytes))
    return answer if answer.fits else greedy(replace(problem, linger=0), GreedyOptions(problem.budget_bytes))


def bound_of(problems: list[Problem]) -> int | None:
    """A bound for all of the problems; None if none of them can fit."""
    return min((b for b in (lower_bound(problem).step_ns for problem in one_each(problems)) if b is not None), default=None)


class Search:
    """`best` is the answer so far, `base` the best one that is made from choices; `limit_ns`: slower plans are not taken."""

    def __init__(self, problems: list[Problem], options: AutoOptions, started: float, tell: Callable[[float, str], None]) -> None:
        self.problems, self.o, self.started, self.tell = problems, options, started, tell
        self.best: Found | None = None
        self.base: Found | None = None
        self.limit_ns: int | None = None
        self.found_any = False
        self.random = random.Random(options.seed)

    def left(self) -> float:
        """Seconds left."""
        return self.o.time_limit_s - (time.perf_counter() - self.started)

    def offer(self, found: Found | None) -> None:
        """Take it if its score is better and it is not slower than the limit."""
        if found is None:
            return
        if self.base is None or found.score < self.base.score:
            self.base = found
        if self.best is None or (found.score < self.best.score and (self.limit_ns is None or found.step_ns <= self.limit_ns)):
            self.best = found

    def take_if_faster(self, found: Found) -> None:
        """Take it if its step is faster, whatever its score; from then on no slower one is taken."""
        if self.best is None or (found.step_ns, found.score) < (self.best.step_ns, self.best.score):
            self.best = found
        if found.expansion is not None and (self.base is None or found.score < self.base.score):
            self.base = found
        self.limit_ns = self.best.step_ns

    def judge(self, problem: Problem, choices: Choices, expansion: Expansion, solver: str) -> Found | None:
        """Realise and score; None if it does not fit."""
        realised = realise(problem, expansion, self.o.tier, self.o.device)
        return None if realised is None else _found(problem, choices, expansion, realised, solver)

    def ladder(self) -> None:
        """Greedy on the fixed rungs at and below the budget, carried up from the lowest."""
        rungs: list[list[Found]] = []
        for target in _rungs(self.problems):
            rungs.append([found for problem in self.problems for found in self._rung(replace(problem, budget_bytes=target))])
            unbeatable = any(found.realised.stall_ns == 0 and found.step_ns == found.problem.compute_ns for found in rungs[-1])
            if unbeatable or (any(rungs) and self.left() < self.o.time_limit_s / 2):
                break
            self.tell(min(0.5, 1 - self.left() / self.o.time_limit_s), "greedy")
        for rung in reversed(rungs):
            for found in rung:
                self.offer(found)
            self.limit_ns = None if self.best is None else self.best.step_ns

    def _rung(self, problem: Problem) -> Iterator[Found]:
        for weight, variant in _variants(problem):
            if self.found_any and self.left() < self.o.time_limit_s / 2:
                return
            answer = greedy(variant, GreedyOptions(round(variant.budget_bytes * 0.98), swap_weight=weight))
            found = self.judge(variant, answer.choices, answer.expansion, "greedy") if answer.fits else None
            if found is not None:
                self.found_any = True
                yield found

    def at_budget(self) -> None:
        """Greedy at the budget itself, and a little below it."""
        for problem in self.problems:
            for share in (1.0, 0.97):
                for weight, variant in _variants(problem) if self.left() > 0 or self.best is None else ():
                    answer = greedy(variant, GreedyOptions(round(problem.budget_bytes * share), swap_weight=weight))
                    if answer.fits:
                        self.offer(self.judge(variant, answer.choices, answer.expansion, "greedy"))
        for problem in self.problems if self.best is None else ():
            answer = least_greedy(problem)
            if answer.fits:
                self.offer(self.judge(problem, answer.choices, answer.expansion, "greedy"))

    def try_window(self) -> None:
        """The window method's plan, if it is faster than all else."""
        for problem in one_each(self.problems) if self.problems[0].may_swap else ():
            answer = window.solve(problem, self.o.tier, self.o.device)
            if answer.schedule is not None:
                self.take_if_faster(_found(problem, {}, None, clock(problem, answer.schedule), "window"))

    def delay(self) -> None:
        """Updates that need not be early wait for the end, where they need no undo copy."""
        base = self.base
        if base is None or base.expansion is None or not base.problem.undo:
            return
        problem = self._own(base.problem)
        order = _delayed(problem, base.choices, base.expansion)
        if order != problem.order:
            problem = replace(problem, order=order)
            self.offer(self.judge(problem, base.choices, expand(problem, base.choices), base.solver))

    def propose(self) -> None:
        """CP-SAT for two targets, repaired by greedy."""
        base = self.base
        if base is None:
            return
        problem = self._own(base.problem)
        for share in (0.97, 0.9):
            limit = min(self.o.time_limit_s * 0.2, self.left())
            if limit <= 0.05:
                return
            self.tell(1 - self.left() / self.o.time_limit_s, "CP-SAT")
            options = exact.ExactOptions(round(problem.budget_bytes * share), limit, workers=self.o.workers, seed=self.o.seed)
            answer = exact.solve(problem, options, base.choices)
            if answer.choices:
                repaired = greedy(problem, GreedyOptions(round(problem.budget_bytes * 0.99)), answer.choices)
                if repaired.fits:
                    self.offer(self.judge(problem, repaired.choices, repaired.expansion, "cp-sat"))

    def improve(self, bound: int) -> None:
        """Windows of the best plan again and again."""
        while self.left() > 0 and (base := self.base) is not None and base.step_ns > bound * _GOOD and base.expansion is not None:
            self.tell(1 - self.left() / self.o.time_limit_s, "neighbourhoods")
            linger = self.random.choice((base.problem.linger, base.problem.linger, *_LINGERS))
            swap = self.problems[0].may_swap and (base.problem.may_swap or self.random.random() < 0.5)
            recompute = self.problems[0].may_recompute and (base.problem.may_recompute or self.random.random() < 0.5)
            problem = replace(self._own(base.problem), linger=linger, may_swap=swap, may_recompute=recompute)
            kept = self._without_window(base, base.expansion)
            target = round(problem.budget_bytes * self.random.choice((1.0, 0.98, 0.95, 0.9)))
            options = GreedyOptions(target, self.random.choice((0.02, 0.1, 0.3, 1.0)), 0.6, self.random.randrange(2**31))
            answer = greedy(problem, options, kept)
            if answer.fits:
                self.offer(self.judge(problem, answer.choices, answer.expansion, f"{base.solver.split('+')[0]}+lns"))

    def _own(self, problem: Problem) -> Problem:
        """The problem with the real budget (a rung's plan has a smaller one)."""
        return replace(problem, budget_bytes=self.problems[0].budget_bytes)

    def _without_window(self, base: Found, expansion: Expansion) -> Choices:
        """Choices with those around a window taken back, but for a few of them."""
        count = len(expansion.steps)
        width = max(3, int(count * self.random.choice((0.03, 0.1, 0.25))))
        stalls = _stalled_steps(base, expansion)
        centre = self.random.choice(stalls) if stalls and self.random.random() < 0.7 else self.random.randrange(count)
        low, high = centre - width, centre + width
        position = {op: step for step, (op, again) in enumerate(expansion.steps) if not again}
        kept: Choices = {}
        for (s, number), how in base.choices.items():
            uses = base.problem.uses[s]
            edge = position[base.problem.order[uses[number if number >= 0 else 0]]]
            back = position[base.problem.order[uses[min(number + 1, len(uses) - 1)]]]
            near = low <= edge <= high or low <= back <= high
            if not near or self.random.random() < 0.3:
                kept[s, number] = how
        try:
            expand(base.problem, kept)
        except ImpossibleChoice:
            return dict(base.choices)
        return kept


def _variants(problem: Problem) -> Iterator[tuple[float, Problem]]:
    """Weights of a copy with variants of the problem for greedy; only those that differ for this problem."""
    seen = set()
    for weight, linger, swap, recompute in _VARIANTS:
        swap, recompute = swap and problem.may_swap, recompute and problem.may_recompute
        key = (weight if swap else 0.0, linger if recompute else 0, swap, recompute)
        if key not in seen and (swap or recompute):
            seen.add(key)
            yield weight, replace(problem, linger=linger, may_swap=swap, may_recompute=recompute)


def _found(problem: Problem, choices: Choices, expansion: Expansion | None, realised: Realised, solver: str) -> Found:
    score = realised.step_ns + _COPY_PRICE * sum(_copied_ns(problem, realised))
    return Found(problem, choices, expansion, realised, score, solver)


def _delayed(problem: Problem, choices: Choices, expansion: Expansion) -> tuple[int, ...]:
    """The order with every update at the end whose gradient there is room for until then, the last ones first."""
    free = problem.budget_bytes - np.array(profile(problem, expansion), dtype=np.int64)
    step_of = {op: step for step, (op, again) in enumerate(expansion.steps) if not again}
    moved = {s for s, _ in choices} | set(expansion.away)
    late: set[int] = set()
    for op in reversed(problem.order):
        one = problem.graph.ops[op]
        if one.phase is not Phase.UPDATE or not moved.isdisjoint(one.writes) or not moved.isdisjoint(one.reads):
            continue
        size = sum(problem.sizes[s] for s in one.reads if not problem.graph.storages[s].external)
        if free[step_of[op] :].min(initial=size) >= size:
            free[step_of[op] :] -= size
            late.add(op)
    return (*(op for op in problem.order if op not in late), *(op for op in problem.order if op in late))


def _rungs(problems: list[Problem]) -> Iterator[int]:
    """Fixed targets from the first at most the budget downwards."""
    target, least = eager_peak(problems[0].graph), min(floor(problem)[0] for problem in one_each(problems))
    while target > problems[0].budget_bytes:
        target = int(target * _RUNG)
    while target >= least:
        yield target
        target = int(target * _RUNG)


def _copied_ns(problem: Problem, realised: Realised) -> Iterator[int]:
    for action in realised.schedule.actions:
        if action.kind in (ActionKind.SWAP_OUT, ActionKind.SAVE):
            yield problem.link.out_ns(problem.sizes[action.subject])
        elif action.kind is ActionKind.SWAP_IN:
            yield problem.link.in_ns(problem.sizes[action.subject])


def _stalled_steps(found: Found, expansion: Expansion) -> list[int]:
    """Steps that compute had to wait before."""
    ops = found.problem.graph.ops
    starts = found.realised.starts_ns
    return [
        step + 1
        for step, (op, _) in enumerate(expansion.steps)
        if starts[step + 1] - starts[step] > ops[op].time_ns and step + 1 < len(expansion.steps)
    ]
