"""Delay Ctrl-C while something has to complete: mostly an engine step, which changes sequences in many places."""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from types import FrameType


class DelayedCtrlC:
    """A block that Ctrl-C does not interrupt: the signal arrives when the block has ended. A second Ctrl-C does not wait."""

    def __enter__(self) -> None:
        self.pressed = False
        # Only the main thread receives signals, and a handler that Python did not set could not be restored.
        self.previous = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
        if self.previous is not None:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self.previous is not None:
            self._deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self.pressed = self.pressed, True
        if again:
            self._deliver()

    def _deliver(self) -> None:
        """Restore the handler, and raise the signal again if it came."""
        signal.signal(signal.SIGINT, self.previous)
        pressed, self.pressed = self.pressed, False
        if pressed:
            signal.raise_signal(signal.SIGINT)
