"""The account of bytes on the device: nothing is allocated before it has been entered here, and nothing over the budget is entered."""

from __future__ import annotations

import torch

from schedopt.capture.captured import Captured, node_info
from schedopt.errors import BudgetError, StepError
from schedopt.graph import Graph
from schedopt.plan import Schedule


class Ledger:
    """Bytes in use by storages and generator states, by the same rules as the checker. `begin` opens the account of a step."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self._graph, self._budget = graph, schedule.budget_bytes
        self._sizes = [s.size_bytes for s in graph.storages]
        self._creates = [op.creates for op in graph.ops]
        self._workspace = [op.workspace_bytes for op in graph.ops]
        away = set(schedule.away)
        self._first = [s.external and s.id not in away for s in graph.storages]
        first = sum(size for size, here in zip(self._sizes, self._first, strict=True) if here)
        self._first_used = first + sum(self._sizes[s] for s in schedule.snapshot)
        self.used = self.peak = 0
        self.present: list[bool] = []

    def begin(self) -> None:
        """What is there before the first action. BudgetError if that alone is too much."""
        self.used = self.peak = self._first_used
        self.present = list(self._first)
        if self.used > self._budget:
            self._over("the step's start", "parameters, buffers and inputs", self.used)

    def take(self, op: int) -> None:
        """Enter what an op creates; for its duration also copies that it throws away and its workspace. BudgetError if over."""
        extra = self._workspace[op]
        for s in self._creates[op]:
            if self.present[s]:
                extra += self._sizes[s]
            else:
                self.used += self._sizes[s]
                self.present[s] = True
        if self.used + extra > self.peak:
            self.peak = self.used + extra
            if self.peak > self._budget:
                largest = max(self._creates[op], key=lambda s: self._sizes[s], default=None)
                name = "its workspace" if largest is None else self._graph.storages[largest].name
                self._over(f"op {self._graph.ops[op].name}", name, self.peak)

    def take_storage(self, storage: int) -> None:
        """Enter a storage that comes back from the lower tier."""
        self.present[storage] = True
        name = self._graph.storages[storage].name
        self._add(self._sizes[storage], f"the copy back of {name}", name)

    def take_rng(self, op: int) -> None:
        """Enter a generator state that is kept for an op."""
        self._add(self._graph.rng_state_bytes, f"op {self._graph.ops[op].name}", "the generator's state")

    def _add(self, size_bytes: int, who: str, what: str) -> None:
        self.used += size_bytes
        if self.used > self.peak:
            self.peak = self.used
            if self.peak > self._budget:
                self._over(who, what, self.peak)

    def give(self, storage: int) -> None:
        """Strike out a storage whose bytes are gone."""
        self.used -= self._sizes[storage]
        self.present[storage] = False

    def _over(self, op_name: str, storage_name: str, needed: int) -> None:
        raise BudgetError(
            f"{op_name} would bring the device to {needed} bytes ({storage_name} is the largest part), the budget is {self._budget}; "
            "it was stopped before the allocation",
            op_name=op_name,
            storage_name=storage_name,
            needed_bytes=needed,
            budget_bytes=self._budget,
        )


class Inspector:
    """Compares the storages that ops really make with those that the graph counts."""

    def __init__(self, captured: Captured) -> None:
        self._graph = captured.graph
        infos = (node_info(node) for node in captured.gm.graph.nodes if node.op == "call_function")
        self._storages = {info.op: info.storages for info in infos if info.op is not None}

    def verify(self, op: int, value: object) -> None:
        """StepError if an op has made a storage of another size than the plan counts."""
        values = value if isinstance(value, tuple | list) else (value,)
        one = self._graph.ops[op]
        for tensor, s in zip(values, self._storages[op], strict=True):
            if s in one.creates and isinstance(tensor, torch.Tensor):
                made, counted = tensor.untyped_storage().nbytes(), self._graph.storages[s].size_bytes
                if made != counted:
                    raise StepError(
                        f"op {one.name} ({one.target}) made {made} bytes for {self._graph.storages[s].name}, the plan counts {counted}"
                    )
