"""How long jobs tell how far they are."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with the stage ("capture", "measure", "self-check", "solve", ...), what is done and the total (0: not known)."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take note."""


def silent(stage: str, done: int, total: int) -> None:
    """A Progress that takes no note."""
