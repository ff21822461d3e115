"""Gaps that could be filled, and what filling them costs."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from schedopt.solvers.expand import DEPTH, Choices, Expansion, Gap
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


def recompute_price(problem: Problem, candidate: Candidate, choices: Choices, limit_ns: float = float("inf")) -> float | None:
    """Time of the recipe, and of bringing back the inputs that will not be there, by a copy or by their own recipes; None if it can not be
    recomputed, or takes longer than `limit_ns`."""
    s, number = candidate.gap
    if number < 0:
        return None
    return _Recipes(problem, choices, problem.uses[s][number + 1], limit_ns).price(s, candidate.need_version)


class _Recipes:
    """What it takes to have a storage on the device again at a position, as far as choices are made."""

    def __init__(self, problem: Problem, choices: Choices, position: int, limit_ns: float) -> None:
        self.p, self.choices, self.position, self.left = problem, choices, position, limit_ns
        self.paid: set[tuple[int, int]] = set()
        self.depth = 0

    def price(self, s: int, version: int) -> float | None:
        """Of the storage's recipe; None if there is none, or it is too dear."""
        recipe = self.p.recipe(s, version) if self.depth < DEPTH else None
        if recipe is None:
            return None
        self.paid.add((s, version))
        self.depth += 1
        cost = 0.0
        for op in recipe:
            cost += self.p.graph.ops[op].time_ns
            self.left -= self.p.graph.ops[op].time_ns
            if self.left < 0:
                return None
            for u in self.p.graph.ops[op].reads:
                part = self._input(u, self.p.needed[op][u])
                if part is None:
                    return None
                cost += part
        self.depth -= 1
        return cost

    def _input(self, u: int, version: int) -> float | None:
        """Of an input: free if it is there then, a copy in if it was swapped, else its recipe."""
        if (u, version) in self.paid or self.p.graph.storages[u].external:
            return 0.0
        uses = self.p.uses[u]
        before = bisect_left(uses, self.position) - 1
        how = self.choices.get((u, before)) if before + 1 < len(uses) else "recompute"
        if how is None:
            return 0.0
        if how == "swap":
            return float(self.p.link.tax_ns(self.p.sizes[u]))
        return self.price(u, version)
