"""Naive valid plans for any graph, made without any solver: they move or rebuild as much as the rules allow."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from schedopt.check import Report, check
from schedopt.graph import Graph, Phase, Recompute, StorageKind, expected_versions
from schedopt.machine import Machine
from schedopt.plan import Action, ActionKind, Plan, Schedule
from tests.machines import TEST_MACHINE

UNLIMITED = 1 << 60


def finished(
    graph: Graph,
    actions: list[Action],
    *,
    away: tuple[int, ...] = (),
    snapshot: tuple[int, ...] | None = None,
    tier: str = "ram",
    undo: bool = True,
    machine: Machine = TEST_MACHINE,
) -> Plan:
    """A plan whose budget is its own peak. AssertionError with the checker's words if it breaks a rule."""
    kept = early_written(graph, away) if snapshot is None else snapshot
    schedule = Schedule("cpu", tier, UNLIMITED, tuple(actions), away, kept)
    plan = Plan(graph.hash(), machine.name, "auto", "by hand", (schedule,), undo=undo)
    report = check(graph, plan, machine)
    assert report.ok, "\n".join(map(str, report.violations[:5]))
    schedule = replace(schedule, budget_bytes=report.peak_bytes)
    return replace(plan, schedules=(schedule,), peak_bytes=report.peak_bytes, step_ns=report.step_ns)


def report_of(graph: Graph, plan: Plan) -> Report:
    """The checker's view of a plan."""
    return check(graph, plan, TEST_MACHINE)


def early_written(graph: Graph, away: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Storages that outlive the step and are written before the update (running statistics, counters)."""
    written = {s for op in graph.ops if op.phase is not Phase.UPDATE for s in op.writes if graph.storages[s].persistent}
    return tuple(sorted(written - set(away)))


def _do(kind: ActionKind, *subjects: int) -> list[Action]:
    return [Action(kind, x) for x in subjects]


def _uses(graph: Graph, order: list[int]) -> dict[int, list[int]]:
    """Positions in `order` at which each storage is touched."""
    uses: dict[int, list[int]] = {s.id: [] for s in graph.storages}
    for position, x in enumerate(order):
        op = graph.ops[x]
        for s in (*op.reads, *op.writes, *op.creates):
            uses[s].append(position)
    return uses


def _temporary(graph: Graph, s: int) -> bool:
    return not graph.storages[s].external and s not in graph.outputs


def plain(graph: Graph, tier: str = "ram") -> Plan:
    """Captured order; every storage goes after its last use."""
    return finished(graph, _in_order(graph, list(range(len(graph.ops)))), tier=tier)


def _in_order(graph: Graph, order: list[int]) -> list[Action]:
    uses = _uses(graph, order)
    actions = []
    for position, x in enumerate(order):
        op = graph.ops[x]
        actions += _do(ActionKind.RUN, x)
        actions += _do(
            ActionKind.RELEASE, *(s for s in dict.fromkeys((*op.reads, *op.writes, *op.creates)) if _last(graph, uses, s, position))
        )
    return actions


def _last(graph: Graph, uses: dict[int, list[int]], s: int, position: int) -> bool:
    return _temporary(graph, s) and uses[s][-1] == position


def swap_everything(graph: Graph, tier: str = "ram", *, persistent: bool = False) -> Plan:
    """After every op everything that is used again later leaves, and comes back just before it is used; nothing overlaps.

    `persistent`: parameters, buffers and optimizer state too (they are back at the end of the step).
    """
    order = list(range(len(graph.ops)))
    uses, actions = _uses(graph, order), []
    here = {s.id: s.external for s in graph.storages}
    movable = {s.id: _temporary(graph, s.id) or (persistent and s.persistent) for s in graph.storages}
    for position, x in enumerate(order):
        op = graph.ops[x]
        for s in (*op.reads, *op.writes):
            if not here[s]:
                actions += _do(ActionKind.SWAP_IN, s) + _do(ActionKind.WAIT_IN, s)
        actions += _do(ActionKind.RUN, x)
        here |= dict.fromkeys((*op.reads, *op.writes, *op.creates), True)
        for s in dict.fromkeys((*op.reads, *op.writes, *op.creates)):
            if _last(graph, uses, s, position):
                actions += _do(ActionKind.RELEASE, s)
            elif movable[s] and uses[s][-1] > position and (persistent or _next_phase(graph, uses, s, position) is not Phase.UPDATE):
                actions += _do(ActionKind.SWAP_OUT, s) + _do(ActionKind.WAIT_OUT, s)
                here[s] = False
    if persistent:
        for s, present in here.items():
            if graph.storages[s].persistent and not present:
                actions += _do(ActionKind.SWAP_IN, s) + _do(ActionKind.WAIT_IN, s)
    return finished(graph, actions, tier=tier, undo=not persistent)


def _next_phase(graph: Graph, uses: dict[int, list[int]], s: int, position: int) -> Phase | None:
    """Phase of the next op that touches a storage. With undo nothing that can fail may stand between updates."""
    return next((graph.ops[p].phase for p in uses[s] if p > position), None)


def all_away(graph: Graph, tier: str = "ram") -> Plan:
    """Parameters, buffers, optimizer state and constants rest on the lower tier and are fetched for each op that needs them."""
    away = tuple(s.id for s in graph.storages if s.persistent)
    order = list(range(len(graph.ops)))
    uses, actions = _uses(graph, order), []
    for position, x in enumerate(order):
        op = graph.ops[x]
        touched = dict.fromkeys((*op.reads, *op.writes, *op.creates))
        for s in touched:
            if s in away:
                actions += _do(ActionKind.SWAP_IN, s)
        actions += _do(ActionKind.WAIT_IN, *(s for s in touched if s in away))
        actions += _do(ActionKind.RUN, x)
        for s in touched:
            if s in away and s in op.writes:
                actions += _do(ActionKind.SWAP_OUT, s) + _do(ActionKind.WAIT_OUT, s)
            elif s in away or _last(graph, uses, s, position):
                actions += _do(ActionKind.RELEASE, s)
    return finished(graph, actions, away=away, tier=tier)


def early_update(graph: Graph, tier: str = "ram", *, undo: bool = True) -> Plan:
    """Every update as soon as its gradient is there, after an undo copy of what it writes (with `undo`)."""
    ready: dict[int, int] = {}
    moves: dict[int, list[int]] = {}
    order: list[int] = []
    forward = [op for op in graph.ops if op.phase is not Phase.UPDATE]
    for op in forward:
        ready |= dict.fromkeys((*op.reads, *op.writes, *op.creates), op.id)
    for op in graph.ops:
        if op.phase is Phase.UPDATE:
            moves.setdefault(max(ready.get(s, -1) for s in (*op.reads, *op.writes)), []).append(op.id)
    for op in forward:
        order += [op.id, *moves.get(op.id, [])]
    actions = []
    for action in _in_order(graph, order):
        if undo and action.kind is ActionKind.RUN and graph.ops[action.subject].phase is Phase.UPDATE:
            written = graph.ops[action.subject].writes
            actions += _do(ActionKind.SAVE, *written) + _do(ActionKind.WAIT_SAVE, *written)
        actions.append(action)
    return finished(graph, actions, tier=tier, undo=undo)


class _Impossible(Exception):
    def __init__(self, storage: int) -> None:
        super().__init__(storage)
        self.storage = storage


def recompute_everything(graph: Graph, tier: str = "ram") -> Plan:
    """After every op all that can be made again is thrown away, and made again just before it is used."""
    updated = {s for op in graph.ops if op.phase is Phase.UPDATE for s in (*op.reads, *op.writes)}
    droppable = {s.id for s in graph.storages if _temporary(graph, s.id) and s.id not in updated}
    while True:
        try:
            return finished(graph, _Rebuild(graph, droppable).actions(), tier=tier)
        except _Impossible as wrong:
            droppable.remove(wrong.storage)


@dataclass
class _Rebuild:
    graph: Graph
    droppable: set[int]
    version: dict[int, int] = field(default_factory=dict)  # of what is on the device
    found: list[Action] = field(default_factory=list)

    def actions(self) -> list[Action]:
        graph = self.graph
        self.needed = expected_versions(graph)
        self.creator = {s: op for op in graph.ops for s in op.creates}
        self.writers: dict[int, list[int]] = {s.id: [op.id for op in graph.ops if s.id in op.writes] for s in graph.storages}
        self.version = {s.id: 0 for s in graph.storages if s.external}
        uses = _uses(graph, list(range(len(graph.ops))))
        for op in graph.ops:
            for s in (*op.reads, *op.writes):
                self._make(s, self.needed[op.id][s], root=s)
            self.found += _do(ActionKind.RUN, op.id)
            self.version |= dict.fromkeys(op.creates, 0)
            for s in op.writes:
                self.version[s] += 1
            for s in list(self.version):
                if _temporary(graph, s) and (s in self.droppable or uses[s][-1] <= op.id):
                    self.found += _do(ActionKind.RELEASE, s)
                    del self.version[s]
        return self._with_generator_states()

    def _make(self, s: int, version: int, root: int) -> None:
        if self.version.get(s) == version:
            return
        if s not in self.version:
            self._again(self.creator[s].id, root) if s in self.creator else self._fail(root)
        for x in self.writers[s][self.version[s] : version]:
            if self.graph.ops[x].writes != (s,):
                self._fail(root)
            self._again(x, root)
        if self.version[s] != version:
            self._fail(root)

    def _again(self, x: int, root: int) -> None:
        op = self.graph.ops[x]
        if op.recompute is Recompute.BARRED:
            self._fail(root)
        writes = () if op.recompute is Recompute.STATISTICS else op.writes
        for s in (*op.reads, *writes):
            self._make(s, self.needed[x][s], root)
        self.found += _do(ActionKind.RECOMPUTE, x)
        for s in op.creates:
            self.version.setdefault(s, 0)
        for s in writes:
            self.version[s] += 1

    def _fail(self, root: int) -> None:
        raise _Impossible(root if root in self.droppable else min(self.droppable))

    def _with_generator_states(self) -> list[Action]:
        again = {a.subject for a in self.found if a.kind is ActionKind.RECOMPUTE}
        actions = []
        for action in self.found:
            if action.kind is ActionKind.RUN and action.subject in again and self.graph.ops[action.subject].recompute is Recompute.RANDOM:
                actions += _do(ActionKind.SAVE_RNG, action.subject)
            actions.append(action)
        return actions


def count(plan: Plan, kind: ActionKind) -> int:
    """How many actions of a kind a plan has."""
    return sum(action.kind is kind for action in plan.schedules[0].actions)


def gradients(graph: Graph) -> list[int]:
    """Storages that hold gradients."""
    return [s.id for s in graph.storages if s.kind is StorageKind.GRADIENT]
