"""Insert pass: text in, text out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn

from schedopt.capture.captured import node_info
from schedopt.capture.workload import Workload
from schedopt.graph import Phase, Recompute
from schedopt.pass_manager import Program
from schedopt.passes import action_calls
from schedopt.passes.insert_actions import InsertActions
from schedopt.plan import Action, ActionKind
from tests import plans
from tests.programs import Maker, program_of, small_job


def tiny() -> Workload:
    """One weight, one sine, a sum."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 2))

    model = Weight()
    return Workload(
        model,
        None,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.ones(4, 2),
        forward=lambda module, x: ((module.w * x).t().sin()).sum(),
    )


def text_of(program: Program) -> list[str]:
    """Calls in order, numbers for storages and ops, names for values."""
    assert program.lowered is not None
    return list(_lines(program.lowered.graph))


def _lines(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if node.op == "call_function":
            ours = node.target in action_calls.CALLS
            args = ", ".join(map(str, node.args[1:] if ours else node.args))
            op = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target.__name__
            left = "" if ours else f"{node.name} = "
            yield f"{left}{op.removeprefix('aten.').removesuffix('.default')}({args})"


def lowered(maker: Maker, workload: Workload | None = None, *, checked: bool = False) -> Program:
    """Pass applied."""
    return InsertActions(checked=checked)(program_of(workload or tiny(), maker))


END = """
    take(5)
    expand_default = expand(ones_like_default, [2, 4])
    mul_tensor_1 = mul.Tensor(expand_default, cos_default)
    release(5, ones_like_default, expand_default)
    release(6, cos_default)
    take(6)
    t_default_1 = t(mul_tensor_1)
    mul_tensor_2 = mul.Tensor(t_default_1, arg1_1)
    release(7, mul_tensor_1, t_default_1)
    writing(7)
    update_w = update_w(arg0_1, mul_tensor_2)
    release(8, mul_tensor_2)
"""
START = """
    take(0)
    mul_tensor = mul.Tensor(arg0_1, arg1_1)
    take(1)
    t_default = t(mul_tensor)
    sin_default = sin(t_default)
"""
# The storages: 0 w, 2 its product with the input, 3 its sine, 4 loss, 5 ones, 6 cosine, 7 gradient of the product, 8 gradient of w
END_ACTIONS = "run 5, release 5, release 6, run 6, release 7, run 7, release 8"


def by_hand(words: str) -> Maker:
    """A maker of the plan that is written out."""
    actions = [Action(ActionKind(kind), int(x)) for kind, x in (word.split() for word in words.split(", "))]
    return lambda graph: plans.finished(graph, actions)


def assert_lowered(words: str, expected: str) -> None:
    """Text in, text out."""
    assert text_of(lowered(by_hand(words))) == [line.strip() for line in expected.splitlines() if line.strip()]


def test_plain_plan() -> None:
    middle = """
        take(2)
        sum_default = sum(sin_default)
        release(3, sin_default)
        take(3)
        ones_like_default = ones_like(sum_default)
        take(4)
        cos_default = cos(t_default)
        release(2, mul_tensor, t_default)
    """
    assert_lowered(f"run 0, run 1, run 2, release 3, run 3, run 4, release 2, {END_ACTIONS}", START + middle + END)


def test_a_swap_keeps_the_tensors_and_their_views() -> None:
    middle = """
        swap_out(2, 0, mul_tensor)
        take(2)
        sum_default = sum(sin_default)
        release(3, sin_default)
        wait_out(2, mul_tensor)
        take(3)
        ones_like_default = ones_like(sum_default)
        swap_in(2, 0, mul_tensor)
        wait_in(2)
        take(4)
        cos_default = cos(t_default)
        release(2, mul_tensor, t_default)
    """
    words = f"run 0, run 1, swap_out 2, run 2, release 3, wait_out 2, run 3, swap_in 2, wait_in 2, run 4, release 2, {END_ACTIONS}"
    assert_lowered(words, START + middle + END)


def test_a_free_eviction_keeps_them_too() -> None:
    middle = """
        swap_out(2, 0, mul_tensor)
        wait_save(2)
        evict(2, mul_tensor)
        take(2)
        sum_default = sum(sin_default)
        release(3, sin_default)
        take(3)
        ones_like_default = ones_like(sum_default)
        swap_in(2, 0, mul_tensor)
        wait_in(2)
        take(4)
        cos_default = cos(t_default)
        release(2, mul_tensor, t_default)
    """
    words = f"run 0, run 1, save 2, wait_save 2, release 2, run 2, release 3, run 3, swap_in 2, wait_in 2, run 4, release 2, {END_ACTIONS}"
    assert_lowered(words, START + middle + END)


RECOMPUTED = """
        take(2)
        sum_default = sum(sin_default)
        release(3, sin_default)
        take(3)
        ones_like_default = ones_like(sum_default)
        take(0)
        mul_tensor_1 = mul.Tensor(arg0_1, arg1_1)
        take(4)
        t_default_1 = t(mul_tensor_1)
        cos_default = cos(t_default_1)
        release(2, mul_tensor_1, t_default_1)
"""


def _later(text: str) -> str:
    """END after a recompute: one more product and one more transpose came before."""
    for old, new in (("mul_tensor_2", "mul_tensor_3"), ("mul_tensor_1", "mul_tensor_2"), ("t_default_1", "t_default_2")):
        text = text.replace(old, new)
    return text


def test_a_recompute_makes_new_tensors_and_replays_views() -> None:
    words = f"run 0, run 1, release 2, run 2, release 3, run 3, recompute 0, run 4, release 2, {END_ACTIONS}"
    assert_lowered(words, START + "release(2, mul_tensor, t_default)" + RECOMPUTED + _later(END))


def test_what_was_swapped_out_may_be_recomputed_instead() -> None:
    words = f"run 0, run 1, swap_out 2, wait_out 2, run 2, release 3, run 3, recompute 0, run 4, release 2, {END_ACTIONS}"
    gone = "swap_out(2, 0, mul_tensor)\n wait_save(2)\n release(2, mul_tensor, t_default)"
    assert_lowered(words, START + gone + RECOMPUTED + _later(END))


def test_a_parameter_that_rests_below_is_written_to_its_other_slot() -> None:
    text = text_of(lowered(plans.all_away))
    assert text[:2] == ["swap_in(0, 0, arg0_1)", "wait_in(0)"]
    assert text.count("evict(0, arg0_1)") == 1
    assert text[-2:] == ["swap_out(0, 1, arg0_1)", "wait_out(0, arg0_1)"]


def test_generator_and_statistics_on_the_second_run() -> None:
    program = lowered(plans.recompute_everything, small_job())
    text = text_of(program)
    (random,) = [op for op in program.graph.ops if op.recompute is Recompute.RANDOM]
    assert text.count(f"save_rng({random.id})") == 1
    assert text.count(f"restore_rng({random.id})") == text.count("resume_rng()") > 0
    norms = [line for line in text if "native_batch_norm(" in line]
    assert len(norms) > 1
    assert ["None, None" in line for line in norms] == [False] + [True] * (len(norms) - 1)


def test_checked_code_looks_at_every_op() -> None:
    program = lowered(plans.plain, checked=True)
    assert [line for line in text_of(program) if line.startswith("verify")][:2] == ["verify(0, mul_tensor)", "verify(1, sin_default)"]
    assert sum(line.startswith("verify") for line in text_of(program)) == len(program.graph.ops)


def test_writes_that_last_are_announced() -> None:
    program = lowered(plans.plain, small_job())
    lasting = [op.id for op in program.graph.ops if any(program.graph.storages[s].persistent for s in op.writes)]
    assert [line for line in text_of(program) if line.startswith("writing")] == [f"writing({x})" for x in lasting]
    assert {program.graph.ops[x].phase for x in lasting} == {Phase.FORWARD, Phase.UPDATE}


@pytest.mark.parametrize("maker", [plans.plain, plans.swap_everything, plans.recompute_everything, plans.all_away, plans.early_update])
def test_every_op_is_there_as_often_as_planned(maker: Maker) -> None:
    program = lowered(maker, small_job())
    assert program.plan is not None
    program.lowered.graph.lint()
    wanted = [a.subject for a in program.plan.schedules[0].actions if a.kind in (ActionKind.RUN, ActionKind.RECOMPUTE)]
    targets = {node_info(n).op: n.target for n in program.captured.gm.graph.nodes if n.op == "call_function"}
    views = {n.target for n in program.captured.gm.graph.nodes if n.op == "call_function" and node_info(n).view}
    emitted = [n.target for n in program.lowered.graph.nodes if n.op == "call_function" and n.target not in action_calls.CALLS]
    assert [t for t in emitted if t not in views] == [targets[x] for x in wanted if targets[x] not in views]
