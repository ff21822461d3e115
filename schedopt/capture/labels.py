"""Says of every node that is being traced: phase of the step, module path, line of the user's code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from schedopt import compat
from schedopt.graph import Phase

_KEY = "schedopt_label"
_CAPTURE = os.path.dirname(__file__) + os.sep
_NOT_USERS = (os.path.dirname(torch.__file__) + os.sep, compat.__file__, contextlib.__file__, "<")


@dataclass(frozen=True, slots=True)
class Label:
    """Where a node comes from; `source` is "file.py:123" or empty."""

    phase: Phase = Phase.FORWARD
    module: str = ""
    source: str = ""


class Labeller:
    """Keeps the present phase and stack of modules while a step is traced and writes a label on every new node."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self.stack: list[str] = []
        self.phase = Phase.FORWARD

    @contextlib.contextmanager
    def watch_modules(self) -> Iterator[None]:
        """Follow which module runs."""

        def enter(module: torch.nn.Module, _: Any) -> None:
            self.stack.append(self._names.get(id(module), type(module).__name__))

        def leave(_: torch.nn.Module, __: Any, ___: Any) -> None:
            self.stack.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def label(self, node: fx.Node, frame: FrameType) -> None:
        """Leave a label on a node that has just been made below `frame`."""
        forward = self.phase is Phase.FORWARD
        module = self.stack[-1] if forward and self.stack else ""
        node.meta[_KEY] = Label(self.phase, module, user_line(frame) if forward else "")


def read_labels(graph: fx.Graph) -> dict[fx.Node, Label]:
    """The label of every node; backward nodes have module and line of their forward node, found by autograd's sequence number."""
    labels = {node: node.meta.pop(_KEY, Label()) for node in graph.nodes}
    forward: dict[int, Label] = {}
    for node, label in labels.items():
        number = node.meta.get("seq_nr", -1)
        if number < 0:
            continue
        if label.phase is Phase.FORWARD:
            forward.setdefault(number, label)
        elif number in forward:
            labels[node] = replace(forward[number], phase=label.phase)
    return labels


def user_line(frame: FrameType | None) -> str:
    """The innermost line that is not torch's, as "file.py:123"; empty if there is none above capture's own call of the user's code."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_CAPTURE):
            return ""
        if not path.startswith(_NOT_USERS):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
