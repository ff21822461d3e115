"""Tensors that a model keeps outside of its parameters and buffers: plain attributes, and what a loss module holds.

While a step is traced a stand-in takes each one's place, so that reads come from and writes go to the live tensor, as in eager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from schedopt.capture.workload import Workload


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is kept: `holder[key]`."""

    holder: MutableMapping[str, Any]
    key: str


def plain_tensors(workload: Workload) -> dict[str, Place]:
    """Places of plain tensors by name: "layer1.scale", "loss_fn.weight"."""
    modules = [(name, module, False) for name, module in workload.model.named_modules()]
    known = {id(module) for _, module, _ in modules}
    if isinstance(workload.loss_fn, torch.nn.Module):
        inner = workload.loss_fn.named_modules(prefix="loss_fn")
        modules += [(name, module, True) for name, module in inner if id(module) not in known]
    places: dict[str, Place] = {}
    for name, module, foreign in modules:
        holders: list[MutableMapping[str, Any]] = [module.__dict__]
        holders += [module._parameters, module._buffers] if foreign else []
        for holder in holders:
            for key, value in holder.items():
                if isinstance(value, torch.Tensor) and _simple(value):
                    places[f"{name}.{key}" if name else key] = Place(holder, key)
    return places


def tensors_at(places: Mapping[str, Place]) -> dict[str, torch.Tensor]:
    """What is kept there now."""
    return {name: place.holder[place.key] for name, place in places.items()}


@contextlib.contextmanager
def replaced(places: Mapping[str, Place], tensors: dict[str, Any]) -> Iterator[None]:
    """Put other tensors there for a while; afterwards `tensors` holds what was found there."""
    kept = tensors_at(places)
    for name, place in places.items():
        place.holder[place.key] = tensors[name]
    try:
        yield
    finally:
        for name, place in places.items():
            tensors[name] = place.holder.get(place.key)
            place.holder[place.key] = kept[name]


def _simple(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and tensor.layout == torch.strided and not tensor.is_quantized
