"""Captured steps made by hand from any function, for tests that need one op of a kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from schedopt.capture.captured import Captured, NodeInfo, set_node_info
from schedopt.capture.workload import Workload
from schedopt.compat import make_fx
from schedopt.graph import Graph, Op, Phase, Storage, StorageKind
from schedopt.machine import Device, Link, Machine, Tier

CPU = Machine(
    "test",
    (Device("cpu", "cpu", 1 << 34, 2e10, (("float32", 1e11), ("bfloat16", 2e11)), 1000),),
    (Tier("file", 1 << 34),),
    (Link("cpu", "file", 1e9, 1e9, 1000),),
    "preset",
)


def traced(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Captured:
    """`function` as a captured step: one op per call that returns a tensor; every tensor owns its storage."""
    gm = make_fx(function, tracing_mode="fake")(*tensors)
    return annotated(gm)


def annotated(gm: fx.GraphModule) -> Captured:
    """Ops, storages and node records for a graph without aliases."""
    storages: list[Storage] = []
    ops: list[Op] = []
    home: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "call_function"):
            continue
        value = node.meta["val"]
        kind = StorageKind.INPUT if node.op == "placeholder" else StorageKind.ACTIVATION
        home[node] = len(storages)
        storages.append(Storage(len(storages), node.name, kind, value.untyped_storage().nbytes()))
        number = None
        if node.op == "call_function":
            number = len(ops)
            reads = tuple(home[n] for n in node.all_input_nodes)
            text = f"{node.target}({[(tuple(n.meta['val'].shape), str(n.meta['val'].dtype)) for n in node.all_input_nodes]}, {node.args})"
            ops.append(Op(number, node.name, str(node.target), Phase.FORWARD, "", reads, (), (home[node],), signature=text))
        set_node_info(node, NodeInfo(number, (home[node],), False))
    graph = Graph("by hand", tuple(ops), tuple(storages), ())

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("costs must not look at live tensors")

    return Captured(graph, gm, (), refuse, refuse, refuse, refuse, refuse)  # type: ignore[arg-type]  # never called


def small_mlp(optimizer: str = "SGD") -> Workload:
    """Two dense layers with an optimizer by name."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)
    batch = (torch.randn(8, 16), torch.randint(0, 4, (8,)))
    return Workload(model, torch.nn.functional.cross_entropy, made, batch)
