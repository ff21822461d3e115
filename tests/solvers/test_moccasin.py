"""Public rematerialisation graphs (Checkmate's CNNs as the Moccasin authors publish them), planned with recompute only."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from schedopt.check import check
from schedopt.graph import Graph, Phase, StorageKind
from schedopt.machine import Device, Link, Machine, Tier
from schedopt.plan import Plan
from schedopt.solvers import auto
from schedopt.solvers.bound import lower_bound
from schedopt.solvers.problem import Problem, captured_order, eager_peak
from tests.graphs import GraphBuilder

DATA = Path(os.environ.get("SCHEDOPT_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "moccasin"
LINK = Link("cpu", "file", 1e9, 1e9, 1000)
MACHINE = Machine("toy", (Device("cpu", "cpu", 1 << 50, 1e10, (), 0),), (Tier("file", 1 << 50),), (LINK,), "test")


def read_graph(name: str) -> Graph:
    """One op and one storage per node, ops in the order of the file's node ids, which is topological."""
    file = DATA / f"data__{name}_(224, 224, 3)_train_nx.json"
    if not file.is_file():
        pytest.skip("the benchmark graphs are not here; SCHEDOPT_DATA names their folder")
    data = json.loads(file.read_text())
    nodes = sorted(data["nodes"], key=lambda node: int(node["id"]))
    sources: dict[int, list[int]] = {}
    for edge in data.get("links", data.get("edges", [])):
        sources.setdefault(int(edge["target"]), []).append(int(edge["source"]))
    build, made = GraphBuilder(name), {}
    for node in nodes:
        number = int(node["id"])
        made[number] = build.storage(StorageKind.ACTIVATION, int(node["cost_ram"]))
        phase = Phase.BACKWARD if node.get("backward") else Phase.FORWARD
        reads = tuple(made[source] for source in sources.get(number, ()))
        build.op(phase, max(1, int(node["cost_cpu"])), reads=reads, creates=(made[number],))
    return build.graph()


def problem(name: str, share: float) -> Problem:
    """The graph under a share of the peak of its own order."""
    graph = read_graph(name)
    return Problem(graph, captured_order(graph), round(eager_peak(graph) * share), LINK, False, may_swap=False)


@pytest.mark.parametrize(
    ("name", "share", "times"),
    [("VGG16 (MLSys)_256", 0.84, 1.03), ("MobileNet (MLSys)_512", 0.6, 1.03), ("ResNet50 (MLSys)_256", 0.6, 1.03)],
)
def test_recompute_only(name: str, share: float, times: float) -> None:
    mine = problem(name, share)
    best = auto.solve([mine], auto.AutoOptions("file", "cpu", 3.0, workers=1)).best
    assert best is not None
    report = check(mine.graph, Plan(mine.graph.hash(), "toy", "recompute", best.solver, (best.realised.schedule,), undo=False), MACHINE)
    assert report.ok, report.violations
    assert report.peak_bytes <= mine.budget_bytes
    bound = lower_bound(mine).step_ns
    assert bound is not None
    assert mine.compute_ns <= bound <= report.step_ns <= times * mine.compute_ns


def test_what_can_not_fit_is_proven() -> None:
    assert lower_bound(problem("VGG16 (MLSys)_256", 0.8)).step_ns is None
