"""Every example offers a workload to the command line, with the options that the README names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from schedopt.capture.workload import Workload, flatten_batch
from schedopt.cli.target import find_function, parse_settings

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mlp", []),
        ("resnet50", ["image_size=64"]),
        ("vgg16", ["image_size=64"]),
        ("gpt2", ["seq_len=32", "size=tiny"]),
        ("huggingface", ["seq_len=32"]),
        ("huggingface", ["seq_len=32", "model=bert"]),
    ],
)
def test_workload(name: str, settings: list[str], optimizer: str) -> None:
    function = find_function(f"{EXAMPLES / name}.py:workload")
    with torch.device("meta"):
        workload = function(**parse_settings(function, [*settings, "batch_size=3", f"optimizer={optimizer}"]))
    assert isinstance(workload, Workload)
    leaves, _ = flatten_batch(workload.batch)
    assert {leaf.shape[0] for leaf in leaves} == {3}
    assert type(workload.optimizer).__name__ == {"sgd": "SGD", "adamw": "AdamW"}[optimizer]


def test_every_example_is_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"mlp", "resnet50", "vgg16", "gpt2", "huggingface"}
