"""Models under hand-made plans that move or rebuild everything: the same bits as eager, the predicted peak to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from schedopt.plan import ActionKind
from tests import plans
from tests.models import MODELS
from tests.programs import Maker, assert_exact, small_job

MAKERS: dict[str, Maker] = {
    "plain": plans.plain,
    "early update": plans.early_update,
    "swap, ram": plans.swap_everything,
    "swap, file": lambda graph: plans.swap_everything(graph, "file"),
    "swap parameters": lambda graph: plans.swap_everything(graph, "file", persistent=True),
    "away, ram": plans.all_away,
    "away, file": lambda graph: plans.all_away(graph, "file"),
    "recompute": plans.recompute_everything,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("model", ["vgg16", "lstm", "odd", "autocast"])
def test_model_is_exact(model: str, maker: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plan = assert_exact(MODELS[model](), MAKERS[maker], directory=str(tmp_path))
    kinds = {"recompute": ActionKind.RECOMPUTE, "plain": ActionKind.RUN, "early update": ActionKind.SAVE}
    assert plans.count(plan, kinds.get(maker, ActionKind.SWAP_IN)) > 5
    assert list(tmp_path.iterdir()) == []


def test_dropout_and_statistics_are_rebuilt() -> None:
    plan = assert_exact(small_job(), plans.recompute_everything)
    assert plans.count(plan, ActionKind.SAVE_RNG) == 1


def test_adamw_with_everything_away() -> None:
    plan = assert_exact(small_job(optimizer="adamw"), lambda graph: plans.all_away(graph, "file"))
    assert len(plan.schedules[0].away) == 8 + 3 + 3 * 8
