"""`schedopt check`, `show` and `export`: all that needs a plan file only, neither the model nor torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from schedopt.check import Report
from schedopt.cli import options as o
from schedopt.cli.shell import FAILED, guarded, out, print_json
from schedopt.export.dot import to_dot
from schedopt.export.figures import budget, replay, summary_json
from schedopt.export.perfetto import to_perfetto
from schedopt.export.readable import to_json
from schedopt.export.text import fates_table, summary_table, timeline, why_table
from schedopt.export.units import duration, size
from schedopt.plan_file import PlanFile, load_plan

FORMATS: dict[str, Callable[[PlanFile, Report], str]] = {
    "json": lambda file, report: json.dumps(to_json(file, report), indent=1, ensure_ascii=False) + "\n",
    "perfetto": lambda file, report: json.dumps(to_perfetto(file, report)) + "\n",
    "dot": lambda file, report: to_dot(file),
}


@guarded
def check(path: o.PlanPath, as_json: o.AsJson = False) -> None:
    """Replay a plan independently of what made it: ok, or every broken rule."""
    file = load_plan(path)
    report = replay(file)
    if as_json:
        print_json(
            {
                "ok": report.ok,
                "violations": [asdict(v) for v in report.violations],
                "budget_bytes": budget(file.plan),
                "peak_bytes": report.peak_bytes,
                "tier_peak_bytes": report.tier_peak_bytes,
                "step_seconds": report.step_ns / 1e9,
                "stall_seconds": report.stall_ns / 1e9,
                "recompute_seconds": report.recompute_ns / 1e9,
            }
        )
    elif report.ok:
        peak, limit, step = size(report.peak_bytes), size(budget(file.plan)), duration(report.step_ns / 1e9)
        out.print(f"[bold green]ok[/]: peak {peak} of {limit}, step {step}, stalled {duration(report.stall_ns / 1e9)}")
    else:
        out.print(_broken(report))
    if not report.ok:
        raise typer.Exit(FAILED)


@guarded
def show(
    path: o.PlanPath,
    why: Annotated[int, typer.Option("--why", help="decisions to list, the largest first")] = 20,
    rows: Annotated[int, typer.Option("--rows", help="slices of time in the memory timeline", min=1)] = 32,
    as_json: o.AsJson = False,
) -> None:
    """What was decided and why, and memory over the step."""
    file = load_plan(path)
    report = replay(file)
    if as_json:
        print_json(to_json(file, report) if report.ok else summary_json(file) | {"violations": [asdict(v) for v in report.violations]})
        return
    out.print(summary_table(file))
    out.print(fates_table(file))
    out.print(why_table(file, why))
    if report.start_ns:
        out.print(timeline(file, report, rows, width=max(20, min(80, out.width - 70))))
    if not report.ok:
        out.print(_broken(report))


@guarded
def export(
    path: o.PlanPath,
    to: Annotated[str, typer.Option("--to", help="json, perfetto or dot")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="the file to write; stdout without it")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Write a plan in another form."""
    if to not in FORMATS:
        raise ValueError(f"--to {to!r} is not known; use one of {', '.join(FORMATS)}")
    if as_json and output is None:
        raise ValueError("--json describes the written file; give -o FILE")
    if output is not None and output.resolve() == path.resolve():
        raise ValueError(f"{output} is the plan itself; an export would overwrite it")
    file = load_plan(path)
    report = replay(file)
    if not report.start_ns:
        raise ValueError(f"{path} can not be replayed: {report.violations[0]}")
    text = FORMATS[to](file, report)
    if output is None:
        typer.echo(text, nl=False)
        return
    o.check_output(output)
    output.write_text(text)
    if as_json:
        print_json({"output": str(output), "format": to, "size_bytes": len(text.encode())})
    else:
        out.print(f"written to {output} ({size(len(text.encode()))})", markup=False)


def _broken(report: Report) -> Table:
    table = Table(title=f"{len(report.violations)} broken rule(s)", title_justify="left", title_style="bold red")
    for column in ("rule", "action", "what"):
        table.add_column(column, overflow="fold")
    for violation in report.violations:
        where = "start or end" if violation.position < 0 else str(violation.position)
        table.add_row(violation.rule, where, violation.message)
    return table
