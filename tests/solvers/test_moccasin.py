"""A public rematerialisation graph (Checkmate's VGG-16 as the Moccasin authors publish it), planned with recompute only."""

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
FILE = DATA / "data__VGG16 (MLSys)_256_(224, 224, 3)_train_nx.json"
LINK = Link("cpu", "file", 1e9, 1e9, 1000)
MACHINE = Machine("toy", (Device("cpu", "cpu", 1 << 50, 1e10, (), 0),), (Tier("file", 1 << 50),), (LINK,), "test")


def read_graph() -> Graph:
    """One op and one storage per node, ops in the order of the file's node ids, which is topological."""
    if not FILE.is_file():
        pytest.skip("the benchmark graphs are not here; SCHEDOPT_DATA names their folder")
    data = json.loads(FILE.read_text())
    nodes = sorted(data["nodes"], key=lambda node: int(node["id"]))
    sources: dict[int, list[int]] = {}
    for edge in data.get("links", data.get("edges", [])):
        sources.setdefault(int(edge["target"]), []).append(int(edge["source"]))
    build, made = GraphBuilder("VGG16 of Checkmate"), {}
    for node in nodes:
        number = int(node["id"])
        made[number] = build.storage(StorageKind.ACTIVATION, int(node["cost_ram"]))
        phase = Phase.BACKWARD if node.get("backward") else Phase.FORWARD
        reads = tuple(made[source] for source in sources.get(number, ()))
        build.op(phase, max(1, int(node["cost_cpu"])), reads=reads, creates=(made[number],))
    return build.graph()


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_recompute_of_vgg16(share: float) -> None:
    graph = read_graph()
    problem = Problem(graph, captured_order(graph), round(eager_peak(graph) * share), LINK, False, may_swap=False)
    best = auto.solve([problem], auto.AutoOptions("file", "cpu", 1.0, workers=1)).best
    assert best is not None
    report = check(graph, Plan(graph.hash(), "toy", "recompute", best.solver, (best.realised.schedule,), undo=False), MACHINE)
    assert report.ok, report.violations
    assert report.peak_bytes <= problem.budget_bytes
    bound = lower_bound(problem).step_ns
    assert bound is not None
    assert problem.compute_ns <= bound <= report.step_ns <= 1.3 * problem.compute_ns
