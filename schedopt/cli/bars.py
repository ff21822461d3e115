"""Progress bars for everything that takes over a second, on stderr."""

from __future__ import annotations

from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from schedopt.cli.shell import err

STAGES = {
    "capture": "capturing the step",
    "self-check": "comparing with eager on copies",
    "probe": "measuring this machine",
    "measure": "measuring ops",
    "solve": "deciding",
    "steps": "training",
    "eager": "eager steps",
}


class Bars:
    """A `schedopt.api.progress.Progress` that draws one bar per stage; use it in a `with` block."""

    def __init__(self, *, quiet: bool = False) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=err, disable=quiet or not err.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Move the bar of a stage; a total of 0 shows a bar that pulses."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(STAGES.get(stage, stage), total=total or None)
        self._progress.update(self._tasks[stage], completed=done, total=total or None)
