"""Ctrl-C and the step: it may stop a step once, while nothing lasting has been written; else it waits for the step's end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class HeldInterrupt:
    """Stands before the program's own SIGINT handler between `install` and `uninstall`.

    The first Ctrl-C goes through unless `hold` was called before; every later one waits, so that nothing tears an undo apart.
    """

    def __init__(self) -> None:
        self.held = False
        self._came = False
        self._before: Callable[[int, FrameType | None], Any] | None = None

    def install(self) -> None:
        """Start. Does nothing outside the main thread, where Python delivers no signals, and where Ctrl-C is not Python's to handle."""
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGINT)
        if callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._receive)

    def hold(self) -> None:
        """From here on Ctrl-C waits."""
        self.held = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.held:
            self._came = True
            return
        assert self._before is not None
        self.held = True
        self._before(number, frame)
        self.held = False

    def uninstall(self) -> None:
        """Give the program's handler back and hand it a Ctrl-C that came meanwhile (which usually raises KeyboardInterrupt)."""
        self.held = True
        if self._before is None:
            return
        before, self._before = self._before, None
        signal.signal(signal.SIGINT, before)
        if self._came:
            before(signal.SIGINT, None)
