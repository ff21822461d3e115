"""Greedy choices: while the profile is over the target, fill the gap at its worst step that costs least per byte and step of relief.

Fallback, warm start and oracle of the other models. Deterministic for given options.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from schedopt.solvers.expand import Choices, Expansion, Gap, ImpossibleChoice, expand, profile
from schedopt.solvers.problem import Problem

_CROWDED = 0.7  # share of the compute time a link may be busy before its copies count in full


@dataclass(frozen=True, slots=True)
class GreedyOptions:
    """`target_bytes`: bytes to get under. `swap_weight`: what a hidden nanosecond of copying counts against one of compute. `noise`:
    relative random change of costs (for restarts), drawn from `seed`."""

    target_bytes: int
    swap_weight: float = 0.05
    noise: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A gap that could be filled: the steps of `spans` become free. `inside_ns`: compute time meanwhile, of which `tail_ns` comes
    before the step's end (0 for a gap that lies inside the step)."""

    gap: Gap
    spans: tuple[tuple[int, int], ...]
    inside_ns: int
    need_version: int
    modified: bool
    tail_ns: int = 0

    def exposed_ns(self, out_ns: int, in_ns: int) -> int:
        """Part of a copy out and a copy in that no compute can hide."""
        if self.gap[1] >= 0:
            return max(0, out_ns + in_ns - self.inside_ns)
        return max(0, out_ns - self.tail_ns) + max(0, in_ns - (self.inside_ns - self.tail_ns))


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """`fits`: under the target. If not, `stuck_step` is where nothing more can be moved."""

    choices: Choices
    expansion: Expansion
    fits: bool
    stuck_step: int = -1


def greedy(problem: Problem, options: GreedyOptions, start: Choices | None = None) -> GreedyAnswer:
    """Fill gaps until the profile is at most the target everywhere, or nothing more can be moved."""
    return _Greedy(problem, options, dict(start or {})).run()


class _Greedy:
    def __init__(self, problem: Problem, options: GreedyOptions, choices: Choices) -> None:
        self.p, self.o, self.choices = problem, options, choices
        self.banned: set[tuple[Gap, str]] = set()
        self.random = random.Random(options.seed)

    def run(self) -> GreedyAnswer:
        """Rounds of: expand, choose for every step that is over, expand again."""
        expansion = self._expand_or_ban([])
        stuck = -1
        while True:
            used = np.array(profile(self.p, expansion), dtype=np.int64)
            if not len(used) or used.max() <= self.o.target_bytes:
                return GreedyAnswer(self.choices, expansion, True)
            added, stuck = self._round(expansion, used)
            if not added:
                return GreedyAnswer(self.choices, expansion, False, stuck)
            expansion = self._expand_or_ban(added)

    def _expand_or_ban(self, added: list[tuple[Gap, str]]) -> Expansion:
        """Expand; where a choice can not be carried out, take back what was added last and forbid the culprit."""
        while True:
            try:
                return expand(self.p, self.choices)
            except ImpossibleChoice:
                if not added:
                    self.choices = {gap: how for gap, how in self.choices.items() if how == "swap"}
                    continue
                half = [a for a in added if a[1] == "recompute"] or added
                good = self._longest_good(half, [a for a in added if a not in half])
                self.banned.update(a for a in half if a not in good)
                added = []

    def _longest_good(self, suspects: list[tuple[Gap, str]], sure: list[tuple[Gap, str]]) -> list[tuple[Gap, str]]:
        base = {gap: how for gap, how in self.choices.items() if (gap, how) not in suspects}
        good: list[tuple[Gap, str]] = []
        pending = [suspects]
        while pending:
            part = pending.pop()
            try:
                expand(self.p, {**base, **dict(good), **dict(part)})
                good += part
            except ImpossibleChoice:
                if len(part) > 1:
                    middle = len(part) // 2
                    pending += [part[middle:], part[:middle]]
        self.choices = {**base, **dict(sure), **dict(good)}
        return good

    def _round(self, expansion: Expansion, used: np.ndarray) -> tuple[list[tuple[Gap, str]], int]:
        """Choices for all steps that are over the target, by an estimate of their effect; the step where none was found."""
        times = [self.p.graph.ops[op].time_ns for op, _ in expansion.steps]
        clock = np.concatenate([[0], np.cumsum(np.array(times, dtype=np.int64))])
        options = candidates(self.p, expansion, clock, self.choices)
        link_ns = self._link_load()
        added: list[tuple[Gap, str]] = []
        estimate, stuck = used.copy(), -1
        hopeless = np.zeros(len(used), dtype=bool)
        taken: set[Gap] = set()
        while True:
            over = np.where(hopeless, 0, estimate - self.o.target_bytes)
            worst = int(over.argmax())
            if over[worst] <= 0:
                return added, stuck
            counts = np.concatenate([[0], np.cumsum(over > 0)])
            best = self._best(options, worst, counts, taken, link_ns)
            if best is None:
                hopeless[worst] = True
                stuck = worst if stuck < 0 or used[worst] > used[stuck] else stuck
                continue
            candidate, how, link = best
            taken.add(candidate.gap)
            self.choices[candidate.gap] = how
            added.append((candidate.gap, how))
            link_ns += link
            for first, last in candidate.spans:
                estimate[first : last + 1] -= self.p.sizes[candidate.gap[0]]

    def _link_load(self) -> float:
        return sum(self.p.link.out_ns(self.p.sizes[s]) for (s, _), how in self.choices.items() if how == "swap")

    def _best(
        self, options: list[Candidate], worst: int, counts: np.ndarray, taken: set[Gap], link_ns: float
    ) -> tuple[Candidate, str, float] | None:
        best: tuple[float, Candidate, str, float] | None = None
        for candidate in options:
            if candidate.gap in taken or not any(a <= worst <= b for a, b in candidate.spans):
                continue
            size = self.p.sizes[candidate.gap[0]]
            relief = size * sum(int(counts[b + 1] - counts[a]) for a, b in candidate.spans)
            for how, cost, link in self._costs(candidate, link_ns):
                if (candidate.gap, how) in self.banned:
                    continue
                noisy = cost * (1.0 + self.o.noise * self.random.uniform(-1, 1)) if self.o.noise else cost
                score = (noisy + 1.0) / relief
                if best is None or score < best[0]:
                    best = (score, candidate, how, link)
        return None if best is None else best[1:]

    def _costs(self, candidate: Candidate, link_ns: float) -> list[tuple[str, float, float]]:
        s, number = candidate.gap
        result: list[tuple[str, float, float]] = []
        if self.p.may_swap:
            out = self.p.link.out_ns(self.p.sizes[s]) if candidate.modified else 0
            back = self.p.link.in_ns(self.p.sizes[s])
            weight = self.o.swap_weight if link_ns < _CROWDED * self.p.compute_ns else 1.0
            tax = self.p.link.tax_ns(self.p.sizes[s]) * (2 if candidate.modified else 1)
            result.append(("swap", tax + (out + back) * weight + candidate.exposed_ns(out, back), out))
        if self.p.may_recompute and number >= 0 and (cost := self._recompute_cost(s, candidate)) is not None:
            result.append(("recompute", cost, 0.0))
        return result

    def _recompute_cost(self, s: int, candidate: Candidate) -> float | None:
        """Time of the recipe, and of the recipes of inputs that will not be there (one level down)."""
        recipe = self.p.recipe(s, candidate.need_version)
        if recipe is None:
            return None
        back = self.p.uses[s][candidate.gap[1] + 1]
        cost = 0.0
        for op in recipe:
            cost += self.p.graph.ops[op].time_ns
            for u in self.p.graph.ops[op].reads:
                if self.p.graph.storages[u].external:
                    continue
                later = self.p.uses[u][-1] >= back
                if not later:
                    again = self.p.recompute_ns(u, self.p.needed[op][u])
                    if again is None:
                        return None
                    cost += again
        return cost


def candidates(problem: Problem, expansion: Expansion, clock: np.ndarray, choices: Choices) -> list[Candidate]:
    """All gaps of an expansion that are kept so far and could be filled."""
    found = []
    last_step = len(expansion.steps) - 1
    for interval in expansion.intervals:
        s = interval.storage
        if not problem.movable[s]:
            continue
        persistent = problem.graph.storages[s].persistent
        written = set(problem.writers[s])
        for (step, number), (after, _) in pairwise(interval.uses):
            if number is None or after <= step + 1 or (s, number) in choices:
                continue
            op = problem.order[problem.uses[s][number]]
            version = problem.needed[op].get(s, 0) + (op in written)
            inside = int(clock[after] - clock[step + 1])
            found.append(Candidate((s, number), ((step + 1, after - 1),), inside, version, True))
        if persistent and interval.uses and (s, -1) not in choices and interval.first < 0 and interval.last > last_step:
            first, last = interval.uses[0][0], interval.uses[-1][0]
            spans = tuple(x for x in ((0, first - 1), (last + 1, last_step)) if x[0] <= x[1])
            tail = int(clock[-1] - clock[last + 1])
            if spans:
                found.append(Candidate((s, -1), spans, int(clock[first]) + tail, 0, bool(written), tail))
    return found
