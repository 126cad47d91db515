"""Hold Ctrl-C back while something has to complete: mostly a step, which changes the state of sequences in many places."""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from types import FrameType


class HeldBack:
    """A block that Ctrl-C does not interrupt: it arrives when the block has ended. A second Ctrl-C does not wait."""

    def __enter__(self) -> None:
        self.came = False
        # Signals come to the main thread alone; and a handler that Python did not set could not be put back.
        self.before = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
        if self.before is not None:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            self._let_go()

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self.came = self.came, True
        if again:
            self._let_go()

    def _let_go(self) -> None:
        signal.signal(signal.SIGINT, self.before)
        came, self.came = self.came, False
        if came:
            signal.raise_signal(signal.SIGINT)
