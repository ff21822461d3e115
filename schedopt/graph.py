"""The training step as plain frozen data: ops and storages, no torch.

Everything that decides or checks works on this. Rules that all readers may rely on:

* `Graph.ops[i].id == i` and `Graph.storages[i].id == i`; the order of `ops` is the captured (eager) order.
* A *storage* owns bytes. Views are not here: they cost nothing and are replayed by the lowering where they are needed.
* An op touches storages in three disjoint ways: it `reads` them, it `writes` them in place (and may read them), it `creates` them.
  Every storage that is not external is created by exactly one op.
* The *version* of a storage is the number of in-place writes it has seen since it was created (or since the step began).
  An op needs each storage it touches at the version which the captured order gives (`expected_versions`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar


class Phase(StrEnum):
    """Part of the training step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class StorageKind(StrEnum):
    """What a storage holds."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER_STATE = "optimizer_state"
    CONSTANT = "constant"
    INPUT = "input"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OUTPUT = "output"


PERSISTENT_KINDS = frozenset({StorageKind.PARAMETER, StorageKind.BUFFER, StorageKind.OPTIMIZER_STATE, StorageKind.CONSTANT})
EXTERNAL_KINDS = PERSISTENT_KINDS | {StorageKind.INPUT}


class Recompute(StrEnum):
    """Whether an op may run a second time, and what that takes."""

    PURE = "pure"  # same inputs, same result, no side effect
    RANDOM = "random"  # draws from the generator: needs the generator's state from before its first run (action `save_rng`)
    STATISTICS = "statistics"  # writes running statistics as a side effect: the second run leaves every write out
    IN_PLACE = "in_place"  # writes storages in place: may run again only on a storage that was itself created again
    BARRED = "barred"  # never (update, collective, host read, ...): `Op.reason` says why


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that live and die together; `module` is the path of the module that creates or owns it.

    With `parent` it is a *part*: the bytes from `start_bytes` on of a storage that outlives the step and is never on the device when the
    part is changed. Parent and parts rest on the lower tier, in one place; ops write the parts, never the parent.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    id: int
    name: str
    kind: StorageKind
    size_bytes: int
    module: str = ""
    parent: int | None = None
    start_bytes: int = 0

    @property
    def persistent(self) -> bool:
        """True if it exists before and after the step (parameter, buffer, optimizer state, constant)."""
        return self.kind in PERSISTENT_KINDS

    @property
    def external(self) -> bool:
        """True if it exists before the step: persistent or an input."""
        return self.kind in EXTERNAL_KINDS


@dataclass(frozen=True, slots=True)
class Op:
    """One call of the captured graph that costs time or memory."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    id: int
    name: str
    target: str
    phase: Phase
    module: str = ""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    creates: tuple[int, ...] = ()
    recompute: Recompute = Recompute.PURE
    reason: str = ""
    time_ns: int = 0
    workspace_bytes: int = 0
    signature: str = ""  # target, shapes, strides, dtypes: the key under which its cost is cached
    source: str = ""  # "file.py:123" of the user's line, where known


@dataclass(frozen=True, slots=True)
class Graph:
    """The whole step. `outputs` are the storages the user gets back (the loss), alive when the step ends."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    outputs: tuple[int, ...] = ()
    rng_state_bytes: int = 5056
    exact: bool = True  # False: known to round differently from eager
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.ops)} ops, {len(self.storages)} storages, {self.hash()[:12]})"

    def hash(self) -> str:
        """Hex digest of what is computed (targets, signatures, storages, their links); costs and notes do not enter."""
        ops = [(o.target, o.phase, o.reads, o.writes, o.creates, o.recompute, o.signature) for o in self.ops]
        storages = [
            (s.name if s.external else "", s.kind, s.size_bytes, *(() if s.parent is None else (s.parent, s.start_bytes)))
            for s in self.storages
        ]
        text = json.dumps([ops, storages, self.outputs], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def split(self) -> frozenset[int]:
        """Parts and their parents: they always rest on the lower tier."""
        return frozenset(s for part in self.storages if part.parent is not None for s in (part.id, part.parent))


def expected_versions(graph: Graph) -> tuple[dict[int, int], ...]:
    """For each op, the version at which it needs each storage that it reads or writes, by the captured order."""
    version = [0] * len(graph.storages)
    needed: list[dict[int, int]] = []
    for op in graph.ops:
        needed.append({s: version[s] for s in (*op.reads, *op.writes)})
        for s in op.writes:
            version[s] += 1
    return tuple(needed)
