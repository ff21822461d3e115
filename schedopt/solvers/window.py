"""The adaptive window scheduler of "Out-of-core training with adaptive window-based scheduling" (arXiv 2010.14109), rebuilt as choices.

It has no cost model and recomputes nothing. A window of bytes (1.5 times the budget) slides over the uses of storages in program order:

* swap in: the head of the window advances over future uses as long as both the window and the budget have room; a storage that is away is
  fetched when the head reaches its use, a storage that will only be created or overwritten takes memory when its op starts (lazy write);
* swap out: after an op, each storage that it used leaves at once if its next use lies beyond the window; one whose last use is over is
  released without a copy (preclear); one that is unmodified since it came in is dropped without a copy;
* cancel: a storage that is on its way out when the head reaches it again just stays;
* wait: copies out are waited for in program order, and only when their bytes are needed;
* backtrack: if an op does not fit, the furthest prefetches are undone and the head may not pass them before that op.

Parameters and optimizer state are storages like any other: what the window does not keep over the step's boundary rests on the tier.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schedopt.plan import Action, ActionKind, Schedule
from schedopt.solvers.problem import Problem

_WINDOW = 1.5
_K = ActionKind


@dataclass(frozen=True, slots=True)
class WindowAnswer:
    """`schedule` is None if op number `stuck` of the order does not fit even alone."""

    schedule: Schedule | None
    stuck: int = -1


def solve(problem: Problem, tier: str, device: str) -> WindowAnswer:
    """Schedule of the window method; everything movable that outlives the step rests on the lower tier between steps."""
    return _Window(problem).run(tier, device)


@dataclass(slots=True)
class _State:
    """Of one storage: where it is, whether the tier has its version, whether a prefetch put it there for a later op."""

    here: bool = False
    leaving: bool = False
    arriving: bool = False
    clean: bool = False
    queue: list[int] = field(default_factory=list)  # future uses inside the window


class _Window:
    def __init__(self, problem: Problem) -> None:
        self.p = problem
        graph = problem.graph
        self.actions: list[Action] = []
        self.state = [_State() for _ in graph.storages]
        rests = [s.persistent and problem.movable[s.id] and bool(problem.uses[s.id]) for s in graph.storages]
        self.away = tuple(s for s, rest in enumerate(rests) if rest or s in problem.split)
        resting = set(self.away)
        self.used = sum(problem.sizes[s] for s in problem.snapshot)
        for storage in graph.storages:
            state = self.state[storage.id]
            state.here = storage.external and storage.id not in resting
            state.clean = storage.id in resting
            self.used += problem.sizes[storage.id] if state.here else 0
        self.window_bytes = _WINDOW * problem.budget_bytes
        self.in_window = 0
        self.head = 0  # next position to bring into the window
        self.tail: list[int] = []  # storages on their way out, in program order
        self.entries = [self._touched(op) for op in problem.order]
        self.stops: dict[int, int] = {}

    def _touched(self, op: int) -> tuple[int, ...]:
        one = self.p.graph.ops[op]
        return tuple(s for s in dict.fromkeys((*one.reads, *one.writes, *one.creates)) if self.p.movable[s])

    def run(self, tier: str, device: str) -> WindowAnswer:
        """Go through the order, one op a block."""
        for position, op in enumerate(self.p.order):
            if not self._begin(position, op):
                return WindowAnswer(None, position)
            self.actions.append(Action(_K.RUN, op))
            self._end(position, op)
        while self.tail:
            self._wait_oldest()
        schedule = Schedule(device, tier, self.p.budget_bytes, tuple(self.actions), self.away, self.p.snapshot)
        return WindowAnswer(schedule)

    def _begin(self, position: int, op: int) -> bool:
        """Extend the window, then make sure that this op has all it needs and the room to run."""
        one = self.p.graph.ops[op]
        self._extend(position)
        for s in self.entries[position]:
            if s not in one.creates and not self._present(s, position):
                return False
        creates = sum(self.p.sizes[s] for s in one.creates)
        if not self._room(creates + one.workspace_bytes, position):
            return False
        for s in self.entries[position]:
            if self.state[s].arriving:
                self.actions.append(Action(_K.WAIT_IN, s))
                self.state[s].arriving = False
            if self.state[s].leaving and s in one.writes:
                self._cancel(s)
        return True

    def _extend(self, position: int) -> None:
        """Advance the head as far as window and budget have room."""
        while self.head < len(self.p.order):
            if self.stops.get(self.head, -1) > position:
                return
            one = self.p.graph.ops[self.p.order[self.head]]
            for s in self.entries[self.head]:
                state = self.state[s]
                if state.queue and state.queue[-1] == self.head:
                    continue
                if state.queue:
                    state.queue.append(self.head)
                    continue
                size = self.p.sizes[s]
                if self.in_window + size > self.window_bytes and self.head > position:
                    return
                lazy = s in one.creates
                short = not lazy and not state.here and self.used + size > self.p.budget_bytes and self.head > position
                if short and not self._drain(size, position):
                    return
                state.queue.append(self.head)
                self.in_window += size
                if not lazy and not state.here and self.head > position:
                    self._fetch(s)
            self.head += 1

    def _fetch(self, s: int) -> None:
        self.actions.append(Action(_K.SWAP_IN, s))
        self.state[s].here = self.state[s].arriving = self.state[s].clean = True
        self.used += self.p.sizes[s]

    def _present(self, s: int, position: int) -> bool:
        if self.state[s].here:
            return True
        if not self._room(self.p.sizes[s], position):
            return False
        self._fetch(s)
        return True

    def _room(self, size: int, position: int) -> bool:
        """Wait for copies out, in order, then undo prefetches, until `size` bytes are free."""
        return self._drain(size, position) or self._backtrack(size, position)

    def _drain(self, size: int, position: int) -> bool:
        needed = set(self.entries[position])
        while self.used + size > self.p.budget_bytes:
            waiting = [s for s in self.tail if s not in needed]
            if not waiting:
                return False
            self._wait(waiting[0])
        return True

    def _wait_oldest(self) -> None:
        self._wait(self.tail[0])

    def _wait(self, s: int) -> None:
        self.tail.remove(s)
        self.actions.append(Action(_K.WAIT_OUT, s))
        state = self.state[s]
        state.here = state.leaving = False
        state.clean = True
        self.used -= self.p.sizes[s]

    def _cancel(self, s: int) -> None:
        """A storage on its way out that is written next: the copy is waited for and fetched again at once."""
        self._wait(s)
        self._fetch(s)
        self.actions.append(Action(_K.WAIT_IN, s))
        self.state[s].arriving = False

    def _backtrack(self, size: int, position: int) -> bool:
        """Give up the furthest prefetches: what no op up to this one needs goes, and is not fetched again before it has run."""
        needed = set(self.entries[position])
        candidates = [
            s
            for s, state in enumerate(self.state)
            if state.here and not state.leaving and s not in needed and self.p.movable[s] and self.p.uses[s]
        ]
        far = sorted(candidates, key=lambda s: -(self.state[s].queue[0] if self.state[s].queue else len(self.p.order)))
        for s in far:
            if self.used + size <= self.p.budget_bytes:
                break
            state = self.state[s]
            if state.arriving:
                self.actions.append(Action(_K.WAIT_IN, s))
                state.arriving = False
            if state.queue:
                self.stops[state.queue[0]] = max(self.stops.get(state.queue[0], -1), position + 1)
                self.head = min(self.head, state.queue[0])
            self._leave(s, position)
        for state_id, state in enumerate(self.state):
            while state.queue and state.queue[-1] >= self.head:
                state.queue.pop()
                if not state.queue:
                    self.in_window -= self.p.sizes[state_id]
        return self._drain(size, position)

    def _leave(self, s: int, position: int) -> None:
        """Out of the device: free if unmodified, else by a copy that is waited for under pressure."""
        state = self.state[s]
        if state.clean:
            self.actions.append(Action(_K.RELEASE, s))
            state.here = False
            self.used -= self.p.sizes[s]
        else:
            self.actions.append(Action(_K.SWAP_OUT, s))
            state.leaving = True
            self.tail.append(s)

    def _end(self, position: int, op: int) -> None:
        """After an op: what is over is released, what the window does not hold leaves."""
        one, graph = self.p.graph.ops[op], self.p.graph
        for s in one.creates:
            self.state[s].here, self.state[s].clean = True, False
            self.used += self.p.sizes[s]
        for s in one.writes:
            self.state[s].clean = False
        for s in dict.fromkeys((*one.reads, *one.writes, *one.creates)):
            state, storage = self.state[s], graph.storages[s]
            if state.queue and state.queue[0] <= position:
                state.queue.pop(0)
                if not state.queue:
                    self.in_window -= self.p.sizes[s]
            over = self.p.uses[s][-1] == position
            if over and not storage.external and s not in graph.outputs:
                if state.leaving:
                    self._wait(s)
                else:
                    self.actions.append(Action(_K.RELEASE, s))
                    state.here = False
                    self.used -= self.p.sizes[s]
            elif self.p.movable[s] and not state.queue and not state.leaving:
                self._leave(s, position)
