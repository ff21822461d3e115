"""From a workload to a program: capture, costs, decisions; and a given plan fitted to a captured step."""

from __future__ import annotations

import os
from dataclasses import replace

from schedopt.api.progress import Progress
from schedopt.api.step_plan import StepPlan
from schedopt.capture.build import capture
from schedopt.capture.captured import Captured
from schedopt.capture.selfcheck import self_check
from schedopt.capture.split import cuts_of, fit, split
from schedopt.capture.workload import Workload
from schedopt.constraints import Constraints, budget_bytes
from schedopt.cost import estimate, load_machine, measure, this_machine
from schedopt.errors import InexactError, PlanMismatchError
from schedopt.graph import Graph
from schedopt.machine import Machine
from schedopt.pass_manager import Program, run_passes, verify
from schedopt.passes import default_passes
from schedopt.plan_file import PlanFile
from schedopt.solvers.problem import eager_peak

SELF_CHECK_SHARE = 0.5


def as_machine(machine: str | os.PathLike[str] | Machine | None) -> Machine | None:
    """A machine by name or file; what is one already, or None, stays. TargetError for an unknown name."""
    return load_machine(os.fspath(machine)) if isinstance(machine, str | os.PathLike) else machine


def as_step_plan(program: Program) -> StepPlan:
    """The handle on a program's plan."""
    assert program.plan is not None
    return StepPlan(PlanFile(plan=program.plan, graph=program.graph, machine=program.machine, constraints=program.constraints))


def decide(workload: Workload, constraints: Constraints, machine: Machine | None, progress: Progress) -> Program:
    """Capture, cost and plan. `machine` None: costs measured here; else estimated from its figures."""
    return decide_captured(captured_step(workload, progress), constraints, machine, progress)


def captured_step(workload: Workload, progress: Progress) -> Captured:
    """Capture, with progress."""
    progress("capture", 0, 1)
    captured = capture(workload)
    progress("capture", 1, 1)
    return captured


def decide_captured(captured: Captured, constraints: Constraints, machine: Machine | None, progress: Progress) -> Program:
    """Cost and plan of a captured step."""
    if machine is None:
        progress("probe", 0, 0)
        machine = this_machine(progress=lambda done, total: progress("probe", done, total))
        progress("probe", 1, 1)
        graph = measure(captured, machine, progress=lambda done, total: progress("measure", done, total))
    else:
        graph = estimate(captured, machine)
    machine = machine.throttled(constraints.throttle_bytes_per_s)
    program = Program(graph, machine, constraints, captured=replace(captured, graph=graph))
    progress("solve", 0, 100)
    program = run_passes(program, default_passes(lambda share, what: progress("solve", round(100 * share), 100)))
    progress("solve", 100, 100)
    return program


def reuse(captured: Captured, given: StepPlan, constraints: Constraints) -> Program:
    """A program with a plan made earlier. PlanMismatchError if it is for another step or device, goes over `constraints.memory`, or
    breaks a rule."""
    plan = given.plan
    if (cuts := cuts_of(given.graph)) and fit(captured, cuts):
        captured = split(captured, cuts)
    if plan.graph_hash != captured.graph.hash() or given.graph.hash() != plan.graph_hash:
        raise PlanMismatchError(f"the plan belongs to another training step: {_difference(given.graph, captured.graph)}; plan again")
    kinds = {device.kind for device in given.machine.devices}
    if kinds != {"cpu"}:
        raise PlanMismatchError(f"the plan was made for {given.machine.name} ({', '.join(sorted(kinds))}); this back end runs on the CPU")
    if constraints.memory is not None:
        limit = budget_bytes(constraints.memory, eager_peak_bytes=plan.eager_peak_bytes)
        if plan.peak_bytes > limit:
            raise PlanMismatchError(f"the plan peaks at {plan.peak_bytes} bytes, the constraints allow {limit}; plan again")
    machine = given.machine.throttled(constraints.throttle_bytes_per_s)
    program = Program(given.graph, machine, constraints, plan=plan, captured=replace(captured, graph=given.graph))
    verify(program)
    return program


def assure_exact(captured: Captured, workload: Workload, constraints: Constraints, wanted: bool | None, progress: Progress) -> Captured:
    """Compare graph and eager on copies (`wanted` None: if the copies fit); the captured step, marked exact if that proved it.

    InexactError if they differ, or are known to, and `constraints.allow_inexact` is not set.
    """
    if wanted or (wanted is None and _copies_fit(captured.graph)):
        progress("self-check", 0, 0)
        result = self_check(workload)
        progress("self-check", 1, 1)
        captured = replace(captured, graph=replace(captured.graph, exact=result.ok))
        reason = f"{result.difference} differs from eager in the self-check"
    else:
        reason = "; ".join(captured.graph.notes) or "it is known to round differently"
    if not captured.graph.exact and not constraints.allow_inexact:
        raise InexactError(f"the captured step would not equal the eager step: {reason}. Constraints(allow_inexact=True) accepts it")
    return captured


def _copies_fit(graph: Graph) -> bool:
    """Whether three copies of model and optimizer and an eager step fit in half of the memory."""
    state = sum(s.size_bytes for s in graph.storages if s.persistent)
    return 3 * state + eager_peak(graph) < SELF_CHECK_SHARE * this_machine().devices[0].memory_bytes


def _difference(theirs: Graph, ours: Graph) -> str:
    """The first thing in which two graphs differ, for a person."""
    inputs = [[f"{s.name} of {s.size_bytes} bytes" for s in g.storages if s.external] for g in (theirs, ours)]
    for a, b in zip(*inputs, strict=False):
        if a != b:
            return f"the plan has {a} where this step has {b}"
    if len(theirs.ops) != len(ours.ops):
        return f"the plan has {len(theirs.ops)} ops, this step {len(ours.ops)}"
    for op, other in zip(theirs.ops, ours.ops, strict=True):
        if (op.signature, op.reads, op.writes, op.creates) != (other.signature, other.reads, other.writes, other.creates):
            return f"op {op.id} is {op.signature or op.name} in the plan, {other.signature or other.name} here"
    return "the graphs differ"
