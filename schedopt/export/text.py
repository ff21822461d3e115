"""Tables and bars for people: what was decided, why, and how memory goes up and down over the step."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from schedopt.check import Report
from schedopt.export.figures import budget, figures
from schedopt.export.units import duration, percent, size
from schedopt.graph import Phase
from schedopt.plan import OP_ACTIONS, ActionKind, Fate
from schedopt.plan_file import PlanFile

PHASE_STYLE = {Phase.FORWARD: "cyan", Phase.BACKWARD: "magenta", Phase.UPDATE: "green"}
FATE_STYLE = {Fate.KEEP: "dim", Fate.SWAP: "blue", Fate.RECOMPUTE: "yellow", Fate.REST: "green", Fate.SPLIT: "magenta"}


def as_text(parts: Iterable[RenderableType], width: int = 110) -> str:
    """Rich renderables as plain text without colour."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, no_color=True, force_terminal=False)
    for part in parts:
        console.print(part)
    return stream.getvalue().rstrip()


def summary(file: PlanFile) -> str:
    """The summary table as text."""
    return as_text([summary_table(file)])


def summary_table(file: PlanFile) -> Table:
    """Budget, peak, step, bound and gap of a plan, and what is swapped, recomputed and resting."""
    plan, done = file.plan, figures(file)
    table = Table(title=f"{file.graph.name} on {plan.machine_name}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    limit, eager_s, step_s = budget(plan), plan.eager_ns / 1e9, plan.step_ns / 1e9
    asked = "" if plan.solver == plan.strategy else f"asked for: {plan.strategy}, "
    table.add_row("plan", plan.solver, f"{asked}solved in {duration(plan.solve_seconds)}")
    table.add_row("budget", size(limit), f"{percent(limit, plan.eager_peak_bytes)} of eager's peak, {size(plan.eager_peak_bytes)}")
    table.add_row("peak", size(plan.peak_bytes), f"{percent(plan.peak_bytes, limit)} of the budget")
    table.add_row("step", duration(step_s), f"{percent(step_s, eager_s)} of eager's time, {duration(eager_s)}")
    if plan.bound_ns is not None and plan.gap is not None:
        table.add_row("bound", duration(plan.bound_ns / 1e9), f"proven; gap {100 * plan.gap:.1f} %")
    table.add_row("swapped", f"{done.num_swapped} storages", size(done.swapped_bytes))
    table.add_row("recomputed", f"{done.num_recomputed} ops", f"{size(done.recomputed_bytes)}, {duration(done.recompute_seconds)}")
    table.add_row("resting", f"{done.num_resting} storages", f"{size(done.resting_bytes)} on the lower tier between steps")
    if done.num_split:
        table.add_row("split", f"{done.num_split} parameters", "too large with gradient and optimizer state: updated in parts")
    table.add_row("copies", size(done.out_bytes + done.in_bytes), f"out {size(done.out_bytes)}, in {size(done.in_bytes)} per step")
    undo = f"{done.num_undo} storages saved, {size(done.undo_bytes)}; {size(done.snapshot_bytes)} of snapshots on the device"
    table.add_row("undo", "on" if plan.undo else "off", undo if plan.undo else "a step that fails after an update stays half-way")
    table.add_row("exact", "yes" if plan.exact else "no", "bit for bit as eager" if plan.exact else "rounds differently from eager")
    for note in plan.notes:
        table.add_row("note", "", note)
    return table


def why_table(file: PlanFile, limit: int = 20) -> Table:
    """The largest decisions and their reasons; `limit` rows."""
    graph, decisions = file.graph, file.plan.decisions
    table = Table(title=f"why ({min(limit, len(decisions))} largest of {len(decisions)} decisions)", title_justify="left")
    for column in ("storage", "bytes", "fate", "from", "to", "why"):
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for decision in sorted(decisions, key=lambda d: -graph.storages[d.storage].size_bytes)[:limit]:
        storage = graph.storages[decision.storage]
        ends = [graph.ops[x].name if x >= 0 else edge for x, edge in ((decision.after_op, "start"), (decision.before_op, "end"))]
        fate = Text(decision.fate.value, style=FATE_STYLE[decision.fate])
        table.add_row(storage.name, size(storage.size_bytes), fate, *ends, decision.why)
    return table


def fates_table(file: PlanFile) -> Table:
    """Decisions summed up per kind of storage and fate."""
    sums: dict[tuple[str, Fate], list[int]] = defaultdict(lambda: [0, 0])
    for decision in file.plan.decisions:
        storage = file.graph.storages[decision.storage]
        entry = sums[storage.kind.value, decision.fate]
        entry[0] += 1
        entry[1] += storage.size_bytes
    table = Table(title="what was decided", title_justify="left")
    for column in ("storages", "fate", "number", "bytes"):
        table.add_column(column, justify="left" if column in ("storages", "fate") else "right")
    for (kind, fate), (count, total) in sorted(sums.items(), key=lambda item: -item[1][1]):
        table.add_row(kind, Text(fate.value, style=FATE_STYLE[fate]), str(count), size(total))
    return table


def timeline(file: PlanFile, report: Report, rows: int = 32, width: int = 60) -> Table:
    """Memory over the step: one bar per slice of time, as long as the most bytes in use in it; the budget is the full width."""
    limit = budget(file.plan)
    table = Table(title=f"memory over the step (full width: {size(limit)})", title_justify="left", box=None, padding=(0, 1))
    for column in ("time", "phase", "bytes", "in use", "module at the top"):
        table.add_column(column, justify="right" if column in ("time", "bytes") else "left", no_wrap=True)
    for start_ns, top in _slices(report, rows):
        used = report.memory_bytes[top]
        phase, module = _whereabouts(file, top)
        cells = min(width, round(width * used / limit)) if limit else 0
        style = "red" if used > limit else PHASE_STYLE[phase]
        bar = Text("█" * cells + "·" * (width - cells), style=style)
        table.add_row(duration(start_ns / 1e9), Text(phase.value, style=PHASE_STYLE[phase]), size(used), bar, module)
    return table


def _slices(report: Report, rows: int) -> list[tuple[int, int]]:
    """(start ns, number of the action with the most bytes) of each slice of time that has actions."""
    end = max(report.step_ns, 1)
    tops: dict[int, int] = {}
    for position, (start, used) in enumerate(zip(report.start_ns, report.memory_bytes, strict=True)):
        part = min(rows - 1, start * rows // end)
        if part not in tops or used > report.memory_bytes[tops[part]]:
            tops[part] = position
    return [(part * end // rows, top) for part, top in sorted(tops.items())]


def _whereabouts(file: PlanFile, position: int) -> tuple[Phase, str]:
    """Phase and module of the op that runs at an action, or of the last one before it."""
    actions = file.plan.schedules[0].actions
    for action in reversed(actions[: position + 1]):
        if action.kind in OP_ACTIONS and action.kind is not ActionKind.SAVE_RNG:
            op = file.graph.ops[action.subject]
            again = " (again)" if action.kind is ActionKind.RECOMPUTE else ""
            return op.phase, f"{op.module or op.name}{again}"
    return Phase.FORWARD, ""
