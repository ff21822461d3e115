"""Greedy choices: while the profile is over the target, fill the gap at its worst step that costs least per byte and step of relief.

Fallback, warm start and oracle of the other models. Deterministic for given options.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedopt.solvers.candidates import Candidate, candidates, recompute_price, swap_prices
from schedopt.solvers.expand import Choices, Expansion, Gap, ImpossibleChoice, expand, profile
from schedopt.solvers.problem import Problem

_BLAMED = 12  # failed expansions after which choices are taken back by halves
_DEAR = 4.0  # a recompute that takes so many times longer than the swap is not looked at any further
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
        self.random = np.random.default_rng(options.seed)

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
        """Expand; where choices can not be carried out, take back some that were added last and forbid them: at first those that are to
        blame, soon more at once, for an expansion of a large step takes long."""
        failures = 0
        while True:
            try:
                return expand(self.p, self.choices)
            except ImpossibleChoice as impossible:
                failures += 1
                guilty = self._guilty(impossible.chain if failures <= _BLAMED else (), added)
                if not guilty:
                    self.choices = {gap: how for gap, how in self.choices.items() if how == "swap"}
                    added = []
                    continue
                self.banned.update(guilty)
                added = [choice for choice in added if choice not in guilty]
                for gap, _ in guilty:
                    del self.choices[gap]

    @staticmethod
    def _guilty(chain: tuple[int, ...], added: list[tuple[Gap, str]]) -> set[tuple[Gap, str]]:
        """Of what was added: recomputes of the first storage in the chain that has any, or else half of all."""
        for s in chain:
            if found := {choice for choice in added if choice[0][0] == s and choice[1] == "recompute"}:
                return found
        recomputes = [choice for choice in added if choice[1] == "recompute"] or added
        return set(recomputes[len(recomputes) // 2 :])

    def _round(self, expansion: Expansion, used: np.ndarray) -> tuple[list[tuple[Gap, str]], int]:
        """Choices for all steps that are over the target, by an estimate of their effect; the step where none was found."""
        times = [self.p.graph.ops[op].time_ns for op, _ in expansion.steps]
        clock = np.concatenate([[0], np.cumsum(np.array(times, dtype=np.int64))])
        market = _Market(self, candidates(self.p, expansion, clock, self.choices))
        link_ns = self._link_load()
        added: list[tuple[Gap, str]] = []
        estimate, stuck = used.copy(), -1
        hopeless = np.zeros(len(used), dtype=bool)
        while True:
            over = np.where(hopeless, 0, estimate - self.o.target_bytes)
            worst = int(over.argmax())
            if over[worst] <= 0:
                return added, stuck
            counts = np.concatenate([[0], np.cumsum(over > 0)])
            best = market.take(worst, counts, link_ns >= _CROWDED * self.p.compute_ns)
            if best is None:
                hopeless[worst] = True
                stuck = worst if stuck < 0 or used[worst] > used[stuck] else stuck
                continue
            candidate, how, link = best
            self.choices[candidate.gap] = how
            added.append((candidate.gap, how))
            link_ns += link
            for first, last in candidate.spans:
                estimate[first : last + 1] -= self.p.sizes[candidate.gap[0]]

    def _link_load(self) -> float:
        return sum(self.p.link.out_ns(self.p.sizes[s]) for (s, _), how in self.choices.items() if how == "swap")


class _Market:
    """All candidates of a round as arrays, so that the best for a step is found at once."""

    def __init__(self, search: _Greedy, options: list[Candidate]) -> None:
        problem, o = search.p, search.o
        self.options = options
        spans = np.array([(*c.spans[0], *(c.spans[1] if len(c.spans) > 1 else (0, -1))) for c in options], dtype=np.int64).reshape(-1, 4)
        self.first, self.last = spans[:, 0::2], spans[:, 1::2]
        self.sizes = np.array([problem.sizes[c.gap[0]] for c in options], dtype=np.float64)
        swaps = swap_prices(problem, options, o.swap_weight, 1.0)
        self.out = swaps[2]
        again = np.full(len(options), np.inf)
        for i, candidate in enumerate(options):
            swappable = problem.may_swap and (candidate.gap, "swap") not in search.banned
            swaps[:2, i] = swaps[:2, i] if swappable else np.inf
            if problem.may_recompute and (candidate.gap, "recompute") not in search.banned:
                limit = _DEAR * swaps[1, i] if np.isfinite(swaps[1, i]) else np.inf
                price = recompute_price(problem, candidate, search.choices, limit)
                again[i] = np.inf if price is None else price
        noise = 1.0 + o.noise * search.random.uniform(-1.0, 1.0, (2, len(options)))
        self.prices = [np.stack([row * noise[0], again * noise[1]]) + 1.0 for row in swaps[:2]]

    def take(self, worst: int, counts: np.ndarray, crowded: bool) -> tuple[Candidate, str, float] | None:
        """The candidate around step `worst` that costs least per byte and step of relief (`counts`: steps over the target, summed up);
        it is not offered again. Also how to fill it and the time of its copy out."""
        around = np.flatnonzero(((self.first <= worst) & (worst <= self.last)).any(axis=1))
        if not len(around):
            return None
        steps = (counts[self.last[around] + 1] - counts[self.first[around]]).sum(axis=1)
        scores = self.prices[crowded][:, around] / (self.sizes[around] * steps)
        how, place = np.unravel_index(int(scores.argmin()), scores.shape)
        if not np.isfinite(scores[how, place]):
            return None
        i = int(around[place])
        for prices in self.prices:
            prices[:, i] = np.inf
        return self.options[i], ("swap", "recompute")[how], float(self.out[i]) if how == 0 else 0.0
