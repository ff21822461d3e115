"""From choices to steps: which op runs when (also a second time) and when each storage must be on the device at the very least.

Demand driven: the ops are gone through in order; what an op needs and is not there is brought back by a copy from the lower tier or by
running its recipe, whose own needs are met the same way. So a set of choices always gives a consistent list of steps; what it costs in
bytes and time is read off the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from schedopt.graph import Recompute
from schedopt.solvers.problem import Problem

Gap = tuple[int, int]  # (storage, number of the use before the gap; -1: over the step's boundary)
Choices = dict[Gap, str]  # "swap" or "recompute"; a gap that is not there is kept
DEPTH = 16  # recipes within recipes: longer chains cost more than they bring


class Begin(Enum):
    """How a storage gets onto the device."""

    START = "start"
    CREATE = "create"
    COPY_IN = "copy_in"


class End(Enum):
    """How it leaves."""

    STAY = "stay"
    DEAD = "dead"
    COPY_OUT = "copy_out"
    EVICT = "evict"


@dataclass(slots=True)
class Interval:
    """A storage is on the device from step `first` to step `last`, both included; `uses` are (step, number of its use or None)."""

    storage: int
    begin: Begin
    first: int
    last: int = -1
    end: End = End.STAY
    uses: list[tuple[int, int | None]] = field(default_factory=list)
    writes: int = 0  # version when it leaves


@dataclass(slots=True)
class Expansion:
    """`steps`: (op, again). `extra_bytes`: per step, workspace and copies thrown away at once. `saved_rng`: ops whose generator state is
    kept. `away`: storages that rest on the lower tier."""

    steps: list[tuple[int, bool]]
    extra_bytes: list[int]
    intervals: list[Interval]
    saved_rng: set[int]
    away: tuple[int, ...]
    recompute_ns: int


class ImpossibleChoice(Exception):
    """A choice that can not be carried out. `chain`: the storage that an op needs, whose recipe needs the next one, and so on to the one
    that can not come back."""

    def __init__(self, chain: tuple[int, ...]) -> None:
        super().__init__(f"storage {chain[-1]} can not come back")
        self.chain = chain


def expand(problem: Problem, choices: Choices) -> Expansion:
    """Carry out `choices`; ImpossibleChoice names storages whose recipes do not work there."""
    return _Expander(problem, choices).run()


class _Expander:
    def __init__(self, problem: Problem, choices: Choices) -> None:
        self.p, self.choices = problem, choices
        graph = problem.graph
        self.steps: list[tuple[int, bool]] = []
        self.extra: list[int] = []
        self.intervals: list[Interval] = []
        self.open: dict[int, Interval] = {}
        self.version = [0] * len(graph.storages)
        self.lower: dict[int, int] = {}
        self.use_number = [-1] * len(graph.storages)
        self.saved_rng: set[int] = set()
        self.recompute_ns = 0
        self.visiting: dict[int, None] = {}
        self.fetched: list[int] = []
        rests = [s.persistent and bool(problem.uses[s.id]) and choices.get((s.id, -1)) == "swap" for s in graph.storages]
        self.away = tuple(s for s, rest in enumerate(rests) if rest or s in problem.split)
        resting = set(self.away)
        for storage in graph.storages:
            if storage.external and storage.id not in resting:
                self._open(storage.id, Begin.START, -1)
        self.lower.update(dict.fromkeys(self.away, 0))
        self.outputs = set(graph.outputs)

    def run(self) -> Expansion:
        """Go through the order."""
        for position, op in enumerate(self.p.order):
            self._run(op, position)
        final = len(self.steps)
        for s, interval in self.open.items():
            interval.last, interval.end, interval.writes = final, End.STAY, self.version[s]
        return Expansion(self.steps, self.extra, self.intervals, self.saved_rng, self.away, self.recompute_ns)

    def _open(self, storage: int, begin: Begin, step: int) -> None:
        interval = Interval(storage, begin, step)
        self.intervals.append(interval)
        self.open[storage] = interval

    def _close(self, storage: int, end: End) -> None:
        interval = self.open.pop(storage)
        interval.last = interval.uses[-1][0] if interval.uses else interval.first
        interval.end, interval.writes = end, self.version[storage]
        if end is End.COPY_OUT:
            self.lower[storage] = self.version[storage]

    def _run(self, op: int, position: int) -> None:
        one = self.p.graph.ops[op]
        needs = (*one.reads, *one.writes)
        for s in needs:
            self._ensure(s, self.p.needed[op][s], position)
        step = len(self.steps)
        self.steps.append((op, False))
        self.extra.append(one.workspace_bytes)
        for s in one.creates:
            self._open(s, Begin.CREATE, step)
            self.version[s] = 0
        for s in one.writes:
            self.version[s] += 1
        for s in dict.fromkeys((*needs, *one.creates)):
            self.use_number[s] += 1
            self.open[s].uses.append((step, self.use_number[s]))
            self._after(s)
        self._drop_fetched(position)

    def _after(self, s: int) -> None:
        """What becomes of a storage after a use."""
        number, storage = self.use_number[s], self.p.graph.storages[s]
        if number + 1 < len(self.p.uses[s]):
            choice = self.choices.get((s, number))
            if choice is not None:
                self._leave(s, choice)
        elif storage.persistent and s in self.away:
            self._leave(s, "swap")
        elif not storage.external and s not in self.outputs:
            self._close(s, End.DEAD)

    def _leave(self, s: int, choice: str) -> None:
        if self.lower.get(s) == self.version[s]:
            self._close(s, End.EVICT)
        else:
            self._close(s, End.COPY_OUT if choice == "swap" else End.EVICT)

    def _ensure(self, s: int, version: int, position: int) -> None:
        if s in self.open:
            if self.version[s] != version:
                raise ImpossibleChoice((*self.visiting, s))
            return
        if self.lower.get(s) == version:
            self._open(s, Begin.COPY_IN, len(self.steps))
            self.version[s] = version
            return
        recipe = self.p.recipe(s, version)
        if recipe is None or s in self.visiting or len(self.visiting) > DEPTH:
            raise ImpossibleChoice((*self.visiting, s))
        self.visiting[s] = None
        for op in recipe:
            self._again(op, s, position)
        del self.visiting[s]

    def _again(self, op: int, target: int, position: int) -> None:
        one = self.p.graph.ops[op]
        writes = () if one.recompute is Recompute.STATISTICS else one.writes
        for s in (*one.reads, *writes):
            if s != target or s not in self.open:
                there = s in self.open
                self._ensure(s, self.p.needed[op][s], position)
                if not there:
                    self.fetched.append(s)
            elif self.version[s] != self.p.needed[op][s]:
                raise ImpossibleChoice(tuple(self.visiting))
        step = len(self.steps)
        self.steps.append((op, True))
        self.recompute_ns += one.time_ns
        if one.recompute is Recompute.RANDOM:
            self.saved_rng.add(op)
        self.extra.append(one.workspace_bytes + sum(self.p.sizes[s] for s in one.creates if s in self.open))
        for s in one.creates:
            if s not in self.open:
                self._open(s, Begin.CREATE, step)
                self.version[s] = 0
                if s != target:
                    self.fetched.append(s)
        for s in writes:
            self.version[s] += 1
        for s in dict.fromkeys((*one.reads, *writes, *(c for c in one.creates if self.open[c].first == step))):
            self.open[s].uses.append((step, None))

    def _drop_fetched(self, position: int) -> None:
        """What came only for a recompute goes again, unless it is used soon anyway."""
        for s in self.fetched:
            if s not in self.open or (self.p.graph.storages[s].external and s not in self.lower):
                continue
            number = self.use_number[s]
            later = self.p.uses[s][number + 1 :]
            if later and later[0] - position <= self.p.linger:
                continue
            if not later and self.p.graph.storages[s].persistent:
                final = len(self.p.writers[s])
                self._leave(s, "swap") if self.version[s] == final else self._close(s, End.EVICT)
            elif not later:
                self._close(s, End.DEAD)
            else:
                self._leave(s, self.choices.get((s, number), "recompute" if self.p.recipe(s, self.version[s]) else "swap"))
        self.fetched.clear()


def profile(problem: Problem, expansion: Expansion) -> list[int]:
    """Bytes at each step with everything on the device only as long as it must be (copies taken as instant)."""
    count = len(expansion.steps)
    change = [0] * (count + 2)
    change[0] += sum(problem.sizes[s] for s in problem.snapshot)
    for interval in expansion.intervals:
        size = problem.sizes[interval.storage]
        change[max(0, interval.first)] += size
        change[min(interval.last, count) + 1] -= size
    for step, (op, again) in enumerate(expansion.steps):
        if not again and op in expansion.saved_rng:
            change[step] += problem.graph.rng_state_bytes
    used, result = 0, []
    for step in range(count):
        used += change[step]
        result.append(used + expansion.extra_bytes[step])
    return result
