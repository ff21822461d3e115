"""The account of bytes against what the allocator really saw, on ops that need no scratch memory."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn

from schedopt.capture.workload import Workload
from schedopt.compat import allocator_changes
from schedopt.run import cpu
from schedopt.run.runner import Runner
from tests import plans
from tests.programs import Maker, leaves_of, program_of

MAKERS: dict[str, Maker] = {
    "plain": plans.plain,
    "swap": plans.swap_everything,
    "early update": plans.early_update,
    "away": plans.all_away,
    "recompute": plans.recompute_everything,
}


def _job() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64, bias=False), nn.Tanh())])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, None, optimizer, torch.randn(128, 64), forward=lambda module, x: module(x).sum())


@pytest.mark.parametrize("maker", MAKERS)
def test_the_allocator_sees_the_predicted_peak(maker: str) -> None:
    torch.set_num_threads(1)
    workload = _job()
    program = program_of(workload, MAKERS[maker])
    assert program.plan is not None
    away = program.plan.schedules[0].away
    there = sum(s.size_bytes for s in program.graph.storages if s.external and s.id not in away)
    leaves = leaves_of(workload)
    with Runner(program) as runner:
        runner.step(leaves)
        outputs, changes = allocator_changes(lambda: runner.step(leaves))
    measured = there + max(itertools.accumulate(changes))
    assert abs(measured - program.plan.peak_bytes) <= 256, (measured, program.plan.peak_bytes)
    assert sum(changes) == outputs[0].untyped_storage().nbytes()


def test_a_failed_step_leaves_no_bytes_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = _job()
    leaves = leaves_of(workload)
    with Runner(program_of(workload, plans.all_away)) as runner:
        runner.step(leaves)
        monkeypatch.setattr(cpu.CpuRuntime, "evict", lambda *_: 1 / 0)

        def failing() -> None:
            with pytest.raises(ZeroDivisionError):
                runner.step(leaves)

        _, changes = allocator_changes(failing)
        assert max(itertools.accumulate(changes)) > 0
        assert sum(changes) == 0


_CHURN = """
import resource, sys, torch
from schedopt.heap import give_back, keep_heap
total, block = 1 << 28, int(sys.argv[1])
def churn():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(block // 4) for _ in range(total // block)]
    del blocks
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * 4096 / total
if keep_heap():
    for _ in range(3):
        churn()
    print(churn())
    give_back()
    print(churn())
"""


@pytest.mark.parametrize("block_bytes", [1 << 20, 1 << 26])
def test_freed_memory_is_not_faulted_in_again_until_given_back(block_bytes: int) -> None:
    out = subprocess.run([sys.executable, "-c", _CHURN, str(block_bytes)], check=True, capture_output=True, text=True).stdout
    if not out:
        pytest.skip("malloc is set up by the user, or is not glibc's")
    kept, returned = map(float, out.split())
    assert kept < 0.5  # a block may come to lie elsewhere
    assert returned > 0.7
