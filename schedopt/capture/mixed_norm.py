"""Batch norm of a half-precision input with float32 parameters: torch's fake kernel gives the saved statistics the input's dtype, the
CPU kernel keeps them in float32. Without the repair their bytes would be counted wrongly."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_NORM = torch.ops.aten.native_batch_norm.default


def repair_mixed_norm(graph: fx.Graph, mode: Any) -> None:
    """Give the saved statistics of mixed batch norms the dtype that the CPU kernel gives them."""
    for node in graph.nodes:
        if node.target is not _NORM or not isinstance(node.args[1], fx.Node):
            continue
        out, *statistics = node.meta["val"]
        weight = node.args[1].meta["val"]
        if out.device.type != "cpu" or weight.dtype == out.dtype:
            continue
        with mode:
            repaired = [torch.empty_strided(s.shape, s.stride(), dtype=torch.float32, device=s.device) for s in statistics]
        node.meta["val"] = (out, *repaired)
        for user in node.users:
            user.meta["val"] = node.meta["val"][user.args[1]]
