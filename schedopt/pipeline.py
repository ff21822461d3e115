"""Pipeline schedules as plain data: what the stages cost, and which device does what for which micro-batch when. No torch.

A step sends `microbatches` micro-batches through the stages and back. Per stage and micro-batch there are three actions:

    F  forward               after the forward of the stage before it
    I  gradient of the input after this stage's own F and the I of the stage behind it
    W  gradient of weights   after this stage's own I

An action is written as in torch.distributed.pipelining: `2F0` is stage 2, forward, micro-batch 0. Times are integers in any unit, the same
for all. A tensor that crosses to another device arrives `link` later. A device runs its actions one after the other, each `per_action`
longer than it says. Bytes: each action changes what its device holds, F when it starts (`forward_bytes`, taken), I and W when they end
(`input_grad_bytes`, `weight_grad_bytes`, given back: at most 0). A device never holds more than the sum of the limits of its stages.

Two figures judge a schedule: `makespan`, from 0 to the last end; and `span`, the longest time any device takes from its first F to its last
action (what counts when steps follow each other and every device starts the next one when it is done, as in arXiv 2401.10241).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter

from schedopt.errors import PlanFileError
from schedopt.problem_file import json_of, read_problem, validated


class Part(StrEnum):
    """The three actions of a stage."""

    FORWARD = "F"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


PARTS = tuple(Part)


@dataclass(frozen=True, slots=True, order=True)
class PipelineAction:
    """One part of one stage for one micro-batch."""

    stage: int
    part: Part
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.part.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class StageCost:
    """Times and changes of bytes of one stage; `limit_bytes` None: any number."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    forward: int
    input_grad: int
    weight_grad: int
    forward_bytes: int = 0
    input_grad_bytes: int = 0
    weight_grad_bytes: int = 0
    limit_bytes: int | None = None

    def time(self, part: Part) -> int:
        """Of one action, without what every action costs."""
        return {Part.FORWARD: self.forward, Part.INPUT_GRAD: self.input_grad, Part.WEIGHT_GRAD: self.weight_grad}[part]

    def bytes(self, part: Part) -> int:
        """By which one action changes the bytes in use."""
        changes = {Part.FORWARD: self.forward_bytes, Part.INPUT_GRAD: self.input_grad_bytes, Part.WEIGHT_GRAD: self.weight_grad_bytes}
        return changes[part]


@dataclass(frozen=True)
class PipelineSpec:
    """A pipeline scheduling problem. `placement`: device of each stage (None: stage i on device i). `link`: time of a transfer between any
    two devices; `links`: (from, to, time) for pairs that differ."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    stages: tuple[StageCost, ...]
    microbatches: int
    link: int = 0
    objective: Literal["span", "makespan"] = "span"
    placement: tuple[int, ...] | None = None
    links: tuple[tuple[int, int, int], ...] = ()
    per_action: int = 0

    def __repr__(self) -> str:
        return f"PipelineSpec({len(self.stages)} stages on {self.num_devices} devices, {self.microbatches} micro-batches, {self.objective})"

    @cached_property
    def device(self) -> tuple[int, ...]:
        """Device of each stage."""
        return tuple(range(len(self.stages))) if self.placement is None else self.placement

    @cached_property
    def num_devices(self) -> int:
        """Devices that have a stage."""
        return max(self.device) + 1

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each device."""
        return tuple(tuple(s for s, d in enumerate(self.device) if d == device) for device in range(self.num_devices))

    @cached_property
    def limit_bytes(self) -> tuple[int | None, ...]:
        """Bytes that each device has; None if one of its stages has no limit."""
        limits = [[self.stages[s].limit_bytes for s in stages] for stages in self.stages_of]
        return tuple(None if None in one else sum(x for x in one if x is not None) for one in limits)

    @cached_property
    def load(self) -> tuple[int, ...]:
        """Time that each device works."""
        each = [sum(stage.time(part) + self.per_action for part in PARTS) for stage in self.stages]
        return tuple(self.microbatches * sum(each[s] for s in stages) for stages in self.stages_of)

    def duration(self, action: PipelineAction) -> int:
        """Of an action on its device."""
        return self.stages[action.stage].time(action.part) + self.per_action

    def transfer(self, source: int, target: int) -> int:
        """Time from a stage's end until another stage has its tensor."""
        here, there = self.device[source], self.device[target]
        if here == there:
            return 0
        return {(a, b): time for a, b, time in self.links}.get((here, there), self.link)


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """Per device its actions in order, each with its start time."""

    devices: tuple[tuple[tuple[PipelineAction, int], ...], ...]
    method: str = ""

    def __repr__(self) -> str:
        return f"PipelineSchedule({len(self.devices)} devices, {sum(map(len, self.devices))} actions, {self.method})"


_ADAPTER = TypeAdapter(PipelineSpec)


def load_pipeline_spec(path: str | Path) -> PipelineSpec:
    """A problem from a JSON file; PlanFileError names the field that is wrong."""
    return parse_pipeline_spec(read_problem(path), str(path))


def parse_pipeline_spec(text: str | bytes, source: str = "the specification") -> PipelineSpec:
    """A problem from JSON text; PlanFileError names the field that is wrong."""
    spec = validated(_ADAPTER, json_of(text, source), source)
    if problem := _incoherence(spec):
        raise PlanFileError(f"{source}: {problem}")
    return spec


def _incoherence(spec: PipelineSpec) -> str:
    """What the types can not say; empty if all is well."""
    if not spec.stages or spec.microbatches < 1:
        return "a pipeline has at least one stage and one micro-batch"
    if spec.placement is not None and len(spec.placement) != len(spec.stages):
        return f"placement names {len(spec.placement)} devices for {len(spec.stages)} stages"
    if set(spec.device) != set(range(spec.num_devices)):
        return "placement must use the devices 0, 1, 2, ... without a gap"
    times = [stage.time(part) for stage in spec.stages for part in PARTS]
    if min(*times, spec.link, spec.per_action, *(time for _, _, time in spec.links), 0) < 0:
        return "times must not be negative"
    for number, stage in enumerate(spec.stages):
        if stage.forward_bytes < 0 or stage.input_grad_bytes > 0 or stage.weight_grad_bytes > 0:
            return f"stages.{number}: forward_bytes must not be negative, input_grad_bytes and weight_grad_bytes not positive"
        if stage.forward_bytes + stage.input_grad_bytes + stage.weight_grad_bytes != 0:
            return f"stages.{number}: forward_bytes, input_grad_bytes and weight_grad_bytes must add up to 0, or bytes pile up"
    if any(not 0 <= d < spec.num_devices for a, b, _ in spec.links for d in (a, b)):
        return "links name a device that no stage is on"
    return ""
