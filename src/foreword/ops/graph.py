"""The one recorder of CUDA graphs: a call is recorded once and replayed without Python or launches in between.

The engine records rounds and prompt passes with it; those who time passes, and a drafter that writes alongside the target,
record calls of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Answer = TypeVar("Answer")


class RecordedCall(Generic[Answer]):
    """A call as a CUDA graph. `answer` is what the call gave; every replay writes it anew, in the same place.

    Whatever the call compiles or allocates at its first run must have happened before. What the graph reads must outlive it:
    the call itself is not kept.
    """

    def __init__(self, call: Callable[[], Answer], pool: Any = None, stream: torch.cuda.Stream | None = None) -> None:
        """`pool`: memory that graphs share which run one after the other. `stream`: the stream to record in, in place of the
        default one."""
        self.kept: Callable[[], Answer] | None = None
        self.graph = torch.cuda.CUDAGraph()
        # Another thread may use the device at the same time, for a draft perhaps: that is no error of this recording.
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.answer = call()

    def replay(self) -> None:
        self.graph.replay()


def record(call: Callable[[], Answer], pool: Any = None, stream: torch.cuda.Stream | None = None) -> RecordedCall[Answer]:
    """Run a call once to warm it up, then record it. The call is kept, and with it whatever the graph reads."""
    call()
    torch.cuda.synchronize()
    recorded = RecordedCall(call, pool, stream)
    recorded.kept = call
    return recorded
