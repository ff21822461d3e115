"""Pipeline schedules: `schedopt solve pipeline` on the published zero-bubble problems and on uneven ones.

    python benchmarks/pipeline_solvers.py --time-limit 60      # a row takes that long unless its schedule is proven best before
    python benchmarks/pipeline_solvers.py --rows 0,3 --time-limit 5

Rows: times (microseconds) and bytes of the zero-bubble paper (arXiv 2401.10241, bubble-rate table; its repository has the profiled
inputs), with room for p and for 2p micro-batches on every device. The reference is what the authors' own heuristic finds for the same
inputs, by their measure: idle share of the longest device from its first forward to its last weight gradient. Uneven rows: the first
row's times with factors per stage, four stages; reference: the authors' heuristic and a CP-SAT model of ours in an earlier study."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from schedopt.check_pipeline import check_pipeline
from schedopt.pipeline import PipelineSpec, StageCost
from schedopt.solvers.pipeline_auto import PipelineOptions, solve_pipeline

RESULTS = Path(__file__).resolve().parent / "results"
_SEQUENCE = 1024
# name, stages, micro-batches, F, I, W, transfer, hidden size, heads, reference bubble with room for p and for 2p
_PAPER = (
    ("1.5B", 8, 24, 18522, 18086, 9337, 601, 2304, 24, 0.1585, 0.0433),
    ("1.5B", 8, 32, 18513, 18086, 9331, 626, 2304, 24, 0.1242, 0.0039),
    ("1.5B", 8, 64, 18546, 18097, 9321, 762, 2304, 24, 0.0674, 0.0026),
    ("6.2B", 8, 24, 29718, 29444, 19927, 527, 4096, 32, 0.1323, 0.0029),
    ("6.2B", 8, 64, 29935, 29621, 19388, 535, 4096, 32, 0.0554, 0.0010),
    ("14.6B", 16, 48, 11347, 11248, 8132, 377, 5120, 40, 0.1397, 0.0066),
    ("14.6B", 16, 128, 11325, 11308, 8109, 378, 5120, 40, 0.0576, 0.0028),
    ("28.3B", 32, 96, 10419, 10207, 7715, 408, 6144, 48, 0.1421, 0.0038),
    ("28.3B", 32, 256, 10402, 10248, 7698, 460, 6144, 48, 0.0594, 0.0018),
)
# name, factor per stage, transfer, micro-batches that fit, reference spans: heuristic, CP-SAT
_UNEVEN = (
    ("factors .8 1.2 .9 1.3", (0.8, 1.2, 0.9, 1.3), 601, 4.0, 508340, 497947),
    ("the same, transfer 6000", (0.8, 1.2, 0.9, 1.3), 6000, 4.0, 562330, 545912),
    ("first stage 1.4", (1.4, 1.0, 1.0, 1.0), 601, 6.0, 538328, 514568),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A problem, and what others reach: a bubble, or spans."""

    name: str
    spec: PipelineSpec
    reference: str
    reference_bubble: float | None = None
    reference_span: int | None = None


def rows() -> Iterator[Row]:
    """All problems in the order of the table."""
    for name, stages, microbatches, f, i, w, link, hidden, heads, *references in _PAPER:
        for room, bubble in zip((1, 2), references, strict=True):
            cost = _cost(f, i, w, hidden, heads, room * stages)
            spec = PipelineSpec((cost,) * stages, microbatches, link=link)
            yield Row(f"{name} p={stages} m={microbatches}, room {room}p", spec, f"bubble {bubble:.4f}", reference_bubble=bubble)
    _, _, _, f, i, w, _, hidden, heads, *_ = _PAPER[0]
    for name, factors, link, fitting, heuristic, exact in _UNEVEN:
        costs = tuple(_cost(int(f * x), int(i * x), int(w * x), hidden, heads, fitting) for x in factors)
        yield Row(name, PipelineSpec(costs, 8, link=link), f"span {heuristic} / {exact}", reference_span=exact)


def _cost(f: int, i: int, w: int, hidden: int, heads: int, room: float) -> StageCost:
    """Bytes as in the paper: 34 h + 5 a s after F, of which W gives 32 h back."""
    taken = 34 * hidden + 5 * heads * _SEQUENCE
    return StageCost(f, i, w, taken, -(2 * hidden + 5 * heads * _SEQUENCE), -32 * hidden, int(room * taken))


def main() -> int:
    """Solve the rows, write table and JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="numbers of rows, such as 0,3")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--name", default="pipeline_solvers", help="name of the files under benchmarks/results")
    args = parser.parse_args()
    wanted = None if args.rows is None else {int(x) for x in args.rows.split(",")}
    done: list[dict[str, object]] = []
    for number, row in enumerate(rows()):
        if wanted is None or number in wanted:
            print(f"[{number}] {row.name}", file=sys.stderr, flush=True)
            done.append(_solve(row, args.time_limit))
            _write(done, args)
    return 0


def _solve(row: Row, time_limit_s: float) -> dict[str, object]:
    answer = solve_pipeline(row.spec, PipelineOptions(time_limit_s))
    assert answer.schedule is not None
    report = check_pipeline(row.spec, answer.schedule)
    assert report.ok, report.violations
    load = max(row.spec.load)
    reached = report.span <= row.reference_span if row.reference_span else round(report.bubble_span, 4) <= (row.reference_bubble or 0.0)
    return {
        "name": row.name,
        "reference": row.reference,
        "span": report.span,
        "bubble_span": report.bubble_span,
        "bubble_makespan": report.bubble_makespan,
        "bound": answer.bound,
        "gap": answer.gap,
        "status": answer.status,
        "method": answer.schedule.method,
        "seconds": answer.seconds,
        "named": {name: 1 - load / value for name, value in answer.named},
        "at_least_as_good": reached,
    }


def _write(done: list[dict[str, object]], args: argparse.Namespace) -> None:
    RESULTS.mkdir(exist_ok=True)
    about = {"cores": os.cpu_count(), "python": platform.python_version(), "time_limit_s": args.time_limit}
    (RESULTS / f"{args.name}.json").write_text(json.dumps({**about, "rows": done}, indent=1) + "\n")
    lines = [
        f"{os.cpu_count()} cores, at most {args.time_limit:.0f} s a row. Bubble: idle share of the longest device's span (microseconds).",
        "",
        "| problem | 1F1B | ZB-H1 | ZB-H2 | reference | schedopt bubble | span | gap to the bound | found by | s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in done:
        named = row["named"]
        assert isinstance(named, dict)
        cells = [f"{named[name]:.4f}" if name in named else "too large" for name in ("1f1b", "zb-h1", "zb-h2")]
        gap = "proven best" if row["status"] == "optimal" else f"{row['gap']:.4f}"
        cells += [str(row["reference"]), f"{row['bubble_span']:.4f}", str(row["span"]), gap, str(row["method"]), f"{row['seconds']:.1f}"]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    (RESULTS / f"{args.name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
