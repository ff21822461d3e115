"""Partition of a model over devices as plain data: what the parts of the model cost, and which device has which part. No torch.

A step (or a sample) flows through all devices like through a pipeline; the slowest of them, the one with the greatest load, sets the pace.
The load of a device is the time of its nodes plus what it spends on transfers: a node whose value is used elsewhere costs `transfer` once
where it is made, and once on every other device that uses it. Where transfers run beside the work (`overlap`), the load is the greatest of
the three sums: work, sent, received. Source of the model: Tarnawski et al., NeurIPS 2020, section 3.

Device 0 has the first stage, device 1 the next, ...: a forward value goes to the same or a later stage, a backward value to the same or an
earlier one (where forward values run between the two groups, these alone tell), so a micro-batch passes each device once on its way and
once on its way back. Nodes of one `group` are on one device (a forward node and its gradient, tied weights). A device never has more bytes
than `limit_bytes`: `bytes` of every node (parameters, gradients, optimizer states) and, for stage i of p, `stash_bytes` of every node
p - i times (the micro-batches that 1F1B has in flight there).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from schedopt.errors import PlanFileError
from schedopt.problem_file import json_of, read_problem, validated


@dataclass(frozen=True, slots=True)
class PartitionNode:
    """A part of the model that stays whole. `time`: on every kind of device, or {kind: time} for the kinds that can run it."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str
    time: float | dict[str, float]
    bytes: float = 0.0
    stash_bytes: float = 0.0
    transfer: float = 0.0
    group: str = ""
    backward: bool = False

    def time_on(self, kind: str) -> float:
        """Infinite where the node can not run."""
        return self.time.get(kind, math.inf) if isinstance(self.time, dict) else self.time


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """`count` equal devices; `limit_bytes` None: any number; `free_transfers`: sends and receives at no cost (the host's memory)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str
    count: int
    limit_bytes: float | None = None
    free_transfers: bool = False


@dataclass(frozen=True)
class PartitionSpec:
    """A partition problem; `edges`: (node that makes a value, node that uses it), by name."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    nodes: tuple[PartitionNode, ...]
    edges: tuple[tuple[str, str], ...]
    devices: tuple[DeviceKind, ...]
    overlap: bool = False

    def __repr__(self) -> str:
        return f"PartitionSpec({len(self.nodes)} nodes, {len(self.edges)} edges, {self.num_devices} devices)"

    @cached_property
    def num_devices(self) -> int:
        """Devices of all kinds."""
        return sum(kind.count for kind in self.devices)

    @cached_property
    def kind(self) -> dict[str, DeviceKind]:
        """By name."""
        return {kind.name: kind for kind in self.devices}


@dataclass(frozen=True, slots=True)
class StagePart:
    """What one device has; `kind` names a DeviceKind."""

    kind: str
    nodes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Partition:
    """One part per device, in the order in which a micro-batch passes them. Empty parts may be left out."""

    parts: tuple[StagePart, ...]
    method: str = ""

    def __repr__(self) -> str:
        return f"Partition({'/'.join(str(len(part.nodes)) for part in self.parts)} nodes, {self.method})"


_ADAPTER = TypeAdapter(PartitionSpec)


def load_partition_spec(path: str | Path) -> PartitionSpec:
    """A problem from a JSON file of our own form or of msr-fiddle/dnn-partitioning; PlanFileError names the field that is wrong."""
    return parse_partition_spec(read_problem(path), str(path))


def parse_partition_spec(text: str | bytes, source: str = "the problem") -> PartitionSpec:
    """A problem from JSON text; PlanFileError names the field that is wrong."""
    data = json_of(text, source)
    if isinstance(data, dict) and "maxFPGAs" in data:
        try:
            spec = _from_dnn_partitioning(data)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanFileError(f"{source}: a field of the dnn-partitioning form is missing or of another type: {error}") from error
    else:
        spec = validated(_ADAPTER, data, source)
    if problem := _incoherence(spec):
        raise PlanFileError(f"{source}: {problem}")
    return spec


def _from_dnn_partitioning(data: dict[str, Any]) -> PartitionSpec:
    """Accelerators are called `fpga` there whatever they are; the cost of an edge is that of its source's value; CPUs transfer for free."""
    cost = {edge["sourceId"]: float(edge["cost"]) for edge in data["edges"]}
    names = {node["id"]: f"{node['name']}#{node['id']}" for node in data["nodes"]}
    nodes = []
    for node in data["nodes"]:
        time = {"cpu": float(node["cpuLatency"])} | ({"fpga": float(node["fpgaLatency"])} if node["supportedOnFpga"] else {})
        group = "" if node.get("colorClass") is None else str(node["colorClass"])
        backward = bool(node.get("isBackwardNode", 0))
        transfer = cost.get(node["id"], 0.0)
        nodes.append(PartitionNode(names[node["id"]], time, float(node["size"]), 0.0, transfer, group, backward))
    edges = tuple((names[edge["sourceId"]], names[edge["destId"]]) for edge in data["edges"])
    fast = DeviceKind("fpga", int(data["maxFPGAs"]), float(data["maxSizePerFPGA"]))
    kinds = (fast, DeviceKind("cpu", int(data["maxCPUs"]), None, free_transfers=True))
    return PartitionSpec(tuple(nodes), edges, tuple(kind for kind in kinds if kind.count))


def _incoherence(spec: PartitionSpec) -> str:
    """What the types can not say; empty if all is well."""
    if not spec.nodes or not spec.devices:
        return "a partition problem has at least one node and one kind of device"
    for what, names in (("node", [node.name for node in spec.nodes]), ("kind of device", [kind.name for kind in spec.devices])):
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            return f"two times the {what} {twice[0]!r}"
    known = {node.name for node in spec.nodes}
    if unknown := [name for edge in spec.edges for name in edge if name not in known]:
        return f"edges name {unknown[0]!r}, which is no node"
    if bad := [kind.name for kind in spec.devices if kind.count < 1 or (kind.limit_bytes or 0) < 0]:
        return f"devices: {bad[0]!r}: count must be positive, limit_bytes not negative"
    for node in spec.nodes:
        times = [node.time_on(kind.name) for kind in spec.devices]
        if min(times) == math.inf:
            return f"node {node.name!r} can run on no kind of device"
        figures = [*(time for time in times if time != math.inf), node.bytes, node.stash_bytes, node.transfer]
        if not all(math.isfinite(x) and x >= 0 for x in figures):
            return f"node {node.name!r}: times, bytes and transfer must be finite and not negative"
    return ""
