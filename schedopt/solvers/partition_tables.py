"""A partition problem as lists of numbers: items (what must stay together), senders (values used elsewhere), and loads from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import networkx as nx

from schedopt.partition import Partition, PartitionSpec, StagePart


@dataclass(frozen=True, slots=True)
class Sender:
    """A value: what its transfer costs, the item that makes it, the other items that use it."""

    cost: float
    home: int
    users: tuple[int, ...]


class PartitionTables:
    """Items are numbered in an order in which contiguous stages can have them."""

    def __init__(self, spec: PartitionSpec) -> None:
        self.spec = spec
        self.members, self.arcs = _items(spec)
        item_of = {name: item for item, names in enumerate(self.members) for name in names}
        nodes = {node.name: node for node in spec.nodes}
        self.time = [[math.fsum(nodes[n].time_on(kind.name) for n in names) for names in self.members] for kind in spec.devices]
        self.bytes = [math.fsum(nodes[n].bytes for n in names) for names in self.members]
        self.stash = [math.fsum(nodes[n].stash_bytes for n in names) for names in self.members]
        self.senders = _senders(spec, item_of)

    def partition(self, device_of: list[int], kinds: list[int], method: str) -> Partition:
        """The answer in names; empty parts are left out."""
        parts = []
        for device, kind in enumerate(kinds):
            names = [name for item, names in enumerate(self.members) if device_of[item] == device for name in names]
            if names:
                parts.append(StagePart(self.spec.devices[kind].name, tuple(names)))
        return Partition(tuple(parts), method)

    def work_bound(self) -> float:
        """No load is less: all work spread evenly, each item on the kind where it pays most (a fractional knapsack over two kinds; with
        more kinds each item where it is fastest); and the longest single item."""
        longest = max(min(self.time[k][i] for k in range(len(self.spec.devices))) for i in range(len(self.members)))
        counts = [kind.count for kind in self.spec.devices]
        if len(counts) != 2:
            fastest = math.fsum(min(times) for times in zip(*self.time, strict=True))
            return max(longest, fastest / sum(counts))
        return max(longest, _two_kinds(self.time[0], self.time[1], counts[0], counts[1]))


def _two_kinds(first: list[float], second: list[float], num_first: int, num_second: int) -> float:
    """Least t such that items, cut at will, fit in num_first * t on one kind and num_second * t on the other."""
    only_first = math.fsum(a for a, b in zip(first, second, strict=True) if b == math.inf)
    only_second = math.fsum(b for a, b in zip(first, second, strict=True) if a == math.inf)
    both = sorted(((a, b) for a, b in zip(first, second, strict=True) if math.inf not in (a, b)), key=lambda p: p[0] / p[1] if p[1] else math.inf)
    load_first, load_second = only_first + math.fsum(a for a, _ in both), only_second
    # The items move from the first kind to the second, those that gain most there first, until the second would be the slower one.
    for a, b in reversed(both):
        if (load_second + b) / num_second >= (load_first - a) / num_first:
            share = (load_first * num_second - load_second * num_first) / (b * num_first + a * num_second)
            return (load_first - max(0.0, share) * a) / num_first if share > 0 else max(load_first / num_first, load_second / num_second)
        load_first, load_second = load_first - a, load_second + b
    return max(load_first / num_first, load_second / num_second)


def _items(spec: PartitionSpec) -> tuple[list[tuple[str, ...]], list[tuple[int, int]]]:
    """Groups, and what lies on a cycle between them, as one. Arcs: the first item in the same or an earlier stage."""
    backward = {node.name for node in spec.nodes if node.backward}
    group = {node.name: ("group", node.group) if node.group else ("node", node.name) for node in spec.nodes}
    order: nx.DiGraph[tuple[str, str]] = nx.DiGraph()
    order.add_nodes_from(group.values())
    inner = [(a, b) for a, b in spec.edges if (a in backward) == (b in backward) and group[a] != group[b]]
    order.add_edges_from((group[a], group[b]) for a, b in inner if a not in backward)
    told = set(order.edges)
    order.add_edges_from((group[b], group[a]) for a, b in inner if a in backward and (group[a], group[b]) not in told)
    whole = nx.condensation(order)
    home = dict(whole.graph["mapping"])
    line = list(nx.lexicographical_topological_sort(whole, key=lambda c: c))
    place = {component: number for number, component in enumerate(line)}
    names: list[list[str]] = [[] for _ in line]
    for node in spec.nodes:
        names[place[home[group[node.name]]]].append(node.name)
    arcs = {(place[home[a]], place[home[b]]) for a, b in order.edges if home[a] != home[b]}
    return [tuple(each) for each in names], sorted(arcs)


def _senders(spec: PartitionSpec, item_of: dict[str, int]) -> list[Sender]:
    """Values that cost something and are used in another item; values with the same home and users are sent as one."""
    users: dict[str, set[int]] = {}
    for source, target in spec.edges:
        if item_of[source] != item_of[target]:
            users.setdefault(source, set()).add(item_of[target])
    merged: dict[tuple[int, tuple[int, ...]], float] = {}
    for node in spec.nodes:
        if node.name in users and node.transfer > 0:
            key = (item_of[node.name], tuple(sorted(users[node.name])))
            merged[key] = merged.get(key, 0.0) + node.transfer
    return [Sender(cost, home, others) for (home, others), cost in merged.items()]
