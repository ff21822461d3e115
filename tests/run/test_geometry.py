"""Every kind of alias comes back from the lower tier, or from a second run, with its exact strides and bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from schedopt.capture.workload import Workload
from tests import plans
from tests.programs import Maker, assert_exact

MAKERS: dict[str, Maker] = {
    "swap": plans.swap_everything,
    "file": lambda graph: plans.swap_everything(graph, "file", persistent=True),
    "recompute": plans.recompute_everything,
    "away": plans.all_away,
}


def _expanded(x: torch.Tensor) -> torch.Tensor:
    row = (x[:1] * 2).expand(5, -1)
    return (row.sin() * row).sum()


def _overlapping(x: torch.Tensor) -> torch.Tensor:
    windows = (x * 3).reshape(-1).as_strided((5, 4), (2, 1))
    return (windows.exp() * windows).sum()


def _transposed(x: torch.Tensor) -> torch.Tensor:
    y = x.exp().t()
    return (y.sin() * y[1:3].sum()).sum()


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    y = x.reshape(1, 4, 3, 2).contiguous(memory_format=torch.channels_last)
    return (y.tanh() * y.exp()).sum()


def _zero_dim(x: torch.Tensor) -> torch.Tensor:
    scale = x.sum().sin()
    return (x * scale).exp().sum() * scale


def _masks(x: torch.Tensor) -> torch.Tensor:
    mask = x > 0
    sign = torch.where(mask, 1, -1).to(torch.int8)
    kept = torch.where(mask, x.sin(), x.cos())
    return (kept * sign).masked_fill(mask.logical_not(), 0.5).sum() + (kept * mask).sum()


def _complex(x: torch.Tensor) -> torch.Tensor:
    y = torch.complex(x, x.sin())
    z = y * y.conj() * y
    return (z.real * z.imag).sum() + torch.view_as_real(z.exp()).sum()


def _in_place_on_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x.contiguous() + 1.0
    y[:, 1:3].mul_(2.0)
    z = y.tanh()
    y.view(-1)[3:9].add_(1.0)
    return (y * z).sum()


def _half(x: torch.Tensor) -> torch.Tensor:
    y = x.to(torch.bfloat16)
    return (y.sin() * y).float().sum() + y.double().exp().sum().float()


def _split(x: torch.Tensor) -> torch.Tensor:
    top, bottom = x.exp().chunk(2)
    values, places = (top + bottom).sort(dim=1)
    return (values * places).sum() + values.topk(2).values.sum() + top[::2].sum()


def _empty(x: torch.Tensor) -> torch.Tensor:
    nothing = x[:0] * 2
    return torch.cat([nothing.sin(), x.exp()]).sum() + nothing.cos().sum()


BODIES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    _expanded,
    _overlapping,
    _transposed,
    _channels_last,
    _zero_dim,
    _masks,
    _complex,
    _in_place_on_a_view,
    _half,
    _split,
    _empty,
]


class _Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).t().contiguous().t())  # not contiguous


def workload_of(body: Callable[[torch.Tensor], torch.Tensor]) -> Workload:
    """Train the argument of `body`."""
    torch.manual_seed(3)
    model = _Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def forward(module: nn.Module, x: Any) -> torch.Tensor:
        return body(module.weight * x)

    return Workload(model, None, optimizer, torch.randn(6, 4), forward=forward)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_geometry(body: Callable[[torch.Tensor], torch.Tensor], maker: str) -> None:
    assert_exact(workload_of(body), MAKERS[maker], steps=2)
