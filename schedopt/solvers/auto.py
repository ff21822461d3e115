"""Keep, swap or recompute for every gap: a portfolio of greedy answers, CP-SAT, and large-neighbourhood search, judged by the clock.

1. Ladder: greedy for fixed targets at and below the budget, several weights of a copy, updates early or late.
2. CP-SAT (`exact`) proposes choices, warm-started by the best so far; greedy repairs them where they do not fit.
3. LNS: take the choices in a window of steps back, preferably one with a stall, and let greedy with noise fill it again.

The answer is the plan with the least score: predicted step time plus a small price for every copied nanosecond, since copies take memory
bandwidth that the clock does not see. The bound comes from `bound`.

Larger budgets: targets of the ladder are powers of 0.97 of the eager peak, the same for every budget, and each target's answer is
realised under that target, not under the budget. So all that a smaller budget gets from the ladder a larger one gets too, with equal
score; only the improvement phases could break the order, so what they found for smaller budgets of the same problem is kept and offered
again (`known`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from schedopt.solvers import exact
from schedopt.solvers.bound import floor, lower_bound
from schedopt.solvers.expand import Choices, Expansion, ImpossibleChoice, expand
from schedopt.solvers.greedy import GreedyOptions, greedy
from schedopt.solvers.problem import Problem, eager_peak
from schedopt.solvers.realise import Realised, realise

_RUNG = 0.97
_RUNGS_BELOW = 5
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
    """One plan that fits: its problem (order), choices, steps, actions, and score."""

    problem: Problem
    choices: Choices
    expansion: Expansion
    realised: Realised
    score: float
    solver: str


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
    """Best plan found for any of the `problems` (the same step in several orders). `known`: plans of smaller budgets.

    `progress(share of the time used, what is done)`.
    """
    started = time.perf_counter()
    tell = progress or (lambda _share, _what: None)
    search = _Search(problems, options, started, tell)
    for found in known or ():
        search.offer(found)
    search.ladder()
    tell(0.1, "bound")
    bound = lower_bound(problems[0]).step_ns
    if search.best is not None and bound is not None and search.best.realised.step_ns > bound * _GOOD:
        search.propose()
        search.improve(bound)
    return AutoAnswer(search.best, bound, time.perf_counter() - started)


class _Search:
    def __init__(self, problems: list[Problem], options: AutoOptions, started: float, tell: Callable[[float, str], None]) -> None:
        self.problems, self.o, self.started, self.tell = problems, options, started, tell
        self.best: Found | None = None
        self.random = random.Random(options.seed)

    def left(self) -> float:
        """Seconds left."""
        return self.o.time_limit_s - (time.perf_counter() - self.started)

    def offer(self, found: Found | None) -> bool:
        """Take it if it is better."""
        if found is None or (self.best is not None and found.score >= self.best.score):
            return False
        self.best = found
        return True

    def judge(self, problem: Problem, choices: Choices, expansion: Expansion, solver: str) -> Found | None:
        """Realise and score; None if it does not fit."""
        realised = realise(problem, expansion, self.o.tier, self.o.device)
        if realised is None:
            return None
        copied = sum(_copied_ns(problem, realised))
        return Found(problem, choices, expansion, realised, realised.step_ns + _COPY_PRICE * copied, solver)

    def ladder(self) -> None:
        """Greedy on the fixed rungs at and below the budget, and a last resort right at the budget."""
        for problem in self.problems:
            rungs = list(_rungs(problem))
            for number, target in enumerate([*rungs[:_RUNGS_BELOW], *rungs[_RUNGS_BELOW::4]]):
                for weight in (0.03, 0.3) if number < _RUNGS_BELOW else (0.1,):
                    under = replace(problem, budget_bytes=target)
                    answer = greedy(under, GreedyOptions(round(target * 0.98), swap_weight=weight))
                    if answer.fits:
                        self.offer(self.judge(under, answer.choices, answer.expansion, "greedy"))
                if self.best is not None and ((number >= _RUNGS_BELOW and self.best.realised.stall_ns == 0) or self.left() < 0):
                    break
            for target in (problem.budget_bytes, round(problem.budget_bytes * 0.95)):
                answer = greedy(problem, GreedyOptions(target))
                if answer.fits:
                    self.offer(self.judge(problem, answer.choices, answer.expansion, "greedy"))

    def propose(self) -> None:
        """CP-SAT for two targets, repaired by greedy."""
        assert self.best is not None
        problem = self._own(self.best.problem)
        for share in (0.97, 0.9):
            limit = min(self.o.time_limit_s * 0.2, self.left())
            if limit <= 0.05:
                return
            self.tell(1 - self.left() / self.o.time_limit_s, "CP-SAT")
            options = exact.ExactOptions(round(problem.budget_bytes * share), limit, workers=self.o.workers, seed=self.o.seed)
            answer = exact.solve(problem, options, self.best.choices)
            if answer.choices:
                repaired = greedy(problem, GreedyOptions(round(problem.budget_bytes * 0.99)), answer.choices)
                if repaired.fits:
                    self.offer(self.judge(problem, repaired.choices, repaired.expansion, "cp-sat"))

    def improve(self, bound: int) -> None:
        """Windows of the best plan again and again."""
        while self.left() > 0 and self.best is not None and self.best.realised.step_ns > bound * _GOOD:
            self.tell(1 - self.left() / self.o.time_limit_s, "neighbourhoods")
            best = self.best
            problem = self._own(best.problem)
            kept = self._without_window(best)
            target = round(problem.budget_bytes * self.random.choice((1.0, 0.98, 0.95, 0.9)))
            options = GreedyOptions(target, self.random.choice((0.02, 0.1, 0.3, 1.0)), 0.6, self.random.randrange(2**31))
            answer = greedy(problem, options, kept)
            if answer.fits:
                self.offer(self.judge(problem, answer.choices, answer.expansion, f"{best.solver.split('+')[0]}+lns"))

    def _own(self, problem: Problem) -> Problem:
        """The problem with the real budget (a rung's plan has a smaller one)."""
        return next(p for p in self.problems if p.order == problem.order)

    def _without_window(self, best: Found) -> Choices:
        """Choices with those around a window taken back; sometimes the kind of a few is turned round."""
        count = len(best.expansion.steps)
        width = max(3, int(count * self.random.choice((0.03, 0.1, 0.25))))
        stalls = _stalled_steps(best)
        centre = self.random.choice(stalls) if stalls and self.random.random() < 0.7 else self.random.randrange(count)
        low, high = centre - width, centre + width
        position = {op: step for step, (op, again) in enumerate(best.expansion.steps) if not again}
        kept: Choices = {}
        for (s, number), how in best.choices.items():
            uses = best.problem.uses[s]
            edge = position[best.problem.order[uses[number if number >= 0 else 0]]]
            back = position[best.problem.order[uses[min(number + 1, len(uses) - 1)]]]
            near = low <= edge <= high or low <= back <= high
            if not near or self.random.random() < 0.3:
                kept[s, number] = how
        try:
            expand(best.problem, kept)
        except ImpossibleChoice:
            return dict(best.choices)
        return kept


def _rungs(problem: Problem) -> Iterator[int]:
    """Fixed targets from the first at most the budget downwards."""
    target, least = eager_peak(problem.graph), floor(problem)[0]
    while target > problem.budget_bytes:
        target = int(target * _RUNG)
    while target >= least:
        yield target
        target = int(target * _RUNG)


def _copied_ns(problem: Problem, realised: Realised) -> Iterator[int]:
    for action in realised.schedule.actions:
        if action.kind in ("swap_out", "save"):
            yield problem.link.out_ns(problem.sizes[action.subject])
        elif action.kind == "swap_in":
            yield problem.link.in_ns(problem.sizes[action.subject])


def _stalled_steps(found: Found) -> list[int]:
    """Steps that compute had to wait before."""
    ops = found.problem.graph.ops
    starts = found.realised.starts_ns
    return [
        step + 1
        for step, (op, _) in enumerate(found.expansion.steps)
        if starts[step + 1] - starts[step] > ops[op].time_ns and step + 1 < len(found.expansion.steps)
    ]
