"""Replays a plan against the rules of `schedopt.plan` and says what it costs. Shares no code with any solver."""

from __future__ import annotations

from dataclasses import dataclass

from schedopt.graph import Graph
from schedopt.machine import Machine
from schedopt.plan import Plan


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
    """Outcome of a replay. `memory_bytes` and `start_ns` have one entry per action: bytes in use while it runs, and when compute starts it."""

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
    copies: tuple[tuple[int, str, int, int], ...]  # (action position, "out" or "in", start ns, end ns)


def check(graph: Graph, plan: Plan, machine: Machine) -> Report:
    """Replay every action of every device; see `schedopt.plan` for the rules, the memory account and the clock."""
    raise SystemExit("written next")
