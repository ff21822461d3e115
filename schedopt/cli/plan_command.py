"""`schedopt plan`: decide without running."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schedopt.cli import options as o
from schedopt.cli.bars import Bars
from schedopt.cli.shell import guarded, out, print_json
from schedopt.cli.target import load_workload
from schedopt.export.figures import summary_json
from schedopt.export.text import fates_table, summary_table

MachineName = Annotated[str | None, typer.Option("--machine", help="a preset such as h200, or a JSON file; costs come from its figures")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="write the plan to this file")]


@guarded
def plan(
    target: o.Target,
    memory: o.Memory = None,
    machine: MachineName = None,
    strategy: o.Strategy = "auto",
    time_limit: o.TimeLimit = 20.0,
    output: Output = None,
    settings: o.Settings = None,
    tier: o.TierName = None,
    throttle: o.Throttle = None,
    no_undo: o.NoUndo = False,
    allow_inexact: o.AllowInexact = False,
    seed: o.Seed = 0,
    as_json: o.AsJson = False,
) -> None:
    """Decide what is kept, swapped and recomputed, without running a step."""
    constraints = o.make_constraints(memory, strategy, tier, time_limit, throttle, no_undo, allow_inexact, seed)
    o.check_output(output)
    from schedopt.api.entry import plan as make_plan
    from schedopt.api.prepare import as_machine

    there = as_machine(machine)
    if there is not None and tier is None and there.devices[0].kind != "cpu":
        constraints = o.make_constraints(memory, strategy, "ram", time_limit, throttle, no_undo, allow_inexact, seed)
    with Bars(quiet=as_json) as bars:
        workload = load_workload(target, settings or (), seed)
        made = make_plan(workload, constraints=constraints, machine=there, progress=bars)
    if output is not None:
        made.save(output)
    if as_json:
        print_json(summary_json(made.file) | {"output": None if output is None else str(output)})
        return
    out.print(summary_table(made.file))
    out.print(fates_table(made.file))
    if output is not None:
        out.print(f"written to {output}", markup=False)
