"""One small hand-made plan file with a swap, a recomputation and a resting parameter, for tests that need no model."""

from __future__ import annotations

from dataclasses import replace

from schedopt.check import check
from schedopt.constraints import Constraints
from schedopt.graph import Graph, Op, Phase, Recompute, Storage, StorageKind
from schedopt.machine import Device, Link, Machine, Tier
from schedopt.plan import Action, ActionKind, Decision, Fate, Plan, Schedule
from schedopt.plan_file import PlanFile

K = StorageKind
W, X, A, B, L, G = range(6)

GRAPH = Graph(
    name="sample",
    storages=(
        Storage(W, "layer.weight", K.PARAMETER, 100, "layer"),
        Storage(X, "input0", K.INPUT, 10),
        Storage(A, "mm", K.ACTIVATION, 50, "layer"),
        Storage(B, "relu", K.ACTIVATION, 40, "block.relu"),
        Storage(L, "loss", K.OUTPUT, 4),
        Storage(G, "mm_1", K.GRADIENT, 100, "layer"),
    ),
    ops=(
        Op(0, "mm", "aten.mm.default", Phase.FORWARD, "layer", reads=(W, X), creates=(A,), time_ns=1000, signature='mm("f32[5,10]")'),
        Op(1, "relu", "aten.relu.default", Phase.FORWARD, "block.relu", reads=(A,), creates=(B,), time_ns=1000),
        Op(2, "loss", "aten.sum.default", Phase.FORWARD, reads=(B,), creates=(L,), time_ns=1000),
        Op(3, "mm_1", "aten.mm.default", Phase.BACKWARD, "layer", reads=(A, B, X), creates=(G,), time_ns=1000, workspace_bytes=8),
        Op(4, "update", "optimizer.SGD", Phase.UPDATE, "layer", (G,), (W,), (), Recompute.BARRED, "update", time_ns=1000),
    ),
    outputs=(L,),
)
MACHINE = Machine(
    "toy",
    (Device("cpu", "cpu", 10_000, 1e9, (("float32", 1e9),), 0),),
    (Tier("file", 5_000),),
    (Link("cpu", "file", 1e8, 2e8, 0),),
    "test",
)
ACTIONS = (
    "swap_in 0, wait_in 0, run 0, release 0, run 1, swap_out 2, run 2, wait_out 2, release 3, swap_in 2, wait_in 2, recompute 1, "
    "run 3, release 2, release 3, swap_in 0, wait_in 0, run 4, release 5, swap_out 0, wait_out 0"
)
DECISIONS = (
    Decision(A, Fate.SWAP, 1, 3, "frees 50 bytes"),
    Decision(B, Fate.RECOMPUTE, 2, 3, "1 us again"),
    Decision(W, Fate.REST, -1, 0, "rests between steps"),
)


def parse_actions(text: str) -> tuple[Action, ...]:
    """Actions written as "run 0, release 2"."""
    return tuple(Action(ActionKind(kind), int(subject)) for kind, subject in (item.split() for item in text.split(",")))


def sample(budget_bytes: int = 220) -> PlanFile:
    """The plan file; its peak is 214 bytes."""
    schedule = Schedule("cpu", "file", budget_bytes, parse_actions(ACTIONS), away=(W,))
    plan = Plan(GRAPH.hash(), "toy", "auto", "greedy", (schedule,), DECISIONS, eager_peak_bytes=320, eager_ns=5000, bound_ns=5000)
    report = check(GRAPH, plan, MACHINE)
    plan = replace(plan, peak_bytes=report.peak_bytes, step_ns=report.step_ns)
    return PlanFile(plan=plan, graph=GRAPH, machine=MACHINE, constraints=Constraints(memory=budget_bytes))
