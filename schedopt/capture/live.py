"""The live tensors behind the placeholders of a captured graph: parameters, buffers, optimizer state, constants."""

from __future__ import annotations

from typing import Any

import torch

from schedopt import compat
from schedopt.capture.trace import Traced
from schedopt.capture.update import UpdateRule, initial_state
from schedopt.capture.workload import Workload
from schedopt.errors import CaptureError


class Live:
    """Finds and replaces live tensors by slot; holds optimizer state that eager would only create at the first step."""

    def __init__(self, workload: Workload, traced: Traced) -> None:
        self.workload = workload
        self.mode = traced.mode
        self.constants: dict[str, torch.Tensor] = {}
        self.rules: dict[str, UpdateRule] = {}
        self._parameters = traced.parameters
        self._attributes = traced.attributes
        self._prepared: dict[str, dict[str, torch.Tensor]] = {}
        self._layouts: dict[str, tuple[int, ...]] = {}
        self._abstract = any(isinstance(p, compat.FakeTensor) or p.is_meta for p in traced.parameters.values())
        names = {id(parameter): name for name, parameter in traced.parameters.items()}
        self.group_of: dict[str, int] = {}
        for number, group in enumerate(workload.optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise CaptureError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model does not; "
                        "make the loss a module of the model, or leave the parameter out"
                    )
                self.group_of[names[id(parameter)]] = number

    def describe_state(self, name: str, gradient: torch.Tensor) -> dict[str, Any]:
        """Fake tensors with the geometry of a parameter's optimizer state."""
        with self.mode:
            layout = torch.empty_like(gradient)
        self._layouts[name] = tuple(layout.stride())
        if self._abstract:
            group = self.workload.optimizer.param_groups[self.group_of[name]]
            with self.mode:
                abstract = torch.empty_like(gradient)
                return initial_state(self.workload.optimizer, group, abstract, self._layouts[name])
        return {key: self.mode.from_tensor(value, static_shapes=True) for key, value in self._state(name).items()}

    def lookup(self, slot: tuple[Any, ...]) -> torch.Tensor:
        """The live tensor of a placeholder; CaptureError for a model without real tensors."""
        if self._abstract:
            raise CaptureError("the model has no real tensors (fake or meta device): it can be planned, not run")
        kind, name = slot[0], slot[1]
        if kind == "parameter":
            return self.workload.model.get_parameter(name)
        if kind == "buffer":
            return self.workload.model.get_buffer(name)
        if kind == "state":
            return self._state(name)[slot[2]]
        place = self._attributes.get(name)
        tensor: torch.Tensor = self.constants[name] if place is None else place.holder[place.key]
        return tensor

    def adopt(self, slot: tuple[Any, ...], tensor: torch.Tensor) -> None:
        """Let the live tensor of a slot use the memory of `tensor` from now on; the tensor object stays the user's."""
        self.lookup(slot).data = tensor

    def begin_step(self) -> None:
        """Tell the update rules which parameters have no state yet."""
        for name, rule in self.rules.items():
            rule.fresh = not self.workload.optimizer.state.get(self._parameters[name])

    def commit_step(self) -> None:
        """Show prepared state in the optimizer, as eager would have created it in this step."""
        for name, state in self._prepared.items():
            shown = self.workload.optimizer.state[self._parameters[name]]
            for key, value in state.items():
                if shown.get(key) is None:
                    shown[key] = value
        self._prepared.clear()
        self.workload.optimizer._opt_called = True  # type: ignore[attr-defined]  # LR schedulers look at it

    def abandon_step(self) -> None:
        """Nothing to do: prepared state stays private."""

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        """State that the optimizer shows; what it does not (yet) have is prepared and stays private until the step is committed."""
        parameter = self._parameters[name]
        shown = self.workload.optimizer.state.get(parameter, {})
        state = {key: value for key, value in shown.items() if isinstance(value, torch.Tensor)}
        rule = self.rules.get(name)
        if state and (rule is None or all(key in state for key in rule.keys)):
            return state
        if name not in self._prepared:
            group = self.workload.optimizer.param_groups[self.group_of[name]]
            self._prepared[name] = initial_state(self.workload.optimizer, group, parameter, self._layouts[name])
        return {**self._prepared[name], **state}
