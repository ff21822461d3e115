"""Every rule of the checker has a plan that keeps it and one that breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedopt.check import Report, check
from schedopt.graph import Graph, Op, Phase, Recompute, Storage, StorageKind
from schedopt.machine import Device, Link, Machine, Tier
from schedopt.plan import Action, ActionKind, Plan, Schedule

K = StorageKind
W, X, A, B, L, G, BIG = range(7)  # storages
FWD, ACT, LOSS, GRAD, UPDATE = range(5)  # ops

GRAPH = Graph(
    name="five ops",
    storages=(
        Storage(W, "w", K.PARAMETER, 100),
        Storage(X, "x", K.INPUT, 10),
        Storage(A, "a", K.ACTIVATION, 50),
        Storage(B, "b", K.ACTIVATION, 50),
        Storage(L, "loss", K.OUTPUT, 4),
        Storage(G, "g", K.GRADIENT, 100),
        Storage(BIG, "big", K.BUFFER, 1000),
    ),
    ops=(
        Op(FWD, "fwd", "mm", Phase.FORWARD, reads=(W, X), creates=(A,), time_ns=1000, workspace_bytes=7),
        Op(ACT, "act", "dropout", Phase.FORWARD, reads=(A,), creates=(B,), recompute=Recompute.RANDOM, time_ns=1000),
        Op(LOSS, "loss", "sum", Phase.FORWARD, reads=(B,), creates=(L,), time_ns=1000),
        Op(GRAD, "grad", "mm_backward", Phase.BACKWARD, reads=(A, B, X), creates=(G,), time_ns=1000),
        Op(UPDATE, "update", "sgd", Phase.UPDATE, reads=(G,), writes=(W,), recompute=Recompute.BARRED, reason="update", time_ns=1000),
    ),
    outputs=(L,),
    rng_state_bytes=5,
)
MACHINE = Machine(
    "toy",
    (Device("cpu", "cpu", 10_000, 1e9, (("float32", 1e9),), 0),),
    (Tier("file", 5_000),),
    (Link("cpu", "file", 1e8, 2e8, 0),),  # 10 ns a byte out, 5 ns a byte in
    "test",
)
PLAIN = "run 0, run 1, run 2, run 3, release 2, release 3, run 4, release 5"


def replay(actions: str, *, graph: Graph = GRAPH, machine: Machine = MACHINE, **fields: object) -> Report:
    """Check a plan written as "run 0, release 2, ..."."""
    pairs = [item.split() for item in actions.split(",") if item.strip()]
    parsed = tuple(Action(ActionKind(kind), int(subject)) for kind, subject in pairs)
    undo = bool(fields.pop("undo", True))
    schedule = replace(Schedule("cpu", "file", 100_000, parsed), **fields)  # type: ignore[arg-type]  # free-form in tests
    return check(graph, Plan(graph.hash(), machine.name, "auto", "test", (schedule,), undo=undo), machine)


def rules(report: Report) -> set[str]:
    """Names of the broken rules."""
    return {violation.rule for violation in report.violations}


def test_plain_plan_is_ok_and_costs_what_a_hand_says() -> None:
    report = replay(PLAIN)
    assert report.ok, report.violations
    resident = 100 + 10 + 1000
    assert report.peak_bytes == resident + 50 + 50 + 4 + 100  # while `grad` runs
    assert report.memory_bytes[0] == resident + 50 + 7  # workspace counts
    assert report.step_ns == 5000
    assert report.stall_ns == report.recompute_ns == report.tier_peak_bytes == 0


def test_swap_times_and_bytes() -> None:
    report = replay("run 0, run 1, swap_out 2, run 2, wait_out 2, swap_in 2, wait_in 2, run 3, release 2, release 3, run 4, release 5")
    assert report.ok, report.violations
    assert report.copies == ((2, "out", 2000, 2500), (5, "in", 3000, 3250))
    assert report.stall_ns == 250
    assert report.step_ns == 5250
    assert report.tier_peak_bytes == 50


def test_copies_out_are_waited_for() -> None:
    report = replay("run 0, run 1, swap_out 2, wait_out 2, run 2, swap_in 2, wait_in 2, run 3, release 2, release 3, run 4, release 5")
    assert report.ok
    assert report.stall_ns == 500 + 250
    assert report.memory_bytes[4] == 100 + 10 + 1000 + 50 + 4


def test_shared_stream_delays_the_other_direction() -> None:
    half = replace(MACHINE, links=(replace(MACHINE.links[0], duplex=False),))
    actions = "swap_out 6, run 0, run 1, swap_out 2, wait_out 2, wait_out 6, swap_in 6, swap_in 2, wait_in 2, run 2, run 3, "
    actions += "release 2, release 3, run 4, release 5, wait_in 6"
    both = replay(actions, undo=False)
    one = replay(actions, machine=half, undo=False)
    assert both.ok
    assert one.ok
    assert one.copies[2][2] >= both.copies[1][3]


def test_recompute_restores_a_released_storage() -> None:
    report = replay("run 0, run 1, release 2, run 2, recompute 0, run 3, release 2, release 3, run 4, release 5")
    assert report.ok, report.violations
    assert report.recompute_ns == 1000
    assert report.step_ns == 6000


def test_recompute_of_a_random_op_needs_its_generator_state() -> None:
    actions = "run 0, save_rng 1, run 1, run 2, release 3, recompute 1, run 3, release 2, release 3, run 4, release 5"
    assert replay(actions).ok
    assert rules(replay(actions.replace("save_rng 1, ", ""))) == {"recompute-random"}


def test_kept_generator_state_counts() -> None:
    plain, saved = replay(PLAIN), replay(PLAIN.replace("run 1", "save_rng 1, run 1"))
    assert saved.ok
    assert saved.peak_bytes == plain.peak_bytes + 5


def test_fresh_copies_of_resident_outputs_count_while_the_op_runs() -> None:
    report = replay("run 0, run 1, run 2, recompute 0, run 3, release 2, release 3, run 4, release 5")
    assert report.ok
    assert report.memory_bytes[3] == 100 + 10 + 1000 + 50 + 50 + 4 + 50 + 7
    assert report.memory_bytes[4] == 100 + 10 + 1000 + 50 + 50 + 4 + 100


@pytest.mark.parametrize(
    ("rule", "actions"),
    [
        ("use-while-away", "run 1, run 0, run 2, run 3, release 2, release 3, run 4, release 5"),
        ("use-while-away", "run 0, run 1, run 2, swap_out 2, wait_out 2, run 3, release 3, run 4, release 5"),
        (
            "use-while-away",
            "run 0, run 1, run 2, swap_out 2, wait_out 2, swap_in 2, run 3, wait_in 2, release 2, release 3, run 4, release 5",
        ),
        ("run-once", "run 0, run 1, run 2, run 3, release 2, release 3, release 5"),
        ("run-once", PLAIN.replace("run 2", "run 2, run 2")),
        ("create", PLAIN.replace("run 2", "run 2, run 2")),
        ("state", PLAIN.replace("run 2", "run 2, release 6, release 6")),
        ("state", PLAIN.replace("run 2", "run 2, wait_out 2")),
        ("busy", PLAIN.replace("run 2", "run 2, save 2, save 2, wait_save 2")),
        ("use-before-copy", "run 0, run 1, release 2, run 2, swap_in 2, wait_in 2, run 3, release 2, release 3, run 4, release 5"),
        ("release-too-early", "run 0, run 1, run 2, run 3, save 2, release 2, wait_save 2, release 3, run 4, release 5"),
        ("release-too-early", PLAIN + ", release 4"),
        ("write-while-copied", PLAIN.replace("run 4", "save 0, run 4, wait_save 0")),
        ("input", PLAIN + ", release 1"),
        ("end", "run 0, run 1, run 2, run 3, release 2, release 3, run 4"),
        ("end", PLAIN + ", release 0"),
        ("end", PLAIN + ", save 6"),
        ("recompute-barred", PLAIN.replace("run 4", "run 4, recompute 4")),
        ("recompute-before-run", PLAIN.replace("run 0", "recompute 0, run 0")),
        ("save-rng", PLAIN.replace("run 1", "run 1, save_rng 1")),
        ("wrong-version", "run 0, run 1, run 2, run 3, release 2, release 3, run 4, release 5, recompute 0, release 2"),
        ("undo", "run 0, run 1, run 2, run 3, release 2, release 3, run 4, recompute 2, release 5"),
    ],
)
def test_broken_rules_are_found(rule: str, actions: str) -> None:
    assert rule in rules(replay(actions)), replay(actions).violations


def test_budget() -> None:
    peak = replay(PLAIN).peak_bytes
    assert replay(PLAIN, budget_bytes=peak).ok
    assert rules(replay(PLAIN, budget_bytes=peak - 1)) == {"budget"}


def test_undo_copy_lets_things_fail_after_the_update() -> None:
    late = "run 0, run 1, run 2, run 3, release 2, release 3, run 4, save 6, wait_save 6, release 5"
    assert rules(replay(late)) == {"undo"}
    assert replay(late, undo=False).ok
    assert replay(late, snapshot=(W,)).ok
    assert replay(late.replace("run 0", "save 0, run 0, wait_save 0"), snapshot=()).ok


def test_storages_that_rest_away() -> None:
    actions = "swap_in 0, wait_in 0, run 0, run 1, run 2, run 3, release 2, release 3, run 4, release 5, swap_out 0, wait_out 0"
    report = replay(actions, away=(W,))
    assert report.ok, report.violations
    assert report.tier_peak_bytes == 200
    stale = actions.replace("swap_out 0, wait_out 0", "release 0")
    assert "end" in rules(replay(stale, away=(W,)))
    assert replay(PLAIN.replace("run 0", "swap_in 6, wait_in 6, run 0, release 6"), away=(BIG,)).ok  # unmodified: evicted for free
    assert "away" in rules(replay(PLAIN, away=(A,)))


def test_tier_capacity() -> None:
    small = replace(MACHINE, tiers=(Tier("file", 199),))
    actions = "swap_in 0, wait_in 0, run 0, run 1, run 2, run 3, release 2, release 3, run 4, release 5, swap_out 0, wait_out 0"
    assert rules(replay(actions, away=(W,), machine=small)) == {"tier"}


def test_random_ops_keep_their_order() -> None:
    second = replace(GRAPH.ops[LOSS], recompute=Recompute.RANDOM, reads=(A,))
    graph = replace(GRAPH, ops=(*GRAPH.ops[:LOSS], second, *GRAPH.ops[LOSS + 1 :]))
    swapped = PLAIN.replace("run 1, run 2", "run 2, run 1")
    assert replay(PLAIN, graph=graph).ok
    assert rules(replay(swapped, graph=graph)) == {"random-order"}


def test_statistics_are_written_once() -> None:
    norm = Op(FWD, "norm", "batch_norm", Phase.FORWARD, reads=(W, X), writes=(BIG,), creates=(A,), recompute=Recompute.STATISTICS)
    graph = replace(GRAPH, ops=(norm, *GRAPH.ops[1:]))
    actions = "run 0, run 1, release 2, run 2, recompute 0, run 3, release 2, release 3, run 4, release 5"
    assert replay(actions, graph=graph, snapshot=(BIG,)).ok
    writing = replace(graph, ops=(replace(norm, recompute=Recompute.IN_PLACE), *GRAPH.ops[1:]))
    assert "recompute-in-place" in rules(replay(actions, graph=writing, snapshot=(BIG,)))


def test_in_place_recipe() -> None:
    relu = Op(ACT, "relu_", "relu_", Phase.FORWARD, writes=(A,), recompute=Recompute.IN_PLACE)
    loss = replace(GRAPH.ops[LOSS], reads=(A,))
    grad = replace(GRAPH.ops[GRAD], reads=(A, X))
    graph = replace(GRAPH, ops=(GRAPH.ops[FWD], relu, loss, grad, GRAPH.ops[UPDATE]))
    whole = "run 0, run 1, run 2, release 2, recompute 0, recompute 1, run 3, release 2, run 4, release 5"
    assert replay(whole, graph=graph).ok
    assert "wrong-version" in rules(replay(whole.replace("recompute 1, ", ""), graph=graph))
    assert "wrong-version" in rules(replay(whole.replace("recompute 1, ", "recompute 1, recompute 1, "), graph=graph))


def test_nonsense_is_an_answer_not_a_crash() -> None:
    assert rules(replay("run 99")) == {"schedule"}
    assert rules(replay("release 99")) == {"schedule"}
    assert rules(replay(PLAIN, away=(99,))) == {"schedule"}
    assert rules(replay(PLAIN, tier="moon")) == {"machine"}
    other = check(GRAPH, Plan("0" * 64, "toy", "auto", "t", (Schedule("cpu", "file", 10**6, ()),)), MACHINE)
    assert "graph" in rules(other)
    assert rules(check(GRAPH, Plan(GRAPH.hash(), "toy", "auto", "t", ()), MACHINE)) == {"schedule"}
