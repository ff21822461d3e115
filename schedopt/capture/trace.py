"""Traces forward, loss, backward and gradient clipping of a workload into one fx graph of ATen ops, on fake tensors."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import traceback as fx_traceback

from schedopt import compat
from schedopt.capture.attributes import Place, plain_tensors, replaced, tensors_at
from schedopt.capture.effects import written_arguments
from schedopt.capture.labels import Label, Labeller, read_labels
from schedopt.capture.unchanged import unchanged
from schedopt.capture.workload import Workload, compute_loss, flatten_batch, micro_batches, unflatten_batch
from schedopt.errors import CaptureError, SchedoptError
from schedopt.graph import Phase

_NOT_USERS = ("/torch/", "/schedopt/", "/contextlib.py", "<", "/functools.py", "/transformers/utils/")


@dataclass(frozen=True, slots=True)
class Traced:
    """`gm`: placeholders parameters, buffers, plain tensors (`attributes`), tensor leaves of the batch; output (loss, gradient or
    None per parameter)."""

    gm: fx.GraphModule
    mode: Any
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, Place]
    leaves: list[Any]
    labels: dict[fx.Node, Label]
    explicit_mask: bool


def trace(workload: Workload) -> Traced:
    """Trace one step up to its gradients. CaptureError names module, line and way out; model and generators stay as they were."""
    with unchanged(workload.model), compat.neutral_checkpoint():
        try:
            with compat.not_tracing_for_transformers():
                return _Tracer(workload).trace(explicit_mask=False)
        except CaptureError as error:
            if not isinstance(error.__cause__, compat.DATA_DEPENDENT_ERRORS) or not _uses_transformers(workload.model):
                raise
        return _Tracer(workload).trace(explicit_mask=True)


def _uses_transformers(model: torch.nn.Module) -> bool:
    return any(type(module).__module__.startswith("transformers") for module in model.modules())


class _Tracer:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.labeller = Labeller(workload.model)
        self.attributes = plain_tensors(workload)
        self.outgrown: set[str] = set()

    def trace(self, *, explicit_mask: bool) -> Traced:
        model = self.workload.model
        parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        buffers = {name: value for name, value in model.named_buffers() if value is not None}
        leaves, spec = flatten_batch(self.workload.batch)
        mode = _fake_mode(list(parameters.values()))
        kept = {**buffers, **tensors_at(self.attributes)}
        tensors = [*parameters.values(), *kept.values(), *(x for x in leaves if isinstance(x, torch.Tensor))]
        memo: dict[int, Any] = {}
        fakes = [memo.setdefault(id(x), _fake(mode, x)) for x in tensors]

        def step(*flat: torch.Tensor) -> tuple[Any, ...]:
            compat.on_traced_node(self._see)
            own = {n: x.detach().requires_grad_(parameters[n].requires_grad) for n, x in zip(parameters, flat, strict=False)}
            compat.copy_gradient_hooks(parameters, own)
            held = dict(zip(kept, flat[len(parameters) :], strict=False))
            rest = iter(flat[len(parameters) + len(kept) :])
            batch = unflatten_batch([next(rest) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
            return self._step(own, held, batch)

        with contextlib.ExitStack() as stack:
            stack.enter_context(self._errors())
            stack.enter_context(self.labeller.watch_modules())
            stack.enter_context(mode)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(fx_traceback.preserve_node_meta())
            gm = compat.make_fx(step, tracing_mode="real")(*fakes)
        self._check_outgrown(gm.graph, [*parameters, *kept])
        return Traced(gm, mode, parameters, buffers, self.attributes, leaves, read_labels(gm.graph), explicit_mask)

    def _see(self, node: fx.Node) -> None:
        """Called with each new node, before it runs."""
        self.labeller.label(node, sys._getframe(1))
        if any(written.op == "get_attr" for written in written_arguments(node)):
            raise CaptureError(
                f"in module {(self.labeller.stack or [''])[-1]!r} the step changes a tensor in place that is kept in a list, a dict or "
                f"outside of the model ({node.target}); register it with register_buffer"
            )

    def _step(self, own: dict[str, Any], held: dict[str, Any], batch: Any) -> tuple[Any, ...]:
        """Loss and gradients, micro-batch by micro-batch, added up in place as autograd does into `.grad`; `held` are buffers and plain
        tensors."""
        workload, total = self.workload, None
        sums: dict[str, torch.Tensor] = {}
        wanted = [name for name, value in own.items() if value.requires_grad]
        if not wanted:
            raise CaptureError("no parameter requires a gradient; nothing can be trained")
        current = dict(held)
        for part in micro_batches(workload, batch):
            self.labeller.phase = Phase.FORWARD
            given = {**own, **{name: value for name, value in current.items() if name not in self.attributes}}
            with replaced(self.attributes, current), compat.reparametrize(workload.model, given):
                loss = compute_loss(workload, workload.model, part)
            current |= {name: given[name] for name in current if name in given}
            if not loss.requires_grad:
                raise CaptureError("the loss does not depend on any parameter; was it detached or computed under no_grad?")
            loss = loss / workload.accumulate if workload.accumulate > 1 else loss
            self.labeller.phase = Phase.BACKWARD
            compat.label_backward(loss)
            gradients = torch.autograd.grad(loss, [own[name] for name in wanted], allow_unused=True)
            total = loss.detach() if total is None else total + loss.detach()
            alone = workload.accumulate == 1 and workload.clip_grad_norm is None
            _accumulate(sums, own, dict(zip(wanted, gradients, strict=True)), alone=alone)
        if workload.clip_grad_norm is not None:
            _clip(own, sums, workload.clip_grad_norm)
        self._keep_reassigned(held, current)
        return (total, *(sums.get(name) for name in own))

    def _keep_reassigned(self, held: dict[str, torch.Tensor], current: dict[str, Any]) -> None:
        """What the model replaced by a new tensor (`self.mean = 0.9 * self.mean + ...`) takes over its values when the step ends."""
        for name, tensor in held.items():
            value = current[name]
            if value is tensor:
                continue
            if isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (tensor.shape, tensor.dtype):
                tensor.copy_(value.detach())
            else:
                self.outgrown.add(name)

    def _check_outgrown(self, graph: fx.Graph, names: list[str]) -> None:
        """A tensor that got another shape or dtype is harmless only if the step does not read what an earlier step left."""
        for node, name in zip(graph.nodes, names, strict=False):
            if name in self.outgrown and (node.users or name not in self.attributes):
                raise CaptureError(f"{name} gets another shape or dtype in the step; keep its shape, or change it in place (copy_)")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except SchedoptError:
            raise
        except Exception as error:  # whatever the user's code or torch raises becomes one error that names the place
            raise CaptureError(_explain(error, self.labeller.stack[-1] if self.labeller.stack else "")) from error


def _accumulate(sums: dict[str, torch.Tensor], own: dict[str, Any], gradients: dict[str, Any], *, alone: bool) -> None:
    """Add gradients as autograd adds them into `.grad`: the first is taken, or copied if it has not the layout of its parameter or
    shares memory (which does not matter if it is only read, `alone`); the others are added in place."""
    seen: set[int] = {value.untyped_storage()._cdata for value in own.values()}
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise CaptureError(f"the gradient of {name} is sparse; build the embedding with sparse=False")
        if name in sums:
            sums[name].add_(gradient)
            continue
        key = gradient.untyped_storage()._cdata
        shared = key in seen or gradient.untyped_storage().nbytes() != gradient.numel() * gradient.element_size()
        seen.add(key)
        if not compat.has_layout_of(gradient, own[name]):
            sums[name] = torch.empty_like(own[name], requires_grad=False).copy_(gradient)
        else:
            sums[name] = gradient.clone() if shared and not alone else gradient


def _clip(own: dict[str, Any], gradients: dict[str, torch.Tensor], limit: float) -> None:
    for name, gradient in gradients.items():
        own[name].grad = gradient
    torch.nn.utils.clip_grad_norm_([own[name] for name in gradients], limit)
    for name in gradients:
        own[name].grad = None


def _fake_mode(parameters: list[torch.Tensor]) -> Any:
    for parameter in parameters:
        if isinstance(parameter, compat.FakeTensor):
            return parameter.fake_mode
    return compat.FakeTensorMode(allow_non_fake_inputs=True)


def _fake(mode: Any, tensor: torch.Tensor) -> Any:
    if isinstance(tensor, compat.FakeTensor):
        return tensor
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CaptureError(f"a {tensor.layout} tensor of shape {tuple(tensor.shape)} can not be scheduled; make it dense")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise CaptureError(f"a tensor of class {type(tensor).__name__} can not be scheduled; use plain torch tensors")
    if tensor.is_meta:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return mode.from_tensor(tensor.detach(), static_shapes=True)


def _explain(error: Exception, module: str) -> str:
    """What went wrong, where, and what to do."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in _NOT_USERS)]
    place = f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown line"
    where = f"in module {module!r}, at {place}" if module else f"at {place}"
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, compat.DATA_DEPENDENT_ERRORS):
        return (
            f"the step depends on values of tensors {where}: {text}. A schedule is made before the values are known: replace .item(), "
            "`if tensor` and boolean indexing by torch.where or masking"
        )
    if "numpy" in text or (isinstance(error, TypeError) and "numpy" in str(error)):
        return f"a tensor leaves torch for numpy {where}: {text}. Use torch operations instead"
    if "sparse" in text.lower():
        return f"sparse tensors can not be scheduled {where}: {text}. Build embeddings with sparse=False"
    return f"the step can not be captured {where}: {type(error).__name__}: {text}"
