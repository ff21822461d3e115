"""Pipeline schedules: the checker first, then every solver against it and against brute force on small problems."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schedopt.check_pipeline import check_pipeline
from schedopt.cli import app
from schedopt.errors import PlanFileError
from schedopt.pipeline import Part, PipelineAction, PipelineSchedule, PipelineSpec, StageCost, parse_pipeline_spec
from schedopt.solvers.pipeline_auto import PipelineOptions, solve_pipeline
from schedopt.solvers.pipeline_clock import PipelineTables, as_schedule, fits, lower_bound, objective, start_times
from schedopt.solvers.pipeline_exact import PipelineExactOptions, solve_stretch, solve_whole
from schedopt.solvers.pipeline_fixed import fixed_orders
from schedopt.solvers.pipeline_greedy import Rules, simulate

UNIT = StageCost(1, 1, 1, 2, -1, -1, None)
PAPER = StageCost(18522, 18086, 9337, 200704, -86016, -114688, None)  # 1.5B row of arXiv 2401.10241


def pipe(stages: int, microbatches: int, cost: StageCost = UNIT, **more: Any) -> PipelineSpec:
    """Equal stages."""
    return replace(PipelineSpec((cost,) * stages, microbatches), **more)


def limited(cost: StageCost, microbatches: float) -> StageCost:
    """With room for so many micro-batches."""
    return replace(cost, limit_bytes=int(microbatches * cost.forward_bytes))


def uneven(seed: int, stages: int, microbatches: int, room: float, **more: Any) -> PipelineSpec:
    """Stages with random times."""
    draw = random.Random(seed)
    costs = [limited(StageCost(draw.randint(2, 9), draw.randint(2, 9), draw.randint(1, 6), 4, -1, -3), room) for _ in range(stages)]
    return replace(PipelineSpec(tuple(costs), microbatches), **more)


def brute_force(spec: PipelineSpec) -> int:
    """Least objective over all orders on every device."""
    tables = PipelineTables(spec)
    choices = []
    for stages in spec.stages_of:
        mine = [tables.number(s, part, k) for s in stages for part in range(3) for k in range(spec.microbatches)]
        after = {(a, b) for a, b, _ in tables.arcs}
        legal = [list(o) for o in itertools.permutations(mine) if not any((o[j], o[i]) in after for j in range(len(o)) for i in range(j))]
        choices.append(
            [o for o in legal if all(o.index(x) < o.index(x + 1) for x in mine if (x + 1) % spec.microbatches and x + 1 in mine)]
        )
    best = 1 << 60
    for orders in itertools.product(*choices):
        starts = start_times(tables, list(orders)) if fits(tables, list(orders)) else None
        if starts is not None:
            best = min(best, objective(tables, list(orders), starts))
    return best


@pytest.mark.parametrize("which", ["span", "makespan"])
@pytest.mark.parametrize("seed", range(4))
def test_as_good_as_brute_force_and_bound_below_it(seed: int, which: str) -> None:
    spec = uneven(seed, 2, 2, 1.5 if seed % 2 else 3, link=seed, objective=which)
    best = brute_force(spec)
    assert lower_bound(PipelineTables(spec)) <= best
    answer = solve_pipeline(spec, PipelineOptions(2.0, seed=seed))
    assert answer.schedule is not None
    assert answer.bound <= best
    assert check_pipeline(spec, answer.schedule).ok
    if which == "makespan" or answer.status == "optimal":
        assert answer.value == best


@pytest.mark.parametrize("seed", range(6))
def test_every_schedule_of_the_simulation_is_right(seed: int) -> None:
    spec = uneven(seed, 4, 7, 1 + seed, link=seed, per_action=seed % 2)
    tables = PipelineTables(spec)
    for fill, patience in itertools.product((0.0, 0.5, 1.0), (0.0, 0.5)):
        orders = simulate(tables, Rules(fill, patience))
        assert orders is not None
        starts = start_times(tables, orders)
        assert starts is not None
        report = check_pipeline(spec, as_schedule(tables, orders, starts, "simulation"))
        assert report.ok, report.violations
        assert report.span == objective(tables, orders, starts) >= lower_bound(tables)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_schedules_with_names_take_what_their_papers_say(stages: int) -> None:
    spec = pipe(stages, 2 * stages)
    tables = PipelineTables(spec)
    spans = {}
    for name, orders in fixed_orders(tables).items():
        starts = start_times(tables, orders)
        assert starts is not None
        report = check_pipeline(spec, as_schedule(tables, orders, starts, name))
        assert report.ok, report.violations
        spans[name] = report
    work = 3 * 2 * stages
    assert spans["zb-h2"].span == work  # no bubble (section 2.2)
    assert spans["zb-h1"].makespan == work + stages - 1  # (p - 1)(F + I - W), section 2.1
    assert max(spans["zb-h1"].peak_bytes) == 2 * stages
    assert max(spans["zb-h2"].peak_bytes) == 2 * (2 * stages - 1)
    assert max(spans["gpipe"].peak_bytes) == 2 * 2 * stages


def test_interleaved_has_a_smaller_bubble_than_1f1b() -> None:
    straight = pipe(4, 8, StageCost(2, 2, 2))
    looped = pipe(8, 8, StageCost(1, 1, 1), placement=(0, 1, 2, 3) * 2)
    spans = []
    for spec, name in ((straight, "1f1b"), (looped, "interleaved")):
        tables = PipelineTables(spec)
        orders = fixed_orders(tables)[name]
        starts = start_times(tables, orders)
        assert starts is not None
        assert check_pipeline(spec, as_schedule(tables, orders, starts, name)).ok
        spans.append(objective(tables, orders, starts))
    assert spans[1] < spans[0]


@pytest.mark.parametrize(("room", "bubble"), [(1, 0.1585), (2, 0.0437)])
def test_zero_bubble_row_of_the_paper(room: int, bubble: float) -> None:
    spec = pipe(8, 24, limited(PAPER, 8 * room), link=601)
    answer = solve_pipeline(spec, PipelineOptions(3.0))
    assert answer.schedule is not None
    report = check_pipeline(spec, answer.schedule)
    assert report.ok
    assert report.bubble_span <= bubble + 5e-5
    assert answer.status == ("optimal" if room == 1 else "feasible")


def test_v_shape_with_limits() -> None:
    spec = pipe(8, 12, limited(StageCost(2, 2, 1, 4, -1, -3), 4), placement=(0, 1, 2, 3, 3, 2, 1, 0), link=1)
    answer = solve_pipeline(spec, PipelineOptions(3.0))
    assert answer.schedule is not None
    report = check_pipeline(spec, answer.schedule)
    assert report.ok
    assert max(report.peak_bytes) <= 32


def test_stretch_mends_a_bad_schedule() -> None:
    spec = pipe(3, 5, StageCost(2, 2, 2, 2, -1, -1, 12))
    tables = PipelineTables(spec)
    orders = fixed_orders(tables)["gpipe"]
    starts = start_times(tables, orders)
    assert starts is not None
    before = objective(tables, orders, starts)
    better = solve_stretch(tables, PipelineExactOptions(5.0, workers=1), orders, starts, 4, max(starts))
    assert better is not None
    again = start_times(tables, better)
    assert again is not None
    assert fits(tables, better)
    assert objective(tables, better, again) < before


def test_whole_model_proves_its_bound() -> None:
    spec = uneven(1, 2, 3, 2, objective="makespan")
    tables = PipelineTables(spec)
    orders = simulate(tables, Rules())
    assert orders is not None
    starts = start_times(tables, orders)
    assert starts is not None
    answer = solve_whole(tables, PipelineExactOptions(10.0, workers=1), orders, starts)
    assert answer.optimal
    assert answer.orders is not None
    times = start_times(tables, answer.orders)
    assert times is not None
    assert answer.bound == objective(tables, answer.orders, times)


def test_checker_finds_every_kind_of_fault() -> None:
    spec = pipe(2, 1, StageCost(2, 2, 1, 4, -1, -3, 3))
    act = PipelineAction
    good = (
        ((act(0, Part.FORWARD, 0), 0), (act(0, Part.INPUT_GRAD, 0), 6), (act(0, Part.WEIGHT_GRAD, 0), 8)),
        ((act(1, Part.FORWARD, 0), 2), (act(1, Part.INPUT_GRAD, 0), 4), (act(1, Part.WEIGHT_GRAD, 0), 6)),
    )
    roomy = pipe(2, 1, StageCost(2, 2, 1, 4, -1, -3, 4))
    assert check_pipeline(roomy, PipelineSchedule(good)).ok
    assert "limit" in str(check_pipeline(spec, PipelineSchedule(good)).violations)
    early = (good[0], ((act(1, Part.FORWARD, 0), 1), *good[1][1:]))
    assert "arrives at 2" in str(check_pipeline(roomy, PipelineSchedule(early)).violations)
    assert "never runs" in str(check_pipeline(roomy, PipelineSchedule((good[0][:2], good[1]))).violations)
    assert "twice" in str(check_pipeline(roomy, PipelineSchedule(((*good[0], (act(0, Part.WEIGHT_GRAD, 0), 9)), good[1]))).violations)
    assert "busy" in str(check_pipeline(roomy, PipelineSchedule(((*good[0][:2], (act(0, Part.WEIGHT_GRAD, 0), 7)), good[1]))).violations)
    assert "is on" in str(check_pipeline(roomy, PipelineSchedule((good[1], good[0]))).violations)
    assert "no action" in str(check_pipeline(roomy, PipelineSchedule((((act(7, Part.FORWARD, 0), 0),), good[1]))).violations)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "no JSON"),
        ('{"stages": [], "microbatches": 1}', "at least one stage"),
        ('{"stages": [{"forward": 1, "input_grad": 1}], "microbatches": 1}', r"stages\.0\.weight_grad"),
        ('{"stages": [{"forward": -1, "input_grad": 1, "weight_grad": 1}], "microbatches": 1}', "negative"),
        ('{"stages": [{"forward": 1, "input_grad": 1, "weight_grad": 1, "forward_bytes": 5}], "microbatches": 1}', "add up to 0"),
        ('{"stages": [{"forward": 1, "input_grad": 1, "weight_grad": 1}], "microbatches": 1, "placement": [1]}', "without a gap"),
        ('{"stages": [{"forward": 1, "input_grad": 1, "weight_grad": 1}], "microbatches": 1, "speed": 2}', "speed"),
        ('{"stages": [{"forward": 1, "input_grad": 1, "weight_grad": 1}], "microbatches": 1, "links": [[0, 3, 1]]}', "links"),
    ],
)
def test_nonsense_is_named(text: str, complaint: str) -> None:
    with pytest.raises(PlanFileError, match=complaint):
        parse_pipeline_spec(text)


def _spec_file(folder: Path, limit: int) -> str:
    stage = {"forward": 3, "input_grad": 3, "weight_grad": 2, "forward_bytes": 4, "input_grad_bytes": -1, "weight_grad_bytes": -3}
    path = folder / "spec.json"
    path.write_text(json.dumps({"stages": [stage | {"limit_bytes": limit}] * 3, "link": 1, "microbatches": 4}))
    return str(path)


def test_command_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["solve", "pipeline", _spec_file(tmp_path, 12), "--time-limit", "2", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert answer["span"] >= answer["bound"] > 0
    assert answer["schedule"][0][0] == ["0F0", 0]
    assert {"status", "makespan", "span", "bubble_span", "bubble_makespan", "bound", "gap", "seconds"} <= answer.keys()
    result = CliRunner().invoke(app, ["solve", "pipeline", _spec_file(tmp_path, 12), "--time-limit", "1"])
    assert result.exit_code == 0
    assert "  2 " in result.output
    assert "zb-h1" in result.output
    result = CliRunner().invoke(app, ["solve", "pipeline", _spec_file(tmp_path, 3), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["status"] == "infeasible"
