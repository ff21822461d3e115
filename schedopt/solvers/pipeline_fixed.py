"""Pipeline schedules that are known by name: the controls, and the first answers that the search starts from.

`gpipe`: all forwards, then all backwards. `1f1b`: as few forwards under way as keep everybody busy, every backward whole. `interleaved`: 1F1B
over several stages per device (stage s on device s modulo devices; Megatron-LM, arXiv 2104.04473). `zb-h1`, `zb-h2`: 1F1B with gradients of
weights put off, so that they fill the end; within the memory of 1F1B, and within twice of it (arXiv 2401.10241, sections 2.1 and 2.2).
"""

from __future__ import annotations

from collections.abc import Callable

from schedopt.solvers.pipeline_clock import Order, PipelineTables


def fixed_orders(tables: PipelineTables) -> dict[str, list[Order]]:
    """By name, the schedules that make sense for the specification (whether they fit its bytes is not looked at)."""
    if all(len(stages) == 1 for stages in tables.spec.stages_of):
        return {name: make(tables) for name, make in _STRAIGHT.items()}
    chunks, devices = divmod(len(tables.spec.stages), tables.spec.num_devices)
    looped = not devices and all(d == s % tables.spec.num_devices for s, d in enumerate(tables.spec.device))
    if looped and tables.m % tables.spec.num_devices == 0:
        return {"interleaved": _interleaved(tables, chunks)}
    return {}


def _gpipe(tables: PipelineTables) -> list[Order]:
    orders: list[Order] = [[] for _ in tables.spec.stages_of]
    for s, d in enumerate(tables.spec.device):
        orders[d] += [tables.number(s, 0, k) for k in range(tables.m)]
        orders[d] += [tables.number(s, part, k) for k in range(tables.m) for part in (1, 2)]
    return orders


def _one_by_one(tables: PipelineTables, ahead: Callable[[int, int], int], lag: Callable[[int], int]) -> list[Order]:
    """Per stage s: `ahead(s, stages)` forwards, then one gradient and one forward in turn; gradients of weights `lag(s)` behind."""
    orders: list[Order] = [[] for _ in tables.spec.stages_of]
    for s, d in enumerate(tables.spec.device):
        order, forward, weights = orders[d], 0, 0
        while forward < min(tables.m, max(1, ahead(s, len(tables.spec.stages)))):
            order.append(tables.number(s, 0, forward))
            forward += 1
        for k in range(tables.m):
            order.append(tables.number(s, 1, k))
            if k + 1 - weights > lag(s) or forward == tables.m:
                order.append(tables.number(s, 2, weights))
                weights += 1
            if forward < tables.m:
                order.append(tables.number(s, 0, forward))
                forward += 1
        order += [tables.number(s, 2, k) for k in range(weights, tables.m)]
    return orders


def _interleaved(tables: PipelineTables, chunks: int) -> list[Order]:
    """Groups of as many micro-batches as there are devices go through one chunk after the other."""
    devices, total = tables.spec.num_devices, tables.m * chunks
    orders: list[Order] = []
    for d in range(devices):
        ahead = min(total, (devices - d - 1) * 2 + (chunks - 1) * devices + 1)

        def at(k: int, part: int, d: int = d) -> int:
            group, inside = divmod(k, devices * chunks)
            chunk, lane = divmod(inside, devices)
            chunk = chunk if part == 0 else chunks - 1 - chunk
            return tables.number(chunk * devices + d, part, group * devices + lane)

        order = [at(k, 0) for k in range(ahead)]
        for k in range(total):
            order += [at(k, 1), at(k, 1) + tables.m]
            if ahead + k < total:
                order.append(at(ahead + k, 0))
        orders.append(order)
    return orders


_STRAIGHT: dict[str, Callable[[PipelineTables], list[Order]]] = {
    "gpipe": _gpipe,
    "1f1b": lambda tables: _one_by_one(tables, lambda s, p: p - s, lambda s: 0),
    "zb-h1": lambda tables: _one_by_one(tables, lambda s, p: p - s, lambda s: s),
    "zb-h2": lambda tables: _one_by_one(tables, lambda s, p: 2 * (p - s) - 1, lambda s: 2 * s),
}
