"""From steps to a list of actions that never exceeds the budget, with copies under way as long as memory allows.

Copies out are issued right after the last use and waited for as late as possible: when they are done by the clock, or when the bytes are
needed. Copies in are issued just in time by the clock with some slack for error, later where memory is short. Links are queues.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from schedopt.graph import Phase
from schedopt.plan import Action, ActionKind, Schedule
from schedopt.solvers.expand import Begin, End, Expansion, Interval, profile
from schedopt.solvers.problem import Problem

_SLACK = 1.6  # copies in are planned as if they took so many times longer
_K = ActionKind


@dataclass(frozen=True, slots=True)
class Realised:
    """A schedule with its predicted time (by our own clock; the checker has another)."""

    schedule: Schedule
    step_ns: int
    stall_ns: int
    starts_ns: tuple[int, ...]  # per step


def realise(problem: Problem, expansion: Expansion, tier: str, device: str, rounds: int = 2) -> Realised | None:
    """Actions for an expansion; None if it does not fit the budget even with every copy waited for at once."""
    if max(profile(problem, expansion), default=0) > problem.budget_bytes:
        return None
    starts = _ideal_starts(problem, expansion)
    best: Realised | None = None
    for _ in range(rounds):
        result = _Realiser(problem, expansion, starts).run(tier, device)
        if best is None or result.step_ns < best.step_ns:
            best = result
        if result.stall_ns == 0:
            break
        starts = list(result.starts_ns)
    return best


def _ideal_starts(problem: Problem, expansion: Expansion) -> list[int]:
    clock, starts = 0, []
    for op, _ in expansion.steps:
        starts.append(clock)
        clock += problem.graph.ops[op].time_ns
    return [*starts, clock]


class _Realiser:
    def __init__(self, problem: Problem, expansion: Expansion, starts: list[int]) -> None:
        self.p, self.e, self.starts = problem, expansion, starts
        self.count = len(expansion.steps)
        self.free = [problem.budget_bytes - used for used in profile(problem, expansion)]
        self.before: list[list[Action]] = [[] for _ in range(self.count + 1)]
        self.issue: list[list[Action]] = [[] for _ in range(self.count + 1)]  # copies in, after the waits of the same step
        self.waits: list[list[Action]] = [[] for _ in range(self.count + 1)]
        self.after: list[list[Action]] = [[] for _ in range(self.count + 1)]
        self.freed_by: dict[int, int] = {}  # id of an interval -> step before which its copy out is waited for
        self.out_busy: list[tuple[int, int]] = []
        self.by_storage: dict[int, list[Interval]] = {}
        for interval in expansion.intervals:
            self.by_storage.setdefault(interval.storage, []).append(interval)

    def run(self, tier: str, device: str) -> Realised:
        """Place all copies, write the actions, run the clock."""
        self._copies_out()
        self._copies_in()
        if self.p.undo:
            self._saves()
        self._ends()
        actions: list[Action] = []
        for step, (op, again) in enumerate(self.e.steps):
            actions += self.before[step] + self.issue[step] + self.waits[step]
            if not again and op in self.e.saved_rng:
                actions.append(Action(_K.SAVE_RNG, op))
            actions.append(Action(_K.RECOMPUTE if again else _K.RUN, op))
            actions += self.after[step]
        actions += self.before[self.count] + self.issue[self.count] + self.waits[self.count]
        schedule = Schedule(device, tier, self.p.budget_bytes, tuple(actions), self.e.away, self.p.snapshot)
        return clock(self.p, schedule)

    def _saves(self) -> None:
        """Undo copies of what is written before something that can still fail, where the out link is idle if possible."""
        covered = {*self.p.snapshot, *self.e.away, *(i.storage for i in self.e.intervals if i.end is End.COPY_OUT and i.writes == 0)}
        last = self._last_fallible()
        deadline: dict[int, int] = {}
        for step, (op, again) in enumerate(self.e.steps[:last]):
            for s in () if again else self.p.graph.ops[op].writes:
                if self.p.graph.storages[s].persistent and s not in covered:
                    deadline.setdefault(s, step)
        idle = self._idle_out()
        for s, step in deadline.items():
            place = min(step, _take(idle, round(self.p.link.out_ns(self.p.sizes[s]) * _SLACK), self.starts))
            (self.after[place - 1] if place else self.before[0]).append(Action(_K.SAVE, s))
            self.waits[step].append(Action(_K.WAIT_SAVE, s))

    def _last_fallible(self) -> int:
        """Number of the last step that can fail or has a copy action before it; updates themselves and releases can not fail."""
        for step in range(self.count, -1, -1):
            if self.before[step] or self.issue[step] or self.waits[step] or (step and self.after[step - 1]):
                return step
            if step and (self.e.steps[step - 1][1] or self.p.graph.ops[self.e.steps[step - 1][0]].phase is not Phase.UPDATE):
                return step - 1
        return 0

    def _idle_out(self) -> list[list[int]]:
        """[start, end] of the times in which the out link has nothing to do, by the clock of the last round."""
        idle, free = [], 0
        for begin, end in self.out_busy:
            if begin > free:
                idle.append([free, begin])
            free = max(free, end)
        return [*idle, [free, max(free, self.starts[-1])]]

    def _copies_out(self) -> None:
        link_free = 0
        for interval in sorted((i for i in self.e.intervals if i.end is End.COPY_OUT), key=lambda i: i.last):
            s, size = interval.storage, self.p.sizes[interval.storage]
            self.after[interval.last].append(Action(_K.SWAP_OUT, s))
            begin = max(self.starts[interval.last + 1], link_free)
            link_free = done = begin + self.p.link.out_ns(size)
            self.out_busy.append((begin, done))
            back = self._next_in(interval)
            step = interval.last + 1
            while step < min(back, self.count) and self.starts[step] < done and self.free[step] >= size:
                self.free[step] -= size
                step += 1
            self.before[step].append(Action(_K.WAIT_OUT, s))
            self.freed_by[id(interval)] = step

    def _next_in(self, interval: Interval) -> int:
        """Step at which the storage is needed on the device again."""
        later = [i.first for i in self.by_storage[interval.storage] if i.first > interval.last]
        return min(later, default=self.count)

    def _copies_in(self) -> None:
        horizon = self.starts[-1]
        for interval in sorted((i for i in self.e.intervals if i.begin is Begin.COPY_IN), key=lambda i: -i.first):
            s, size, need = interval.storage, self.p.sizes[interval.storage], interval.first
            horizon = min(horizon, self.starts[need]) - round(self.p.link.in_ns(size) * _SLACK)
            earliest = self._earliest(interval)
            step = need
            while step > earliest and self.starts[step] > horizon and self.free[step - 1] >= size:
                step -= 1
                self.free[step] -= size
            self.issue[step].insert(0, Action(_K.SWAP_IN, s))
            self.waits[need].append(Action(_K.WAIT_IN, s))

    def _earliest(self, interval: Interval) -> int:
        mine = self.by_storage[interval.storage]
        place = mine.index(interval)
        if place == 0:
            return 0
        before = mine[place - 1]
        return self.freed_by.get(id(before), before.last + 1)

    def _ends(self) -> None:
        for interval in self.e.intervals:
            if interval.end in (End.DEAD, End.EVICT):
                self.after[interval.last].append(Action(_K.RELEASE, interval.storage))


def _take(idle: list[list[int]], length_ns: int, starts: list[int]) -> int:
    """Use up the first idle time that is long enough from the start of a step on (if none is, the last one); that step."""
    for slot in idle:
        step = min(bisect_left(starts, slot[0]), len(starts) - 1)
        if starts[step] + length_ns <= slot[1] or slot is idle[-1]:
            slot[0] = starts[step] + length_ns
            break
    return step


def clock(problem: Problem, schedule: Schedule) -> Realised:
    """Times of a schedule: compute, and a queue per direction."""
    ops, link, sizes = problem.graph.ops, problem.link, problem.sizes
    now = out_free = in_free = stall = 0
    done: dict[int, int] = {}
    starts: list[int] = []
    for action in schedule.actions:
        kind, x = action.kind, action.subject
        if kind in (_K.RUN, _K.RECOMPUTE):
            starts.append(now)
            now += ops[x].time_ns
        elif kind in (_K.SWAP_OUT, _K.SAVE):
            begin = max(now, out_free, 0 if link.duplex else in_free)
            done[x] = out_free = begin + link.out_ns(sizes[x])
            now += link.tax_ns(sizes[x])
        elif kind is _K.SWAP_IN:
            begin = max(now, in_free, 0 if link.duplex else out_free)
            done[x] = in_free = begin + link.in_ns(sizes[x])
            now += link.tax_ns(sizes[x])
        elif kind in (_K.WAIT_OUT, _K.WAIT_IN, _K.WAIT_SAVE):
            stall += max(0, done[x] - now)
            now = max(now, done[x])
    end = max(now, out_free, in_free)
    return Realised(schedule, end, stall + end - now, (*starts, end))
