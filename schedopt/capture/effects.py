"""What an op does to the storages of its arguments, and whether it may run a second time: one table for all of it.

The schema says most (alias annotations), four things it does not say: batch norm ops write running statistics, oneDNN's recurrent
backward uses the saved workspace up, random ops draw from the generator (torch.Tag.nondeterministic_seeded), and attention without
dropout carries that tag but draws nothing.

RANDOM with writes (`bernoulli_` on a fresh mask) means: run again only on a storage that was itself created again, with the generator
put back to its state from before the first run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from schedopt.graph import Recompute

aten = torch.ops.aten

# op -> (names of the running statistics arguments, name of the flag that says they are updated; None: always)
_STATISTICS: dict[Any, tuple[tuple[str, ...], str | None]] = {
    aten.native_batch_norm.default: (("running_mean", "running_var"), "training"),
    aten._native_batch_norm_legit.default: (("running_mean", "running_var"), "training"),
    aten.cudnn_batch_norm.default: (("running_mean", "running_var"), "training"),
    aten.miopen_batch_norm.default: (("running_mean", "running_var"), "training"),
    aten.batch_norm_update_stats.default: (("running_mean", "running_var"), None),
    aten._batch_norm_with_update.default: (("running_mean", "running_var"), None),
}
# op -> names of arguments that it writes without saying so
_HIDDEN_WRITES: dict[Any, tuple[str, ...]] = {aten.mkldnn_rnn_layer_backward.default: ("workspace",)}
_DROPOUT_ARGUMENTS = ("dropout_p", "p")
_KNOWN_NAMESPACES = frozenset({"aten", "prims", "torchvision"})


def aten_op(node: fx.Node) -> torch._ops.OpOverload | None:
    """The registered op that a node calls, directly or through one of our wrappers; None for an optimizer update."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target
    wrapped = getattr(node.target, "wrapped_op", None)
    return wrapped if isinstance(wrapped, torch._ops.OpOverload) else None


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of an ATen call by schema name, defaults left out."""
    op = aten_op(node)
    assert op is not None
    schema = op._schema
    names = [argument.name for argument in schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose storage this op writes in place."""
    op = aten_op(node)
    if op is None:
        return
    given = named_arguments(node)
    for argument in op._schema.arguments:
        hidden = argument.name in _HIDDEN_WRITES.get(op, ())
        if hidden or (argument.alias_info is not None and argument.alias_info.is_write):
            yield from (x for x in pytree.tree_leaves(given.get(argument.name)) if isinstance(x, fx.Node))
    yield from _written_statistics(node)


def recompute_class(node: fx.Node, *, writes_external: bool) -> tuple[Recompute, str]:
    """Whether the op may run twice, and the reason where it may not."""
    target = aten_op(node)
    if target is None:
        return Recompute.BARRED, "optimizer update"
    if any(True for _ in _written_statistics(node)):
        return Recompute.STATISTICS, ""
    if writes_external:
        return Recompute.BARRED, "changes a tensor that outlives the step"
    if target.namespace not in _KNOWN_NAMESPACES:
        return Recompute.BARRED, f"{target.namespace} op: may have effects that its schema does not show"
    if is_random(node):
        return Recompute.RANDOM, ""
    if any(True for _ in written_arguments(node)):
        return Recompute.IN_PLACE, ""
    return Recompute.PURE, ""


def is_random(node: fx.Node) -> bool:
    """True if the op draws from the generator."""
    target = aten_op(node)
    if target is None or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if "attention" in str(target):
        given = named_arguments(node)
        return any(given.get(name, 0.0) != 0.0 for name in _DROPOUT_ARGUMENTS)
    return True


def recompute_args(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for the second run of an op: running statistics are left out (the result is the same bit for bit)."""
    if node.target not in _STATISTICS:
        return node.args, dict(node.kwargs)
    schema = node.target._schema  # type: ignore[union-attr]  # OpOverload
    position = {argument.name: i for i, argument in enumerate(schema.arguments)}
    drop = _STATISTICS[node.target][0]
    args = tuple(None if any(position[name] == i for name in drop) else value for i, value in enumerate(node.args))
    kwargs = {name: None if name in drop else value for name, value in node.kwargs.items()}
    return args, kwargs


def _written_statistics(node: fx.Node) -> Iterator[fx.Node]:
    if node.target not in _STATISTICS:
        return
    names, flag = _STATISTICS[node.target]
    given = named_arguments(node)
    if flag is None or given.get(flag):
        yield from (given[name] for name in names if isinstance(given.get(name), fx.Node))
