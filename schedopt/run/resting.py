"""Storages that outlive the step: how they are handed to it, and where they rest between steps.

One that rests on the lower tier has two slots. The user's tensor is mapped onto the slot that holds the last finished step, so the model,
`state_dict()` and `load_state_dict()` work at any time without device memory. A step reads that slot, writes the other, and turns them
round when it has succeeded: a step that fails has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from schedopt.capture.captured import Captured, External
from schedopt.errors import StepError
from schedopt.plan import Schedule
from schedopt.run.slots import Slots
from schedopt.run.tier import Tier, storage_bytes


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor of the user's, and what told that it was good; `alias` shares its memory."""

    tensor: torch.Tensor
    alias: torch.Tensor
    address: int
    shape: torch.Size
    stride: tuple[int, ...]


class Resting:
    """Keeps the live tensors of a captured step where the schedule wants them."""

    def __init__(self, captured: Captured, schedule: Schedule, tier: Tier, slots: Slots) -> None:
        self._captured, self._tier, self._slots = captured, tier, slots
        self._sizes = {s.id: s.size_bytes for s in captured.graph.storages}
        self._offsets = {n.name: n.meta["val"].storage_offset() for n in captured.gm.graph.nodes if n.op == "placeholder"}
        self._groups: dict[int, list[External]] = {}  # storage -> its placeholders
        for external in captured.externals:
            if captured.graph.storages[external.storage].persistent and external.slot[0] != "part":
                self._groups.setdefault(external.storage, []).append(external)
        self._parts: dict[int, list[int]] = {}  # storage -> its parts, which lie in its slots and have no tensors of the user's
        for part in captured.graph.storages:
            if part.parent is not None:
                self._parts.setdefault(part.parent, []).append(part.id)
        self.away = frozenset(schedule.away) & self._groups.keys()
        self._moved = frozenset(slots.base) - self.away
        self._inside: dict[str, torch.Tensor] = {}  # the step's own tensors for what rests, without bytes between steps
        self._mapped: dict[int, torch.UntypedStorage] = {}
        self._seen: dict[str, _Seen] = {}  # the user's tensors as the last step found them good
        for s in self.away:
            storage = _memory(self._sizes[s])
            self._inside |= {e.node: self._place(storage, e) for e in self._groups[s]}
            storage.resize_(0)
        for external in captured.externals:
            if external.slot[0] == "part":
                storage = _memory(self._sizes[external.storage])
                self._inside[external.node] = self._place(storage, external)
                storage.resize_(0)

    def _place(self, storage: torch.UntypedStorage, external: External) -> torch.Tensor:
        """A tensor with the geometry that was captured."""
        whole = torch.empty(0, dtype=external.dtype)
        return whole.set_(storage, self._offsets[external.node], external.shape, external.stride)

    def begin(self, leaves: Sequence[Any]) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        """The tensors for the placeholders, and one tensor per storage that outlives the step and rests on the device.

        Tensors that the user has put in another's place since the last step are taken over. ValueError if they do not fit the graph.
        """
        handed: dict[str, torch.Tensor] = dict(self._inside)
        live: dict[int, torch.Tensor] = {}
        for s, group in self._groups.items():
            tensors = [self._captured.lookup(e.slot) for e in group]
            if not all(self._unchanged(e.node, t) for e, t in zip(group, tensors, strict=True)):
                self._take_over(s, group, tensors)
            if s in self.away:
                self._tier.settle(self._slots.base[s], self._sizes[s])
                continue
            for external in group:
                handed[external.node] = live[s] = self._seen[external.node].alias
        for external in self._captured.externals:
            if external.slot[0] == "input":
                handed[external.node] = leaf = leaves[external.slot[1]].detach()
                _check(external, leaf)
        return [handed[e.node] for e in self._captured.externals], live

    def _unchanged(self, node: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the one of the last step, where it was and as it was."""
        seen = self._seen.get(node)
        if seen is None or tensor is not seen.tensor or tensor.data_ptr() != seen.address:
            return False
        return tensor.stride() == seen.stride and tensor.shape == seen.shape and tensor.dtype == seen.alias.dtype

    def _take_over(self, s: int, group: list[External], tensors: list[torch.Tensor]) -> None:
        """Check tensors that are new here and put them where the schedule wants them."""
        for external, tensor in zip(group, tensors, strict=True):
            _check(external, tensor)
        if s in self.away:
            self._let_rest(s, tensors)
        elif not self._fits(s, tensors):
            self._take_home(s, tensors)
        for external, tensor in zip(group, tensors, strict=True):
            self._seen[external.node] = _Seen(tensor, tensor.detach(), tensor.data_ptr(), tensor.shape, tensor.stride())

    def _fits(self, s: int, tensors: list[torch.Tensor]) -> bool:
        """Whether tensors lie in one storage just as they did when captured, and the schedule may take its bytes away."""
        storage = tensors[0].untyped_storage()
        if storage.nbytes() != self._sizes[s] or (s in self._moved and not storage.resizable()):
            return False
        placed = all(t.storage_offset() == self._offsets[e.node] for e, t in zip(self._groups[s], tensors, strict=True))
        return placed and all(t.untyped_storage().data_ptr() == storage.data_ptr() for t in tensors[1:])

    def _take_home(self, s: int, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Ordinary memory of its own for a storage; the user's tensors from now on live there."""
        home = _memory(self._sizes[s])
        placed = [self._place(home, e) for e in self._groups[s]]
        for external, new, old in zip(self._groups[s], placed, tensors, strict=True):
            if s in self._moved and old.is_shared():  # type: ignore[no-untyped-call]  # torch has no types here
                raise StepError(
                    f"{'/'.join(map(str, external.slot[1:]))} is shared between processes; a schedule that moves it can not run"
                )
            new.copy_(old)
        for external, new in zip(self._groups[s], placed, strict=True):
            self._captured.adopt(external.slot, new)
        return placed

    def settle(self) -> None:
        """Put everything that rests on the lower tier there, now."""
        for s in self.away:
            self._take_over(s, self._groups[s], [self._captured.lookup(e.slot) for e in self._groups[s]])

    def _let_rest(self, s: int, tensors: list[torch.Tensor]) -> None:
        """Move a storage into its base slot, unless it is there, and map the user's tensors onto it."""
        if all(self._is_mapped(s, tensor) for tensor in tensors):
            return
        if not self._fits(s, tensors) or self._is_mapped(s, tensors[0]):
            tensors = self._take_home(s, tensors)
        self._tier.write(self._slots.base[s], storage_bytes(tensors[0])).wait()
        self._adopt(s, self._map(s, self._slots.base[s]))

    def _is_mapped(self, s: int, live: torch.Tensor) -> bool:
        return s in self._mapped and live.untyped_storage().data_ptr() == self._mapped[s].data_ptr()

    def _map(self, s: int, offset: int) -> list[torch.Tensor]:
        storage = self._tier.mapped(offset, self._sizes[s])
        return [self._place(storage, external) for external in self._groups[s]]

    def _adopt(self, s: int, tensors: list[torch.Tensor]) -> None:
        self._mapped[s] = tensors[0].untyped_storage()
        for external, tensor in zip(self._groups[s], tensors, strict=True):
            self._captured.adopt(external.slot, tensor)

    def prepare(self, changed: set[int]) -> dict[int, list[torch.Tensor]]:
        """The step has come to its end: tensors mapped onto what it wrote, for `commit`."""
        written = changed | {s for s, parts in self._parts.items() if not changed.isdisjoint(parts)}
        return {s: self._map(s, self._slots.changed[s]) for s in self.away & written}

    def commit(self, prepared: dict[int, list[torch.Tensor]]) -> None:
        """What the step wrote becomes what the user sees. Only assignments: nothing here can fail."""
        for s, tensors in prepared.items():
            for x in (s, *self._parts.get(s, ())):
                self._slots.base[x], self._slots.changed[x] = self._slots.changed[x], self._slots.base[x]
            self._adopt(s, tensors)

    def empty(self) -> None:
        """Free what a failed step has left on the device."""
        for tensor in self._inside.values():
            if tensor.untyped_storage().nbytes():
                tensor.untyped_storage().resize_(0)

    def bring_home(self) -> None:
        """Give every tensor that rests ordinary memory of its own; those that the user has put in another's place stay. A later step
        takes them all over again."""
        for s in self.away:
            tensors = [self._captured.lookup(e.slot) for e in self._groups[s]]
            if any(self._is_mapped(s, tensor) for tensor in tensors):
                self._take_home(s, tensors)
        self._mapped.clear()
        self._seen.clear()


def _memory(size_bytes: int) -> torch.UntypedStorage:
    return torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()


def _check(external: External, tensor: torch.Tensor) -> None:
    """ValueError if a tensor is not of the captured kind. Strides of dimensions of size one say nothing."""
    same = tensor.shape == external.shape and tensor.dtype == external.dtype
    if same and tensor.stride() != external.stride and tensor.numel():
        same = all(a == b or n == 1 for a, b, n in zip(tensor.stride(), external.stride, external.shape, strict=True))
    if not same:
        name = "/".join(map(str, external.slot))
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} now, the step was compiled for "
            f"{external.dtype} {external.shape} with strides {external.stride}; compile again"
        )
