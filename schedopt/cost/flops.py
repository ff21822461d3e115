"""Floating point operations of a captured call: the formulas of torch.utils.flop_counter, and those it lacks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def flops(node: fx.Node) -> int:
    """Multiplications and additions (two per multiply-add) of the call; 0 for an op that only moves or maps elements.

    Only shapes are looked at; `node.meta["val"]` may be fake.
    """
    packet = op_packet(node)
    if packet in _OWN:
        return int(_OWN[packet](*fx.map_arg(node.args, _value)))
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _value)
    return int(formula(*args, **kwargs, out_val=_value(node)))


def op_packet(node: fx.Node) -> Any:
    """The registered op that a node calls, directly or through a wrapper that names it `op`, without overload; None for others."""
    target = node.target if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "op", None)
    return getattr(target, "overloadpacket", None)


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]  # torch's own


def _cpu_attention_backward(grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = (grad_out.shape, query.shape, key.shape, value.shape)
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]  # torch's own


def _matrix_vector(matrix: Any, vector: Any, *_: Any) -> int:
    return 2 * int(matrix.numel())


def _add_matrix_vector(added: Any, matrix: Any, vector: Any, *_: Any) -> int:
    return 2 * int(matrix.numel())


def _dot(left: Any, right: Any) -> int:
    return 2 * int(left.numel())


def _recurrent_layer(sequence: Any, weight_input: Any, weight_hidden: Any, *_: Any) -> int:
    """Gates of an LSTM layer: both weights once per position and sample."""
    positions: int = math.prod(sequence.shape[:-1])
    return 2 * positions * int(weight_input.numel() + weight_hidden.numel())


def _recurrent_layer_backward(sequence: Any, weight_input: Any, weight_hidden: Any, *_: Any) -> int:
    return 2 * _recurrent_layer(sequence, weight_input, weight_hidden)


_OWN: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    aten.mv: _matrix_vector,
    aten.addmv: _add_matrix_vector,
    aten.dot: _dot,
    aten.vdot: _dot,
    aten.mkldnn_rnn_layer: _recurrent_layer,
    aten.mkldnn_rnn_layer_backward: _recurrent_layer_backward,
}
