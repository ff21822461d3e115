"""The graph as DOT, one colour per fate, grouped by module; a large graph is drawn with one node per module and phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from schedopt.export.units import duration, size
from schedopt.graph import Graph, Phase
from schedopt.plan import ActionKind, Fate
from schedopt.plan_file import PlanFile

FATE_COLOUR = {Fate.KEEP: "#e8e8e8", Fate.SWAP: "#9ecae1", Fate.RECOMPUTE: "#fdd49e", Fate.REST: "#a1d99b", Fate.SPLIT: "#d4b9da"}
COLLAPSE_ABOVE = 300
_RANK = (Fate.RECOMPUTE, Fate.SWAP, Fate.SPLIT, Fate.REST, Fate.KEEP)


@dataclass(slots=True)
class _Box:
    """One drawn node: some ops of one module."""

    label: str
    module: str
    fates: set[Fate] = field(default_factory=set)


def storage_fates(file: PlanFile) -> dict[int, Fate]:
    """What the plan's actions do with each storage."""
    fates = dict.fromkeys(range(len(file.graph.storages)), Fate.KEEP)
    for schedule in file.plan.schedules:
        for action in schedule.actions:
            if action.kind is ActionKind.SWAP_IN:
                fates[action.subject] = Fate.SWAP
            elif action.kind is ActionKind.RECOMPUTE:
                fates |= dict.fromkeys(file.graph.ops[action.subject].creates, Fate.RECOMPUTE)
        fates |= dict.fromkeys(schedule.away, Fate.REST)
        fates |= dict.fromkeys(file.graph.split(), Fate.SPLIT)
    return fates


def to_dot(file: PlanFile, *, collapse: bool | None = None) -> str:
    """The graph in DOT. `collapse`: one node per module and phase; None: if there are more than 300 ops."""
    graph, fates = file.graph, storage_fates(file)
    collapse = len(graph.ops) > COLLAPSE_ABOVE if collapse is None else collapse
    key_of = {op.id: f"{op.phase.value}:{op.module}" if collapse else str(op.id) for op in graph.ops}
    boxes = _boxes(graph, fates, key_of, collapse=collapse)
    number = {key: f"n{i}" for i, key in enumerate(boxes)}
    lines = [
        "digraph step {",
        "  rankdir=TB; compound=true;",
        '  node [shape=box, style="filled,rounded", fontname="sans-serif", fontsize=10];',
    ]
    lines += _legend()
    lines += _clusters(boxes, number)
    for (source, target), total in _edges(graph, key_of).items():
        lines.append(f"  {number[source]} -> {number[target]} [label={_quote(size(total))}, fontsize=8];")
    return "\n".join([*lines, "}"]) + "\n"


def _boxes(graph: Graph, fates: dict[int, Fate], key_of: dict[int, str], *, collapse: bool) -> dict[str, _Box]:
    boxes: dict[str, _Box] = {}
    members: dict[str, list[int]] = defaultdict(list)
    for op in graph.ops:
        members[key_of[op.id]].append(op.id)
    for key, ids in members.items():
        ops = [graph.ops[x] for x in ids]
        created = sum(graph.storages[s].size_bytes for op in ops for s in op.creates)
        head = f"{ops[0].module or 'model'} {ops[0].phase.value}\n{len(ops)} ops" if collapse else f"{ops[0].name}\n{ops[0].target}"
        label = f"{head}\n{duration(sum(op.time_ns for op in ops) / 1e9)}, creates {size(created)}"
        touched = [s for op in ops for s in (*op.creates, *(op.writes if op.phase is Phase.UPDATE else ()))]
        boxes[key] = _Box(label, ops[0].module, {fates[s] for s in touched})
    return boxes


def _edges(graph: Graph, key_of: dict[int, str]) -> dict[tuple[str, str], int]:
    """Bytes that go from the op that made or last wrote a storage to those that use it."""
    maker: dict[int, int] = {}
    edges: dict[tuple[str, str], int] = defaultdict(int)
    for op in graph.ops:
        for s in (*op.reads, *op.writes):
            if s in maker and key_of[maker[s]] != key_of[op.id]:
                edges[key_of[maker[s]], key_of[op.id]] += graph.storages[s].size_bytes
        maker |= dict.fromkeys((*op.creates, *op.writes), op.id)
    return edges


def _clusters(boxes: dict[str, _Box], number: dict[str, str]) -> Iterator[str]:
    """Nested subgraphs by the first two parts of the module path."""
    tree: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, box in boxes.items():
        first, _, rest = box.module.partition(".")
        tree[first][rest.partition(".")[0]].append(key)
    for first, inner in tree.items():
        yield from _open(first)
        for second, keys in inner.items():
            yield from _open(f"{first}.{second}" if second else "")
            for key in keys:
                fate = next((f for f in _RANK if f in boxes[key].fates), Fate.KEEP)
                yield f"    {number[key]} [label={_quote(boxes[key].label)}, fillcolor={_quote(FATE_COLOUR[fate])}];"
            yield from _close(second)
        yield from _close(first)


def _open(name: str) -> list[str]:
    return [f"  subgraph {_quote('cluster_' + name)} {{ label={_quote(name)}; fontsize=9;"] if name else []


def _close(name: str) -> list[str]:
    return ["  }"] if name else []


def _legend() -> list[str]:
    cells = [f"    legend_{f.value} [label={_quote(f.value)}, fillcolor={_quote(FATE_COLOUR[f])}];" for f in FATE_COLOUR]
    return ["  subgraph cluster_legend { label=fate;", *cells, "  }"]


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
