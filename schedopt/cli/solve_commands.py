"""`schedopt solve`: a solver alone, on a problem from a file. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from schedopt.check_partition import PartitionReport, check_partition
from schedopt.check_pipeline import PipelineReport, check_pipeline
from schedopt.cli import options as o
from schedopt.cli.bars import Bars
from schedopt.cli.shell import FAILED, guarded, out, print_json
from schedopt.export.pipeline_text import pipeline_lines
from schedopt.partition import load_partition_spec
from schedopt.pipeline import PipelineSpec, load_pipeline_spec
from schedopt.solvers.partition_auto import PartitionAnswer, PartitionOptions, solve_partition
from schedopt.solvers.pipeline_auto import PipelineAnswer, PipelineOptions, solve_pipeline

app = typer.Typer(no_args_is_help=True, help="The solvers alone, on problems from files.")
PartitionPath = Annotated[Path, typer.Argument(help="a JSON file, see schedopt.partition", metavar="FILE")]
SpecPath = Annotated[Path, typer.Argument(help="a JSON file, see schedopt.pipeline", metavar="SPEC")]


@app.callback()
def solvers() -> None:
    """The solvers alone, on problems from files."""


@app.command("pipeline")
@guarded
def pipeline_command(path: SpecPath, time_limit: o.TimeLimit = 60.0, seed: o.Seed = 0, as_json: o.AsJson = False) -> None:
    """The order of forwards, input gradients and weight gradients on every device of a pipeline."""
    if time_limit <= 0:
        raise ValueError(f"--time-limit must be positive, not {time_limit}")
    spec = load_pipeline_spec(path)
    with Bars(quiet=as_json) as bars:
        options = PipelineOptions(time_limit, seed=seed)
        answer = solve_pipeline(spec, options, lambda share, what: bars("solve", round(100 * share), 100))
    report = None if answer.schedule is None else check_pipeline(spec, answer.schedule)
    if report is not None and not report.ok:
        raise AssertionError(f"the solver's schedule breaks a rule: {report.violations[0]}")
    if as_json:
        print_json(_json(answer, report))
    else:
        _show(spec, answer, report)
    if report is None:
        raise typer.Exit(FAILED)


def _json(answer: PipelineAnswer, report: PipelineReport | None) -> dict[str, object]:
    found: dict[str, object] = {"status": answer.status, "bound": answer.bound, "gap": answer.gap, "seconds": answer.seconds}
    if report is None or answer.schedule is None:
        return found
    return found | {
        "makespan": report.makespan,
        "span": report.span,
        "bubble_span": report.bubble_span,
        "bubble_makespan": report.bubble_makespan,
        "peak_bytes": list(report.peak_bytes),
        "method": answer.schedule.method,
        "named": dict(answer.named),
        "schedule": [[[str(action), start] for action, start in device] for device in answer.schedule.devices],
    }


def _show(spec: PipelineSpec, answer: PipelineAnswer, report: PipelineReport | None) -> None:
    if report is None or answer.schedule is None:
        why = "one micro-batch alone takes more than a device has" if answer.status == "infeasible" else "none was found in the time"
        out.print(f"[bold red]{answer.status}[/]: no schedule within the limits; {why}")
        return
    table = Table(show_header=False, title=f"{len(spec.stages)} stages, {spec.num_devices} devices, {spec.microbatches} micro-batches")
    table.add_row("status", f"{answer.status}, by {answer.schedule.method}, {answer.seconds:.1f} s")
    table.add_row("makespan", f"{report.makespan}, bubble {report.bubble_makespan:.2%}")
    table.add_row("span", f"{report.span}, bubble {report.bubble_span:.2%}")
    table.add_row("bound", f"{answer.bound} for the {spec.objective}, gap {answer.gap or 0.0:.2%}")
    for name, value in answer.named:
        table.add_row(name, f"{spec.objective} {value}")
    table.add_row("peak bytes", ", ".join(map(str, report.peak_bytes)))
    out.print(table)
    for line in pipeline_lines(spec, answer.schedule, max(20, out.width - 4)):
        out.print(line, markup=False, overflow="crop", no_wrap=True)


@app.command("partition")
@guarded
def partition_command(path: PartitionPath, time_limit: o.TimeLimit = 60.0, seed: o.Seed = 0, as_json: o.AsJson = False) -> None:
    """Contiguous stages of a model over devices: the slowest device as fast as can be, within the bytes of each."""
    if time_limit <= 0:
        raise ValueError(f"--time-limit must be positive, not {time_limit}")
    spec = load_partition_spec(path)
    with Bars(quiet=as_json) as bars:
        options = PartitionOptions(time_limit, seed)
        answer = solve_partition(spec, options, lambda share, what: bars(what, round(100 * share), 100))
    report = None if answer.partition is None else check_partition(spec, answer.partition)
    if report is not None and not report.ok:
        raise AssertionError(f"the solver's partition breaks a rule: {report.violations[0]}")
    if as_json:
        print_json(_partition_json(answer, report))
    else:
        _show_partition(answer, report)
    if report is None:
        raise typer.Exit(FAILED)


def _partition_json(answer: PartitionAnswer, report: PartitionReport | None) -> dict[str, object]:
    found: dict[str, object] = {"status": answer.status, "bound": answer.bound, "gap": answer.gap, "seconds": answer.seconds}
    if report is None or answer.partition is None:
        return found
    rows = zip(answer.partition.parts, report.loads, report.work, report.sent, report.received, report.bytes, strict=True)
    names = ("load", "work", "sent", "received", "bytes")
    stages = [{"kind": part.kind, **dict(zip(names, figures, strict=True)), "nodes": list(part.nodes)} for part, *figures in rows]
    return found | {"max_load": report.max_load, "method": answer.partition.method, "stages": stages}


def _show_partition(answer: PartitionAnswer, report: PartitionReport | None) -> None:
    if report is None or answer.partition is None:
        why = "the bytes of the devices do not hold the model" if answer.status == "infeasible" else "none was found in the time"
        out.print(f"[bold red]{answer.status}[/]: no partition within the limits; {why}")
        return
    title = f"greatest load {report.max_load:.6g}, {answer.status}, bound {answer.bound:.6g}, {answer.seconds:.1f} s"
    table = Table("stage", "device", "nodes", "load", "work", "sent", "received", "bytes", title=title)
    for number, part in enumerate(answer.partition.parts):
        figures = (report.loads, report.work, report.sent, report.received, report.bytes)
        table.add_row(str(number), part.kind, str(len(part.nodes)), *(f"{each[number]:.6g}" for each in figures))
    out.print(table)
