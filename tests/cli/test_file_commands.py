"""check, show and export on plan files: exit codes, JSON, and no traceback for nonsense."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schedopt.cli import app
from schedopt.plan_file import PlanFile, save_plan
from tests.sample_plan import parse_actions, sample


@pytest.fixture
def good(tmp_path: Path) -> str:
    """A plan file that checks."""
    path = tmp_path / "good.json"
    save_plan(sample(), path)
    return str(path)


def _with_actions(text: str) -> PlanFile:
    file = sample()
    return replace(file, plan=replace(file.plan, schedules=(replace(file.plan.schedules[0], actions=parse_actions(text)),)))


@pytest.fixture
def bad(tmp_path: Path) -> str:
    """A plan file that breaks several rules: the parameter is used while away, and most ops never run."""
    path = tmp_path / "bad.json"
    save_plan(_with_actions("run 0, release 2"), path)
    return str(path)


def invoke(*args: str) -> tuple[int, str]:
    """Exit code and all output of a command."""
    result = CliRunner().invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def invoke_json(*args: str, code: int = 0) -> Any:
    """The object that a command prints with --json."""
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_check_says_ok(good: str) -> None:
    code, shown = invoke("check", good)
    assert code == 0
    assert "ok" in shown
    assert "214 B" in shown


def test_check_lists_every_broken_rule(bad: str) -> None:
    code, shown = invoke("check", bad)
    assert code == 1
    assert "use-while-away" in shown
    assert "run-once" in shown


def test_check_json(good: str, bad: str) -> None:
    assert invoke_json("check", good) | {"ok": True, "peak_bytes": 214, "budget_bytes": 220, "violations": []} == invoke_json("check", good)
    result = invoke_json("check", bad, code=1)
    assert result["ok"] is False
    assert {v["rule"] for v in result["violations"]} >= {"use-while-away", "run-once"}


def test_show_has_summary_reasons_and_timeline(good: str, bad: str) -> None:
    code, shown = invoke("show", good)
    assert code == 0
    for part in ("budget", "frees 50 bytes", "backward", "█"):
        assert part in shown
    code, shown = invoke("show", bad)
    assert code == 0
    assert "broken rule" in shown
    assert invoke_json("show", good)["predicted_peak_bytes"] == 214
    assert invoke_json("show", good)["actions"][0]["kind"] == "swap_in"


@pytest.mark.parametrize("form", ["json", "perfetto", "dot"])
def test_export_writes_each_form(good: str, tmp_path: Path, form: str) -> None:
    path = tmp_path / "sub" / f"out.{form}"
    code, shown = invoke("export", good, "--to", form, "-o", str(path))
    assert code == 0, shown
    assert path.read_text() == invoke("export", good, "--to", form)[1]
    assert invoke_json("export", good, "--to", form, "-o", str(path))["size_bytes"] == path.stat().st_size


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["check", "GONE"], 1, "can not be read"),
        (["check", "."], 1, "can not be read"),
        (["show", "TEXT"], 1, "not a JSON file"),
        (["export", "GOOD", "--to", "cake"], 2, "json, perfetto, dot"),
        (["export", "GOOD"], 2, "--to"),
        (["export", "GOOD", "--to", "dot", "-o", "/proc/none/x"], 1, "No such file"),
        (["export", "GOOD", "--to", "json", "-o", "GOOD"], 2, "overwrite"),
        (["show", "GOOD", "--rows", "0"], 2, "rows"),
        (["bake"], 2, "bake"),
        ([], 2, "Usage"),
    ],
)
def test_nonsense_gets_a_message_and_an_exit_code(good: str, tmp_path: Path, args: list[str], code: int, message: str) -> None:
    (tmp_path / "text.txt").write_text("hello")
    places = {"GOOD": good, "GONE": str(tmp_path / "gone.json"), "TEXT": str(tmp_path / "text.txt")}
    got, shown = invoke(*(places.get(arg, arg) for arg in args))
    assert got == code, shown
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown


def test_errors_are_json_too(tmp_path: Path) -> None:
    error = invoke_json("check", str(tmp_path / "gone.json"), code=1)["error"]
    assert error["type"] == "PlanFileError"
    assert "gone.json" in error["message"]


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--debug", "check", str(tmp_path / "gone.json")])
    assert type(result.exception).__name__ == "PlanFileError"
    assert invoke("check", str(tmp_path / "gone.json"))[0] == 1  # and the next call does not


def test_plan_files_need_no_torch(good: str) -> None:
    program = (
        "import sys\n"
        "from schedopt.cli import app\n"
        f"for args in (['check', {good!r}], ['show', {good!r}], ['export', {good!r}, '--to', 'dot'], ['--help']):\n"
        "    try: app(args)\n"
        "    except SystemExit as end: assert not end.code, args\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
