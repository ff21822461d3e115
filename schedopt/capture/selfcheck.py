"""Compares the captured graph with eager, bit for bit, on clones; and the eager step that everything is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from schedopt.capture.build import capture
from schedopt.capture.captured import Captured
from schedopt.capture.workload import Workload, compute_loss, flatten_batch, micro_batches


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """`ok` and, if not, the first thing that differs."""

    ok: bool
    difference: str = ""


def run_eager_step(workload: Workload, batch: Any = None) -> torch.Tensor:
    """One eager training step as a user would write it; the loss, detached."""
    workload.optimizer.zero_grad(set_to_none=True)
    total: torch.Tensor | None = None
    for part in micro_batches(workload, workload.batch if batch is None else batch):
        loss = compute_loss(workload, workload.model, part)
        loss = loss / workload.accumulate if workload.accumulate > 1 else loss
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        total = loss.detach() if total is None else total + loss.detach()
    if workload.clip_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(workload.model.parameters(), workload.clip_grad_norm)
    workload.optimizer.step()
    assert total is not None
    return total


def run_graph_step(captured: Captured, batch: Any) -> torch.Tensor:
    """One step by calling the captured graph as it is, without any plan; the loss."""
    leaves, _ = flatten_batch(batch)
    captured.begin_step()
    args = [leaves[e.slot[1]] if e.slot[0] == "input" else captured.lookup(e.slot) for e in captured.externals]
    with torch.no_grad():
        (loss,) = captured.gm(*args)
    captured.commit_step()
    result: torch.Tensor = loss
    return result


def self_check(workload: Workload, steps: int = 2) -> SelfCheck:
    """Run eager and graph for `steps` steps on two deep copies of the workload from the same generator state and compare all they change.

    Needs three times the memory of model and optimizer. The workload itself and the generator stay as they were.
    """
    generator = torch.get_rng_state()
    try:
        eager, graph = (clone_workload(workload) for _ in range(2))
        captured = capture(graph)
        losses = []
        runs: tuple[Callable[[], torch.Tensor], ...] = (
            lambda: run_eager_step(eager),
            lambda: run_graph_step(captured, graph.batch),
        )
        for run in runs:
            torch.set_rng_state(generator)
            losses.append([*(run() for _ in range(steps)), torch.get_rng_state()])
    finally:
        torch.set_rng_state(generator)
    for number, (theirs, ours) in enumerate(zip(*losses, strict=True), start=1):
        if not same_bits(theirs, ours):
            return SelfCheck(False, f"the loss of step {number}" if number <= steps else "the state of the random generator")
    ours_state = step_state(graph)
    for name, value in step_state(eager).items():
        if name not in ours_state or not same_bits(value, ours_state[name]):
            return SelfCheck(False, name)
    return SelfCheck(True)


def clone_workload(workload: Workload) -> Workload:
    """A deep copy with its own model, optimizer and batch."""
    memo: dict[int, Any] = {}
    model = copy.deepcopy(workload.model, memo)
    optimizer = copy.deepcopy(workload.optimizer, memo)
    kept = {id(workload.model): model}
    loss_fn = kept.get(id(workload.loss_fn), workload.loss_fn)
    return replace(workload, model=model, optimizer=optimizer, loss_fn=loss_fn, batch=copy.deepcopy(workload.batch))


def step_state(workload: Workload) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer state by name."""
    names = {id(p): name for name, p in workload.model.named_parameters()}
    state = dict(workload.model.named_parameters()) | dict(workload.model.named_buffers())
    for parameter, entries in workload.optimizer.state.items():
        tensors = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
        state |= {f"{names[id(parameter)]}/{key}": value for key, value in tensors.items()}
    return {name: value.detach() for name, value in state.items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors have the same shape, dtype and bytes (so NaN equals the same NaN)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))
