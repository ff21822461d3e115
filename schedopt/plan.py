"""The plan: every decision as data, in the form that is checked, exported and lowered.

The heart of a plan is one list of *actions* per device, in the order in which the device's compute stream meets them. Two copy
streams (out, in) take the copies in the order in which they are issued. Residency intervals follow from the list.

A storage is, on its device, in one of these states; `lower` says whether the lower tier holds its present version:

    ABSENT     no bytes on the device (not yet created, released, or away)
    RESIDENT   may be read and written
    LEAVING    a copy out is under way: its bytes still count, it may be read, not written
    ARRIVING   a copy in is under way: its bytes count, it may be neither read nor written

What each action needs and does (`x` is an op for run, recompute, save_rng and a storage for the others):

    run x        all that op x reads and writes is there at the version it needs; creates become RESIDENT. Each op runs exactly once.
    recompute x  as run, for a second time: created storages that are ABSENT become RESIDENT at version 0, fresh copies of the others are
                 thrown away at once (but count while the op runs). A `statistics` op leaves its writes out; a `random` op restores the
                 state that save_rng kept and afterwards the present one; an `in_place` op raises the version of what it writes.
    save_rng x   keep the generator's state for op x, just before `run x`; its bytes count to the end of the step.
    swap_out x   RESIDENT -> LEAVING; copy queued on the out stream.
    wait_out x   compute waits for that copy; LEAVING -> ABSENT, bytes freed, lower tier holds the version.
    save x       RESIDENT stays RESIDENT; copy queued on the out stream (an undo copy, or the first half of a free eviction).
    wait_save x  compute waits for that copy; lower tier holds the version. Until then x may be read, not written or released.
    swap_in x    ABSENT (lower tier holds the version) -> ARRIVING; bytes are taken here; copy queued on the in stream.
    wait_in x    compute waits for that copy; ARRIVING -> RESIDENT; the lower copy stays valid until x is written.
    release x    RESIDENT -> ABSENT; bytes freed. What is needed later must be in the lower tier (free eviction) or be recomputed.

A storage with a `parent` is a part of it (`graph.Storage`): both are in `away`, no op writes the parent; what is read of either is the
value from before the step, for the lower tier keeps it to the end.

Start: persistent storages in `away` are ABSENT with a valid lower copy, all other external storages are RESIDENT.
End: the same again, at the final versions; outputs and inputs are RESIDENT; all else is ABSENT; no copy is under way.
Inputs belong to the user and are never released or swapped.

Bytes used at a moment = RESIDENT + LEAVING + ARRIVING storages + `snapshot` storages once more (their undo copies on the device, for
small things such as BatchNorm statistics) + kept generator states. While an op runs, its creates, its thrown-away copies and its
workspace are added. The largest such sum is the peak and must not exceed the budget.

Time: compute goes through the list; run and recompute take `Op.time_ns`. A copy starts when it has been issued and its stream is free,
and takes `Link.out_ns` or `Link.in_ns` (one shared stream for both directions if the link is not duplex); issuing it costs compute
`Link.tax_ns`, what ops lose to it. A wait moves compute to the
end of its copy. The step ends when compute and both streams are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

PLAN_VERSION = 1


class ActionKind(StrEnum):
    """What an action does; see the module docstring."""

    RUN = "run"
    RECOMPUTE = "recompute"
    SAVE_RNG = "save_rng"
    SWAP_OUT = "swap_out"
    WAIT_OUT = "wait_out"
    SAVE = "save"
    WAIT_SAVE = "wait_save"
    SWAP_IN = "swap_in"
    WAIT_IN = "wait_in"
    RELEASE = "release"


OP_ACTIONS = frozenset({ActionKind.RUN, ActionKind.RECOMPUTE, ActionKind.SAVE_RNG})


class Fate(StrEnum):
    """What becomes of a storage between two uses."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"
    REST = "rest"  # persistent, lives on the lower tier between steps
    SPLIT = "split"  # persistent, rests on the lower tier and is updated there part by part


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a device's list; `subject` is an op id or a storage id, by `kind`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: ActionKind
    subject: int

    def __str__(self) -> str:
        return f"{self.kind.value} {self.subject}"


@dataclass(frozen=True, slots=True)
class Decision:
    """Why: the fate of one storage between op `after_op` and op `before_op` (ids; -1: the step's start or end)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    storage: int
    fate: Fate
    after_op: int
    before_op: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Schedule:
    """All that one device does in a step."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    device: str
    tier: str
    budget_bytes: int
    actions: tuple[Action, ...]
    away: tuple[int, ...] = ()
    snapshot: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"Schedule({self.device!r}, {len(self.actions)} actions, budget {self.budget_bytes}, {len(self.away)} away)"


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions for one graph on one machine.

    `strategy` is what was asked for ("auto", "window", "recompute", "swap"), `solver` what made it ("plain" if the job fits).
    `peak_bytes` and `step_ns` are predictions by the checker; `bound_ns` is a proven lower bound of the step time under this budget in
    the same cost model (None: none computed); `gap` = step_ns / bound_ns - 1. `undo`: a step that fails after an update is rolled back.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    graph_hash: str
    machine_name: str
    strategy: str
    solver: str
    schedules: tuple[Schedule, ...]
    decisions: tuple[Decision, ...] = ()
    undo: bool = True
    peak_bytes: int = 0
    step_ns: int = 0
    eager_peak_bytes: int = 0
    eager_ns: int = 0
    bound_ns: int | None = None
    solve_seconds: float = 0.0
    exact: bool = True
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Plan({self.strategy}/{self.solver}, {len(self.schedules)} device(s), peak {self.peak_bytes}, "
            f"step {self.step_ns} ns, graph {self.graph_hash[:12]})"
        )

    @property
    def gap(self) -> float | None:
        """Relative distance of the predicted step time from the proven bound; None without a bound."""
        return None if not self.bound_ns else max(0.0, self.step_ns / self.bound_ns - 1.0)
