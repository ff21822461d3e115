"""`schedopt run`: train under the budget and put what was predicted beside what was measured."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from schedopt.api.step_plan import StepPlan
from schedopt.cli import options as o
from schedopt.cli.bars import Bars
from schedopt.cli.shell import guarded, out, print_json
from schedopt.cli.target import load_workload
from schedopt.export.figures import budget, summary_json
from schedopt.export.text import summary_table
from schedopt.export.units import duration, percent, size

if TYPE_CHECKING:
    from schedopt.api.training_step import Stats, TrainingStep
    from schedopt.capture.workload import Workload

PlanOption = Annotated[Path | None, typer.Option("--plan", help="use this plan instead of deciding anew")]
Steps = Annotated[int, typer.Option("--steps", help="training steps to run", min=1)]
Compare = Annotated[str | None, typer.Option("--compare", help="eager: run the same steps eagerly first, on a copy")]
Directory = Annotated[Path | None, typer.Option("--directory", help="where the swap file goes")]
SelfCheck = Annotated[bool | None, typer.Option("--self-check/--no-self-check", help="compare graph and eager on copies first")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="write the plan to this file")]


@dataclass(frozen=True, slots=True)
class Timed:
    """Losses and seconds of some steps."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds per step, the first one (warm-up) left out if there are others."""
        return statistics.median(self.seconds[1:] or self.seconds)


@guarded
def run(
    target: o.Target,
    memory: o.Memory = None,
    plan: PlanOption = None,
    steps: Steps = 20,
    compare: Compare = None,
    strategy: o.Strategy = "auto",
    time_limit: o.TimeLimit = 20.0,
    output: Output = None,
    settings: o.Settings = None,
    tier: o.TierName = None,
    throttle: o.Throttle = None,
    no_undo: o.NoUndo = False,
    allow_inexact: o.AllowInexact = False,
    directory: Directory = None,
    self_check: SelfCheck = None,
    seed: o.Seed = 0,
    as_json: o.AsJson = False,
) -> None:
    """Train some steps under the budget; predicted beside measured."""
    if compare not in (None, "eager"):
        raise ValueError(f"--compare {compare!r} is not known; use eager")
    constraints = o.make_constraints(memory, strategy, tier, time_limit, throttle, no_undo, allow_inexact, seed)
    o.check_output(output)
    given = None if plan is None else StepPlan.load(plan)
    from schedopt.api.entry import compile as compile_step

    with Bars(quiet=as_json) as bars:
        workload = load_workload(target, settings or (), seed)
        eager = _run_eager(workload, steps, bars) if compare else None
        step = compile_step(workload, constraints=constraints, plan=given, directory=directory, self_check=self_check, progress=bars)
        with step:
            timed, peak = _run_steps(step, workload, steps, bars)
            stats, made = step.stats, step.plan
    assert stats is not None
    if output is not None:
        made.save(output)
    if as_json:
        print_json(_as_json(made, stats, timed, peak, eager))
        return
    out.print(summary_table(made.file))
    out.print(_comparison(made, timed, peak, eager))
    if output is not None:
        out.print(f"plan written to {output}", markup=False)


def _run_steps(step: TrainingStep, workload: Workload, steps: int, bars: Bars) -> tuple[Timed, int]:
    losses, seconds, peak = [], [], 0
    for number in range(steps):
        bars("steps", number, steps)
        started = time.perf_counter()
        loss = step(workload.batch)
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss))
        assert step.stats is not None
        peak = max(peak, step.stats.peak_bytes)
    bars("steps", steps, steps)
    return Timed(tuple(losses), tuple(seconds)), peak


def _run_eager(workload: Workload, steps: int, bars: Bars) -> Timed:
    """The same steps without schedopt, on a copy that is gone afterwards; the generator stays as it was."""
    import torch

    from schedopt.capture.selfcheck import clone_workload, run_eager_step

    generator = torch.get_rng_state()
    copy = clone_workload(workload)
    losses, seconds = [], []
    for number in range(steps):
        bars("eager", number, steps)
        started = time.perf_counter()
        loss = run_eager_step(copy)
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss))
    bars("eager", steps, steps)
    torch.set_rng_state(generator)
    return Timed(tuple(losses), tuple(seconds))


def _as_json(made: StepPlan, stats: Stats, timed: Timed, peak: int, eager: Timed | None) -> dict[str, Any]:
    result = summary_json(made.file) | {
        "losses": list(timed.losses),
        "steps": len(timed.losses),
        "peak_bytes": peak,
        "step_seconds": timed.median,
        "all_step_seconds": list(timed.seconds),
        "stall_seconds": stats.stall_seconds,
        "copied_out_bytes": stats.out_bytes,
        "copied_in_bytes": stats.in_bytes,
    }
    if eager is not None:
        result |= {
            "eager_step_seconds": eager.median,
            "eager_losses": list(eager.losses),
            "losses_equal_eager": eager.losses == timed.losses,
        }
    return result


def _comparison(made: StepPlan, timed: Timed, peak: int, eager: Timed | None) -> Table:
    plan = made.plan
    table = Table(title="predicted beside measured", title_justify="left")
    for column in ("", "predicted", "measured", "measured / predicted", *(("eager", "of eager") if eager else ())):
        table.add_column(column, justify="right" if column else "left")
    memory = ["peak", size(plan.peak_bytes), size(peak), percent(peak, plan.peak_bytes)]
    step_s = plan.step_ns / 1e9
    speed = ["step", duration(step_s), duration(timed.median), percent(timed.median, step_s)]
    loss = ["loss", "", f"{timed.losses[0]:.6g} → {timed.losses[-1]:.6g}", ""]
    if eager is not None:
        memory += [f"{size(plan.eager_peak_bytes)} (predicted)", percent(peak, plan.eager_peak_bytes)]
        speed += [duration(eager.median), percent(timed.median, eager.median)]
        same = "[green]the same bits[/]" if eager.losses == timed.losses else "[red]different[/]"
        loss += [f"{eager.losses[0]:.6g} → {eager.losses[-1]:.6g}", same]
    for row in (memory, speed, loss):
        table.add_row(*row)
    table.caption = f"budget {size(budget(plan))}, {len(timed.losses)} steps; times are medians without the first step"
    return table
