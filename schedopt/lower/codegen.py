"""Generates one straight-line Python function from a lowered fx graph: no interpreter, values dropped exactly where the plan says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from schedopt.passes import action_calls as calls

_LITERALS = (bool, int, str, type(None))


@dataclass(frozen=True, slots=True)
class Lowered:
    """`function(runtime, inputs)` runs a step; `inputs` is a list that the function empties. `source` is its text."""

    function: Callable[[calls.Runtime, list[torch.Tensor]], tuple[torch.Tensor, ...]]
    source: str

    def __repr__(self) -> str:
        return f"Lowered({self.source.count(chr(10))} lines)"


def generate(gm: fx.GraphModule) -> Lowered:
    """Code for a graph that `InsertActions` has made."""
    writer = _Writer(gm.graph)
    source = "\n".join(writer.lines()) + "\n"
    scope: dict[str, Any] = dict(writer.constants)
    exec(compile(source, "<schedopt step>", "exec"), scope)
    return Lowered(scope["step"], source)


class _Writer:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.constants: dict[str, Any] = {}
        self._known: dict[tuple[str, Any], str] = {}

    def lines(self) -> Iterator[str]:
        """The function, line by line."""
        yield "def step(RT, INPUTS):"
        names = [node.name for node in self.graph.nodes if node.op == "placeholder"][1:]
        yield f"    [{', '.join(names)}] = INPUTS"
        yield "    INPUTS.clear()"
        bound = self._bound_methods()
        yield from (f"    {local} = RT.{method}" for method, local in bound.items())
        tuples = self._last_uses()
        for node in self.graph.nodes:
            if node.op == "output":
                yield f"    return {self._text(node.args[0])}"
            elif node.op == "call_function":
                yield from self._call(node, bound)
                if dead := [n.name for n in tuples.get(node, ())]:
                    yield f"    {' = '.join(dead)} = None"

    def _bound_methods(self) -> dict[str, str]:
        used = {node.target.__name__ for node in self.graph.nodes if node.op == "call_function" and node.target in calls.CALLS}
        return {method: f"RT_{method}" for method in sorted(used)}

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """Values that no `release` drops: dropped after their last use. (Tuples, and values without a storage.)"""
        released = {n for node in self.graph.nodes if node.target is calls.release for n in node.args[2:]}
        last: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            for used in node.all_input_nodes:
                last[used] = node
        dead: dict[fx.Node, list[fx.Node]] = {}
        for used, node in last.items():
            plain = used.op == "call_function" and used not in released and used.target not in calls.CALLS
            if plain and node.op == "call_function":
                dead.setdefault(node, []).append(used)
        return dead

    def _call(self, node: fx.Node, bound: dict[str, str]) -> Iterator[str]:
        if node.target is calls.release:
            if names := [self._text(n) for n in node.args[2:]]:
                yield f"    {' = '.join(names)} = None"
            yield f"    {bound['release']}({node.args[1]})"
            return
        if node.target in calls.CALLS:
            yield f"    {bound[node.target.__name__]}({', '.join(self._text(a) for a in node.args[1:])})"
            return
        args = [self._text(a) for a in node.args] + [f"{k}={self._text(v)}" for k, v in node.kwargs.items()]
        left = f"{node.name} = " if node.users else ""
        yield f"    {left}{self._constant(node.target, self._target_name(node.target))}({', '.join(args)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, _LITERALS):
            return repr(value)
        if type(value) in (list, fx.immutable_collections.immutable_list):
            return "[" + ", ".join(self._text(x) for x in value) + "]"
        if type(value) is tuple:
            return "(" + "".join(f"{self._text(x)}, " for x in value) + ")"
        return self._constant(value, "constant")

    def _target_name(self, target: Any) -> str:
        name = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", "call")
        return re.sub(r"\W+", "_", name)

    def _constant(self, value: Any, hint: str) -> str:
        key = (hint, id(value))
        if key not in self._known:
            name = f"K{len(self._known)}_{hint}"
            self._known[key] = name
            self.constants[name] = value
        return self._known[key]
