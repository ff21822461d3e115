"""Stages of a model: `schedopt solve partition` on published problems.

    python benchmarks/partition_solvers.py --data ../shared/data --time-limit 60

Rows: the throughput inputs of msr-fiddle/dnn-partitioning (Tarnawski et al., NeurIPS 2020; time per sample, transfers counted), with what
PipeDream's optimiser reaches there and what the authors' own dynamic programming finds as the contiguous optimum, both re-run from their
code; and profiles of msr-fiddle/pipedream cut into straight pipelines, speed-up over one device: without transfers, as its optimiser
counts by default, and with transfers of every value at 16 GB/s beside the work, which it leaves out. PipeDream's figure for eight stages
was found under a limit of memory, which these rows do not have."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from schedopt.check_partition import check_partition
from schedopt.partition import DeviceKind, PartitionNode, PartitionSpec, load_partition_spec
from schedopt.solvers.partition_auto import PartitionOptions, solve_partition

RESULTS = Path(__file__).resolve().parent / "results"
_BYTES_PER_MS = 16e9 / 1e3
# file, PipeDream's greatest load, contiguous optimum of the authors (None: their program had not ended after ten minutes)
_DNN_PARTITIONING = (
    ("LayerGraphs__bert24_inference", 17.790, 17.790),
    ("LayerGraphs__bert24_training", 187.914, 41.746),
    ("LayerGraphs__gnmt_training", 294.905, 107.004),
    ("LayerGraphs__resnet50_inference", 39.398, 33.775),
    ("LayerGraphs__resnet50_training", 83.674, 78.632),
    ("LayerGraphs__inceptionv3_inference", 60.417, None),
    ("OperatorGraphs__bert_l-3_inference", 37.456, 27.919),
    ("OperatorGraphs__bert_l-3_training", 122.987, 65.303),
    ("OperatorGraphs__bert_l-6_inference", 65.565, 29.580),
    ("OperatorGraphs__resnet50_inference", 129.155, 124.349),
    ("OperatorGraphs__resnet50_training", 684.891, 255.194),
)
# profile, devices, speed-up of PipeDream's straight pipeline
_PIPEDREAM = (("vgg16", 4, 3.107), ("resnet50", 4, 3.977), ("resnet50", 8, 6.965))


def main() -> int:
    """Solve the rows one after the other, write the table and the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with dnn-partitioning/ and pipedream/")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--name", default="partition_solvers", help="name of the files under benchmarks/results")
    args = parser.parse_args()
    done: list[dict[str, object]] = []
    for name, spec, references in _rows(args.data):
        print(name, file=sys.stderr, flush=True)
        answer = solve_partition(spec, PartitionOptions(args.time_limit))
        assert answer.partition is not None
        report = check_partition(spec, answer.partition)
        assert report.ok, report.violations
        found = {"max_load": report.max_load, "status": answer.status, "bound": answer.bound, "gap": answer.gap, "seconds": answer.seconds}
        total = sum(node.time for node in spec.nodes if isinstance(node.time, float))
        done.append({"name": name, **references, **found, "speed_up": total / report.max_load if total else None})
        _write(done, args)
    return 0


def _rows(data: Path) -> Iterator[tuple[str, PartitionSpec, dict[str, object]]]:
    for file, pipedream, optimum in _DNN_PARTITIONING:
        spec = load_partition_spec(data / "dnn-partitioning" / f"throughput-inputs__{file}.json")
        yield file.replace("__", " "), spec, {"pipedream": pipedream, "optimum": optimum}
    for model, devices, speed_up in _PIPEDREAM:
        for per_ms in (None, _BYTES_PER_MS):
            path = data / "pipedream" / f"image_classification__{model}.graph.txt"
            how = "no transfers" if per_ms is None else "16 GB/s"
            yield f"{model}, {devices} stages, {how}", _profile(path, devices, per_ms), {"pipedream_speed_up": speed_up}


def _profile(path: Path, devices: int, bytes_per_ms: float | None) -> PartitionSpec:
    """A profile of PipeDream: forward and backward of a layer are one node; the input of the model is free."""
    nodes, edges = [], []
    for line in path.read_text().splitlines():
        if line.startswith("\t"):
            source, target = line.strip().split(" -- ")
            edges.append((source, target))
            continue
        name, layer, rest = line.split(" -- ")
        figures = {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", rest)}
        time = 0.0 if layer.startswith("Input") else figures["forward_compute_time"] + figures["backward_compute_time"]
        transfer = figures["activation_size"] / bytes_per_ms if bytes_per_ms else 0.0
        nodes.append(PartitionNode(name, time, figures["parameter_size"], 0.0, transfer))
    return PartitionSpec(tuple(nodes), tuple(edges), (DeviceKind("gpu", devices),), overlap=True)


def _write(done: list[dict[str, object]], args: argparse.Namespace) -> None:
    RESULTS.mkdir(exist_ok=True)
    about = {"cores": os.cpu_count(), "python": platform.python_version(), "time_limit_s": args.time_limit}
    (RESULTS / f"{args.name}.json").write_text(json.dumps({**about, "rows": done}, indent=1) + "\n")
    lines = [
        f"At most {args.time_limit:.0f} s a row. Greatest load: less is better; speed-up over one device: more is better.",
        "",
        "| problem | PipeDream | authors' contiguous optimum | schedopt | status | gap to the bound |",
        "|---|---|---|---|---|---|",
    ]
    for row in done:
        if row["speed_up"]:
            cells = [f"{row['pipedream_speed_up']}x", "", f"{row['speed_up']:.3f}x"]
        else:
            cells = [str(row["pipedream"]), str(row["optimum"] or "over 10 min"), f"{row['max_load']:.3f}"]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + f" | {row['status']} | {row['gap']:.4f} |")
    (RESULTS / f"{args.name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
