"""The CPU back end: carries out the actions of one step, keeps the account of bytes, and can undo the step."""

from __future__ import annotations

import contextlib
import time

import torch
from torch.utils import _pytree as pytree

from schedopt.errors import BudgetError, StepError, TierError
from schedopt.pass_manager import Program
from schedopt.passes.action_calls import BASE
from schedopt.run.interrupt import HeldInterrupt
from schedopt.run.resting import Resting
from schedopt.run.slots import Slots
from schedopt.run.tier import Copy, Tier, storage_bytes


class CpuRuntime:
    """One step's state. Methods are the actions (see `passes.action_calls.Runtime`)."""

    def __init__(self, program: Program, tier: Tier, slots: Slots, resting: Resting, interrupt: HeldInterrupt) -> None:
        assert program.plan is not None
        self.graph, self.schedule = program.graph, program.plan.schedules[0]
        self.ops, self.sizes = self.graph.ops, [s.size_bytes for s in self.graph.storages]
        self.tier, self.slots, self.resting, self.interrupt = tier, slots, resting, interrupt
        self.budget = self.schedule.budget_bytes
        self.copies: dict[int, Copy] = {}
        self.issued: list[Copy] = []
        self.saved_base: set[int] = set(self.schedule.away)  # base copies that are complete on the lower tier
        self.pending_base: set[int] = set()
        self.changed: set[int] = set()
        self.stall_ns = self.bytes_out = self.bytes_in = 0
        self.present = [s.external and s.id not in resting.away for s in self.graph.storages]
        self.used = sum(size for size, here in zip(self.sizes, self.present, strict=True) if here)
        self.used += sum(self.sizes[s] for s in self.schedule.snapshot)
        self.peak = self.used
        self._extra: list[int] = []
        self._rng: dict[int, torch.Tensor] = {}
        self._rng_now: torch.Tensor | None = None
        self._rng_start = torch.get_rng_state()
        covered = set(self.schedule.snapshot)
        self.outliving = [tuple(s for s in o.writes if self.graph.storages[s].persistent and s not in covered) for o in self.ops]
        self._live = self._live_tensors(program)
        self._snapshots = [(self._live[s], self._live[s].clone()) for s in self.schedule.snapshot]
        if self.used > self.budget:
            self._over("the start of the step", "parameters and inputs", self.used)

    def _live_tensors(self, program: Program) -> dict[int, torch.Tensor]:
        """A tensor over the whole storage of everything that outlives the step and rests on the device."""
        found: dict[int, torch.Tensor] = {}
        for external in program.captured.externals:
            storage = self.graph.storages[external.storage]
            if storage.persistent and storage.id not in self.resting.away and storage.id not in found:
                whole = program.captured.lookup(external.slot).untyped_storage()
                found[storage.id] = torch.empty(0, dtype=torch.uint8).set_(whole, 0, (whole.nbytes(),))
        return found

    # --- bytes -------------------------------------------------------------------------------------------------------------------

    def take(self, op: int) -> None:
        """Account for an op's creates, thrown-away copies and workspace."""
        one = self.ops[op]
        extra = one.workspace_bytes
        for s in one.creates:
            if self.present[s]:
                extra += self.sizes[s]
            else:
                self.used += self.sizes[s]
                self.present[s] = True
        total = self.used + extra
        if total > self.peak:
            self.peak = total
            if total > self.budget:
                largest = max(one.creates, key=lambda s: self.sizes[s], default=None)
                self._over(f"op {one.name}", self.graph.storages[largest].name if largest is not None else "its workspace", total)

    def _over(self, op_name: str, storage_name: str, needed: int) -> None:
        raise BudgetError(
            f"{op_name} would need {needed} bytes ({storage_name} is the largest part), the budget is {self.budget}; nothing was allocated",
            op_name=op_name,
            storage_name=storage_name,
            needed_bytes=needed,
            budget_bytes=self.budget,
        )

    def drop_workspace(self, op: int) -> None:
        """The account of `used` never held it."""

    def verify(self, op: int, value: object) -> None:
        """StepError if an op made storages of another size than the plan counts."""
        made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)}
        one = self.ops[op]
        if one.creates and not one.writes and sum(made.values()) > sum(self.sizes[s] for s in one.creates):
            raise StepError(f"op {one.name} ({one.target}) made {sum(made.values())} bytes, the plan counts {sum(self.sizes[s] for s in one.creates)}")

    def release(self, storage: int) -> None:
        """Bytes are gone."""
        self.used -= self.sizes[storage]
        self.present[storage] = False

    def evict(self, storage: int, tensor: torch.Tensor) -> None:
        """Free bytes that the lower tier holds."""
        self._check_base(storage)
        tensor.untyped_storage().resize_(0)
        self.release(storage)

    # --- copies ------------------------------------------------------------------------------------------------------------------

    def swap_out(self, storage: int, copy: int, tensor: torch.Tensor) -> None:
        """Queue a copy to the lower tier."""
        offset = (self.slots.base if copy == BASE else self.slots.changed)[storage]
        if copy == BASE:
            self.pending_base.add(storage)
        self._issue(storage, self.tier.write(offset, storage_bytes(tensor)))
        self.bytes_out += self.sizes[storage]

    def _issue(self, storage: int, copy: Copy) -> None:
        self.copies[storage] = copy
        self.issued.append(copy)

    def _wait(self, storage: int) -> None:
        copy = self.copies.pop(storage)
        if not copy.done.is_set():
            started = time.perf_counter_ns()
            copy.done.wait()
            self.stall_ns += time.perf_counter_ns() - started
        copy.wait()

    def wait_save(self, storage: int) -> None:
        """Wait for a copy to the lower tier."""
        self._wait(storage)
        if storage in self.pending_base:
            self.pending_base.discard(storage)
            self.saved_base.add(storage)

    def wait_out(self, storage: int, tensor: torch.Tensor) -> None:
        """Wait, then free the bytes."""
        self.wait_save(storage)
        tensor.untyped_storage().resize_(0)
        self.release(storage)

    def swap_in(self, storage: int, copy: int, tensor: torch.Tensor) -> None:
        """Take bytes, queue a copy from the lower tier."""
        self.used += self.sizes[storage]
        self.present[storage] = True
        self.peak = max(self.peak, self.used)
        if self.used > self.budget:
            name = self.graph.storages[storage].name
            self._over(f"swap_in of {name}", name, self.used)
        tensor.untyped_storage().resize_(self.sizes[storage])
        offset = (self.slots.base if copy == BASE else self.slots.changed)[storage]
        self._issue(storage, self.tier.read(offset, storage_bytes(tensor)))
        self.bytes_in += self.sizes[storage]

    def wait_in(self, storage: int) -> None:
        """Wait for a copy from the lower tier."""
        self._wait(storage)

    def _check_base(self, storage: int) -> None:
        if self.graph.storages[storage].persistent and storage not in self.saved_base and storage not in self.changed:
            raise StepError(f"{self.graph.storages[storage].name} would be evicted without a copy")

    # --- generator ---------------------------------------------------------------------------------------------------------------

    def save_rng(self, op: int) -> None:
        """Keep the generator's state for op."""
        self._rng[op] = torch.get_rng_state()
        self.used += self.graph.rng_state_bytes
        self.peak = max(self.peak, self.used)

    def restore_rng(self, op: int) -> None:
        """Generator as it was before op's first run."""
        self._rng_now = torch.get_rng_state()
        torch.set_rng_state(self._rng[op])

    def resume_rng(self) -> None:
        """Generator as it was before the recompute."""
        assert self._rng_now is not None
        torch.set_rng_state(self._rng_now)
        self._rng_now = None

    # --- undo --------------------------------------------------------------------------------------------------------------------

    def writing(self, op: int) -> None:
        """From the first lasting change on, Ctrl-C waits for the end of the step."""
        self.interrupt.hold()
        self.changed.update(self.outliving[op])

    def roll_back(self) -> list[str]:
        """Undo the step; names of storages that could not be restored."""
        for copy in self.issued:
            copy.done.wait()
        lost = []
        for s, whole in self._live.items():
            storage = whole.untyped_storage()
            gone = storage.nbytes() != self.sizes[s] and self.sizes[s] > 0 and s in self.slots.base
            if not gone and s not in self.changed:
                continue
            if gone:
                storage.resize_(self.sizes[s])
            if s in self.saved_base or s in self.pending_base:
                with contextlib.suppress(TierError):
                    self.tier.read(self.slots.base[s], storage_bytes(whole)).wait()
                    continue
            lost.append(self.graph.storages[s].name)
        for live, kept in self._snapshots:
            live.copy_(kept)
        self.resting.empty()
        torch.set_rng_state(self._rng_start)
        return lost

