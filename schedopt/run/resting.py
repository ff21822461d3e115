"""Storages that outlive the step: how they are handed to it, and where they rest between steps.

One that rests on the lower tier has two slots. The user's tensor is mapped onto the slot that holds the last finished step, so the model,
`state_dict()` and `load_state_dict()` work at any time without device memory. A step reads that slot, writes the other, and turns them
round when it has succeeded: a step that fails has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from schedopt.capture.captured import Captured, External
from schedopt.plan import Schedule
from schedopt.run.slots import Slots
from schedopt.run.tier import Tier, storage_bytes


class Resting:
    """Keeps the live tensors of a captured step where the schedule wants them."""

    def __init__(self, captured: Captured, schedule: Schedule, tier: Tier, slots: Slots) -> None:
        self.captured, self.tier, self.slots = captured, tier, slots
        self.sizes = {s.id: s.size_bytes for s in captured.graph.storages}
        self.away: dict[int, list[External]] = {s: [] for s in schedule.away}
        for external in captured.externals:
            if external.storage in self.away:
                self.away[external.storage].append(external)
        self._inside: dict[int, torch.UntypedStorage] = {}  # device storages of the step, empty between steps
        self._mapped: dict[int, torch.UntypedStorage] = {}
        self._offsets: dict[str, int] = {}
        for s, externals in self.away.items():
            self._inside[s] = torch.UntypedStorage(0)
            self._settle_down(s, externals)

    def _place(self, storage: torch.UntypedStorage, external: External) -> torch.Tensor:
        offset = self._offsets[external.node]
        return torch.empty(0, dtype=external.dtype).set_(storage, offset, external.shape, external.stride)

    def _settle_down(self, s: int, externals: list[External]) -> None:
        """Move a storage into its base slot and map the user's tensors onto it."""
        live = [self.captured.lookup(e.slot) for e in externals]
        for external, tensor in zip(externals, live, strict=True):
            self._offsets[external.node] = tensor.storage_offset()
        self.tier.write(self.slots.base[s], storage_bytes(live[0])).wait()
        self._map(s)

    def _map(self, s: int) -> None:
        self._mapped[s] = self.tier.mapped(self.slots.base[s], self.sizes[s])
        for external in self.away[s]:
            self.captured.adopt(external.slot, self._place(self._mapped[s], external))
        self.tier.settle(self.slots.base[s], self.sizes[s])

    def begin(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors for the placeholders. Tensors that the user has put in another's place since the last step are taken over."""
        inputs = []
        for external in self.captured.externals:
            if external.slot[0] == "input":
                inputs.append(leaves[external.slot[1]].detach())
                continue
            live = self.captured.lookup(external.slot)
            if tuple(live.shape) != external.shape or live.dtype != external.dtype:
                raise ValueError(f"{'/'.join(map(str, external.slot[1:]))} has changed shape or dtype; compile again")
            if external.storage in self.away:
                if not self._is_mapped(external.storage, live):
                    self._settle_down(external.storage, self.away[external.storage])
                inputs.append(self._place(self._inside[external.storage], external))
            else:
                inputs.append(live.detach())
        for s in self.away:
            self.tier.settle(self.slots.base[s], self.sizes[s])
        return inputs

    def commit(self, changed: set[int]) -> None:
        """The step has succeeded: what it wrote becomes what the user sees."""
        for s in self.away:
            if s in changed:
                self.slots.base[s], self.slots.changed[s] = self.slots.changed[s], self.slots.base[s]
                self._map(s)

    def empty(self) -> None:
        """Free what a failed step has left on the device."""
        for storage in self._inside.values():
            if storage.nbytes():
                storage.resize_(0)

    def _is_mapped(self, s: int, live: torch.Tensor) -> bool:
        return s in self._mapped and live.untyped_storage().data_ptr() == self._mapped[s].data_ptr()

    def close(self) -> None:
        """Give every tensor that rests ordinary memory of its own; those that the user has put in another's place stay. A later step
        takes them all over again."""
        for s, externals in self.away.items():
            if not self._is_mapped(s, self.captured.lookup(externals[0].slot)):
                continue
            home = torch.UntypedStorage(self.sizes[s])
            torch.empty(0, dtype=torch.uint8).set_(home, 0, (self.sizes[s],)).copy_(
                torch.empty(0, dtype=torch.uint8).set_(self._mapped[s], 0, (self.sizes[s],))
            )
            for external in externals:
                self.captured.adopt(external.slot, self._place(home, external))
        self._mapped.clear()
