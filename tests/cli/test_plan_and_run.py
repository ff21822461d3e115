"""plan, run and machine from end to end on a small job: what is printed, what is written, what nonsense is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from schedopt.api import prepare
from schedopt.cli import app
from schedopt.plan_file import load_plan
from tests.machines import TEST_MACHINE

ROOT = Path(__file__).parents[2]
SMALL = ["--set", "batch_size=128", "--set", "width=192", "--set", "num_layers=4", "--time-limit", "0.5", "--tier", "ram"]
TARGET = f"{ROOT / 'examples' / 'mlp.py'}:workload"


@pytest.fixture(autouse=True)
def _small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepare, "this_machine", lambda tier=None, progress=None: TEST_MACHINE)


def invoke(*args: str) -> tuple[int, str]:
    """Exit code and all output of a command."""
    result = CliRunner().invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def invoke_json(*args: str, code: int = 0) -> Any:
    """The one object that a command prints with --json."""
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == code, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def test_run_json_has_what_machines_need_and_the_losses_of_eager() -> None:
    result = invoke_json("run", TARGET, "--memory", "50%", "--steps", "3", "--compare", "eager", *SMALL)
    assert len(result["losses"]) == 3
    assert result["losses"] == result["eager_losses"]
    assert result["losses_equal_eager"] is True
    assert result["losses"][2] < result["losses"][0]
    assert 0 < result["peak_bytes"] <= result["budget_bytes"] == result["predicted_eager_peak_bytes"] // 2
    assert result["predicted_peak_bytes"] == result["peak_bytes"]
    assert result["strategy"] == "auto"
    for name in ("step_seconds", "predicted_step_seconds", "eager_step_seconds", "bound_seconds"):
        assert 0 < result[name] < 10
    assert result["gap"] >= 0


def test_run_writes_a_plan_that_checks_and_runs_again(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    code, shown = invoke("run", TARGET, "--memory", "50%", "--steps", "1", "-o", path, *SMALL)
    assert code == 0, shown
    for part in ("budget", "predicted beside measured", "measured", "loss", "plan written to"):
        assert part in shown
    assert invoke("check", path)[0] == 0
    first = invoke_json("run", TARGET, "--plan", path, "--steps", "1", *SMALL)
    assert first["solve_seconds"] == load_plan(path).plan.solve_seconds
    code, shown = invoke("run", TARGET, "--plan", path, "--steps", "1", *SMALL, "--set", "batch_size=96")
    assert code == 1
    assert "another training step" in shown


def test_plan_for_a_machine_that_is_not_here(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = invoke_json("plan", TARGET, "--memory", "60%", "--machine", "h200", "-o", str(path), *SMALL[:-2])
    assert result["machine"] == "h200"
    assert result["output"] == str(path)
    assert load_plan(path).plan.schedules[0].device == "cuda:0"
    assert load_plan(path).plan.schedules[0].tier == "pinned"
    assert invoke("check", str(path))[0] == 0
    code, shown = invoke("run", TARGET, "--plan", str(path), *SMALL)
    assert code == 1
    assert "h200" in shown


@pytest.mark.parametrize("strategy", ["window", "recompute", "swap"])
def test_every_strategy_plans(strategy: str) -> None:
    result = invoke_json("plan", TARGET, "--memory", "95%", "--strategy", strategy, *SMALL)
    assert result["strategy"] == strategy
    assert result["predicted_peak_bytes"] <= result["budget_bytes"]


def test_infeasible_names_the_least_budget() -> None:
    error = invoke_json("plan", TARGET, "--memory", "10KiB", *SMALL, code=1)["error"]
    assert error["type"] == "InfeasibleError"
    assert 10 * 1024 < error["floor_bytes"] <= error["least_bytes"]
    least = invoke_json("plan", TARGET, "--memory", str(error["least_bytes"]), *SMALL)
    assert least["predicted_peak_bytes"] <= error["least_bytes"]
    code, shown = invoke("plan", TARGET, "--memory", "10KiB", *SMALL)
    assert code == 1
    assert str(error["least_bytes"]) in shown


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["run", TARGET, "--memory", "lots"], 2, 'use bytes, a size such as "6GiB"'),
        (["run", TARGET, "--strategy", "luck"], 2, "auto, window, recompute, swap"),
        (["run", TARGET, "--tier", "tape"], 2, "file, ram"),
        (["run", TARGET, "--steps", "0"], 2, "steps"),
        (["run", TARGET, "--compare", "lazy"], 2, "use eager"),
        (["run", TARGET, "--throttle", "fast"], 2, "bytes per second"),
        (["run", TARGET, "--plan", "/nope.json"], 1, "can not be read"),
        (["run", "nothing"], 2, "file.py:function"),
        (["plan", TARGET, "--machine", "h2000"], 2, "did you mean h200"),
        (["plan", TARGET, "--time-limit", "0"], 2, "must be positive"),
        (["plan", TARGET, "--set", "width=abc"], 2, "valid integer"),
        (["plan", TARGET, "-o", "/proc/none/plan.json"], 1, "No such file"),
        (["machine", "show", "h201"], 2, "did you mean h200"),
    ],
)
def test_nonsense_gets_a_message_and_an_exit_code(args: list[str], code: int, message: str) -> None:
    got, shown = invoke(*args)
    assert got == code, shown
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown


def test_machines() -> None:
    names = {machine["name"] for machine in invoke_json("machine", "list")["machines"]}
    assert {"h200", "h100", "a100-80gb", "a100-40gb", "v100-16gb", "rtx4090", "t4"} <= names
    assert "h200" in invoke("machine", "list")[1]
    assert invoke_json("machine", "show", "t4")["devices"][0]["kind"] == "cuda"
    assert "GiB" in invoke("machine", "show", "t4")[1]


def test_the_generator_is_where_eager_leaves_it() -> None:
    invoke_json("run", TARGET, "--steps", "2", "--seed", "3", *SMALL)
    without = torch.rand(1)
    invoke_json("run", TARGET, "--steps", "2", "--seed", "3", "--compare", "eager", *SMALL)
    assert torch.rand(1).equal(without)
