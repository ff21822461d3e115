"""TARGET and --set: what is accepted, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from schedopt.capture.workload import Workload
from schedopt.cli.options import throttle_bytes
from schedopt.cli.target import find_function, load_workload, parse_settings
from schedopt.errors import TargetError

SOURCE = """
import torch
from torch import nn
from helper import WIDTH
import schedopt


def workload(batch_size: int = 4, rate: float = 0.1, bias: bool = True, optimizer="sgd"):
    model = nn.Linear(WIDTH, 2, bias=bias)
    batch = (torch.randn(batch_size, WIDTH), torch.randint(0, 2, (batch_size,)))
    rule = getattr(torch.optim, {"sgd": "SGD", "adamw": "AdamW"}[optimizer])(model.parameters(), lr=rate)
    return schedopt.Workload(model, nn.functional.cross_entropy, rule, batch)


def wrong():
    return 3


def needs(size: int):
    return workload(size)


def breaks():
    raise RuntimeError("no data")


number = 3
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A file of workloads that imports a neighbour."""
    (tmp_path / "helper.py").write_text("WIDTH = 5\n")
    path = tmp_path / "jobs.py"
    path.write_text(SOURCE)
    return str(path)


def test_settings_are_typed_by_annotation_or_default(place: str) -> None:
    job = load_workload(f"{place}:workload", ["batch_size=7", "rate=1e-3", "bias=false", "optimizer=adamw"], seed=0)
    assert isinstance(job, Workload)
    assert job.batch[0].shape == (7, 5)
    assert [name for name, _ in job.model.named_parameters()] == ["weight"]
    assert job.optimizer.param_groups[0]["lr"] == 1e-3
    assert load_workload(f"{place}:needs", ["size=2"], seed=0).batch[0].shape == (2, 5)


def test_the_seed_decides_the_weights(place: str) -> None:
    first, again, other = (load_workload(f"{place}:workload", [], seed).model.get_parameter("weight") for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)


def test_a_module_is_a_target_too() -> None:
    assert find_function("tests.models:mlp32").__name__ == "mlp32"


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        ("FILE", [], "file.py:function"),
        ("FILE:", [], "file.py:function"),
        (":workload", [], "file.py:function"),
        ("FILE:worklod", [], "did you mean workload"),
        ("FILE:number", [], "no function 'number'"),
        ("jobz.py:workload", [], "no file jobz.py"),
        ("no.such.module:workload", [], "there is no module"),
        ("json.nope:workload", [], "there is no module"),
        ("FILE:wrong", [], "returned int"),
        ("FILE:breaks", [], r"RuntimeError: no data \(jobs.py:\d+\)"),
        ("FILE:needs", [], "needs size"),
        ("FILE:workload", ["batch_size"], "key=value"),
        ("FILE:workload", ["batch_sise=3"], "did you mean batch_size"),
        ("FILE:workload", ["batch_size=many"], "batch_size=many: .*integer"),
        ("FILE:workload", ["bias=perhaps"], "bias=perhaps"),
        ("FILE:workload", ["optimizer=lbfgs"], "KeyError"),
    ],
)
def test_a_wrong_target_is_told_what_is_wrong(place: str, target: str, settings: list[str], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        load_workload(target.replace("FILE", place), settings, seed=0)


@pytest.mark.parametrize("text", ["import nosuchmodule\n", "def f(:\n", "raise SystemError('x')\n"])
def test_a_file_that_can_not_be_loaded(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(TargetError, match=r"broken\.py can not be loaded"):
        find_function(f"{path}:workload")


def test_literals_and_optional_settings() -> None:
    def function(mode: Literal["a", "b"] = "a", limit: int | None = 3, **rest: Any) -> None: ...

    assert parse_settings(function, ["mode=b", "limit=none", "free=1"]) == {"mode": "b", "limit": None, "free": "1"}
    assert parse_settings(function, ["limit=5"]) == {"limit": 5}
    with pytest.raises(TargetError, match=r"mode=c: .*'a' or 'b'"):
        parse_settings(function, ["mode=c"])


def test_throttle() -> None:
    assert throttle_bytes("500MB/s") == throttle_bytes("500MB") == 500_000_000
    for nonsense in ("fast", "30%", "-3", ""):
        with pytest.raises(ValueError, match="not understood"):
            throttle_bytes(nonsense)
