"""The predicted step as a Chrome trace, which Perfetto opens: compute, both copy directions, and memory beside the budget."""

from __future__ import annotations

from typing import Any

from schedopt.check import Report
from schedopt.export.figures import budget
from schedopt.plan import OP_ACTIONS, ActionKind
from schedopt.plan_file import PlanFile

COMPUTE, COPY_OUT, COPY_IN = 1, 2, 3
_PID = 1
_TIMED = OP_ACTIONS - {ActionKind.SAVE_RNG}


def to_perfetto(file: PlanFile, report: Report) -> dict[str, Any]:
    """The trace as an object to be written as JSON; times in microseconds, as the format wants them."""
    schedule = file.plan.schedules[0]
    tracks = {COMPUTE: "compute", COPY_OUT: f"copy out to {schedule.tier}", COPY_IN: f"copy in from {schedule.tier}"}
    events: list[dict[str, Any]] = [_named("process_name", 0, f"{file.graph.name} on {schedule.device}")]
    for track, name in tracks.items():
        events += [_named("thread_name", track, name), {**_named("thread_sort_index", track, ""), "args": {"sort_index": track}}]
    events += _compute(file, report)
    for position, way, start, end in report.copies:
        storage = file.graph.storages[schedule.actions[position].subject]
        args = {"bytes": storage.size_bytes, "kind": storage.kind.value, "module": storage.module}
        kind = schedule.actions[position].kind.value
        events.append(_slice(COPY_OUT if way == "out" else COPY_IN, f"{kind} {storage.name}", kind, start, end, args))
    limit = budget(file.plan)
    for start, used in zip(report.start_ns, report.memory_bytes, strict=True):
        events.append({"ph": "C", "pid": _PID, "name": "memory", "ts": start / 1e3, "args": {"bytes": used}})
    for moment in (0, report.step_ns):
        events.append({"ph": "C", "pid": _PID, "name": "budget", "ts": moment / 1e3, "args": {"bytes": limit}})
    other = {"peak_bytes": report.peak_bytes, "budget_bytes": limit, "step_seconds": report.step_ns / 1e9, "solver": file.plan.solver}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _compute(file: PlanFile, report: Report) -> list[dict[str, Any]]:
    """Runs, recomputations, and the stalls between them."""
    actions, ends = file.plan.schedules[0].actions, (*report.start_ns[1:], report.step_ns)
    events = []
    for action, start, end in zip(actions, report.start_ns, ends, strict=True):
        if action.kind in _TIMED:
            op = file.graph.ops[action.subject]
            args = {"op": op.name, "target": op.target, "module": op.module, "source": op.source, "workspace_bytes": op.workspace_bytes}
            again = "again: " if action.kind is ActionKind.RECOMPUTE else ""
            events.append(_slice(COMPUTE, again + op.name, f"{action.kind.value},{op.phase.value}", start, start + op.time_ns, args))
        elif end > start and action.kind in (ActionKind.WAIT_IN, ActionKind.WAIT_OUT, ActionKind.WAIT_SAVE):
            storage = file.graph.storages[action.subject]
            events.append(_slice(COMPUTE, f"stall: {action.kind.value} {storage.name}", "stall", start, end, {"bytes": storage.size_bytes}))
    return events


def _slice(track: int, name: str, category: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> dict[str, Any]:
    duration = (end_ns - start_ns) / 1e3
    return {"ph": "X", "pid": _PID, "tid": track, "name": name, "cat": category, "ts": start_ns / 1e3, "dur": duration, "args": args}


def _named(what: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": _PID, "tid": track, "name": what, "args": {"name": name}}
