"""A call as a CUDA graph of its own, and waiting for a device: for those who time passes. Rounds are captured in engine/."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Captured:
    """A call, run once to warm up and then captured. The call is kept, and with it whatever the graph reads."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        call()  # whatever is compiled or allocated at the first call may not happen in a capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            call()

    def replay(self) -> None:
        self.graph.replay()


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
