"""The only place that touches torch names which are not public; each with what it is used for."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.utils.stateless import _reparametrize_module

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "allocator_changes",
    "check_hooks",
    "copy_gradient_hooks",
    "has_layout_of",
    "init_optimizer_state",
    "label_backward",
    "make_fx",
    "neutral_checkpoint",
    "not_tracing_for_transformers",
    "on_traced_node",
    "reparametrize",
]

DATA_DEPENDENT_ERRORS: tuple[type[BaseException], ...] = (DataDependentOutputException, DynamicOutputShapeException)


def reparametrize(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Let the model run with other tensors as its parameters and buffers; ties stay ties."""
    context: contextlib.AbstractContextManager[Any] = _reparametrize_module(model, tensors, tie_weights=True)
    return context


def init_optimizer_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Create the state of a group's parameters that have a gradient, by the optimizer class's own code, without a step."""
    method: Any = type(optimizer)._init_group  # type: ignore[attr-defined]  # exists on every torch.optim class we support
    lists = len(inspect.signature(method).parameters) - 2
    method(optimizer, group, *([] for _ in range(lists)))


def _plain_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    for option in ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"):
        kwargs.pop(option, None)
    return function(*args, **kwargs)


@contextlib.contextmanager
def neutral_checkpoint() -> Iterator[None]:
    """torch.utils.checkpoint becomes a plain call: what to recompute is ours to decide, and its own recompute is traced wrongly."""

    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    class PlainFunction:
        """Stands for CheckpointFunction: `apply(run_function, preserve_rng_state, *args)`."""

        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            return function(*args)

    with contextlib.ExitStack() as stack:
        for name in ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"):
            if hasattr(torch_checkpoint, name):
                stack.enter_context(mock.patch.object(torch_checkpoint, name, generator))
        stack.enter_context(mock.patch.object(torch_checkpoint, "CheckpointFunction", PlainFunction))
        yield


@contextlib.contextmanager
def not_tracing_for_transformers() -> Iterator[None]:
    """transformers takes another path (an explicit mask) when it sees a fake tensor; make it take the eager one."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "is_tracing"):
        yield
        return
    with mock.patch.object(masking, "is_tracing", return_value=False):
        yield


def label_backward(loss: torch.Tensor) -> None:
    """Give nodes traced in the backward pass the `seq_nr` of their forward node."""
    if loss.grad_fn is not None:
        setup_stacktrace_preservation_hooks([loss.grad_fn])


def on_traced_node(call: Callable[[torch.fx.Node], None]) -> None:
    """Let the running make_fx call `call` with every node that it creates from now on."""
    mode: Any = get_proxy_mode()
    create_node = mode.tracer.create_node

    def create(*args: Any, **kwargs: Any) -> torch.fx.Node:
        node: torch.fx.Node = create_node(*args, **kwargs)
        call(node)
        return node

    mode.tracer.create_node = create


def copy_gradient_hooks(parameters: dict[str, torch.Tensor], stand_ins: dict[str, torch.Tensor]) -> None:
    """Put the hooks which the user registered on parameters (`register_hook`) on the tensors that stand for them."""
    for name, parameter in parameters.items():
        for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
            stand_ins[name].register_hook(hook)  # type: ignore[no-untyped-call]  # torch's own signature


def check_hooks(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The first user hook that a scheduled step could not call, as text; empty if there is none."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"parameter {name} has a post-accumulate-grad hook"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has step hooks"
    return ""


def has_layout_of(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """True if autograd would take `gradient` as `parameter.grad` as it is: strides of a dense parameter, else contiguous."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:
            return gradient.is_contiguous()
        expected *= size
    pairs = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(size == 1 or ours == theirs for size, ours, theirs in pairs)


def allocator_changes(call: Callable[[], Any]) -> tuple[Any, list[int]]:
    """The result of `call` and every change of bytes that the CPU allocator saw in this thread meanwhile, in order.

    By the older profiler: it is quiet and starts in microseconds, the one under torch.profiler logs to stderr at every start.
    """
    autograd: Any = torch.autograd
    options = torch._C._profiler._ExperimentalConfig()
    autograd._enable_profiler_legacy(autograd.ProfilerConfig(autograd.ProfilerState.CPU, False, True, False, False, False, options))
    try:
        result = call()
    finally:
        records: Any = autograd._disable_profiler_legacy()
    return result, [event.cpu_memory_usage() for thread in records for event in thread if event.kind() == "memory_alloc"]
