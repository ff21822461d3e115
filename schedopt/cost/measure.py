"""Times every distinct op of a captured step on this CPU, in isolation, so that memory for one op at a time is enough.

An op timed in a tight loop is not the op of a training step: its inputs sit in the cache. Tried on ResNet-50 (8 x 112 px) and GPT-2
(2 layers, 2 x 256 tokens) against the same ops timed inside the running step; sum over all ops relative to the latter:

    warm loop 0.9 to 1.2 (BatchNorm backward 0.4, SGD 0.5), heap trimmed before each run 2.2 (page faults that the step does not see),
    caches evicted before each run 0.94 to 1.04.

Against whole steps of the captured graph (CPU time, one thread, a busy machine): ResNet-50 0.97, VGG-16 0.93, GPT-2 0.97.

So caches are evicted. Dropping the result is part of the time: large blocks go back to the kernel, and the step pays for that too. Other
programs on the machine only ever add time, in bursts: samples come from two rounds over all ops and the lower quartile counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from schedopt import compat
from schedopt.capture.captured import Captured, node_info
from schedopt.cost.analytic import analytic_cost
from schedopt.cost.arguments import real_arguments
from schedopt.cost.cache import CostCache, OpCost
from schedopt.graph import Graph, Op
from schedopt.heap import give_back, keep_heap
from schedopt.machine import Machine

logger = logging.getLogger(__name__)

_ROUNDS = 2
_ROUND_NS = 12_000_000
_LONG_NS = 200_000_000
_EVICT_BYTES = 32 << 20
_LARGEST_HEAP_BLOCK = 31 << 20

Progress = Callable[[int, int], None]


def measure(captured: Captured, machine: Machine, *, progress: Progress | None = None, cache: CostCache | None = None) -> Graph:
    """The plain graph with `time_ns` and `workspace_bytes` of every op, measured on this CPU.

    `progress(done, total)` counts measured ops; those found in `cache` are not run (None: the cache of this user, saved at the end).
    An op that does not run on made-up values gets its analytic cost for `machine`. The random generator and all live tensors stay as
    they are. ValueError for tensors that are not on the CPU: use `estimate`.
    """
    kept = CostCache() if cache is None else cache
    wanted: dict[str, tuple[fx.Node, Op]] = {}
    keys: list[str] = []
    for node in captured.gm.graph.nodes:
        if node.op != "call_function" or (number := node_info(node).op) is None:
            continue
        op = captured.graph.ops[number]
        key = cost_key(node, op)
        keys.append(key)
        if kept.get(key) is None:
            wanted.setdefault(key, (node, op))
    if wanted:
        keep_heap()
        _measure_all(wanted, machine, kept, progress or (lambda done, total: None))
        kept.save()
        give_back()
    ops = []
    for op, key in zip(captured.graph.ops, keys, strict=True):
        cost = kept.get(key)
        assert cost is not None
        ops.append(replace(op, time_ns=cost.time_ns, workspace_bytes=cost.workspace_bytes))
    return replace(captured.graph, ops=tuple(ops))


def cost_key(node: fx.Node, op: Op) -> str:
    """Under what the cost of a call is kept: its signature; for an optimizer update also the options that choose its arithmetic."""
    optimizer = getattr(node.target, "optimizer", None)
    if optimizer is None:
        return op.signature
    options = {
        name: value for name, value in optimizer.defaults.items() if isinstance(value, bool | None) or name in ("momentum", "dampening")
    }
    options["weight_decay"] = bool(optimizer.defaults.get("weight_decay"))
    return f"{op.signature} {sorted(options.items())}"


def _measure_all(wanted: dict[str, tuple[fx.Node, Op]], machine: Machine, kept: CostCache, progress: Progress) -> None:
    generator = torch.get_rng_state()
    torch.empty(_LARGEST_HEAP_BLOCK, dtype=torch.uint8).fill_(
        0
    )  # freed at once: from here on glibc keeps blocks of this size, as in a step
    evictor = torch.zeros(_EVICT_BYTES, dtype=torch.uint8)
    samples: dict[str, list[int]] = {key: [] for key in wanted}
    workspace: dict[str, int] = {}
    done, total = 0, _ROUNDS * len(wanted)
    try:
        with torch.no_grad():
            for _ in range(_ROUNDS):
                for key, (node, op) in wanted.items():
                    if kept.get(key) is None:
                        _sample(key, node, op, machine, kept, evictor, samples, workspace)
                    done += 1
                    progress(done, total)
    finally:
        torch.set_rng_state(generator)
    for key, bytes_ in workspace.items():
        if (times := sorted(samples[key])) and kept.get(key) is None:
            kept.put(key, OpCost(times[len(times) // 4], bytes_))


def _sample(
    key: str,
    node: fx.Node,
    op: Op,
    machine: Machine,
    kept: CostCache,
    evictor: torch.Tensor,
    samples: dict[str, list[int]],
    workspace: dict[str, int],
) -> None:
    """One round of one op: the first time with its workspace, then timed runs."""
    _refuse_other_devices(node)
    try:
        args, kwargs = real_arguments(node)
        if key not in workspace:
            workspace[key] = workspace_bytes(node.target, args, kwargs)  # type: ignore[arg-type]  # a call_function node's target is callable
        samples[key] += run_times_ns(node.target, args, kwargs, evictor)  # type: ignore[arg-type]  # as above
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
        logger.warning("%s does not run on made-up values, its cost is estimated: %s", op.target, error)
        workspace.pop(key, None)
        kept.put(key, analytic_cost(node, op, machine.devices[0]))


def run_times_ns(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], evictor: torch.Tensor) -> list[int]:
    """Times of runs with cold caches, dropping of the result included: as many as go into 12 ms, at least two, of a long op one."""
    times: list[int] = []
    begun = time.perf_counter_ns()
    while len(times) < (1 if times and times[0] > _LONG_NS else 2) or time.perf_counter_ns() - begun < _ROUND_NS:
        evictor.add_(1)
        started = time.perf_counter_ns()
        call(*args, **kwargs)
        times.append(time.perf_counter_ns() - started)
    return times


def workspace_bytes(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The most bytes that a call has allocated at one moment beyond the new storages that it returns."""
    result, changes = compat.allocator_changes(lambda: call(*args, **kwargs))
    given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
    made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(result)}
    created = sum(size for key, size in made.items() if key not in given)
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return max(0, peak - created)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _refuse_other_devices(node: fx.Node) -> None:
    for one in (node, *node.all_input_nodes):
        for tensor in _tensors(one.meta.get("val")):
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"op {node.name} works on {tensor.device}: only the CPU is measured; use the analytic cost model (estimate)"
                )
