"""A call as a CUDA graph of its own, and waiting for a device: for those who time passes, and for a draft that is written
meanwhile. Rounds are captured in engine/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Answer = TypeVar("Answer")


class Captured(Generic[Answer]):
    """A call, run once to warm up and then captured. The call is kept, and with it whatever the graph reads. `answer` is
    what the call gave; every replay writes it anew."""

    def __init__(self, call: Callable[[], Answer], pool: Any = None, stream: torch.cuda.Stream | None = None) -> None:
        """`pool`: memory that graphs share which run one after the other. `stream`: to capture in, not the default one."""
        self.call = call
        call()  # whatever is compiled or allocated at the first call may not happen in a capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.answer = call()

    def replay(self) -> None:
        self.graph.replay()


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
