"""The optimizer's update as one op per parameter: the optimizer's own step, run on a shadow that owns one parameter only.

So the arithmetic is the user's, bit for bit, whatever `foreach`, `fused` or `capturable` say; learning rate and all other options are
read from the live parameter group at every step, hence LR schedulers work and nothing is baked in.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch

from schedopt.compat import init_optimizer_state
from schedopt.errors import CaptureError

SUPPORTED = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam")


class UpdateRule:
    """Callable `rule(parameter, gradient, *states)`: updates parameter and states in place. Target of an update node."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: int, name: str, keys: tuple[str, ...]) -> None:
        self.optimizer, self.group, self.parameter_name, self.keys = optimizer, group, name, keys
        self.fresh = False  # the next step is the parameter's first: SGD's momentum buffer does not exist in eager yet
        self.kind = type(optimizer).__name__
        self.__name__ = self.__qualname__ = f"update_{name}".replace(".", "_")
        self.__module__ = "schedopt.capture.update"
        self._step = inspect.unwrap(type(optimizer).step)

    def __repr__(self) -> str:
        return f"<{self.kind} update of {self.parameter_name}>"

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor, *states: torch.Tensor) -> None:
        """Update in place."""
        live = self.optimizer.param_groups[self.group]
        leaf = parameter.detach()
        leaf.grad = gradient
        state = dict(zip(self.keys, states, strict=True))
        cloned = self.fresh and self.kind == "SGD" and live["momentum"] != 0 and live["dampening"] != 0
        shadow = _shadow(self.optimizer, {**live, "params": [leaf]})
        shadow.state[leaf] = {} if cloned else state
        with torch.no_grad():
            self._step(shadow)
            if cloned:
                state["momentum_buffer"].copy_(shadow.state[leaf]["momentum_buffer"])
        leaf.grad = None


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """CaptureError unless the optimizer updates every parameter on its own by torch's code."""
    kind = type(optimizer)
    if kind.__name__ not in SUPPORTED or kind is not getattr(torch.optim, kind.__name__, None):
        raise CaptureError(
            f"optimizer {kind.__module__}.{kind.__name__} can not be scheduled parameter by parameter; use one of torch.optim."
            + ", torch.optim.".join(SUPPORTED)
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise CaptureError("an optimizer with differentiable=True can not be scheduled; build it with differentiable=False")


def initial_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor, stride: tuple[int, ...]
) -> dict[str, Any]:
    """State that the optimizer would create for `parameter` at its first step; `stride` is that of the gradient's clone.

    SGD clones the gradient then: a buffer of -0.0 gives the same bits, as momentum * -0.0 + g == g for every g.
    """
    leaf = parameter.detach()
    leaf.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    shadow = _shadow(optimizer, {**group, "params": [leaf]})
    init_optimizer_state(shadow, shadow.param_groups[0])
    state = dict(shadow.state[leaf])
    if type(optimizer).__name__ == "SGD" and group["momentum"] != 0:
        state["momentum_buffer"] = torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device=parameter.device).fill_(-0.0)
    return {key: value for key, value in state.items() if value is not None}


def _shadow(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.param_groups = [group]
    shadow.state = defaultdict(dict)
    return shadow
