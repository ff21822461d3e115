"""Contiguous stages of least maximum load: dynamic programming over some orders of the model at first, then over all ideals."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from schedopt.partition import Partition, PartitionSpec
from schedopt.solvers.partition_dp import StagePlan, all_ideals, best_stages, prefixes
from schedopt.solvers.partition_tables import PartitionTables

_MOST_IDEALS = 60_000
_ORDERS = 24


@dataclass(frozen=True, slots=True)
class PartitionOptions:
    """`time_limit_s` for all together; `seed` for the orders that are tried."""

    time_limit_s: float = 60.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PartitionAnswer:
    """`partition` None: nothing found within the bytes (`status` says whether that is proven). `bound`: no partition's greatest load is
    less."""

    status: str  # "optimal", "feasible", "infeasible", "unknown"
    partition: Partition | None
    max_load: float
    bound: float
    seconds: float

    @property
    def gap(self) -> float | None:
        """Relative distance of the greatest load from the bound."""
        return self.max_load / self.bound - 1.0 if self.partition is not None and self.bound else None


def solve_partition(
    spec: PartitionSpec, options: PartitionOptions | None = None, progress: Callable[[float, str], None] | None = None
) -> PartitionAnswer:
    """See the module. `progress(share done, what is done)`."""
    chosen, tell = options or PartitionOptions(), progress or (lambda _share, _what: None)
    started = time.perf_counter()
    until = started + chosen.time_limit_s
    tables = PartitionTables(spec)
    tell(0.0, "some orders")
    draw = random.Random(chosen.seed)
    orders = [list(range(len(tables.members)))] + [_random_order(tables, draw) for _ in range(_ORDERS)]
    best, method = best_stages(tables, prefixes(orders), until=until), "some orders"
    ideals = all_ideals(tables, _MOST_IDEALS) if time.perf_counter() < until else None
    proven = False
    if ideals is not None:
        under = best.max_load if best else float("inf")
        better = best_stages(tables, ideals, under, until, lambda share: tell(share, f"{len(ideals)} ideals"))
        proven = time.perf_counter() < until
        best, method = (better, "all ideals") if better else (best, method)
    return _answer(tables, best, method, proven, time.perf_counter() - started)


def _answer(tables: PartitionTables, best: StagePlan | None, method: str, proven: bool, seconds: float) -> PartitionAnswer:
    bound = tables.work_bound()
    if best is None:
        return PartitionAnswer("infeasible" if proven else "unknown", None, 0.0, bound, seconds)
    partition = tables.partition(best.device_of, best.kinds, method)
    status = "optimal" if proven else "feasible"
    return PartitionAnswer(status, partition, best.max_load, best.max_load if proven else min(bound, best.max_load), seconds)


def _random_order(tables: PartitionTables, draw: random.Random) -> list[int]:
    """Of the items, each after what comes before it."""
    missing = [0] * len(tables.members)
    after: list[list[int]] = [[] for _ in tables.members]
    for a, b in tables.arcs:
        missing[b] += 1
        after[a].append(b)
    ready, line = [i for i, count in enumerate(missing) if not count], []
    while ready:
        item = ready.pop(draw.randrange(len(ready)) if draw.random() < 0.5 else -1)
        line.append(item)
        for other in after[item]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    return line
