"""Replays a pipeline schedule against the rules of `schedopt.pipeline` and says what it costs. Shares no code with any solver."""

from __future__ import annotations

from dataclasses import dataclass

from schedopt.pipeline import PARTS, Part, PipelineAction, PipelineSchedule, PipelineSpec


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """`violations` in words. `span`: the longest device from its first start to its last end. A bubble is idle time over total time, of the
    device with the longest span and of the whole makespan on the busiest device."""

    violations: tuple[str, ...]
    makespan: int
    span: int
    bubble_span: float
    bubble_makespan: float
    peak_bytes: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether every rule holds."""
        return not self.violations


def check_pipeline(spec: PipelineSpec, schedule: PipelineSchedule) -> PipelineReport:
    """Never raises for a wrong schedule: what is wrong is in `violations`."""
    broken: list[str] = []
    wanted = {PipelineAction(s, p, m) for s in range(len(spec.stages)) for p in PARTS for m in range(spec.microbatches)}
    broken += [f"{action} is no action of this pipeline" for device in schedule.devices for action, _ in device if action not in wanted]
    devices = [tuple(entry for entry in device if entry[0] in wanted) for device in schedule.devices]
    start: dict[PipelineAction, int] = {}
    for device, entries in enumerate(devices):
        clock = 0
        for action, begin in entries:
            if spec.device[action.stage] != device:
                broken.append(f"{action} runs on device {device}, its stage is on {spec.device[action.stage]}")
            if action in start:
                broken.append(f"{action} runs twice")
            if begin < clock:
                broken.append(f"{action} starts at {begin} on device {device}, which is busy until {clock}")
            start[action] = begin
            clock = begin + spec.duration(action)
    broken += [f"{action} never runs" for action in sorted(wanted - start.keys())]
    for action, begin in start.items():
        broken += _early(spec, start, action, begin)
    peaks = tuple(_peak(spec, entries) for entries in devices)
    for device, (peak, limit) in enumerate(zip(peaks, spec.limit_bytes, strict=False)):
        if limit is not None and peak > limit:
            broken.append(f"device {device} holds {peak} bytes, its limit is {limit}")
    spans = [_span(spec, entries) for entries in devices]
    makespan = max((begin + spec.duration(action) for action, begin in start.items()), default=0)
    span, busiest = max(spans, default=0), max(spec.load)
    return PipelineReport(tuple(broken), makespan, span, _idle(busiest, span), _idle(busiest, makespan), peaks)


def _early(spec: PipelineSpec, start: dict[PipelineAction, int], action: PipelineAction, begin: int) -> list[str]:
    """Starts before something that is needed has arrived, told anew from the text of `schedopt.pipeline`."""
    s, m = action.stage, action.microbatch
    before: list[PipelineAction] = []
    if action.part is Part.FORWARD and s > 0:
        before.append(PipelineAction(s - 1, Part.FORWARD, m))
    if action.part is Part.INPUT_GRAD:
        before.append(PipelineAction(s, Part.FORWARD, m))
        if s + 1 < len(spec.stages):
            before.append(PipelineAction(s + 1, Part.INPUT_GRAD, m))
    if action.part is Part.WEIGHT_GRAD:
        before.append(PipelineAction(s, Part.INPUT_GRAD, m))
    found = []
    for other in before:
        if other not in start:
            continue
        arrives = start[other] + spec.duration(other) + spec.transfer(other.stage, s)
        if begin < arrives:
            found.append(f"{action} starts at {begin}, but {other} arrives at {arrives}")
    return found


def _peak(spec: PipelineSpec, entries: tuple[tuple[PipelineAction, int], ...]) -> int:
    used = peak = 0
    for action, _ in entries:
        used += spec.stages[action.stage].bytes(action.part)
        peak = max(peak, used)
    return peak


def _span(spec: PipelineSpec, entries: tuple[tuple[PipelineAction, int], ...]) -> int:
    if not entries:
        return 0
    return max(begin + spec.duration(action) for action, begin in entries) - min(begin for _, begin in entries)


def _idle(busy: int, total: int) -> float:
    return (total - busy) / total if total else 0.0
