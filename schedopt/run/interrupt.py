"""Holds Ctrl-C back while a step must not be torn apart."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class HeldInterrupt:
    """`hold()` keeps SIGINT waiting, `let_go()` gives it back and raises KeyboardInterrupt if one came meanwhile."""

    def __init__(self) -> None:
        self.held = False
        self._came = False
        self._before: Any = None

    def hold(self) -> None:
        """From here on Ctrl-C waits. Does nothing outside the main thread, where Python delivers no signals."""
        if self.held or threading.current_thread() is not threading.main_thread():
            return
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is None:  # not set from Python: leave it alone
            return
        signal.signal(signal.SIGINT, self._note)
        self.held = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def release(self) -> None:
        """Give the handler back without raising what came."""
        if self.held:
            signal.signal(signal.SIGINT, self._before)
            self.held = False

    def let_go(self) -> None:
        """Give the handler back; deliver a Ctrl-C that came meanwhile."""
        self.release()
        if self._came:
            self._came = False
            if callable(self._before):
                self._before(signal.SIGINT, None)
