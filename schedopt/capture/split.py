"""Large updates in parts: parameter, gradient and optimizer state of one layer need not be on the device together.

`update_fc(p, g, m)` with cuts at elements 0, 1000, 2000 becomes
`update_fc_0(p[0], g, m[0]); update_fc_1(p[1], g, m[1]); ...`, where `p[i]` and `m[i]` are storages of their own that come from the lower
tier and go back there, into the place of `p` and `m`. Optimizers work element by element, so the bits are the same. State that is not one
value per element (Adam's step) is read by all parts and written by the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import fx

from schedopt.capture.captured import Captured, External, node_info, set_node_info
from schedopt.capture.update import UpdateRule
from schedopt.graph import Graph, Op, Storage, StorageKind

PAGE = 4096  # parts start on pages of the lower tier
LEAST_PART_BYTES = 256 * 1024
_LARGE = 8  # an update is large if it needs more than this part of the eager peak
_PARTS = 64  # its parts have this share of the eager peak
_ODD_BYTES = 1024  # scalars and the like, which a part needs as much as the whole

Cuts = dict[int, tuple[int, ...]]  # storage of a parameter -> first byte of each part, and its size


class UpdatePart:
    """Callable `part(parameter, gradient, *states)`: one part's share of an update. Target of an update node."""

    def __init__(self, rule: UpdateRule, number: int, start: int, shared: tuple[bool, ...], *, last: bool) -> None:
        self.rule, self.number, self.start, self.shared, self.last = rule, number, start, shared, last
        self.kind = rule.kind
        self.__name__ = self.__qualname__ = f"{rule.__name__}_{number}"
        self.__module__ = "schedopt.capture.split"

    def __repr__(self) -> str:
        return f"<part {self.number} of the {self.kind} update of {self.rule.parameter_name}>"

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor, *states: torch.Tensor) -> None:
        """Update in place."""
        mine = gradient.as_strided(parameter.shape, (1,), gradient.storage_offset() + self.start)
        own = [s if self.last or not shared else s.clone() for s, shared in zip(states, self.shared, strict=True)]
        self.rule(parameter, mine, *own)


def large_updates(captured: Captured, eager_peak_bytes: int) -> Cuts:
    """Cuts for every update that needs a large part of the memory and can be made in parts."""
    cuts: Cuts = {}
    graph = captured.graph
    part = max(LEAST_PART_BYTES, eager_peak_bytes // _PARTS) // PAGE * PAGE
    for node in captured.gm.graph.nodes:
        if not isinstance(node.target, UpdateRule):
            continue
        op = graph.ops[_op(node)]
        needed = sum(graph.storages[s].size_bytes for s in (*op.reads, *op.writes))
        parameter = _storage(_arguments(node)[0])
        size = graph.storages[parameter].size_bytes
        if needed > eager_peak_bytes // _LARGE and size >= 2 * part and _divisible(captured, node):
            cuts[parameter] = (*range(0, size, part), size)
    return cuts


def cuts_of(graph: Graph) -> Cuts:
    """The cuts that were made in a graph."""
    starts: dict[int, list[int]] = {}
    for storage in graph.storages:
        if storage.parent is not None and storage.kind is StorageKind.PARAMETER:
            starts.setdefault(storage.parent, []).append(storage.start_bytes)
    return {parent: (*sorted(found), graph.storages[parent].size_bytes) for parent, found in starts.items()}


def fit(captured: Captured, cuts: Cuts) -> bool:
    """Whether cuts, from a file perhaps, are ones that this step's updates can be made in: whole pages, nothing left out."""
    updates = {_storage(_arguments(n)[0]): n for n in captured.gm.graph.nodes if isinstance(n.target, UpdateRule)}
    return all(
        parameter in updates
        and starts[0] == 0
        and end == captured.graph.storages[parameter].size_bytes
        and all(a < b and a % PAGE == 0 for a, b in pairwise((*starts, end)))
        and _divisible(captured, updates[parameter])
        for parameter, (*starts, end) in cuts.items()
    )


def _op(node: fx.Node) -> int:
    number = node_info(node).op
    assert number is not None
    return number


def _arguments(update: fx.Node) -> tuple[fx.Node, ...]:
    """Parameter, gradient, states."""
    return tuple(argument for argument in update.args if isinstance(argument, fx.Node))


def _storage(node: fx.Node) -> int:
    (storage,) = node_info(node).storages
    assert storage is not None
    return storage


def _divisible(captured: Captured, node: fx.Node) -> bool:
    """Whether parameter, gradient and states have their elements in one order without holes, each in a storage that only this op writes."""
    parameter, gradient, *states = (n.meta["val"] for n in _arguments(node))
    wholes = [v for v in (parameter, *states) if v.numel() == parameter.numel() > 1]
    same = all(v.stride() == parameter.stride() and v.dtype.itemsize == parameter.dtype.itemsize for v in wholes)
    dense = 1 + sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True)) == parameter.numel()
    if not same or not dense or gradient.stride() != parameter.stride() or PAGE % parameter.dtype.itemsize:
        return False
    for argument, value in zip(_arguments(node), (parameter, gradient, *states), strict=True):
        if value is gradient or value.numel() != parameter.numel():
            continue
        storage = _storage(argument)
        alone = sum(e.storage == storage for e in captured.externals) == 1
        whole = value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.numel() * value.dtype.itemsize
        if not alone or not whole or sum(storage in op.writes for op in captured.graph.ops) != 1:
            return False
    return True


def split(captured: Captured, cuts: Cuts) -> Captured:
    """The captured step with the updates of the parameters in `cuts` made in parts. Storages keep their numbers, ops do not."""
    return _Splitter(captured, cuts).run()


@dataclass(frozen=True, slots=True)
class _Part:
    node: fx.Node
    storage: int


class _Splitter:
    def __init__(self, captured: Captured, cuts: Cuts) -> None:
        self.old, self.cuts = captured, cuts
        self.graph = fx.Graph()
        self.storages = list(captured.graph.storages)
        self.externals = list(captured.externals)
        self.ops: list[Op] = []
        self.value: dict[fx.Node, fx.Node] = {}
        self.parts: dict[fx.Node, list[_Part]] = {}  # placeholder that is cut -> its parts

    def run(self) -> Captured:
        """Copy the graph node by node."""
        nodes = list(self.old.gm.graph.nodes)
        updates = [n for n in nodes if isinstance(n.target, UpdateRule) and _storage(_arguments(n)[0]) in self.cuts]
        inputs = [n for n in nodes if n.op == "placeholder"]
        for node in inputs:
            self.value[node] = self.graph.node_copy(node)
        for node in updates:
            self._cut(node)
        for node in nodes[len(inputs) :]:
            if node in updates:
                self._update(node)
            else:
                self._copy(node)
        self.graph.lint()
        old = self.old.graph
        plain = replace(old, ops=tuple(self.ops), storages=tuple(self.storages))
        return replace(self.old, graph=plain, gm=fx.GraphModule(self.old.gm, self.graph), externals=tuple(self.externals))

    def _copy(self, node: fx.Node) -> None:
        new = self.value[node] = self.graph.node_copy(node, lambda n: self.value[n])
        if node.op != "output" and (number := node_info(node).op) is not None:
            set_node_info(new, replace(node_info(node), op=len(self.ops)))
            self.ops.append(replace(self.old.graph.ops[number], id=len(self.ops)))

    def _bounds(self, update: fx.Node) -> Iterator[tuple[int, int]]:
        """First byte and end of each part."""
        return pairwise(self.cuts[_storage(_arguments(update)[0])])

    def _cut(self, update: fx.Node) -> None:
        """Placeholders for the parts of parameter and states."""
        parameter, _, *states = _arguments(update)
        for node in (parameter, *states):
            value = node.meta["val"]
            if value.numel() == parameter.meta["val"].numel():
                self.parts[node] = [self._placeholder(node, value, i, *span) for i, span in enumerate(self._bounds(update))]

    def _placeholder(self, node: fx.Node, whole: torch.Tensor, number: int, start: int, end: int) -> _Part:
        parent = _storage(node)
        slot = next(e.slot for e in self.old.externals if e.node == node.name)
        count, storage = (end - start) // whole.dtype.itemsize, len(self.storages)
        new = self.graph.placeholder(f"{node.name}_part{number}")
        new.meta.update(node.meta)
        new.meta["val"] = torch.empty(count, dtype=whole.dtype, device="meta")
        set_node_info(new, replace(node_info(node), storages=(storage,)))
        old = self.storages[parent]
        self.storages.append(Storage(storage, f"{old.name}[{number}]", old.kind, end - start, old.module, parent, start))
        self.externals.append(External(new.name, storage, ("part", slot, number), (count,), (1,), whole.dtype))
        return _Part(new, storage)

    def _update(self, node: fx.Node) -> None:
        """One node and op per part; times and workspace in proportion."""
        whole: Op = self.old.graph.ops[_op(node)]
        rule, arguments = node.target, _arguments(node)
        assert isinstance(rule, UpdateRule)
        shared = tuple(n not in self.parts for n in arguments[2:])
        common = tuple(dict.fromkeys(_storage(n) for n in arguments[2:] if n not in self.parts))
        bounds = list(self._bounds(node))
        odd = min(whole.workspace_bytes, _ODD_BYTES) + sum(self.storages[s].size_bytes for s in common)
        for i, (start, end) in enumerate(bounds):
            last = i + 1 == len(bounds)
            args = [self._argument(n, i) for n in arguments]
            first = start // arguments[0].meta["val"].dtype.itemsize
            new = self.graph.call_function(UpdatePart(rule, i, first, shared, last=last), tuple(args))
            new.meta.update(node.meta)
            set_node_info(new, replace(node_info(node), op=len(self.ops)))
            share = (end - start) / bounds[-1][1]
            mine = tuple(self.parts[n][i].storage for n in arguments if n in self.parts)
            self.ops.append(
                replace(
                    whole,
                    id=len(self.ops),
                    name=f"{whole.name}_{i}",
                    reads=(*whole.reads, *(() if last else common)),
                    writes=(*mine, *(common if last else ())),
                    time_ns=round(whole.time_ns * share),
                    workspace_bytes=math.ceil(whole.workspace_bytes * share) + odd,
                    signature=f"{whole.signature}#{start}:{end}",
                )
            )

    def _argument(self, node: fx.Node, part: int) -> fx.Node:
        return self.parts[node][part].node if node in self.parts else self.value[node]
