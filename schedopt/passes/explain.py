"""Why a schedule does what it does: every stay off the device as a `Decision` with its reason and what the alternatives would cost."""

from __future__ import annotations

from schedopt.graph import Recompute
from schedopt.plan import ActionKind, Decision, Fate, Schedule
from schedopt.solvers.problem import Problem


def explain(problem: Problem, schedule: Schedule) -> tuple[Decision, ...]:
    """One decision for every time that a storage comes back to the device, in the order of the schedule."""
    ops = problem.graph.ops
    gone: dict[int, int] = dict.fromkeys(schedule.away, -1)  # storage -> the op after which it left
    back: dict[int, Fate] = {}
    last: dict[int, int] = {}
    decisions: list[Decision] = []
    for action in schedule.actions:
        kind, x = action.kind, action.subject
        if kind in (ActionKind.SWAP_OUT, ActionKind.RELEASE):
            gone[x] = last.get(x, -1)
        elif kind is ActionKind.SWAP_IN:
            back[x] = Fate.SWAP if last.get(x, -1) >= 0 else Fate.REST
        elif kind in (ActionKind.RUN, ActionKind.RECOMPUTE):
            again = kind is ActionKind.RECOMPUTE
            writes = () if again and ops[x].recompute is Recompute.STATISTICS else ops[x].writes
            used = (*ops[x].reads, *writes)
            for s in used if again else (*used, *ops[x].creates):
                if not again:
                    last[s] = x
                if s in back:
                    fate = back.pop(s)
                    if fate is Fate.REST and problem.graph.storages[s].parent is not None:
                        fate = Fate.SPLIT
                    decisions.append(Decision(s, fate, gone[s], x, _why(problem, s, fate, gone.pop(s), x)))
            if again:
                back.update((s, Fate.RECOMPUTE) for s in ops[x].creates if s in gone)
    return tuple(decisions)


def _why(problem: Problem, s: int, fate: Fate, after: int, before: int) -> str:
    size, ops = problem.sizes[s], problem.graph.ops
    copy_us = (problem.link.out_ns(size) + problem.link.in_ns(size)) / 1000
    if fate is Fate.REST:
        return f"rests on the lower tier between steps, which frees {size} bytes until then; its copies take {copy_us:.0f} us of the links"
    if fate is Fate.SPLIT:
        whole = problem.sizes[problem.graph.storages[s].parent or 0]
        return f"part of {whole} bytes that are updated piece by piece from the lower tier; its copies take {copy_us:.0f} us of the links"
    again = problem.recompute_ns(s, problem.needed[before].get(s, 0))
    if fate is Fate.RECOMPUTE:
        return f"frees {size} bytes; running it again takes {(again or 0) / 1000:.0f} us, copying would take {copy_us:.0f} us of the links"
    first, end = problem.position[after], problem.position[before]
    idle_us = sum(ops[op].time_ns for op in problem.order[first + 1 : end]) / 1000
    other = "it can not be recomputed" if again is None else f"recompute would take {again / 1000:.0f} us of compute"
    return f"frees {size} bytes for {idle_us:.0f} us of compute; copies take {copy_us:.0f} us of the links; {other}"
