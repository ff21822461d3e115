"""Costs from formulas, for a machine that is not here: the roofline of Williams et al. 2009 per op.

    time = max(flops / flops_per_s(dtype), bytes touched / memory_bytes_per_s) + launch_ns

Bytes touched: every tensor read once, every tensor created or written once, a tensor written in place also read; a gather reads from its
table only what it puts out. An optimizer update that is not fused goes over its tensors once per elementary step (`_UPDATE_PASSES`).

Workspace is 0 but for: convolution (copies of its tensors in the kernel's own layout, `_convolution_workspace`), flash attention backward
(gradients accumulated in float32), updates that are not fused (temporaries of the parameter's size: 2 for the Adam family, else 1).
Matrix products of cuBLAS and MKL keep their workspace outside of the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from schedopt.capture.captured import Captured, node_info
from schedopt.cost.cache import OpCost
from schedopt.cost.flops import flops, op_packet
from schedopt.graph import Graph, Op
from schedopt.machine import Device, Machine

aten = torch.ops.aten

_NO_WORK = frozenset({aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.empty_permuted})
_GATHERS = frozenset({aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward})
_CONVOLUTIONS = frozenset({aten.convolution, aten._convolution, aten.mkldnn_convolution, aten.cudnn_convolution})
_CONVOLUTIONS_BACKWARD = frozenset({aten.convolution_backward})
_TWO_TEMPORARIES = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta")
_UPDATE_PASSES = 2  # of what a fused kernel touches; elementary kernels read and write their temporaries too
_UPDATE_LAUNCHES = 8


def estimate(captured: Captured, machine: Machine) -> Graph:
    """The plain graph with `time_ns` and `workspace_bytes` of every op from formulas for the machine's first device.

    Looks at shapes only: works on fake tensors and allocates nothing.
    """
    device = machine.devices[0]
    known: dict[str, OpCost] = {}
    ops = []
    for node in captured.gm.graph.nodes:
        if node.op != "call_function" or (number := node_info(node).op) is None:
            continue
        op = captured.graph.ops[number]
        if op.signature not in known:
            known[op.signature] = analytic_cost(node, op, device)
        cost = known[op.signature]
        ops.append(replace(op, time_ns=cost.time_ns, workspace_bytes=cost.workspace_bytes))
    return replace(captured.graph, ops=tuple(ops))


def analytic_cost(node: fx.Node, op: Op, device: Device) -> OpCost:
    """Cost of one captured call on a device."""
    if op.target.startswith("optimizer."):
        return _update_cost(node, op, device)
    packet = op_packet(node)
    if packet in _NO_WORK:
        return OpCost(device.launch_ns, 0)
    work = flops(node)
    seconds = work / flops_per_s(device, _dtype(node), convolution=packet in _CONVOLUTIONS | _CONVOLUTIONS_BACKWARD) if work else 0.0
    seconds = max(seconds, bytes_touched(node, op) / device.memory_bytes_per_s)
    return OpCost(device.launch_ns + round(seconds * 1e9), _workspace(node, packet, device))


def flops_per_s(device: Device, dtype: torch.dtype, *, convolution: bool = False) -> float:
    """Reachable rate for a dtype. On CUDA float32 takes TensorFloat32 where torch's present settings allow it (convolutions: by default).

    A dtype that the device does not list runs at its float32 rate, float64 at half of that.
    """
    rates = dict(device.flops_per_s)
    name = str(dtype).removeprefix("torch.")
    if name == "float32" and device.kind == "cuda":
        allowed = torch.backends.cudnn.allow_tf32 if convolution else torch.get_float32_matmul_precision() != "highest"
        name = "tfloat32" if allowed else name
    single = rates.get("float32", max(rates.values()))
    return rates.get(name, single / 2 if name == "float64" else single)


def bytes_touched(node: fx.Node, op: Op) -> int:
    """Bytes that the call has to move between memory and the chip at least."""
    read = {id(one): sum(_extent(t) for t in _tensors(one)) for one in node.all_input_nodes}
    given = {t.untyped_storage()._cdata for one in node.all_input_nodes for t in _tensors(one)}
    created = sum(_extent(t) for t in _tensors(node) if t.untyped_storage()._cdata not in given)
    if op_packet(node) in _GATHERS:
        table = node.all_input_nodes[0]
        read[id(table)] = min(read[id(table)], created)
    written = 0
    for one in node.all_input_nodes:
        if set(node_info(one).storages) & set(op.writes):
            written += sum(_extent(t) for t in _tensors(one))
    return sum(read.values()) + created + written


def _update_cost(node: fx.Node, op: Op, device: Device) -> OpCost:
    """The update of one parameter: bound by bytes; `node.target` is the capture's update rule, whose optimizer says whether it is fused."""
    fused = bool(getattr(node.target, "optimizer").defaults.get("fused"))  # noqa: B009  # a call target has no such attribute for mypy
    parameter = node.args[0]
    assert isinstance(parameter, fx.Node)
    size = sum(_extent(t) for t in _tensors(parameter))
    temporaries = 2 if op.target.removeprefix("optimizer.") in _TWO_TEMPORARIES else 1
    seconds = bytes_touched(node, op) * (1 if fused else _UPDATE_PASSES) / device.memory_bytes_per_s
    launches = device.launch_ns * (1 if fused else _UPDATE_LAUNCHES)
    return OpCost(launches + round(seconds * 1e9), 0 if fused else temporaries * size)


def _workspace(node: fx.Node, packet: Any, device: Device) -> int:
    if packet in _CONVOLUTIONS or packet in _CONVOLUTIONS_BACKWARD:
        return _convolution_workspace(node, packet, device)
    if packet is not None and "attention" in packet.__name__ and "backward" in packet.__name__:
        query = node.args[1]
        assert isinstance(query, fx.Node)
        return sum(4 * t.numel() for t in _tensors(query))
    return 0


def _convolution_workspace(node: fx.Node, packet: Any, device: Device) -> int:
    """oneDNN copies what is not channels-last into blocks of its own, result included; cuDNN is taken to want as much as its input.

    Pointwise convolutions of cuDNN are plain matrix products and want nothing.
    """
    weight = node.args[1] if packet in _CONVOLUTIONS else node.args[2]
    assert isinstance(weight, fx.Node)
    sizes = [sum(_extent(t) for t in _tensors(one)) for one in node.all_input_nodes]
    if device.kind == "cpu":
        return sum(sizes) + sum(_extent(t) for t in _tensors(node))
    kernel = next(iter(_tensors(weight))).shape[2:]
    return 0 if all(width == 1 for width in kernel) else max(sizes)


def _dtype(node: fx.Node) -> torch.dtype:
    for one in node.all_input_nodes:
        for tensor in _tensors(one):
            if tensor.is_floating_point():
                return tensor.dtype
    return torch.float32


def _tensors(node: fx.Node) -> Iterable[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor))


def _extent(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, each counted once (an expanded tensor is no larger than its storage)."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
