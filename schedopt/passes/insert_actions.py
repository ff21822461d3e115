"""Carries a plan out on the fx graph.

Before: `a = op_a(x); b = op_b(a); c = op_c(a, b)` in captured order.
After, for `run a, run b, swap_out a, wait_out a, swap_in a, wait_in a, run c, release a`, with `rt` a new first placeholder:
`take(rt, 0); a = op_a(x); take(rt, 1); b = op_b(a); swap_out(rt, a.id, 0, a); wait_out(rt, a.id, a); swap_in(rt, a.id, 0, a);
wait_in(rt, a.id); take(rt, 2); c = op_c(a, b); release(rt, a.id, a)`.

Swapping keeps the tensor objects and takes their bytes away, so every alias comes back with its exact strides. Recomputing makes new
tensors; views are replayed on them just before they are needed.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from schedopt.capture.captured import Captured, node_info
from schedopt.capture.effects import recompute_args
from schedopt.graph import Graph, Recompute
from schedopt.pass_manager import Program
from schedopt.passes import action_calls as calls
from schedopt.plan import Action, ActionKind, Schedule


@dataclass(frozen=True, slots=True)
class InsertActions:
    """Pass: `program.plan` onto `program.captured.gm`, into `program.lowered`. `checked` adds a comparison after every op."""

    checked: bool = False
    name: str = "insert_actions"

    def __call__(self, program: Program) -> Program:
        """Build the graph in the order of the plan."""
        assert program.plan is not None
        assert program.captured is not None
        graph = _Inserter(program.captured, program.plan.schedules[0], self.checked).build()
        return replace(program, lowered=fx.GraphModule(program.captured.gm, graph))


class _Inserter:
    def __init__(self, captured: Captured, schedule: Schedule, checked: bool) -> None:
        self.plain: Graph = captured.graph
        self.schedule, self.checked = schedule, checked
        self.source = captured.gm.graph
        self.node_of: dict[int, fx.Node] = {}
        self.aliases: dict[int, list[fx.Node]] = {}  # storage -> nodes of the captured graph that live in it
        for node in self.source.nodes:
            if node.op not in ("placeholder", "call_function"):
                continue
            info = node_info(node)
            if info.op is not None:
                self.node_of[info.op] = node
            if len(info.storages) == 1 and info.storages[0] is not None:
                self.aliases.setdefault(info.storages[0], []).append(node)
        self.graph = fx.Graph()
        self.runtime = self.graph.placeholder("rt")
        self.value: dict[fx.Node, fx.Node] = {}  # captured node -> the node that holds its value now
        self.writes: dict[int, int] = {}
        self.next_kind = self._next_kinds()

    def _next_kinds(self) -> list[ActionKind | None]:
        """For each action that takes a storage's bytes away: how it next comes back (swap_in, recompute) or None."""
        coming: dict[int, ActionKind] = {}
        found: list[ActionKind | None] = [None] * len(self.schedule.actions)
        for i in range(len(self.schedule.actions) - 1, -1, -1):
            action = self.schedule.actions[i]
            if action.kind is ActionKind.SWAP_IN:
                coming[action.subject] = ActionKind.SWAP_IN
            elif action.kind is ActionKind.RECOMPUTE:
                coming.update(dict.fromkeys(self.plain.ops[action.subject].creates, ActionKind.RECOMPUTE))
            elif action.kind in (ActionKind.RELEASE, ActionKind.WAIT_OUT):
                found[i] = coming.pop(action.subject, None)
        return found

    def build(self) -> fx.Graph:
        """The new graph."""
        for node in self.source.nodes:
            if node.op == "placeholder":
                self.value[node] = self.graph.node_copy(node)
        for position, action in enumerate(self.schedule.actions):
            self._action(position, action)
        output = next(node for node in self.source.nodes if node.op == "output")
        self.graph.output(fx.map_arg(output.args[0], self._get))
        self.graph.lint()
        return self.graph

    def _call(self, function: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(function, (self.runtime, *args))

    def _get(self, node: fx.Node) -> fx.Node:
        """The value of a captured node, replaying views that are not there."""
        if node not in self.value:
            assert node_info(node).view, f"{node.name} is used while it is away"
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._get)
            assert callable(node.target)
            self.value[node] = self.graph.call_function(node.target, args, kwargs)
        return self.value[node]

    def _handle(self, storage: int) -> fx.Node:
        """Any value that lives in the storage."""
        return next(self.value[node] for node in self.aliases[storage] if node in self.value)

    def _copy(self, storage: int) -> int:
        persistent = self.plain.storages[storage].persistent
        return calls.CHANGED if persistent and self.writes.get(storage) else calls.BASE

    def _action(self, position: int, action: Action) -> None:
        kind, x = action.kind, action.subject
        if kind is ActionKind.RUN or kind is ActionKind.RECOMPUTE:
            self._execute(x, again=kind is ActionKind.RECOMPUTE)
        elif kind is ActionKind.SAVE_RNG:
            self._call(calls.save_rng, x)
        elif kind in (ActionKind.SWAP_OUT, ActionKind.SAVE):
            self._call(calls.swap_out, x, self._copy(x), self._handle(x))
        elif kind is ActionKind.WAIT_OUT and self._stays(position, x):
            self._call(calls.wait_out, x, self._handle(x))
        elif kind in (ActionKind.WAIT_SAVE, ActionKind.WAIT_OUT):
            self._call(calls.wait_save, x)
            if kind is ActionKind.WAIT_OUT:
                self._drop(x)
        elif kind is ActionKind.SWAP_IN:
            self._call(calls.swap_in, x, self._copy(x), self._handle(x))
        elif kind is ActionKind.WAIT_IN:
            self._call(calls.wait_in, x)
        elif self._stays(position, x):
            self._call(calls.evict, x, self._handle(x))
        else:
            self._drop(x)

    def _stays(self, position: int, storage: int) -> bool:
        """Whether the tensors live on without their bytes, for a swap_in or the end of the step to fill them."""
        return self.plain.storages[storage].persistent or self.next_kind[position] is ActionKind.SWAP_IN

    def _drop(self, storage: int) -> None:
        gone = [self.value.pop(node) for node in self.aliases.get(storage, ()) if node in self.value]
        self._call(calls.release, storage, *gone)

    def _execute(self, x: int, *, again: bool) -> None:
        op, node = self.plain.ops[x], self.node_of[x]
        if op.creates or op.workspace_bytes:
            self._call(calls.take, x)
        if not again:
            if any(self.plain.storages[s].persistent for s in op.writes):
                self._call(calls.writing, x)
            for s in op.writes:
                self.writes[s] = self.writes.get(s, 0) + 1
        random = again and op.recompute is Recompute.RANDOM
        if random:
            self._call(calls.restore_rng, x)
        new = self._emit(node, again=again)
        if random:
            self._call(calls.resume_rng)
        if self.checked:
            self._call(calls.verify, x, new)
        self._bind(node, new)

    def _emit(self, node: fx.Node, *, again: bool) -> fx.Node:
        args, kwargs = recompute_args(node) if again else (node.args, dict(node.kwargs))
        args, kwargs = fx.map_arg((args, kwargs), self._get)
        assert callable(node.target)
        return self.graph.call_function(node.target, args, kwargs)

    def _bind(self, node: fx.Node, new: fx.Node) -> None:
        """Elements of a tuple are taken out at once, so that none of them is held by the tuple."""
        if len(node_info(node).storages) == 1 and not isinstance(node.meta.get("val"), tuple | list):
            self.value.setdefault(node, new)
            return
        for user in node.users:
            if user.target is operator.getitem and user not in self.value:
                self.value[user] = self.graph.call_function(operator.getitem, (new, user.args[1]))
