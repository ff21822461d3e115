"""The scheduling problem of one device as plain data: an order of ops, what each needs, what may move.

Positions count along `order`. A storage is *movable* if it is large enough to be worth a copy; the gap after its k-th use (and, for what
outlives the step, the gap over the step's boundary, k = -1) may be filled by keeping it, by a swap, or by a recompute.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from schedopt.graph import Graph, Phase, Recompute, expected_versions
from schedopt.machine import Link

SMALL_BYTES = 64 * 1024  # below this a storage never moves: copying it costs more than its bytes bring


@dataclass(frozen=True)
class Problem:
    """One device, one budget, one order of ops. `linger`: what was brought back only as the input of a recompute stays on the device if it
    is used again within so many positions. `copies`: whether anything may be copied at all (not in the plain plan)."""

    graph: Graph
    order: tuple[int, ...]
    budget_bytes: int
    link: Link
    undo: bool
    may_swap: bool = True
    may_recompute: bool = True
    linger: int = 6
    copies: bool = True

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes per storage."""
        return tuple(s.size_bytes for s in self.graph.storages)

    @cached_property
    def position(self) -> dict[int, int]:
        """Op -> position in the order."""
        return {op: i for i, op in enumerate(self.order)}

    @cached_property
    def needed(self) -> tuple[dict[int, int], ...]:
        """Per op, the version at which it needs each storage."""
        return expected_versions(self.graph)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """Per storage, the positions at which an op touches it."""
        found: list[list[int]] = [[] for _ in self.graph.storages]
        for position, op in enumerate(self.order):
            one = self.graph.ops[op]
            for s in dict.fromkeys((*one.reads, *one.writes, *one.creates)):
                found[s].append(position)
        return tuple(map(tuple, found))

    @cached_property
    def writers(self) -> tuple[tuple[int, ...], ...]:
        """Per storage, the ops that write it in place, in captured order."""
        found: list[list[int]] = [[] for _ in self.graph.storages]
        for op in self.graph.ops:
            for s in op.writes:
                found[s].append(op.id)
        return tuple(map(tuple, found))

    @cached_property
    def creator(self) -> dict[int, int]:
        """Storage -> the op that creates it."""
        return {s: op.id for op in self.graph.ops for s in op.creates}

    @cached_property
    def split(self) -> frozenset[int]:
        """Storages that have parts, and the parts: they always rest on the lower tier."""
        return self.graph.split()

    @cached_property
    def movable(self) -> tuple[bool, ...]:
        """Per storage, whether it may be swapped or dropped at all."""
        outputs = set(self.graph.outputs)
        inputs = {s.id for s in self.graph.storages if s.external and not s.persistent}
        return tuple(
            (s.size_bytes >= SMALL_BYTES or s.id in self.split) and s.id not in outputs and s.id not in inputs for s in self.graph.storages
        )

    @cached_property
    def snapshot(self) -> tuple[int, ...]:
        """Small storages that outlive the step and are written: their undo copy stays on the device. Those that only the updates at the
        very end write need none if no copy comes after (`copies`)."""
        if not self.undo:
            return ()
        calm = len(self.order)
        while calm and self.graph.ops[self.order[calm - 1]].phase is Phase.UPDATE:
            calm -= 1
        early = {s for op in self.order[: len(self.order) if self.copies else calm] for s in self.graph.ops[op].writes}
        return tuple(s.id for s in self.graph.storages if s.persistent and s.id in early and not self.movable[s.id])

    def recipe(self, storage: int, version: int) -> tuple[int, ...] | None:
        """Ops that make the storage again, up to a version; None where that is not allowed."""
        if storage not in self.creator:
            return None
        ops = (self.creator[storage], *self.writers[storage][:version])
        for op in ops:
            one = self.graph.ops[op]
            alone = one.recompute is Recompute.STATISTICS or set(one.writes) <= {storage}
            if one.recompute is Recompute.BARRED or not alone:
                return None
        return ops

    def recompute_ns(self, storage: int, version: int) -> int | None:
        """Time of the recipe alone; None without one."""
        recipe = self.recipe(storage, version)
        return None if recipe is None else sum(self.graph.ops[op].time_ns for op in recipe)

    @cached_property
    def compute_ns(self) -> int:
        """Time of all ops once."""
        return sum(op.time_ns for op in self.graph.ops)


def one_each(problems: list[Problem]) -> list[Problem]:
    """The first of the problems of each graph."""
    return list({id(problem.graph): problem for problem in reversed(problems)}.values())[::-1]


def captured_order(graph: Graph) -> tuple[int, ...]:
    """Every update at the end, as eager does."""
    return tuple(op.id for op in graph.ops)


def early_order(graph: Graph) -> tuple[int, ...]:
    """Each update as soon as its gradient is complete and nobody reads the old parameter any more."""
    last_touch: dict[int, int] = {}
    for op in graph.ops:
        if op.phase is not Phase.UPDATE:
            last_touch.update(dict.fromkeys((*op.reads, *op.writes, *op.creates), op.id))
    after: dict[int, list[int]] = {}
    for op in graph.ops:
        if op.phase is Phase.UPDATE:
            ready = max((last_touch.get(s, -1) for s in (*op.reads, *op.writes)), default=-1)
            after.setdefault(ready, []).append(op.id)
    order = list(after.get(-1, []))
    for op in graph.ops:
        if op.phase is not Phase.UPDATE:
            order += [op.id, *after.get(op.id, [])]
    return tuple(order)


def order_profile(graph: Graph, order: tuple[int, ...]) -> list[int]:
    """Bytes in use at each position when everything is kept until its last use."""
    last: dict[int, int] = {}
    for position, op in enumerate(order):
        one = graph.ops[op]
        last.update(dict.fromkeys((*one.reads, *one.writes, *one.creates), position))
    outputs = set(graph.outputs)
    used = sum(s.size_bytes for s in graph.storages if s.external and s.parent is None)
    profile = []
    for position, op in enumerate(order):
        one = graph.ops[op]
        used += sum(graph.storages[s].size_bytes for s in one.creates)
        profile.append(used + one.workspace_bytes)
        for s in dict.fromkeys((*one.reads, *one.writes, *one.creates)):
            if last[s] == position and not graph.storages[s].external and s not in outputs:
                used -= graph.storages[s].size_bytes
    return profile


def eager_peak(graph: Graph) -> int:
    """Peak of the eager step: captured order, every gradient alive until its update, all else released at its last use."""
    return max(order_profile(graph, captured_order(graph)), default=0)


def lazy_order(graph: Graph, limit_bytes: int) -> tuple[int, ...]:
    """Each update as late as `limit_bytes` allows: an update runs early only where the next op would not fit otherwise."""
    early = early_order(graph)
    pending: list[int] = []
    order: list[int] = []
    sizes = [s.size_bytes for s in graph.storages]
    last: dict[int, int] = {}
    for op in graph.ops:
        if op.phase is not Phase.UPDATE:
            last.update(dict.fromkeys((*op.reads, *op.writes, *op.creates), op.id))
    kept = {s for op in graph.ops if op.phase is Phase.UPDATE for s in op.reads} | set(graph.outputs)
    used = sum(s.size_bytes for s in graph.storages if s.external)
    for op_id in early:
        op = graph.ops[op_id]
        if op.phase is Phase.UPDATE:
            pending.append(op_id)
            continue
        need = op.workspace_bytes + sum(sizes[s] for s in op.creates)
        while pending and used + need > limit_bytes:
            update = graph.ops[pending.pop(0)]
            order.append(update.id)
            used -= sum(sizes[s] for s in update.reads if not graph.storages[s].external)
        order.append(op_id)
        used += sum(sizes[s] for s in op.creates)
        for s in dict.fromkeys((*op.reads, *op.writes, *op.creates)):
            if last[s] == op_id and s not in kept and not graph.storages[s].external:
                used -= sizes[s]
    return tuple(order + pending)
