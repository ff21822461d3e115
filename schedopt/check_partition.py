"""Replays a partition against the rules of `schedopt.partition` and says what it costs. Shares no code with any solver."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from schedopt.partition import Partition, PartitionNode, PartitionSpec

_ROUNDING = 1e-9  # of sums of floats, relative


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """`violations` in words; per part its load, work (time of its nodes) and bytes; `sent` and `received`: time of its transfers."""

    violations: tuple[str, ...]
    loads: tuple[float, ...]
    work: tuple[float, ...]
    sent: tuple[float, ...]
    received: tuple[float, ...]
    bytes: tuple[float, ...]

    @property
    def ok(self) -> bool:
        """Whether every rule holds."""
        return not self.violations

    @property
    def max_load(self) -> float:
        """What sets the pace."""
        return max(self.loads, default=0.0)


def check_partition(spec: PartitionSpec, partition: Partition) -> PartitionReport:
    """Never raises for a wrong partition: what is wrong is in `violations`."""
    nodes = {node.name: node for node in spec.nodes}
    broken = [
        f"part {p} is on {part.kind!r}, which is no kind of device" for p, part in enumerate(partition.parts) if part.kind not in spec.kind
    ]
    part_of: dict[str, int] = {}
    for p, part in enumerate(partition.parts):
        for name in part.nodes:
            if name not in nodes:
                broken.append(f"part {p} has {name!r}, which is no node")
            elif name in part_of:
                broken.append(f"{name!r} is in the parts {part_of[name]} and {p}")
            else:
                part_of[name] = p
    broken += [f"{node.name!r} is in no part" for node in spec.nodes if node.name not in part_of]
    used = Counter(part.kind for part in partition.parts if part.nodes)
    broken += [
        f"{used[kind.name]} parts on {kind.name!r}, of which there are {kind.count}"
        for kind in spec.devices
        if used[kind.name] > kind.count
    ]
    if any("is no kind of device" in text for text in broken):
        return PartitionReport(tuple(broken), (), (), (), (), ())
    broken += _scattered_groups(spec, part_of)
    broken += _backwards(spec, nodes, part_of)
    work, sent, received = _sums(spec, partition, nodes, part_of)
    broken += [
        f"part {p} has a node that can not run on {part.kind!r}" for p, part in enumerate(partition.parts) if work[p] == float("inf")
    ]
    held, wrong = _bytes(spec, partition, nodes)
    both = zip(work, sent, received, strict=True)
    loads = tuple(max(each) if spec.overlap else sum(each) for each in both)
    return PartitionReport(tuple(broken + wrong), loads, tuple(work), tuple(sent), tuple(received), held)


def _scattered_groups(spec: PartitionSpec, part_of: dict[str, int]) -> list[str]:
    homes: dict[str, set[int]] = {}
    for node in spec.nodes:
        if node.group and node.name in part_of:
            homes.setdefault(node.group, set()).add(part_of[node.name])
    return [f"group {group!r} is spread over the parts {sorted(where)}" for group, where in homes.items() if len(where) > 1]


def _backwards(spec: PartitionSpec, nodes: dict[str, PartitionNode], part_of: dict[str, int]) -> list[str]:
    found = []
    group = {name: node.group or name for name, node in nodes.items()}
    told = {(group[a], group[b]) for a, b in spec.edges if not nodes[a].backward and not nodes[b].backward}
    for source, target in spec.edges:
        if nodes[source].backward and (group[source], group[target]) in told:
            continue
        if source not in part_of or target not in part_of or nodes[source].backward != nodes[target].backward:
            continue
        first, second = (target, source) if nodes[source].backward else (source, target)
        if part_of[first] > part_of[second]:
            found.append(f"{source!r} -> {target!r} goes against the order of the stages: {part_of[source]} -> {part_of[target]}")
    return found


def _sums(
    spec: PartitionSpec, partition: Partition, nodes: dict[str, PartitionNode], part_of: dict[str, int]
) -> tuple[list[float], list[float], list[float]]:
    """Per part: time of its nodes, of what it sends, of what it receives."""
    work = [sum(nodes[name].time_on(part.kind) for name in part.nodes if name in nodes) for part in partition.parts]
    sent, received = [0.0] * len(work), [0.0] * len(work)
    crossing = {(source, part_of.get(target)) for source, target in spec.edges if part_of.get(source) != part_of.get(target)}
    for source, target_part in crossing:
        if target_part is not None and not spec.kind[partition.parts[target_part].kind].free_transfers:
            received[target_part] += nodes[source].transfer
    for source in {source for source, _ in crossing}:
        home = part_of.get(source)
        if home is not None and not spec.kind[partition.parts[home].kind].free_transfers:
            sent[home] += nodes[source].transfer
    return work, sent, received


def _bytes(spec: PartitionSpec, partition: Partition, nodes: dict[str, PartitionNode]) -> tuple[tuple[float, ...], list[str]]:
    filled = [p for p, part in enumerate(partition.parts) if part.nodes]
    held, broken = [0.0] * len(partition.parts), []
    for position, p in enumerate(filled):
        part = partition.parts[p]
        in_flight = len(filled) - position
        mine = [nodes[name] for name in part.nodes if name in nodes]
        held[p] = sum(node.bytes + in_flight * node.stash_bytes for node in mine)
        limit = spec.kind[part.kind].limit_bytes
        if limit is not None and held[p] > limit * (1 + _ROUNDING):
            broken.append(f"part {p} has {held[p]:.0f} bytes, the limit of {part.kind!r} is {limit:.0f}")
    return tuple(held), broken
