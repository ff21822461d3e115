"""A pipeline schedule as text: one line per device, one letter per tick of the clock."""

from __future__ import annotations

from collections.abc import Iterator

from schedopt.pipeline import PipelineSchedule, PipelineSpec


def pipeline_lines(spec: PipelineSpec, schedule: PipelineSchedule, width: int = 110) -> Iterator[str]:
    """F, I and W where a device works on one of them, a dot where it waits; `width` ticks for the makespan."""
    end = max((start + spec.duration(action) for device in schedule.devices for action, start in device), default=0)
    for number, device in enumerate(schedule.devices):
        line = ["."] * width
        for action, start in device:
            first = start * width // max(1, end)
            last = max(first + 1, (start + spec.duration(action)) * width // max(1, end))
            line[first:last] = action.part.value * (min(last, width) - first)
        yield f"{number:3d} {''.join(line)}"
