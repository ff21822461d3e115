"""Counts, bytes and times of a plan: the figures that tables and JSON show."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from schedopt.check import Report, check
from schedopt.graph import StorageKind
from schedopt.plan import ActionKind, Plan
from schedopt.plan_file import PlanFile


@dataclass(frozen=True, slots=True)
class Figures:
    """What a plan does in one step. `num_` counts storages (runs of ops for `num_recomputed`); `bytes_` are per step.

    swapped: copied out and brought back within the step. resting: on the lower tier between steps. split: parameters that are updated in
    parts. undo: copied only so that a failed step can be rolled back. recomputed: ops that run a second time, and the bytes they create.
    """

    num_swapped: int
    swapped_bytes: int
    num_resting: int
    resting_bytes: int
    num_split: int
    num_recomputed: int
    recomputed_bytes: int
    recompute_seconds: float
    num_undo: int
    undo_bytes: int
    snapshot_bytes: int
    out_bytes: int
    in_bytes: int


def figures(file: PlanFile) -> Figures:
    """Count what the plan's schedules do."""
    graph = file.graph
    subjects: dict[ActionKind, list[int]] = {kind: [] for kind in ActionKind}
    for schedule in file.plan.schedules:
        for action in schedule.actions:
            subjects[action.kind].append(action.subject)

    def total(storages: list[int] | set[int] | tuple[int, ...]) -> int:
        return sum(graph.storages[s].size_bytes for s in storages)

    away = {s for schedule in file.plan.schedules for s in schedule.away}
    swapped = (set(subjects[ActionKind.SWAP_OUT]) | (set(subjects[ActionKind.SAVE]) & set(subjects[ActionKind.SWAP_IN]))) - away
    undo = set(subjects[ActionKind.SAVE]) - swapped - away
    again = subjects[ActionKind.RECOMPUTE]
    resting = {s for s in away if graph.storages[s].parent is None}
    return Figures(
        num_swapped=len(swapped),
        swapped_bytes=total(swapped),
        num_resting=len(resting),
        resting_bytes=total(resting),
        num_split=len({s.parent for s in graph.storages if s.parent is not None and s.kind is StorageKind.PARAMETER}),
        num_recomputed=len(again),
        recomputed_bytes=sum(total(graph.ops[x].creates) for x in again),
        recompute_seconds=sum(graph.ops[x].time_ns for x in again) / 1e9,
        num_undo=len(undo),
        undo_bytes=total(undo),
        snapshot_bytes=sum(total(schedule.snapshot) for schedule in file.plan.schedules),
        out_bytes=total(subjects[ActionKind.SWAP_OUT]) + total(subjects[ActionKind.SAVE]),
        in_bytes=total(subjects[ActionKind.SWAP_IN]),
    )


def budget(plan: Plan) -> int:
    """The byte budget of the plan's device (the smallest, if there are several)."""
    return min((schedule.budget_bytes for schedule in plan.schedules), default=0)


def replay(file: PlanFile) -> Report:
    """What the checker says of the plan in a file."""
    return check(file.graph, file.plan, file.machine)


def summary_json(file: PlanFile) -> dict[str, Any]:
    """The plan's headline figures, sizes in bytes and times in seconds."""
    plan = file.plan
    return {
        "name": file.graph.name,
        "machine": plan.machine_name,
        "strategy": plan.strategy,
        "solver": plan.solver,
        "budget_bytes": budget(plan),
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_step_seconds": plan.step_ns / 1e9,
        "predicted_eager_peak_bytes": plan.eager_peak_bytes,
        "predicted_eager_seconds": plan.eager_ns / 1e9,
        "bound_seconds": None if plan.bound_ns is None else plan.bound_ns / 1e9,
        "gap": plan.gap,
        "solve_seconds": plan.solve_seconds,
        "exact": plan.exact,
        "undo": plan.undo,
        "graph_hash": plan.graph_hash,
        "num_ops": len(file.graph.ops),
        "num_storages": len(file.graph.storages),
        "notes": list(plan.notes),
    } | asdict(figures(file))
