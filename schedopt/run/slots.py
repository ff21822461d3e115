"""Where each storage lies on the lower tier."""

from __future__ import annotations

from dataclasses import dataclass

from schedopt.errors import TierError
from schedopt.graph import Graph
from schedopt.pass_manager import Program
from schedopt.plan import ActionKind, Schedule
from schedopt.run.tier import PAGE, FileTier, RamTier, Tier


@dataclass(frozen=True, slots=True)
class Slots:
    """Byte offsets: `base[s]` and, for storages that outlive the step, `changed[s]`, so that the old value is never overwritten. Parts lie
    inside their parents' slots; `flat` are the offsets of both."""

    base: dict[int, int]
    changed: dict[int, int]
    size_bytes: int
    flat: frozenset[int] = frozenset()


def lay_out(graph: Graph, schedule: Schedule) -> Slots:
    """Slots for all that the schedule moves. Storages of one step whose times away do not overlap share a slot (first fit)."""
    base: dict[int, int] = {}
    changed: dict[int, int] = {}
    end = 0
    moved = dict.fromkeys(schedule.away)
    moved |= dict.fromkeys(a.subject for a in schedule.actions if a.kind in (ActionKind.SWAP_OUT, ActionKind.SAVE))
    for s in moved:
        if graph.storages[s].persistent and graph.storages[s].parent is None:
            for slots in (base, changed):
                slots[s] = end
                end += _padded(graph.storages[s].size_bytes)
    for part in graph.storages:
        if part.parent is not None:
            for slots in (base, changed):
                slots[part.id] = slots[part.parent] + part.start_bytes
    flat = frozenset(slots[s] for s in graph.split() for slots in (base, changed))
    spans: dict[int, list[int]] = {}
    for position, action in enumerate(schedule.actions):
        if action.kind in (ActionKind.SWAP_OUT, ActionKind.SAVE, ActionKind.WAIT_IN) and not graph.storages[action.subject].persistent:
            spans.setdefault(action.subject, [position, position])[1] = position
    placed: list[tuple[int, int, int, int]] = []  # (first, last, offset, size)
    for s, (first, last) in sorted(spans.items(), key=lambda item: -graph.storages[item[0]].size_bytes):
        size = _padded(graph.storages[s].size_bytes)
        offset = end
        for _, _, start, length in sorted((p for p in placed if p[0] <= last and first <= p[1]), key=lambda p: p[2]):
            if offset + size <= start:
                break
            offset = max(offset, start + length)
        base[s] = offset
        placed.append((first, last, offset, size))
    return Slots(base, changed, max([end, *(p[2] + p[3] for p in placed)]), flat)


def make_tier(program: Program, directory: str | None) -> tuple[Tier, Slots]:
    """The tier that the plan asks for, large enough; TierError if there is no room."""
    assert program.plan is not None
    schedule, constraints = program.plan.schedules[0], program.constraints
    slots = lay_out(program.graph, schedule)
    if constraints.tier_bytes is not None and slots.size_bytes > constraints.tier_bytes:
        raise TierError(f"the plan needs {slots.size_bytes} bytes on the lower tier, tier_bytes allows {constraints.tier_bytes}")
    link, throttle = program.machine.link(schedule.device, schedule.tier), constraints.throttle_bytes_per_s
    if schedule.tier == "file":
        return FileTier(slots.size_bytes, directory=directory, duplex=link.duplex, throttle_bytes_per_s=throttle, flat=slots.flat), slots
    return RamTier(slots.size_bytes, duplex=link.duplex, throttle_bytes_per_s=throttle, blocking=link.blocking), slots


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE + PAGE
