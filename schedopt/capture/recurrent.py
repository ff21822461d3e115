"""oneDNN's recurrent layer behaves unlike other ops in two ways that a captured graph must repair.

Its kernel keeps the workspace for the backward pass only while grad mode is on (a scheduled step runs without), and the fake kernel
does not know the size of that workspace.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default


class RecurrentLayer:
    """Callable that stands for `aten.mkldnn_rnn_layer` and always keeps the workspace."""

    wrapped_op = _LAYER
    __name__ = __qualname__ = "recurrent_layer"
    __module__ = "schedopt.capture.recurrent"

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """As the op, on detached tensors with grad mode on."""
        plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        with torch.enable_grad():
            result: tuple[torch.Tensor, ...] = _LAYER(*plain)
        return result

    def __str__(self) -> str:
        return str(_LAYER)


recurrent_layer = RecurrentLayer()


def repair_recurrent(graph: fx.Graph, mode: Any) -> None:
    """Put `recurrent_layer` in place of the op and give its workspace the size that a real call says."""
    for node in graph.nodes:
        if node.target is not _LAYER:
            continue
        node.target = recurrent_layer
        zeros = [_zeros(a.meta["val"]) if isinstance(a, fx.Node) else a for a in node.args]
        size = recurrent_layer(*zeros)[3].numel()
        with mode:
            workspace = torch.empty(size, dtype=torch.uint8)
        node.meta["val"] = (*node.meta["val"][:3], workspace)
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == 3:
                user.meta["val"] = workspace


def _zeros(fake: torch.Tensor) -> torch.Tensor:
    return torch.zeros(fake.shape, dtype=fake.dtype)
