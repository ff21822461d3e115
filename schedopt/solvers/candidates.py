"""Gaps that could be filled, and what filling them costs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from schedopt.solvers.expand import Choices, Expansion, Gap
from schedopt.solvers.problem import Problem


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


def swap_prices(problem: Problem, options: list[Candidate], weight: float, crowded_weight: float) -> np.ndarray:
    """Per candidate: cost of a swap with the first and with the second weight of hidden copies, and its copy out; shape (3, n), ns."""
    rows = np.zeros((3, len(options)))
    for i, candidate in enumerate(options):
        size = problem.sizes[candidate.gap[0]]
        out, back = problem.link.out_ns(size) if candidate.modified else 0, problem.link.in_ns(size)
        fixed = problem.link.tax_ns(size) * (2 if candidate.modified else 1) + candidate.exposed_ns(out, back)
        rows[:, i] = (fixed + weight * (out + back), fixed + crowded_weight * (out + back), out)
    return rows


def recompute_price(problem: Problem, candidate: Candidate) -> float | None:
    """Time of the recipe, and of the recipes of inputs that will not be there (one level down); None if it can not be recomputed."""
    s, number = candidate.gap
    recipe = problem.recipe(s, candidate.need_version) if number >= 0 else None
    if recipe is None:
        return None
    back = problem.uses[s][number + 1]
    cost = 0.0
    for op in recipe:
        cost += problem.graph.ops[op].time_ns
        for u in problem.graph.ops[op].reads:
            if problem.graph.storages[u].external or problem.uses[u][-1] >= back:
                continue
            again = problem.recompute_ns(u, problem.needed[op][u])
            if again is None:
                return None
            cost += again
    return cost
