"""What the user wants trained: model, loss, optimizer, batch, and how a loss comes from them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from schedopt.errors import CaptureError

_LEAVES = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, type)


@dataclass(frozen=True, slots=True)
class Workload:
    """A training step.

    How the loss is computed from a batch: `forward(model, batch)` if given; else by the shape of the batch:
    tuple or list of two or more: `loss_fn(model(*batch[:-1]), batch[-1])`; dict: `loss_fn(model(**batch), batch)`; anything else (a
    tensor, a dataclass): `loss_fn(model(batch), batch)`. With `loss_fn=None` the model returns its own loss: a scalar tensor, an output
    with `.loss` or `["loss"]`, or a tuple whose first element is it. `accumulate=k` splits every batch tensor along dimension 0 into k
    micro-batches whose losses are divided by k and whose gradients are added. `clip_grad_norm` clips as torch.nn.utils.clip_grad_norm_
    does. `autocast` runs forward and loss under torch.autocast with that dtype.
    """

    model: torch.nn.Module
    loss_fn: Callable[..., Any] | None
    optimizer: torch.optim.Optimizer
    batch: Any
    forward: Callable[[torch.nn.Module, Any], Any] | None = None
    accumulate: int = 1
    clip_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """How the leaves of a batch belong together; `parts` are leaves of `tree` that were opened in turn, as a value of class `kind`."""

    tree: Any
    parts: tuple[BatchSpec | None, ...]
    kind: type | None = None

    def __str__(self) -> str:
        kind = f"{self.kind.__module__}.{self.kind.__qualname__}" if self.kind else ""
        return f"{kind}{self.tree}[{', '.join(str(part) for part in self.parts if part)}]"


def flatten_batch(batch: Any) -> tuple[list[Any], BatchSpec]:
    """Leaves of a batch and what `unflatten_batch` needs to put it together again; dataclasses and mappings are opened at any depth.

    CaptureError for an object whose tensors can not be seen.
    """
    return _flatten(batch, None)


def unflatten_batch(leaves: list[Any], spec: BatchSpec) -> Any:
    """Inverse of `flatten_batch`."""
    return _unflatten(iter(leaves), spec)


def _flatten(value: Any, kind: type | None) -> tuple[list[Any], BatchSpec]:
    outer, tree = pytree.tree_flatten(value)
    leaves: list[Any] = []
    parts: list[BatchSpec | None] = []
    for leaf in outer:
        if isinstance(leaf, _LEAVES):
            leaves.append(leaf)
            parts.append(None)
            continue
        inner, spec = _flatten(_opened(leaf), type(leaf))
        leaves.extend(inner)
        parts.append(spec)
    return leaves, BatchSpec(tree, tuple(parts), kind)


def _unflatten(leaves: Iterator[Any], spec: BatchSpec) -> Any:
    outer = [next(leaves) if part is None else _unflatten(leaves, part) for part in spec.parts]
    value = pytree.tree_unflatten(outer, spec.tree)
    if spec.kind is None:
        return value
    if not dataclasses.is_dataclass(spec.kind):
        return spec.kind(value)
    instance = object.__new__(spec.kind)
    for name, field in value.items():
        object.__setattr__(instance, name, field)
    return instance


def _opened(leaf: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
    if isinstance(leaf, Mapping):
        return dict(leaf)
    raise CaptureError(
        f"the batch holds a {type(leaf).__module__}.{type(leaf).__qualname__}, into which capture can not see; "
        "pass tensors in tuples, lists, dicts or dataclasses"
    )


def batch_device(workload: Workload) -> torch.device:
    """Device of the model's first parameter (the CPU for a model without any)."""
    for parameter in workload.model.parameters():
        return parameter.device
    return torch.device("cpu")


def compute_loss(workload: Workload, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Loss of one (micro-)batch, a scalar; CaptureError if what comes out is none."""
    if workload.autocast is None:
        return _as_loss(_forward(workload, model, batch))
    with torch.autocast(batch_device(workload).type, dtype=workload.autocast):
        return _as_loss(_forward(workload, model, batch))


def micro_batches(workload: Workload, batch: Any) -> list[Any]:
    """The batch in `accumulate` equal parts along dimension 0 of every tensor."""
    if workload.accumulate == 1:
        return [batch]
    leaves, spec = flatten_batch(batch)
    parts: list[list[Any]] = [[] for _ in range(workload.accumulate)]
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            chunks = [leaf] * workload.accumulate
        elif leaf.shape[0] % workload.accumulate:
            raise CaptureError(f"accumulate={workload.accumulate} does not divide the batch dimension {leaf.shape[0]}; choose a divisor")
        else:
            chunks = list(leaf.chunk(workload.accumulate))
        for part, chunk in zip(parts, chunks, strict=True):
            part.append(chunk)
    return [unflatten_batch(part, spec) for part in parts]


def _forward(workload: Workload, model: torch.nn.Module, batch: Any) -> Any:
    if workload.forward is not None:
        return workload.forward(model, batch)
    if isinstance(batch, tuple | list) and len(batch) >= 2 and workload.loss_fn is not None:
        return workload.loss_fn(model(*batch[:-1]), batch[-1])
    if isinstance(batch, tuple | list):
        output = model(*batch)
    elif isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(batch)
    return output if workload.loss_fn is None else workload.loss_fn(output, batch)


def _as_loss(output: Any) -> torch.Tensor:
    loss = output
    if not isinstance(loss, torch.Tensor):
        if getattr(output, "loss", None) is not None:
            loss = output.loss
        elif isinstance(output, Mapping) and "loss" in output:
            loss = output["loss"]
        elif isinstance(output, tuple | list) and output:
            loss = output[0]
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"no loss: got {type(output).__name__}; pass loss_fn, or let the model return a scalar tensor or an output with .loss"
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise CaptureError(f"the loss must be one floating point number, not {tuple(loss.shape)} {loss.dtype}; reduce it (mean or sum)")
    return loss if loss.dim() == 0 else loss.reshape(())
