"""Replays a plan against the rules of `schedopt.plan` and says what it costs. Shares no code with any solver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from schedopt.graph import Graph, Phase, Recompute, expected_versions
from schedopt.machine import Link, Machine
from schedopt.plan import OP_ACTIONS, Action, ActionKind, Plan, Schedule


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: at action number `position` (-1: start or end), with names a person can read."""

    rule: str
    position: int
    message: str

    def __str__(self) -> str:
        return f"{self.rule} at action {self.position}: {self.message}"


@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of a replay.

    `memory_bytes` and `start_ns` have one entry per action: bytes in use while it runs, and when compute starts it. `copies` lists
    (action position, "out" or "in", start ns, end ns). `tier_peak_bytes` counts two slots for a storage that rests on the lower tier.
    """

    ok: bool
    violations: tuple[Violation, ...]
    peak_bytes: int
    peak_position: int
    tier_peak_bytes: int
    step_ns: int
    stall_ns: int
    recompute_ns: int
    memory_bytes: tuple[int, ...]
    start_ns: tuple[int, ...]
    copies: tuple[tuple[int, str, int, int], ...]

    def __str__(self) -> str:
        state = "ok" if self.ok else f"{len(self.violations)} broken rule(s)"
        return f"{state}, peak {self.peak_bytes} bytes, step {self.step_ns} ns, stall {self.stall_ns} ns"


class _State(Enum):
    ABSENT = "absent"
    RESIDENT = "resident"
    LEAVING = "leaving"
    ARRIVING = "arriving"


def check(graph: Graph, plan: Plan, machine: Machine) -> Report:
    """Replay every action of the plan's device; see `schedopt.plan` for the rules, the memory account and the clock.

    Never raises for a wrong plan: what is wrong is in `Report.violations`.
    """
    if len(plan.schedules) != 1:
        return _refusal("schedule", f"a plan for one device has one schedule, this one has {len(plan.schedules)}")
    schedule = plan.schedules[0]
    subjects = {True: len(graph.ops), False: len(graph.storages)}
    for position, action in enumerate(schedule.actions):
        if not 0 <= action.subject < subjects[action.kind in OP_ACTIONS]:
            return _refusal("schedule", f"action {position} ({action}) names nothing in the graph")
    if unknown := [s for s in (*schedule.away, *schedule.snapshot) if not 0 <= s < len(graph.storages)]:
        return _refusal("schedule", f"away or snapshot names no storage of the graph: {unknown[:5]}")
    try:
        link = machine.link(schedule.device, schedule.tier)
    except KeyError:
        return _refusal("machine", f"{machine.name} has no link between {schedule.device!r} and tier {schedule.tier!r}")
    replay = _Replay(graph, plan, schedule, link)
    if plan.graph_hash != graph.hash():
        replay.fail("graph", -1, f"the plan is for graph {plan.graph_hash[:12]}, this is {graph.hash()[:12]}")
    replay.go()
    capacity = {t.name: t.capacity_bytes for t in machine.tiers}.get(schedule.tier)
    if capacity is not None and replay.tier_peak > capacity:
        replay.fail("tier", -1, f"the plan keeps {replay.tier_peak} bytes on tier {schedule.tier}, which has {capacity}")
    return replay.report()


def _refusal(rule: str, message: str) -> Report:
    return Report(False, (Violation(rule, -1, message),), 0, -1, 0, 0, 0, 0, (), (), ())


class _Replay:
    """State of storages, memory account and clocks while the list of actions is gone through."""

    def __init__(self, graph: Graph, plan: Plan, schedule: Schedule, link: Link) -> None:
        self.graph, self.plan, self.schedule, self.link = graph, plan, schedule, link
        self.needed = expected_versions(graph)
        away = set(schedule.away)
        self.state = [_State.RESIDENT if s.external and s.id not in away else _State.ABSENT for s in graph.storages]
        self.version = [0] * len(graph.storages)
        self.lower: list[int | None] = [0 if s.id in away else None for s in graph.storages]
        self.saving: dict[int, int] = {}  # storage -> end of its save, not yet waited for
        self.copy_end = [0] * len(graph.storages)
        self.runs = [0] * len(graph.ops)
        self.rng_saved: set[int] = set()
        self.last_random = -1
        self.first_write: dict[int, int] = {}  # persistent storages without an undo copy -> position of their first write
        self.used = sum(s.size_bytes for s in graph.storages if self.state[s.id] is _State.RESIDENT)
        self.used += sum(graph.storages[s].size_bytes for s in schedule.snapshot)
        self.on_tier = {s: 2 * graph.storages[s].size_bytes if graph.storages[s].parent is None else 0 for s in away}
        self.tier_used = self.tier_peak = sum(self.on_tier.values())
        self.last_in = {a.subject: i for i, a in enumerate(schedule.actions) if a.kind is ActionKind.WAIT_IN}
        self.clock = self.out_free = self.in_free = self.stall = self.recompute_time = 0
        self.violations: list[Violation] = []
        self.memory: list[int] = []
        self.starts: list[int] = []
        self.copies: list[tuple[int, str, int, int]] = []
        self.last_fallible = -1

    def go(self) -> None:
        """Replay start rules, all actions, end rules."""
        self._begin()
        handlers: dict[ActionKind, Callable[[int, int], None]] = {
            ActionKind.RUN: self._run,
            ActionKind.RECOMPUTE: self._recompute,
            ActionKind.SAVE_RNG: self._save_rng,
            ActionKind.SWAP_OUT: self._swap_out,
            ActionKind.WAIT_OUT: self._wait_out,
            ActionKind.SAVE: self._save,
            ActionKind.WAIT_SAVE: self._wait_save,
            ActionKind.SWAP_IN: self._swap_in,
            ActionKind.WAIT_IN: self._wait_in,
            ActionKind.RELEASE: self._release,
        }
        for position, action in enumerate(self.schedule.actions):
            self.starts.append(self.clock)
            self.memory.append(self.used)
            handlers[action.kind](position, action.subject)
            self.memory[-1] = max(self.memory[-1], self.used)
            self._note_fallible(position, action)
            if self.memory[-1] > self.schedule.budget_bytes:
                over = self.memory[-1] - self.schedule.budget_bytes
                self.fail("budget", position, f"{action.kind.value} {self._subject(action)} goes {over} bytes over the budget")
        self._end()

    def fail(self, rule: str, position: int, message: str) -> None:
        """Note a broken rule."""
        self.violations.append(Violation(rule, position, message))

    def report(self) -> Report:
        """The outcome so far."""
        peak = max(self.memory, default=self.used)
        return Report(
            ok=not self.violations,
            violations=tuple(self.violations),
            peak_bytes=peak,
            peak_position=self.memory.index(peak) if self.memory else -1,
            tier_peak_bytes=self.tier_peak,
            step_ns=max(self.clock, self.out_free, self.in_free),
            stall_ns=self.stall,
            recompute_ns=self.recompute_time,
            memory_bytes=tuple(self.memory),
            start_ns=tuple(self.starts),
            copies=tuple(self.copies),
        )

    def _name(self, storage: int) -> str:
        return f"storage {storage} ({self.graph.storages[storage].name})"

    def _subject(self, action: Action) -> str:
        return f"op {self.graph.ops[action.subject].name}" if action.kind in OP_ACTIONS else self._name(action.subject)

    def _size(self, storage: int) -> int:
        return self.graph.storages[storage].size_bytes

    def _begin(self) -> None:
        for s in self.schedule.away:
            if not self.graph.storages[s].persistent:
                self.fail("away", -1, f"{self._name(s)} is not persistent and can not rest on the lower tier")
        for s in self.schedule.snapshot:
            if not self.graph.storages[s].persistent or s in self.schedule.away:
                self.fail("snapshot", -1, f"{self._name(s)} is not a persistent storage resting on the device")
        written = {s for op in self.graph.ops for s in op.writes}
        for part in self.graph.storages:
            if part.parent is None:
                continue
            if not {part.id, part.parent} <= set(self.schedule.away):
                self.fail("split", -1, f"{self._name(part.id)} and {self._name(part.parent)} must both rest on the lower tier")
            if part.parent in written:
                self.fail("split", -1, f"{self._name(part.parent)} is written, but it has parts")
        if self.used > self.schedule.budget_bytes:
            self.fail("budget", -1, f"{self.used} bytes are on the device before the step, over the budget {self.schedule.budget_bytes}")

    # --- ops ---------------------------------------------------------------------------------------------------------------------

    def _run(self, position: int, x: int) -> None:
        op = self.graph.ops[x]
        self.runs[x] += 1
        if self.runs[x] > 1:
            self.fail("run-once", position, f"op {op.name} runs a second time; a second time is `recompute`")
        if op.recompute is Recompute.RANDOM:
            if x < self.last_random:
                self.fail("random-order", position, f"random op {op.name} runs after a later one; the random stream would differ")
            self.last_random = max(self.last_random, x)
        self._need(position, x, (*op.reads, *op.writes))
        for s in op.creates:
            if self.state[s] is not _State.ABSENT:
                self.fail("create", position, f"op {op.name} creates {self._name(s)}, which is {self.state[s].value}")
        self._execute(position, x, op.writes)

    def _recompute(self, position: int, x: int) -> None:
        op = self.graph.ops[x]
        if not self.runs[x]:
            self.fail("recompute-before-run", position, f"op {op.name} is recomputed before it ran")
        if op.recompute is Recompute.BARRED:
            self.fail("recompute-barred", position, f"op {op.name} may not run again: {op.reason or 'barred'}")
        if op.recompute is Recompute.RANDOM and x not in self.rng_saved:
            self.fail("recompute-random", position, f"random op {op.name} is recomputed, but its generator state was not kept")
        writes = () if op.recompute is Recompute.STATISTICS else op.writes
        for s in writes:
            if self.graph.storages[s].external:
                self.fail("recompute-in-place", position, f"op {op.name} would write {self._name(s)} a second time")
        self._need(position, x, (*op.reads, *writes))
        self._execute(position, x, writes)
        self.recompute_time += op.time_ns

    def _need(self, position: int, x: int, storages: tuple[int, ...]) -> None:
        op = self.graph.ops[x]
        for s in storages:
            state = self.state[s]
            written = s in op.writes
            if state is not _State.RESIDENT and not (state is _State.LEAVING and not written):
                self.fail("use-while-away", position, f"op {op.name} uses {self._name(s)}, which is {state.value}")
            elif self.version[s] != self.needed[x][s]:
                got, want = self.version[s], self.needed[x][s]
                self.fail("wrong-version", position, f"op {op.name} needs {self._name(s)} after {want} write(s), it has seen {got}")
            if written and s in self.saving:
                self.fail("write-while-copied", position, f"op {op.name} writes {self._name(s)} while it is being saved")

    def _execute(self, position: int, x: int, writes: tuple[int, ...]) -> None:
        op = self.graph.ops[x]
        self.memory[-1] = self.used + op.workspace_bytes + sum(self._size(s) for s in op.creates)
        for s in op.creates:
            if self.state[s] is _State.ABSENT:
                self.state[s], self.version[s] = _State.RESIDENT, 0
                self.used += self._size(s)
        for s in writes:
            storage = self.graph.storages[s]
            covered = s in self.schedule.snapshot or self.lower[s] == 0
            if storage.persistent and self.version[s] == 0 and not covered:
                self.first_write[s] = position
            self.version[s] += 1
        self.clock += op.time_ns

    def _save_rng(self, position: int, x: int) -> None:
        op = self.graph.ops[x]
        if self.runs[x] or op.recompute is not Recompute.RANDOM:
            self.fail("save-rng", position, f"the generator state of op {op.name} must be kept just before it runs, and only of random ops")
        self.rng_saved.add(x)
        self.used += self.graph.rng_state_bytes

    # --- copies ------------------------------------------------------------------------------------------------------------------

    def _copy_out(self, position: int, s: int) -> int:
        if not self.link.duplex:
            self.out_free = max(self.out_free, self.in_free)
        start = max(self.clock, self.out_free)
        self.out_free = start + self.link.out_ns(self._size(s))
        self.copies.append((position, "out", start, self.out_free))
        self.clock += self.link.tax_ns(self._size(s))
        if s not in self.on_tier:
            self.on_tier[s] = self._size(s)
            self.tier_used += self._size(s)
            self.tier_peak = max(self.tier_peak, self.tier_used)
        return self.out_free

    def _wait(self, end: int) -> None:
        self.stall += max(0, end - self.clock)
        self.clock = max(self.clock, end)

    def _require(self, position: int, s: int, state: _State, what: str) -> None:
        if self.state[s] is not state:
            self.fail("state", position, f"{what} {self._name(s)}, which is {self.state[s].value}, not {state.value}")
        if self.graph.storages[s].external and not self.graph.storages[s].persistent:
            self.fail("input", position, f"{what} {self._name(s)}: inputs belong to the user")

    def _swap_out(self, position: int, s: int) -> None:
        self._require(position, s, _State.RESIDENT, "swap_out")
        if s in self.saving:
            self.fail("busy", position, f"swap_out {self._name(s)} while it is being saved")
        self.state[s] = _State.LEAVING
        self.copy_end[s] = self._copy_out(position, s)

    def _wait_out(self, position: int, s: int) -> None:
        self._require(position, s, _State.LEAVING, "wait_out")
        if self.state[s] is not _State.LEAVING:
            return
        self._wait(self.copy_end[s])
        self.state[s], self.lower[s] = _State.ABSENT, self.version[s]
        self.used -= self._size(s)

    def _save(self, position: int, s: int) -> None:
        self._require(position, s, _State.RESIDENT, "save")
        if s in self.saving:
            self.fail("busy", position, f"save {self._name(s)} while it is being saved")
        self.saving[s] = self._copy_out(position, s)

    def _wait_save(self, position: int, s: int) -> None:
        if s not in self.saving:
            self.fail("state", position, f"wait_save {self._name(s)}, which is not being saved")
            return
        self._wait(self.saving.pop(s))
        self.lower[s] = self.version[s]

    def _swap_in(self, position: int, s: int) -> None:
        self._require(position, s, _State.ABSENT, "swap_in")
        lower = self.lower[s]
        if lower is None:
            self.fail("use-before-copy", position, f"swap_in {self._name(s)}: the lower tier has no copy of it")
            lower = 0
        if not self.link.duplex:
            self.in_free = max(self.out_free, self.in_free)
        start = max(self.clock, self.in_free)
        self.in_free = self.copy_end[s] = start + self.link.in_ns(self._size(s))
        self.copies.append((position, "in", start, self.in_free))
        self.clock += self.link.tax_ns(self._size(s))
        if self.state[s] is _State.ABSENT:
            self.used += self._size(s)
        self.state[s], self.version[s] = _State.ARRIVING, lower

    def _wait_in(self, position: int, s: int) -> None:
        self._require(position, s, _State.ARRIVING, "wait_in")
        self._wait(self.copy_end[s])
        self.state[s] = _State.RESIDENT
        if self.last_in[s] == position and not self.graph.storages[s].persistent:
            self.tier_used -= self.on_tier.pop(s, 0)

    def _release(self, position: int, s: int) -> None:
        self._require(position, s, _State.RESIDENT, "release")
        if s in self.saving:
            self.fail("release-too-early", position, f"release {self._name(s)} while it is being saved")
        if s in self.graph.outputs:
            self.fail("release-too-early", position, f"release {self._name(s)}, which the user gets back")
        if self.state[s] is _State.RESIDENT:
            self.used -= self._size(s)
        self.state[s] = _State.ABSENT

    # --- undo and end ------------------------------------------------------------------------------------------------------------

    def _note_fallible(self, position: int, action: Action) -> None:
        calm = action.kind is ActionKind.RELEASE or (action.kind is ActionKind.RUN and self.graph.ops[action.subject].phase is Phase.UPDATE)
        if not calm:
            self.last_fallible = position

    def _end(self) -> None:
        final = [0] * len(self.graph.storages)
        for op in self.graph.ops:
            if not self.runs[op.id]:
                self.fail("run-once", -1, f"op {op.name} never runs")
            for s in op.writes:
                final[s] += 1
        for storage in self.graph.storages:
            self._check_end(storage.id, final[storage.id])
        if self.saving:
            self.fail("end", -1, f"a save of {self._name(next(iter(self.saving)))} is never waited for")
        for s, position in self.first_write.items() if self.plan.undo else ():
            if position < self.last_fallible:
                self.fail("undo", position, f"{self._name(s)} is written without an undo copy, and something that can fail comes later")

    def _check_end(self, s: int, final: int) -> None:
        storage, state = self.graph.storages[s], self.state[s]
        away = s in self.schedule.away
        stays = (storage.external and not away) or s in self.graph.outputs
        if state is not (_State.RESIDENT if stays else _State.ABSENT):
            self.fail("end", -1, f"{self._name(s)} is {state.value} when the step ends")
        elif stays and self.version[s] != final:
            self.fail("end", -1, f"{self._name(s)} ends after {self.version[s]} write(s) instead of {final}")
        elif away and self.lower[s] != final:
            self.fail("end", -1, f"the lower tier ends with {self._name(s)} after {self.lower[s]} write(s) instead of {final}")
