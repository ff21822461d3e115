"""Times of a pipeline schedule from the order of actions on every device: as early as possible, and then as late as the ends allow.

Actions are numbered `(stage * 3 + part) * microbatches + microbatch` here, parts in the order F, I, W.
"""

from __future__ import annotations

import math
from collections import deque
from functools import cached_property
from itertools import pairwise

from schedopt.pipeline import PARTS, PipelineAction, PipelineSchedule, PipelineSpec

Order = list[int]


class PipelineTables:
    """A specification as lists of numbers."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec
        self.m = spec.microbatches
        self.count = len(spec.stages) * 3 * self.m
        self.duration = [stage.time(part) + spec.per_action for stage in spec.stages for part in PARTS]
        self.bytes = [stage.bytes(part) for stage in spec.stages for part in PARTS]
        last = len(spec.stages) - 1
        self.forward_link = [spec.transfer(s, s + 1) if s < last else 0 for s in range(last + 1)]  # from s to the next
        self.back_link = [spec.transfer(s, s - 1) if s else 0 for s in range(last + 1)]  # from s to the one before

    def number(self, stage: int, part: int, microbatch: int) -> int:
        """Number of an action; `part` 0, 1, 2 for F, I, W."""
        return (stage * 3 + part) * self.m + microbatch

    def action(self, number: int) -> PipelineAction:
        """The action with a number."""
        kind, microbatch = divmod(number, self.m)
        return PipelineAction(kind // 3, PARTS[kind % 3], microbatch)

    @cached_property
    def arcs(self) -> list[tuple[int, int, int]]:
        """(before, after, least time from start to start) by data."""
        found = []
        for s in range(len(self.spec.stages)):
            for k in range(self.m):
                f, i, w = (self.number(s, part, k) for part in range(3))
                found += [(f, i, self.duration[3 * s]), (i, w, self.duration[3 * s + 1])]
                if s + 1 < len(self.spec.stages):
                    found.append((f, self.number(s + 1, 0, k), self.duration[3 * s] + self.forward_link[s]))
                if s:
                    found.append((i, self.number(s - 1, 1, k), self.duration[3 * s + 1] + self.back_link[s]))
        return found

    def time(self, number: int) -> int:
        """Duration of an action."""
        return self.duration[number // self.m]


def start_times(tables: PipelineTables, orders: list[Order]) -> list[int] | None:
    """Start per action, as late as possible for the earliest possible ends of all devices; None if the orders wait for each other."""
    arcs = [*tables.arcs]
    for order in orders:
        arcs += [(a, b, tables.time(a)) for a, b in pairwise(order)]
    after: list[list[tuple[int, int]]] = [[] for _ in range(tables.count)]
    missing = [0] * tables.count
    for a, b, least in arcs:
        after[a].append((b, least))
        missing[b] += 1
    early = [0] * tables.count
    ready = deque(x for x in range(tables.count) if not missing[x])
    line: list[int] = []
    while ready:
        x = ready.popleft()
        line.append(x)
        for y, least in after[x]:
            early[y] = max(early[y], early[x] + least)
            missing[y] -= 1
            if not missing[y]:
                ready.append(y)
    if len(line) < tables.count:
        return None
    late = [1 << 62] * tables.count
    for order in orders:
        late[order[-1]] = early[order[-1]]
    for x in reversed(line):
        for y, least in after[x]:
            late[x] = min(late[x], late[y] - least)
    return late


def fits(tables: PipelineTables, orders: list[Order]) -> bool:
    """Whether no device ever holds more bytes than it has."""
    for order, limit in zip(orders, tables.spec.limit_bytes, strict=True):
        used = 0
        for x in order if limit is not None else ():
            used += tables.bytes[x // tables.m]
            if limit is not None and used > limit:
                return False
    return True


def objective(tables: PipelineTables, orders: list[Order], starts: list[int]) -> int:
    """Span or makespan, as the specification asks."""
    ends = [starts[order[-1]] + tables.time(order[-1]) for order in orders]
    if tables.spec.objective == "makespan":
        return max(ends) - min(0, *(starts[order[0]] for order in orders))
    return max(end - starts[order[0]] for end, order in zip(ends, orders, strict=True))


def as_schedule(tables: PipelineTables, orders: list[Order], starts: list[int], method: str) -> PipelineSchedule:
    """The schedule with named actions."""
    return PipelineSchedule(tuple(tuple((tables.action(x), starts[x]) for x in order) for order in orders), method)


def lower_bound(tables: PipelineTables) -> int:
    """No schedule within the bytes is shorter. Per device: its work, and what it must wait (`_waits`); or one micro-batch's way alone.

    For the makespan also the way of the first micro-batch to a device, and of its last gradient back from there.
    """
    spec, count = tables.spec, len(tables.spec.stages)
    trips = [_return_at(tables, s) + tables.duration[3 * s + 1] + tables.duration[3 * s + 2] for s in range(count)]
    spans = [load + sum(_waits(tables, device)) for device, load in enumerate(spec.load)]
    if spec.objective == "span":
        return max(*spans, *trips)
    head = [0]
    for s in range(count - 1):
        head.append(head[-1] + tables.duration[3 * s] + tables.forward_link[s])
    tail = [0]  # from the end of the last I of a stage to the end of the last action of the stages before it
    for s in range(1, count):
        tail.append(tables.back_link[s] + tables.duration[3 * (s - 1) + 1] + max(tables.duration[3 * (s - 1) + 2], tail[-1]))
    best = max(head[s] + trips[s] for s in range(count))
    for device, stages in enumerate(spec.stages_of):
        after = min(max(0, tail[s] - sum(tables.duration[3 * x + 2] for x in stages) * tables.m) for s in stages)
        best = max(best, min(head[s] for s in stages) + spans[device] + after)
    return best


def _return_at(tables: PipelineTables, s: int) -> int:
    """From the start of a stage's F to the earliest start of the same micro-batch's I there."""
    behind = range(s + 1, len(tables.spec.stages))
    there = tables.duration[3 * s] + sum(tables.forward_link[x - 1] + tables.duration[3 * x] for x in behind)
    return there + sum(tables.duration[3 * x + 1] + tables.back_link[x] for x in behind)


def _waits(tables: PipelineTables, device: int) -> tuple[int, int]:
    """Time in which a device with one stage can only wait, for lack of bytes.

    Before its first I it runs forwards only, each of which holds its bytes until then: no more than fit. After its last F it runs only what
    the bytes let be under way besides that micro-batch, until its I may start. If all micro-batches fit at once the two may be the same time.
    """
    stages, limit = tables.spec.stages_of[device], tables.spec.limit_bytes[device]
    if len(stages) > 1 or limit is None:
        return 0, 0
    s = stages[0]
    forward, gradient, weights = tables.duration[3 * s : 3 * s + 3]
    taken = tables.bytes[3 * s]
    kept = taken + tables.bytes[3 * s + 1]
    if taken <= 0 or taken > limit:
        return 0, 0
    returns, under_way = _return_at(tables, s), limit // taken
    first = max(0, returns - min(under_way, tables.m) * forward)
    if kept <= 0:
        return first, 0
    work = max((gradient + weights) / taken, weights / kept) * (limit - taken)
    last = max(0, returns - forward - math.ceil(work))
    return (first, last) if tables.m > under_way else (max(first, last), 0)
