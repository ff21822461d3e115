"""Memory against speed on this CPU: schedopt beside eager and its rivals, each row in processes of its own.

    python benchmarks/memory.py                      # all models and budgets; over an hour on two cores
    python benchmarks/memory.py --models resnet50 --budgets 100,30 --rivals eager,checkpoint
    python benchmarks/memory.py --quick              # small sizes, to see that everything runs

Time: eager lives in one process, the row in another; they step in turn, the order changing from pair to pair, and the median of the
ratios of all pairs counts. The row "eager" is a second eager process: how far it is from 1 is the noise. All rows, eager too, keep freed
memory mapped (`schedopt.heap`), since a fresh process that gives it back loses much more to page faults than any plan gains. Peak:
another process runs from its first tensor on under torch's allocator log, so the live bytes need no assumption, and takes the largest
value during the second step. Process peak: the kernel's high-water mark (VmHWM) over one more step of the timed process, less what it
held before it built anything; with `--tier ram` that includes the tier. Steps with blocks over 32 MiB spend much time on page faults,
more or less of it by chance: `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` in front of the command makes all rows steadier. Ratios only: the
machines are shared and noisy.
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
_LONGEST_S = 1800
_WARM_UP = 2
_FEWEST, _LONG_ENOUGH_S = 3, 45.0  # pairs that count at least; no more of them after so many seconds
MARK_BYTES = 1_234_567  # an allocation of this size marks the start of the last step in the log


def main() -> int:
    """Run the rows one after the other, write the table and the JSON after each."""
    args = _arguments()
    if args.worker:
        try:
            result = _work(json.loads(args.worker))
        except Exception as error:  # noqa: BLE001  # whatever ends a row belongs into the table
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(result), flush=True)
        return 0
    rows = []
    for model in args.models.split(","):
        names = ["eager"] + [f"auto@{b}" for b in args.budgets.split(",")] + [f"window@{b}" for b in args.window_budgets.split(",") if b]
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
    parser.add_argument("--window-budgets", default="50%,30%,25%,least", help="budgets of the window method, the control")
    parser.add_argument("--rivals", default=",".join(RIVALS))
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--tier", default="ram")
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--name", default="memory", help="name of the files under benchmarks/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _row(model: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "row": name}
    with tempfile.TemporaryDirectory() as folder:
        task = {"model": model, "row": name, "tier": args.tier, "quick": args.quick}
        task |= {"plan": str(Path(folder) / "plan.json"), "time_limit": min(args.time_limit, 3.0) if args.quick else args.time_limit}
        try:
            row |= _time(task, args.steps)
            row |= _result(_start({**task, "what": "peak"}).communicate(timeout=_LONGEST_S)[0])
        except subprocess.TimeoutExpired:
            row["error"] = f"took over {_LONGEST_S} seconds"
        except RuntimeError as error:
            row["error"] = str(error)
    return row


def _start(task: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__)), "--worker", json.dumps(task)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT.parent), str(ROOT)])}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)


def _result(text: str) -> dict[str, Any]:
    """Of a worker's last line; RuntimeError with what it says went wrong."""
    lines = text.strip().splitlines()
    if not lines:
        raise RuntimeError("the process died without a word")
    result: dict[str, Any] = json.loads(lines[-1])
    if "error" in result:
        raise RuntimeError(result["error"])
    return result


class Stepper:
    """A process that has built a row's step and makes one step whenever it is asked to."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._process = _start(task)
        self.about = self._answer()

    def step(self) -> float:
        """Seconds of one step."""
        return float(self._ask("step")["seconds"])

    def process_peak(self) -> int:
        """Largest memory of the process during one more step, less what it held before it built anything."""
        return int(self._ask("peak")["process_peak_bytes"])

    def _ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return _result(self._process.stdout.readline())


def _time(task: dict[str, Any], count: int) -> dict[str, Any]:
    """Pairs of steps, eager and row in turn: `count` of them, fewer where they are long."""
    both: list[Stepper] = []
    try:
        for one in ("eager", task["row"]):
            both.append(Stepper({**task, "row": one, "what": "time"}))
        pairs: list[list[float]] = []
        started = time.perf_counter()
        while len(pairs) < count + _WARM_UP:
            order = (0, 1) if len(pairs) % 2 else (1, 0)
            seconds = {which: both[which].step() for which in order}
            pairs.append([seconds[0], seconds[1]])
            if len(pairs) >= _WARM_UP + _FEWEST and time.perf_counter() - started > _LONG_ENOUGH_S:
                break
        process_peak = both[1].process_peak()
    finally:
        for stepper in both:
            stepper.close()
    measured = pairs[_WARM_UP:]
    result = both[1].about | {"pairs": len(measured), "process_peak_bytes": process_peak}
    result["time_over_eager"] = statistics.median(b / a for a, b in measured)
    if "predicted_s" in result:
        result["predicted_over_measured_time"] = result.pop("predicted_s") / statistics.median(b for _, b in measured)
    return result


def _work(task: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: one measurement of one row."""
    import torch

    from schedopt.heap import keep_heap

    torch.manual_seed(0)
    keep_heap()
    if task["what"] == "time":
        return _serve(task)
    from schedopt.compat import allocator_changes

    def run() -> None:
        step = _step(task)[0]
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


def _serve(task: dict[str, Any]) -> dict[str, Any]:
    """Build the step, say so, and make a step for every line that comes in."""
    base = _status("VmRSS")
    started = time.perf_counter()
    step, ours = _step(task)
    about: dict[str, Any] = {"prepare_seconds": time.perf_counter() - started}
    if ours is not None:
        plan = ours.plan.plan
        about |= {
            "solver": plan.solver,
            "budget_bytes": plan.schedules[0].budget_bytes,
            "predicted_peak_bytes": plan.peak_bytes,
            "predicted_eager_peak_bytes": plan.eager_peak_bytes,
            "predicted_s": plan.step_ns / 1e9,
            "predicted_over_eager": plan.step_ns / plan.eager_ns,
            "bound_over_eager": (plan.bound_ns or 0) / plan.eager_ns,
            "gap": plan.gap,
            "solve_seconds": plan.solve_seconds,
        }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from the present
        begin = time.perf_counter()
        step()
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds} if line == "step\n" else {"process_peak_bytes": _status("VmHWM") - base}), flush=True)
    return {}


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
    malloc = os.environ.get("GLIBC_TUNABLES", "")
    about = {
        "machine": machine,
        "malloc": malloc,
        "tier": args.tier,
        "steps": args.steps,
        "quick": args.quick,
        "time_limit_s": args.time_limit,
    }
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
        + f"median of {_FEWEST} to {about['steps']} pairs"
        + (", quick sizes" if about["quick"] else "")
        + (f", all rows with GLIBC_TUNABLES={about['malloc']}" if about["malloc"] else ""),
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
