"""Turns a traced fx graph into what the rest of schedopt works on: a cleaned graph with update nodes, and the plain Graph beside it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from schedopt import compat
from schedopt.capture.captured import Captured, External, NodeInfo, set_node_info
from schedopt.capture.effects import aten_op, recompute_class, written_arguments
from schedopt.capture.labels import Label
from schedopt.capture.live import Live
from schedopt.capture.mixed_norm import repair_mixed_norm
from schedopt.capture.recurrent import repair_recurrent
from schedopt.capture.trace import Traced, trace
from schedopt.capture.update import UpdateRule, check_optimizer
from schedopt.capture.workload import Workload
from schedopt.errors import CaptureError
from schedopt.graph import Graph, Op, Phase, Storage, StorageKind

aten = torch.ops.aten
_CLUTTER = (aten.alias.default, aten.detach.default)
_EXPLICIT_MASK = "transformers builds its attention mask explicitly here; eager may take another kernel that rounds differently"


def capture(workload: Workload) -> Captured:
    """The whole training step of `workload` as one graph.

    Raises CaptureError (what can not be captured, where, and the way out); model, optimizer and generators stay as they were.
    """
    check_optimizer(workload.optimizer)
    if hook := compat.check_hooks(workload.model, workload.optimizer):
        raise CaptureError(f"{hook}, which a scheduled step would not call; remove it, or do its work in the loss or after the step")
    traced = trace(workload)
    live = Live(workload, traced)
    builder = _Builder(workload, traced, live)
    builder.clean()
    builder.append_updates()
    return builder.finish()


class _Builder:
    def __init__(self, workload: Workload, traced: Traced, live: Live) -> None:
        self.workload, self.traced, self.live = workload, traced, live
        self.graph = traced.gm.graph
        self.label_of = dict(traced.labels)
        self.slots: dict[fx.Node, tuple[Any, ...]] = {}
        self.storage_ids: dict[int, int] = {}
        self.storages: list[Storage] = []

    def clean(self) -> None:
        """Name the placeholders, lift constants, drop aliases and what nobody needs."""
        inputs = [i for i, leaf in enumerate(self.traced.leaves) if isinstance(leaf, torch.Tensor)]
        slots: list[tuple[Any, ...]] = [("parameter", n) for n in self.traced.parameters]
        slots += [("buffer", n) for n in self.traced.buffers]
        slots += [("constant", n) for n in self.traced.attributes]
        slots += [("input", i) for i in inputs]
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.slots = dict(zip(placeholders, slots, strict=True))
        self._lift_constants(placeholders[-1])
        for node in list(self.graph.nodes):
            if node.target in _CLUTTER:
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)
        self._drop_idle()
        for node in [n for n, slot in self.slots.items() if slot[0] == "constant" and not n.users]:
            del self.slots[node]
            self.graph.erase_node(node)
        repair_recurrent(self.graph, self.traced.mode)
        repair_mixed_norm(self.graph, self.traced.mode)

    def _drop_idle(self) -> None:
        for node in reversed(list(self.graph.nodes)):
            if not node.users and node.op == "call_function" and self._idle(node):
                self.graph.erase_node(node)

    def _lift_constants(self, last: fx.Node) -> None:
        lifted: dict[str, fx.Node] = {}
        for node in [n for n in self.graph.nodes if n.op == "get_attr"]:
            name = str(node.target)
            value = getattr(self.traced.gm, name)
            if not isinstance(value, torch.Tensor):
                raise CaptureError(f"control flow operators such as torch.cond are not supported yet (graph attribute {name})")
            if name not in lifted:
                with self.graph.inserting_after(last):
                    lifted[name] = self.graph.placeholder(f"constant{name}")
                lifted[name].meta["val"] = node.meta["val"] if "val" in node.meta else self.traced.mode.from_tensor(value)
                self.slots[lifted[name]] = ("constant", name)
                self.label_of[lifted[name]] = Label()
                self.live.constants[name] = value
            node.replace_all_uses_with(lifted[name])
            self.graph.erase_node(node)

    def _idle(self, node: fx.Node) -> bool:
        """True for a node without users that may be dropped: it writes nothing and draws nothing."""
        if node.target is operator.getitem or "profiler" in str(node.target):
            return True
        op = aten_op(node)
        if op is None or op.namespace not in ("aten", "prims"):
            return False
        return not list(written_arguments(node)) and torch.Tag.nondeterministic_seeded not in op.tags

    def append_updates(self) -> None:
        """One update node per parameter with a gradient; the output keeps the loss only."""
        output = next(node for node in self.graph.nodes if node.op == "output")
        loss, *gradients = output.args[0]
        by_name = {slot[1]: node for node, slot in self.slots.items() if slot[0] == "parameter"}
        last = list(self.slots)[-1]
        updates = []
        for name, gradient in zip(self.traced.parameters, gradients, strict=True):
            group = self.live.group_of.get(name)
            if gradient is None or group is None:
                continue
            states, keys = [], []
            for key, value in self.live.describe_state(name, gradient.meta["val"]).items():
                with self.graph.inserting_after(last):
                    last = self.graph.placeholder(f"{by_name[name].name}_{key}")
                last.meta["val"] = value
                self.slots[last] = ("state", name, key)
                keys.append(key)
                self.label_of[last] = Label(Phase.UPDATE)
                states.append(last)
            rule = UpdateRule(self.workload.optimizer, group, name, tuple(keys))
            self.live.rules[name] = rule
            updates.append((name, rule, (by_name[name], gradient, *states)))
        with self.graph.inserting_before(output):
            for name, rule, args in updates:
                node = self.graph.call_function(rule, args)
                node.meta["val"] = None
                self.label_of[node] = Label(Phase.UPDATE, name.rpartition(".")[0])
        if not updates:
            raise CaptureError("the optimizer holds no parameter that gets a gradient from this loss")
        output.args = ((loss,),)
        self._drop_idle()

    def finish(self) -> Captured:
        """Number storages and ops, leave NodeInfo on every node."""
        gradients = {id(n.args[1]) for n in self.graph.nodes if isinstance(n.target, UpdateRule)}
        externals = []
        ops: list[Op] = []
        for node in self.graph.nodes:
            if node.op == "placeholder":
                externals.append(self._external(node))
            elif node.op == "call_function":
                self._call(node, ops)
        output = next(node for node in self.graph.nodes if node.op == "output")
        outputs = tuple(dict.fromkeys(self._ids(output.args[0][0])))
        kinds = {s: StorageKind.GRADIENT for n in self.graph.nodes if id(n) in gradients for s in self._ids(n)}
        kinds |= dict.fromkeys(outputs, StorageKind.OUTPUT)
        storages = tuple(
            s if s.external or s.id not in kinds else Storage(s.id, s.name, kinds[s.id], s.size_bytes, s.module) for s in self.storages
        )
        self.graph.lint()
        self.traced.gm.recompile()
        notes = (_EXPLICIT_MASK,) if self.traced.explicit_mask else ()
        name = self.workload.name or type(self.workload.model).__name__
        plain = Graph(name, tuple(ops), storages, outputs, exact=not self.traced.explicit_mask, notes=notes)
        live = self.live
        return Captured(
            plain, self.traced.gm, tuple(externals), live.lookup, live.adopt, live.begin_step, live.commit_step, live.abandon_step
        )

    def _external(self, node: fx.Node) -> External:
        slot, value = self.slots[node], node.meta["val"]
        kind = {"parameter": StorageKind.PARAMETER, "buffer": StorageKind.BUFFER, "state": StorageKind.OPTIMIZER_STATE}.get(slot[0])
        kind = kind or (StorageKind.CONSTANT if slot[0] == "constant" else StorageKind.INPUT)
        name = f"input{slot[1]}" if slot[0] == "input" else "/".join(slot[1:])
        size = value.untyped_storage().nbytes()
        if kind is StorageKind.INPUT:
            size = min(size, value.numel() * value.element_size())  # a slice of a data set stands for itself only
        key = value.untyped_storage()._cdata
        if key not in self.storage_ids:
            self.storage_ids[key] = len(self.storages)
            self.storages.append(Storage(len(self.storages), name, kind, size, name.rpartition(".")[0]))
        storage = self.storage_ids[key]
        set_node_info(node, NodeInfo(None, (storage,), False))
        return External(node.name, storage, slot, tuple(value.shape), tuple(value.stride()), value.dtype)

    def _ids(self, node: fx.Node) -> list[int]:
        values = pytree.tree_leaves(node.meta.get("val"))
        return [self.storage_ids[v.untyped_storage()._cdata] for v in values if isinstance(v, torch.Tensor)]

    def _call(self, node: fx.Node, ops: list[Op]) -> None:
        value = node.meta.get("val")
        tensors = list(value) if isinstance(value, tuple | list) else [value]
        label = self.label_of[node]
        created = []
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            key = tensor.untyped_storage()._cdata
            if key not in self.storage_ids:
                self.storage_ids[key] = len(self.storages)
                created.append(len(self.storages))
                name = node.name if len(tensors) == 1 else f"{node.name}.{i}"
                self.storages.append(
                    Storage(len(self.storages), name, StorageKind.ACTIVATION, tensor.untyped_storage().nbytes(), label.module)
                )
        ids = tuple(self.storage_ids[t.untyped_storage()._cdata] if isinstance(t, torch.Tensor) else None for t in tensors)
        if isinstance(node.target, UpdateRule):
            written = [s for n in (node.args[0], *node.args[2:]) for s in self._ids(n)]  # type: ignore[arg-type]  # all nodes
        else:
            written = [s for n in written_arguments(node) for s in self._ids(n)]
        if not created and not written:
            set_node_info(node, NodeInfo(None, ids, True))
            return
        writes = tuple(dict.fromkeys(written))
        reads = tuple(dict.fromkeys(s for n in node.all_input_nodes for s in self._ids(n) if s not in writes))
        external = any(self.storages[s].external for s in writes)
        recompute, reason = recompute_class(node, writes_external=external)
        target = f"optimizer.{node.target.kind}" if isinstance(node.target, UpdateRule) else str(node.target)
        op = Op(
            id=len(ops),
            name=node.name,
            target=target,
            phase=label.phase,
            module=label.module,
            reads=reads,
            writes=writes,
            creates=tuple(created),
            recompute=recompute,
            reason=reason,
            signature=signature(node, target),
            source=label.source,
        )
        ops.append(op)
        set_node_info(node, NodeInfo(op.id, ids, False))


def signature(node: fx.Node, target: str) -> str:
    """Target, geometry of all tensors and the other arguments, as stable text: calls with equal text cost the same."""

    def text(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return _geometry(argument.meta.get("val"))
        if isinstance(argument, list | tuple):
            return "[" + ",".join(text(x) for x in argument) + "]"
        return str(argument)

    args = [text(a) for a in node.args] + [f"{k}={text(v)}" for k, v in sorted(node.kwargs.items())]
    return f"{target}({','.join(args)})"


def _geometry(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ",".join(_geometry(v) for v in value) + "]"
    if not isinstance(value, torch.Tensor):
        return str(value)
    shape = "x".join(map(str, value.shape))
    stride = "" if value.is_contiguous() else "/" + "x".join(map(str, value.stride()))
    return f"{str(value.dtype).removeprefix('torch.')}[{shape}{stride}]"
