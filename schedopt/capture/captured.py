"""What capture hands on: the fx graph, the plain graph, and how the two belong together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from schedopt.graph import Graph

INFO_KEY = "schedopt"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What schedopt knows of one fx node, kept in `node.meta` (see `node_info`).

    `op`: id of its op in the plain graph, None for placeholders, views, getitem and output. `storages`: per tensor of its value (one
    entry for a tensor, one per element for a tuple or list, None for an element that is no tensor), the id of the storage it lives in.
    `view`: it makes no bytes and may be replayed wherever its inputs are there (views, getitem).
    """

    op: int | None
    storages: tuple[int | None, ...]
    view: bool


def node_info(node: fx.Node) -> NodeInfo:
    """The record that capture left on a node; KeyError for a node that capture has not seen."""
    info: NodeInfo = node.meta[INFO_KEY]
    return info


def set_node_info(node: fx.Node, info: NodeInfo) -> None:
    """Leave a record on a node."""
    node.meta[INFO_KEY] = info


@dataclass(frozen=True, slots=True)
class External:
    """One placeholder of the captured graph: the storage it lives in and where its tensor is found at run time.

    `slot` names it: ("parameter", "layer1.weight"), ("buffer", "bn1.running_mean"), ("state", "layer1.weight", "momentum_buffer"),
    ("input", 0) for the leaf 0 of the flattened batch, ("constant", "_tensor_constant0").
    """

    node: str
    storage: int
    slot: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured training step.

    `gm.graph`: placeholders in the order of `externals`; then one node per op (each with `NodeInfo.op`) and view nodes; the output is a
    tuple whose first element is the loss. Every node value in `node.meta["val"]` is a fake tensor (or a tuple of them) with the exact
    shape, strides, dtype and storage offset of the eager run. `lookup(slot)` returns the live tensor of a placeholder; `adopt(slot,
    tensor)` makes `tensor` the live one (used when a storage rests on the lower tier). `begin_step()` prepares optimizer state that does
    not exist yet; `commit_step()` shows it in `optimizer.state` after a step that succeeded; `abandon_step()` after one that failed.
    """

    graph: Graph
    gm: fx.GraphModule
    externals: tuple[External, ...]
    lookup: Callable[[tuple[Any, ...]], torch.Tensor]
    adopt: Callable[[tuple[Any, ...], torch.Tensor], None]
    begin_step: Callable[[], None]
    commit_step: Callable[[], None]
    abandon_step: Callable[[], None]
