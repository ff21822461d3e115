"""The CPU back end: carries out the actions of one step."""

from __future__ import annotations

import time

import torch

from schedopt.graph import Graph
from schedopt.passes.action_calls import BASE
from schedopt.run.interrupt import HeldInterrupt
from schedopt.run.ledger import Inspector, Ledger
from schedopt.run.slots import Slots
from schedopt.run.tier import Copy, Tier, storage_bytes
from schedopt.run.undo import Undo


class CpuRuntime:
    """One step's state. Methods are the actions (see `passes.action_calls.Runtime`)."""

    def __init__(
        self, graph: Graph, ledger: Ledger, inspector: Inspector, tier: Tier, slots: Slots, undo: Undo, interrupt: HeldInterrupt
    ) -> None:
        self._sizes = [s.size_bytes for s in graph.storages]
        self._persistent = [s.persistent for s in graph.storages]
        self._ledger, self._tier, self._slots, self._undo, self._interrupt = ledger, tier, slots, undo, interrupt
        self.take = ledger.take
        self.release = ledger.give
        self.verify = inspector.verify
        self.stall_ns = self.bytes_out = self.bytes_in = 0
        self._copies: dict[int, Copy] = {}
        self._base_copies: set[int] = set()  # storages whose copy out under way is of their value at the step's start
        self._rng: dict[int, torch.Tensor] = {}
        self._rng_now: torch.Tensor | None = None

    def writing(self, op: int) -> None:
        """From the first lasting change on, Ctrl-C waits for the end of the step."""
        written = self._undo.lasting(op)
        if not self._interrupt.held and not self._undo.at_hand(written):
            self._interrupt.hold()
        self._undo.changed.update(written)

    # --- copies ------------------------------------------------------------------------------------------------------------------

    def _offset(self, storage: int, copy: int) -> int:
        return (self._slots.base if copy == BASE else self._slots.changed)[storage]

    def _wait(self, storage: int) -> None:
        copy = self._copies[storage]
        if not copy.done.is_set():
            started = time.perf_counter_ns()
            copy.done.wait()
            self.stall_ns += time.perf_counter_ns() - started
        copy.wait()
        del self._copies[storage]

    def swap_out(self, storage: int, copy: int, tensor: torch.Tensor) -> None:
        """Queue a copy to the lower tier. What lies there already is left alone: it may be needed for undo, or be what the user sees."""
        if self._persistent[storage] and copy == BASE:
            if storage in self._undo.saved:
                self._copies[storage] = Copy.finished()
                return
            self._base_copies.add(storage)
        self._copies[storage] = self._tier.write(self._offset(storage, copy), storage_bytes(tensor))
        self.bytes_out += self._sizes[storage]

    def wait_save(self, storage: int) -> None:
        """Wait for a copy to the lower tier."""
        self._wait(storage)
        if storage in self._base_copies:
            self._base_copies.discard(storage)
            self._undo.saved.add(storage)

    def wait_out(self, storage: int, tensor: torch.Tensor) -> None:
        """Wait, then free the bytes."""
        self.wait_save(storage)
        self.evict(storage, tensor)

    def evict(self, storage: int, tensor: torch.Tensor) -> None:
        """Free bytes that the lower tier holds."""
        if self._persistent[storage]:
            self._undo.stale.add(storage)
        tensor.untyped_storage().resize_(0)
        self._ledger.give(storage)

    def swap_in(self, storage: int, copy: int, tensor: torch.Tensor) -> None:
        """Take bytes, queue a copy from the lower tier."""
        self._ledger.take_storage(storage)
        tensor.untyped_storage().resize_(self._sizes[storage])
        self._copies[storage] = self._tier.read(self._offset(storage, copy), storage_bytes(tensor))
        self.bytes_in += self._sizes[storage]

    def wait_in(self, storage: int) -> None:
        """Wait for a copy from the lower tier."""
        self._wait(storage)
        self._undo.stale.discard(storage)

    # --- generator ---------------------------------------------------------------------------------------------------------------

    def save_rng(self, op: int) -> None:
        """Keep the generator's state for op."""
        self._ledger.take_rng(op)
        self._rng[op] = torch.get_rng_state()

    def restore_rng(self, op: int) -> None:
        """Generator as it was before op's first run."""
        self._rng_now = torch.get_rng_state()
        torch.set_rng_state(self._rng[op])

    def resume_rng(self) -> None:
        """Generator as it was before the recompute."""
        assert self._rng_now is not None
        torch.set_rng_state(self._rng_now)
        self._rng_now = None
