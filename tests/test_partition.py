"""Partitions: the checker first, then the solver against it, against brute force and against published optima."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedopt.check_partition import check_partition
from schedopt.cli import app
from schedopt.errors import PlanFileError
from schedopt.partition import DeviceKind, Partition, PartitionNode, PartitionSpec, StagePart, load_partition_spec, parse_partition_spec
from schedopt.solvers.partition_auto import PartitionOptions, solve_partition

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "dnn-partitioning"
# Optima of the authors' own C++ program on their inputs, re-run.
PUBLISHED = {
    "throughput-inputs__LayerGraphs__bert24_inference.json": 17.790,
    "throughput-inputs__LayerGraphs__bert24_training.json": 41.746,
    "throughput-inputs__LayerGraphs__resnet50_inference.json": 33.775,
    "throughput-inputs__LayerGraphs__resnet50_training.json": 78.632,
    "throughput-inputs__OperatorGraphs__bert_l-3_inference.json": 27.919,
    "throughput-inputs__OperatorGraphs__resnet50_training.json": 255.194,
}


def chain(times: tuple[float, ...], devices: int, transfer: float = 0.0, limit: float | None = None) -> PartitionSpec:
    """Nodes a, b, c, ... of one byte each."""
    names = [chr(ord("a") + i) for i in range(len(times))]
    nodes = tuple(PartitionNode(name, time, 1.0, 0.0, transfer) for name, time in zip(names, times, strict=True))
    return PartitionSpec(nodes, tuple(itertools.pairwise(names)), (DeviceKind("gpu", devices, limit),))


def tangled(seed: int) -> PartitionSpec:
    """A small graph with skips, backward nodes, groups and two kinds of devices."""
    draw = random.Random(seed)
    names = [f"n{i}" for i in range(6)]
    arcs = [(a, b) for a, b in itertools.combinations(names, 2) if draw.random() < 0.4]
    nodes, edges = [], list(arcs)
    for name in names:
        costs = {"gpu": float(draw.randint(1, 9)), "host": float(draw.randint(5, 30))}
        nodes.append(PartitionNode(name, costs, draw.randint(1, 4), draw.randint(0, 2), draw.randint(0, 3), name))
        nodes.append(PartitionNode(name + "grad", {"gpu": 1.0, "host": 9.0}, 0.0, 0.0, draw.randint(0, 3), name, backward=True))
    edges += [(b + "grad", a + "grad") for a, b in arcs] + [(name, name + "grad") for name in names]
    kinds = (DeviceKind("gpu", 2, draw.choice((None, 14.0, 20.0))), DeviceKind("host", 1, None, free_transfers=True))
    return PartitionSpec(tuple(nodes), tuple(edges), kinds, overlap=draw.random() < 0.4)


def brute_force(spec: PartitionSpec) -> float:
    """Least greatest load by the checker over all orders of kinds and all assignments of groups; infinite if nothing is allowed."""
    groups = sorted({node.group for node in spec.nodes})
    slots = [kind.name for kind in spec.devices for _ in range(kind.count)]
    best = float("inf")
    for kinds in set(itertools.permutations(slots)):
        for where in itertools.product(range(len(slots)), repeat=len(groups)):
            home = dict(zip(groups, where, strict=True))
            parts = tuple(StagePart(kind, tuple(n.name for n in spec.nodes if home[n.group] == d)) for d, kind in enumerate(kinds))
            report = check_partition(spec, Partition(parts))
            if report.ok:
                best = min(best, report.max_load)
    return best


def test_checker_counts_transfers_once_per_device() -> None:
    spec = chain((4, 3, 2, 1), 3, transfer=10)
    spec = replace(spec, edges=(*spec.edges, ("a", "c"), ("a", "d")))
    report = check_partition(spec, Partition((StagePart("gpu", ("a",)), StagePart("gpu", ("b",)), StagePart("gpu", ("c", "d")))))
    assert report.ok
    assert report.loads == (14, 23, 23)
    assert check_partition(replace(spec, overlap=True), Partition((StagePart("gpu", ("a", "b", "c", "d")),))).max_load == 10


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((("a", "b"), ("c",)), "'d' is in no part"),
        ((("a", "b"), ("b", "c", "d")), "'b' is in the parts 0 and 1"),
        ((("b",), ("a", "c", "d")), "goes against the order"),
        ((("a",), ("b",), ("c",), ("d",)), "of which there are 3"),
        ((("a", "b", "c"), ("d",)), "the limit of 'gpu' is 2"),
        ((("a", "b"), ("c", "d", "e")), "'e', which is no node"),
    ],
)
def test_checker_says_what_is_broken(parts: tuple[tuple[str, ...], ...], words: str) -> None:
    spec = chain((1, 1, 1, 1), 3, limit=2)
    report = check_partition(spec, Partition(tuple(StagePart("gpu", names) for names in parts)))
    assert any(words in text for text in report.violations), report.violations


def test_checker_keeps_groups_together_and_counts_micro_batches_in_flight() -> None:
    spec = chain((1, 1), 2, limit=5)
    spec = replace(spec, nodes=tuple(replace(node, group="tied", stash_bytes=2.0) for node in spec.nodes))
    report = check_partition(spec, Partition((StagePart("gpu", ("a",)), StagePart("gpu", ("b",)))))
    assert any("group 'tied'" in text for text in report.violations)
    assert report.bytes == (5, 3)


@pytest.mark.parametrize("seed", range(24))
def test_solver_equals_brute_force(seed: int) -> None:
    spec = tangled(seed)
    answer, best = solve_partition(spec), brute_force(spec)
    if best == float("inf"):
        assert answer.status == "infeasible"
        return
    assert answer.status == "optimal"
    assert answer.partition is not None
    report = check_partition(spec, answer.partition)
    assert report.ok, report.violations
    assert report.max_load == pytest.approx(best)
    assert answer.max_load == pytest.approx(best)


def test_infeasible_twin() -> None:
    assert solve_partition(chain((1, 1, 1), 2, limit=2)).status == "optimal"
    assert solve_partition(chain((1, 1, 1), 2, limit=1)).status == "infeasible"


def test_no_time_is_not_infeasible() -> None:
    assert solve_partition(chain((1, 2, 3), 2), PartitionOptions(time_limit_s=1e-9)).status in ("unknown", "feasible")


@pytest.mark.skipif(not DATA.exists(), reason=f"the public instances are not at {DATA}")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_optima(name: str) -> None:
    spec = load_partition_spec(DATA / name)
    answer = solve_partition(spec)
    assert answer.partition is not None
    assert check_partition(spec, answer.partition).ok
    assert answer.status == "optimal"
    assert answer.max_load == pytest.approx(PUBLISHED[name], abs=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"edges": [["a", "x"]]}, "'x', which is no node"),
        ({"nodes": [{"name": "a", "time": 1}, {"name": "a", "time": 1}]}, "two times the node 'a'"),
        ({"nodes": [{"name": "a", "time": {"tpu": 1}}], "edges": []}, "can run on no kind"),
        ({"nodes": [{"name": "a", "time": -1}], "edges": []}, "not negative"),
        ({"devices": [{"name": "gpu", "count": 0}]}, "count must be positive"),
        ({"colour": 1}, "colour"),
        ({"maxFPGAs": 2, "maxCPUs": 1}, "dnn-partitioning form"),
    ],
)
def test_broken_files_name_the_field(change: dict[str, object], words: str) -> None:
    good = {"nodes": [{"name": "a", "time": 1}, {"name": "b", "time": 1}], "edges": [["a", "b"]], "devices": [{"name": "gpu", "count": 2}]}
    assert parse_partition_spec(json.dumps(good)).num_devices == 2
    with pytest.raises(PlanFileError, match=words):
        parse_partition_spec(json.dumps(good | change))


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    nodes = [{"name": name, "time": time, "bytes": 8} for name, time in (("a", 3), ("b", 1), ("c", 2), ("d", 2))]
    data = {"nodes": nodes, "edges": [["a", "b"], ["b", "c"], ["c", "d"]], "devices": [{"name": "gpu", "count": 2, "limit_bytes": 16}]}
    path.write_text(json.dumps(data))
    answer = json.loads(CliRunner().invoke(app, ["solve", "partition", str(path), "--json"]).stdout)
    assert (answer["status"], answer["max_load"]) == ("optimal", 4)
    assert [stage["nodes"] for stage in answer["stages"]] == [["a", "b"], ["c", "d"]]
    assert "greatest load 4, optimal" in CliRunner().invoke(app, ["solve", "partition", str(path)]).stdout
    data["devices"] = [{"name": "gpu", "count": 2, "limit_bytes": 8}]
    path.write_text(json.dumps(data))
    result = CliRunner().invoke(app, ["solve", "partition", str(path)])
    assert (result.exit_code, "infeasible" in result.stdout) == (1, True)
