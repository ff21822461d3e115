"""What it takes to put everything back when a step fails."""

from __future__ import annotations

import contextlib

import torch

from schedopt.errors import TierError
from schedopt.graph import Graph
from schedopt.plan import Schedule
from schedopt.run.slots import Slots
from schedopt.run.tier import Tier, storage_bytes


class Undo:
    """The step's start: copies of small things on the device, base copies of others on the lower tier, the generator's state.

    `live` has one tensor per storage that outlives the step and rests on the device. Storages that rest on the lower tier need nothing:
    the slot with their old value is not written in the step.
    """

    def __init__(self, graph: Graph, schedule: Schedule, tier: Tier, slots: Slots, live: dict[int, torch.Tensor]) -> None:
        self._graph, self._tier, self._slots, self._live = graph, tier, slots, live
        self._generator = bytearray(storage_bytes(torch.get_rng_state()))  # not a tensor: no bytes of the device
        self._snapshots = {s: torch.from_numpy(storage_bytes(live[s])).clone() for s in schedule.snapshot if s in live}
        self.saved = set(schedule.away)  # their value at the step's start is complete on the lower tier
        self.stale: set[int] = set()  # their bytes on the device are not there, or not to be trusted
        self.changed: set[int] = set()  # written in this step

    def lasting(self, op: int) -> list[int]:
        """What op writes of that which outlives the step."""
        return [s for s in self._graph.ops[op].writes if self._graph.storages[s].persistent]

    def at_hand(self, storages: list[int]) -> bool:
        """Whether all of them have copies on the device, so that putting them back can not fail."""
        return self._snapshots.keys() >= set(storages)

    def roll_back(self) -> list[str]:
        """Put everything back; names of the storages for which there is no copy. No copy may be under way."""
        lost = []
        for s in sorted((self.changed | self.stale) & self._live.keys()):
            storage = self._live[s].untyped_storage()
            if storage.nbytes() != self._graph.storages[s].size_bytes:
                storage.resize_(self._graph.storages[s].size_bytes)
            if not self._restore(s):
                lost.append(self._graph.storages[s].name)
        torch.set_rng_state(torch.frombuffer(self._generator, dtype=torch.uint8))
        return lost

    def _restore(self, s: int) -> bool:
        whole = storage_bytes(self._live[s])
        if s in self._snapshots:
            whole[:] = self._snapshots[s].numpy()
            return True
        if s in self.saved:
            with contextlib.suppress(TierError):
                self._tier.read(self._slots.base[s], whole).wait()
                return True
        return False
