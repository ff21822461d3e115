"""Traces forward, loss, backward and gradient clipping of a workload into one fx graph of ATen ops, on fake tensors."""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx import traceback as fx_traceback
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from schedopt import compat
from schedopt.capture.workload import Workload, compute_loss, flatten_batch, micro_batches, unflatten_batch
from schedopt.errors import CaptureError, SchedoptError
from schedopt.graph import Phase

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NOT_USERS = ("/torch/", "/schedopt/", "/contextlib.py", "<", "/functools.py", "/transformers/utils/")


@dataclass(frozen=True, slots=True)
class Traced:
    """`gm`: placeholders parameters, buffers, batch leaves; output (loss, gradient or None per parameter). `gradients` names the
    parameters in the order of the output. `phases`: (node number, phase) marks; `modules`: (node number, module path) marks."""

    gm: fx.GraphModule
    mode: Any
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    leaves: list[Any]
    phases: tuple[tuple[int, Phase], ...]
    modules: tuple[tuple[int, str], ...]
    explicit_mask: bool


def trace(workload: Workload) -> Traced:
    """Trace one step up to its gradients. CaptureError names module, line and way out; model and generators stay as they were."""
    with _unchanged(workload.model), compat.neutral_checkpoint():
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
        self.names = {id(module): name for name, module in workload.model.named_modules()}
        self.stack: list[str] = []
        self.modules: list[tuple[int, str]] = []
        self.phases: list[tuple[int, Phase]] = []

    def trace(self, *, explicit_mask: bool) -> Traced:
        model = self.workload.model
        parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        buffers = {name: value for name, value in model.named_buffers() if value is not None}
        leaves, spec = flatten_batch(self.workload.batch)
        mode = _fake_mode(list(parameters.values()))
        tensors = [*parameters.values(), *buffers.values(), *(x for x in leaves if isinstance(x, torch.Tensor))]
        memo: dict[int, Any] = {}
        fakes = [memo.setdefault(id(x), _fake(mode, x)) for x in tensors]

        def step(*flat: torch.Tensor) -> tuple[Any, ...]:
            own = {n: x.detach().requires_grad_(parameters[n].requires_grad) for n, x in zip(parameters, flat, strict=False)}
            kept = dict(zip(buffers, flat[len(parameters) :], strict=False))
            rest = iter(flat[len(parameters) + len(buffers) :])
            batch = unflatten_batch([next(rest) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
            return self._step(own, kept, batch)

        with self._hooks(), self._errors(), mode, torch.autograd.set_multithreading_enabled(False), fx_traceback.preserve_node_meta():
            gm = compat.make_fx(step, tracing_mode="real")(*fakes)
        return Traced(gm, mode, parameters, buffers, leaves, tuple(self.phases), tuple(self.modules), explicit_mask)

    def _step(self, own: dict[str, Any], buffers: dict[str, Any], batch: Any) -> tuple[Any, ...]:
        """Loss and gradients, micro-batch by micro-batch, added up in place as autograd does into `.grad`."""
        workload, total = self.workload, None
        sums: dict[str, torch.Tensor] = {}
        wanted = [name for name, value in own.items() if value.requires_grad]
        if not wanted:
            raise CaptureError("no parameter requires a gradient; nothing can be trained")
        for part in micro_batches(workload, batch):
            self.phases.append((compat.num_traced_nodes(), Phase.FORWARD))
            with compat.reparametrize(workload.model, {**own, **buffers}):
                loss = compute_loss(workload, workload.model, part)
            if not loss.requires_grad:
                raise CaptureError("the loss does not depend on any parameter; was it detached or computed under no_grad?")
            loss = loss / workload.accumulate if workload.accumulate > 1 else loss
            self.phases.append((compat.num_traced_nodes(), Phase.BACKWARD))
            compat.label_backward(loss)
            gradients = torch.autograd.grad(loss, [own[name] for name in wanted], allow_unused=True)
            total = loss.detach() if total is None else total + loss.detach()
            alone = workload.accumulate == 1 and workload.clip_grad_norm is None
            _accumulate(sums, own, dict(zip(wanted, gradients, strict=True)), alone=alone)
        if workload.clip_grad_norm is not None:
            _clip(own, sums, workload.clip_grad_norm)
        return (total, *(sums.get(name) for name in own))

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        def enter(module: torch.nn.Module, _: Any) -> None:
            self.stack.append(self.names.get(id(module), type(module).__name__))
            self.modules.append((compat.num_traced_nodes(), self.stack[-1]))

        def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
            self.stack.pop()
            self.modules.append((compat.num_traced_nodes(), self.stack[-1] if self.stack else ""))

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except SchedoptError:
            raise
        except Exception as error:  # whatever the user's code or torch raises becomes one error that names the place
            raise CaptureError(_explain(error, self.stack[-1] if self.stack else "")) from error


def _accumulate(sums: dict[str, torch.Tensor], own: dict[str, Any], gradients: dict[str, Any], *, alone: bool) -> None:
    """Add gradients as autograd adds them into `.grad`: the first is taken (or copied if it shares memory), the others added in place."""
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
        sums[name] = gradient.clone(memory_format=torch.contiguous_format) if shared and not alone else gradient


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


@contextlib.contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Give every module its attributes back, the generators their states; CaptureError if the step had changed one that matters."""
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    plain = {name: {k: _comparable(v) for k, v in attributes.items()} for name, attributes in before.items()}
    generator, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    failed = True
    try:
        yield
        failed = False
    finally:
        torch.set_rng_state(generator)
        changed = _restore(model, before, plain)
        drew = "random" if random.getstate() != python else "numpy.random" if not _same_numpy(numpy) else ""
        random.setstate(python)
        np.random.set_state(numpy)
        if changed and not failed:
            raise CaptureError(
                f"the step changes Python state that a schedule would freeze: {changed}. Keep counters in a registered buffer (a tensor)"
            )
        if drew and not failed:
            raise CaptureError(f"the step draws numbers from Python's {drew}, which a schedule would freeze; draw with torch instead")


def _same_numpy(state: Any) -> bool:
    now: Any = np.random.get_state()
    return bool(now[0] == state[0] and np.array_equal(now[1], state[1]) and now[2] == state[2])


def _comparable(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple | set) and all(isinstance(x, _PLAIN) for x in value):
        return type(value)(value)
    if isinstance(value, dict) and all(isinstance(x, _PLAIN) for x in value.values()):
        return dict(value)
    return None


def _restore(model: torch.nn.Module, before: dict[str, dict[str, Any]], plain: dict[str, dict[str, Any]]) -> str:
    """Put attributes back; the first one of plain Python type that had changed, as text."""
    changed = ""
    for name, module in model.named_modules():
        old = before.get(name)
        if old is None:
            continue
        for key, value in list(module.__dict__.items()):
            kept = plain[name].get(key)
            known = key in old and (kept is not None or old[key] is None)
            if known and _comparable(value) != kept and not changed:
                changed = f"{type(module).__name__}.{key} of module {name or 'the model'!r} went from {kept!r} to {value!r}"
            if key not in old:
                if isinstance(value, _PLAIN) and not changed:
                    changed = f"{type(module).__name__}.{key} of module {name or 'the model'!r} appeared as {value!r}"
                del module.__dict__[key]
        module.__dict__.update({k: v for k, v in old.items() if not isinstance(v, dict)})
        for key, kept in plain[name].items():
            if isinstance(kept, list | set | dict) and isinstance(old.get(key), list | set | dict) and old[key] != kept:
                old[key].clear()
                old[key].extend(kept) if isinstance(kept, list) else old[key].update(kept)
    return changed
