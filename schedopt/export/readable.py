"""A plan as JSON for other programs: names in place of ids, sizes in bytes, times in seconds."""

from __future__ import annotations

from typing import Any

from schedopt.check import Report
from schedopt.export.figures import summary_json
from schedopt.plan import OP_ACTIONS, ActionKind
from schedopt.plan_file import PlanFile


def to_json(file: PlanFile, report: Report) -> dict[str, Any]:
    """Headline figures, every action with its predicted start and the bytes in use, every copy, every decision."""
    graph, schedule = file.graph, file.plan.schedules[0]

    def name(kind: ActionKind, subject: int) -> str:
        return graph.ops[subject].name if kind in OP_ACTIONS else graph.storages[subject].name

    actions = [
        {"kind": a.kind.value, "subject": name(a.kind, a.subject), "id": a.subject, "start_seconds": start / 1e9, "memory_bytes": used}
        for a, start, used in zip(schedule.actions, report.start_ns, report.memory_bytes, strict=True)
    ]
    copies = [
        {"storage": name(ActionKind.SAVE, schedule.actions[at].subject), "way": way, "start_seconds": start / 1e9, "end_seconds": end / 1e9}
        for at, way, start, end in report.copies
    ]
    decisions = [
        {
            "storage": graph.storages[d.storage].name,
            "size_bytes": graph.storages[d.storage].size_bytes,
            "fate": d.fate.value,
            "after_op": graph.ops[d.after_op].name if d.after_op >= 0 else None,
            "before_op": graph.ops[d.before_op].name if d.before_op >= 0 else None,
            "why": d.why,
        }
        for d in file.plan.decisions
    ]
    away = [graph.storages[s].name for s in schedule.away]
    return summary_json(file) | {
        "device": schedule.device,
        "tier": schedule.tier,
        "stall_seconds": report.stall_ns / 1e9,
        "tier_peak_bytes": report.tier_peak_bytes,
        "away": away,
        "actions": actions,
        "copies": copies,
        "decisions": decisions,
    }
