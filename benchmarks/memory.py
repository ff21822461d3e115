"""Memory against speed on this CPU: schedopt beside eager and its rivals, each row in processes of its own.

    python benchmarks/memory.py                      # all models and budgets; an hour on two cores
    python benchmarks/memory.py --models resnet50 --budgets 100,30 --rivals eager,checkpoint
    python benchmarks/memory.py --quick              # small sizes, to see that everything runs

Per row one process measures time: steps of eager and of the row in turn, the ratio of each pair, the median of the ratios. A second
process measures the peak from outside our books: it runs from its first tensor on under torch's allocator log, so the live bytes need no
assumption, and takes the largest value during the last step. A third reads the kernel's high-water mark (VmHWM) over that step, less what
the process held before it built anything. Ratios only: the machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
RIVALS = ("checkpoint", "save_on_cpu", "activation_budget:0.5", "activation_budget:0.1", "rockmate")
MARK_BYTES = 1_234_567  # an allocation of this size marks the start of the last step in the log


def main() -> int:
    """Run the rows one after the other, write the table and the JSON after each."""
    args = _arguments()
    if args.worker:
        print(json.dumps(_work(json.loads(args.worker))))
        return 0
    rows = []
    for model in args.models.split(","):
        names = ["eager"] + [f"auto@{b}" for b in args.budgets.split(",")] + [f"window@{b}" for b in args.budgets.split(",")]
        names += [r for r in args.rivals.split(",") if r]
        for number, name in enumerate(names, start=1):
            print(f"[{model} {number}/{len(names)}] {name}", file=sys.stderr, flush=True)
            rows.append(_row(model, name, args))
            _write(rows, args)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,vgg16,gpt2")
    parser.add_argument("--budgets", default="100%,50%,30%,25%,least")
    parser.add_argument("--rivals", default=",".join(RIVALS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tier", default="ram")
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--name", default="memory", help="name of the files under benchmarks/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _row(model: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "row": name}
    with tempfile.TemporaryDirectory() as folder:
        task = {"model": model, "row": name, "steps": args.steps, "tier": args.tier, "quick": args.quick}
        task |= {"plan": str(Path(folder) / "plan.json"), "time_limit": args.time_limit}
        for what in ("time", "peak", "process"):
            if "error" not in row:
                row |= _spawn({**task, "what": what})
    return row


def _spawn(task: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__)), "--worker", json.dumps(task)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT.parent), str(ROOT)])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"error": "took over 30 minutes"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": lines[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _work(task: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: one measurement of one row."""
    import torch

    torch.manual_seed(0)
    if task["what"] == "time":
        return _time(task)
    base = _status("VmRSS")
    if task["what"] == "process":
        step = _step(task)[0]
        step()
        step()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        step()
        return {"process_peak_bytes": _status("VmHWM") - base}
    from schedopt.compat import allocator_changes

    def run() -> None:
        step = _step(task)[0]
        step()
        step()
        gc.collect()
        del_me = torch.empty(MARK_BYTES, dtype=torch.uint8)
        del del_me
        step()

    changes = allocator_changes(run)[1]
    mark = max(i for i, change in enumerate(changes) if change == MARK_BYTES)
    live, peak = 0, 0
    for i, change in enumerate(changes):
        live += change
        peak = max(peak, live) if i > mark + 1 else peak
    return {"peak_bytes": peak}


def _step(task: dict[str, Any]) -> tuple[Any, Any]:
    """The row's training step, and the compiled step where it is ours."""
    import workloads

    import schedopt

    job = workloads.MODELS[task["model"]](task["quick"])
    if "@" not in task["row"]:
        return workloads.rival_step(task["row"], job), None
    strategy, memory = task["row"].split("@")
    plan = task["plan"] if Path(task["plan"]).exists() else None
    options = {"strategy": strategy, "tier": task["tier"], "time_limit_s": task["time_limit"]}
    try:
        limit = None if plan else memory
        ours = schedopt.compile(job, constraints=_constraints(options, limit), plan=plan, self_check=False)
    except schedopt.errors.InfeasibleError as error:
        if memory != "least":
            raise
        ours = schedopt.compile(job, constraints=_constraints(options, error.least_bytes), self_check=False)
    if plan is None:
        ours.plan.save(task["plan"])
    batch = job.batch
    return (lambda: ours(*batch)) if isinstance(batch, tuple) else (lambda: ours(batch)), ours


def _constraints(options: dict[str, Any], memory: Any) -> Any:
    import schedopt

    return schedopt.Constraints(memory=1 if memory == "least" else memory, **options)


def _time(task: dict[str, Any]) -> dict[str, Any]:
    import workloads

    eager_job = workloads.MODELS[task["model"]](task["quick"])
    eager = workloads.rival_step("eager", eager_job)
    started = time.perf_counter()
    step, ours = _step(task)
    ready = time.perf_counter() - started
    pairs = []
    for number in range(task["steps"] + 1):
        times = []
        for one in (eager, step):
            begin = time.perf_counter()
            one()
            times.append(time.perf_counter() - begin)
            eager_job.optimizer.zero_grad(set_to_none=True)
        if number:
            pairs.append(times)
    result: dict[str, Any] = {"time_over_eager": statistics.median(b / a for a, b in pairs), "prepare_seconds": ready}
    if ours is not None:
        plan = ours.plan.plan
        measured = statistics.median(b for _, b in pairs)
        result |= {
            "solver": plan.solver,
            "budget_bytes": plan.schedules[0].budget_bytes,
            "predicted_peak_bytes": plan.peak_bytes,
            "predicted_eager_peak_bytes": plan.eager_peak_bytes,
            "predicted_over_measured_time": plan.step_ns / 1e9 / measured,
            "predicted_over_eager": plan.step_ns / plan.eager_ns,
            "bound_over_eager": (plan.bound_ns or 0) / plan.eager_ns,
            "gap": plan.gap,
            "solve_seconds": plan.solve_seconds,
        }
        ours.close()
    return result


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _write(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Table and JSON, whole after every row."""
    import torch

    RESULTS.mkdir(exist_ok=True)
    cpu = next((x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    machine = {"cpu": cpu or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
    about = {"machine": machine, "tier": args.tier, "steps": args.steps, "quick": args.quick, "time_limit_s": args.time_limit}
    _replace(RESULTS / f"{args.name}.json", json.dumps({**about, "rows": rows}, indent=1) + "\n")
    _replace(RESULTS / f"{args.name}.md", _table(rows, about))


def _replace(path: Path, text: str) -> None:
    scratch = path.with_suffix(".part")
    scratch.write_text(text)
    scratch.replace(path)


def _table(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    machine = about["machine"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, lower tier {about['tier']}, "
        + f"median of {about['steps']} pairs"
        + (", quick sizes" if about["quick"] else ""),
        "",
        "| model | row | peak / eager | process peak / eager | time / eager | predicted / measured peak | predicted / measured time "
        "| bound / eager | gap | solve s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    eager = {r["model"]: r for r in rows if r["row"] == "eager"}
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['model']} | {row['row']} | failed: {row['error']} | | | | | | | |")
            continue
        base = eager.get(row["model"], {})
        cells = [_ratio(row.get("peak_bytes"), base.get("peak_bytes"))]
        cells.append(_ratio(row.get("process_peak_bytes"), base.get("process_peak_bytes")))
        cells.append(f"{row['time_over_eager']:.3f}")
        cells.append(_ratio(row.get("predicted_peak_bytes"), row.get("peak_bytes")))
        cells += [f"{row[k]:.3f}" if row.get(k) is not None else "" for k in ("predicted_over_measured_time", "bound_over_eager", "gap")]
        cells.append(f"{row['solve_seconds']:.0f}" if "solve_seconds" in row else "")
        lines.append(f"| {row['model']} | {row['row']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ratio(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.3f}" if part and whole else ""


if __name__ == "__main__":
    sys.exit(main())
