"""Pipeline schedules by simulation: every device takes the next action by a few rules as soon as it is free.

Gradients of inputs come first, for other devices wait for them; then forwards, as far as the bytes allow; gradients of weights fill the time
in which neither is there, or free bytes that a forward needs (zero-bubble scheduling, arXiv 2401.10241). The rules' numbers are tried in many
combinations by `pipeline_auto`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from schedopt.solvers.pipeline_clock import Order, PipelineTables

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Rules:
    """`fill`: a gradient of weights may start if the next arrival is at least this share of its time away. `patience`: a forward is put off if
    a gradient arrives within this share of its time. `cap`: forwards under way per stage at most (None: bytes alone decide). `deep_first`:
    of several stages on a device the last one goes first."""

    fill: float = 0.5
    patience: float = 0.0
    cap: tuple[int, ...] | None = None
    deep_first: bool = True


def simulate(tables: PipelineTables, rules: Rules) -> list[Order] | None:
    """The order on each device; None if the rules get stuck."""
    return _Simulation(tables, rules).run()


class _Simulation:
    def __init__(self, tables: PipelineTables, rules: Rules) -> None:
        self.t, self.r = tables, rules
        spec = tables.spec
        count = len(spec.stages)
        self.done = [[0, 0, 0] for _ in range(count)]  # per stage: F, I and W started
        self.arrived: list[list[list[int]]] = [[[], []] for _ in range(count)]  # per stage: when F and I may start, by micro-batch
        self.arrived[0][0] = [0] * tables.m
        self.used = [0] * spec.num_devices
        self.free_at = [0] * spec.num_devices
        self.orders: list[Order] = [[] for _ in range(spec.num_devices)]
        self.events = [(0, d) for d in range(spec.num_devices)]
        self.deeper = [sum(spec.stages[x].forward_bytes for x in spec.stages_of[spec.device[s]] if x > s) for s in range(count)]

    def run(self) -> list[Order] | None:
        """Go from event to event."""
        heapq.heapify(self.events)
        while self.events:
            now, device = heapq.heappop(self.events)
            if now >= self.free_at[device]:
                self._decide(now, device)
        if sum(map(len, self.orders)) < self.t.count:
            return None
        return self.orders

    def _decide(self, now: int, device: int) -> None:
        stages = self.t.spec.stages_of[device]
        gradients = [(when, s) for s in stages if (when := self._gradient_at(s)) < _NEVER]
        forwards = [(when, s) for s in stages if (when := self._forward_at(s)) < _NEVER]
        ready = [s for when, s in gradients if when <= now]
        open_forwards = [s for when, s in forwards if when <= now and self._room(device, s)]
        if ready:
            self._start(now, device, min(ready, key=lambda s: (self.done[s][1], -s)), 1)
            return
        soon = min((when for when, _ in gradients), default=_NEVER)
        if open_forwards:
            s = max(open_forwards) if self.r.deep_first else min(open_forwards, key=lambda s: (self.done[s][0], s))
            if soon - now >= self.r.patience * self.t.duration[3 * s]:
                self._start(now, device, s, 0)
                return
        owed = [s for s in stages if self.done[s][1] > self.done[s][2]]
        coming = min(soon, min((when for when, s in forwards if when > now and self._room(device, s)), default=_NEVER))
        blocked = any(when <= now and not self._room(device, s) for when, s in forwards)
        if owed:
            s = min(owed, key=lambda s: (self.done[s][2], -s))
            if coming - now >= self.r.fill * self.t.duration[3 * s + 2] or (blocked and not open_forwards):
                self._start(now, device, s, 2)
                return
        if coming < _NEVER:
            heapq.heappush(self.events, (max(coming, now + 1), device))

    def _gradient_at(self, s: int) -> int:
        """When the next gradient of an input may start, as far as is known."""
        k = self.done[s][1]
        return self.arrived[s][1][k] if k < len(self.arrived[s][1]) else _NEVER

    def _forward_at(self, s: int) -> int:
        k = self.done[s][0]
        return self.arrived[s][0][k] if k < len(self.arrived[s][0]) else _NEVER

    def _room(self, device: int, s: int) -> bool:
        limit = self.t.spec.limit_bytes[device]
        if self.r.cap is not None and self.done[s][0] - self.done[s][1] >= self.r.cap[s]:
            return False
        return limit is None or self.used[device] + self.t.bytes[3 * s] + self.deeper[s] <= limit

    def _start(self, now: int, device: int, s: int, part: int) -> None:
        k = self.done[s][part]
        self.done[s][part] += 1
        self.orders[device].append(self.t.number(s, part, k))
        self.used[device] += self.t.bytes[3 * s + part]
        end = self.free_at[device] = now + self.t.duration[3 * s + part]
        heapq.heappush(self.events, (end, device))
        last = len(self.t.spec.stages) - 1
        if part == 0 and s < last:
            self._arrive(s + 1, 0, end + self.t.forward_link[s])
        elif part == 0:
            self._arrive(s, 1, end)
        elif part == 1 and s:
            self._arrive(s - 1, 1, end + self.t.back_link[s])

    def _arrive(self, s: int, part: int, when: int) -> None:
        self.arrived[s][part].append(when)
        heapq.heappush(self.events, (max(when, self.free_at[self.t.spec.device[s]]), self.t.spec.device[s]))
