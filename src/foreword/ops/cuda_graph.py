"""Record a call as a CUDA graph once, and replay it without Python or launches in between.

The engine records rounds and prompt passes. Code that times passes, and a drafter that runs alongside the target, record
calls of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Answer = TypeVar("Answer")


class RecordedCall(Generic[Answer]):
    """A call as a CUDA graph. `answer` is what the call returned; every replay overwrites it in place.

    The call must have run before, so that whatever it compiles or allocates the first time exists. The tensors that the
    graph reads must outlive it: the call itself is not kept.
    """

    def __init__(self, call: Callable[[], Answer], pool: Any = None, stream: torch.cuda.Stream | None = None) -> None:
        """Record the call. pool: memory shared by graphs that run one after the other. stream: the stream to record in,
        instead of the default one."""
        self.kept: Callable[[], Answer] | None = None
        self.graph = torch.cuda.CUDAGraph()
        # Another thread may use the device at the same time, for example to draft. That must not fail this recording.
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.answer = call()

    def replay(self) -> None:
        self.graph.replay()


def record(call: Callable[[], Answer], pool: Any = None, stream: torch.cuda.Stream | None = None) -> RecordedCall[Answer]:
    """Run a call once to warm it up, then record it. The call is kept, and with it the tensors that the graph reads."""
    call()
    torch.cuda.synchronize()
    recorded = RecordedCall(call, pool, stream)
    recorded.kept = call
    return recorded
