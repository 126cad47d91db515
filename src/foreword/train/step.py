"""One optimizer step: AdamW with clipped gradients, which skips gradients that are not finite; and the mean of the weights.

The device decides whether a gradient is finite, through the optimizer's `found_inf`, so no step waits for the host; `check`
asks later. After the first broken step nothing changes: weights and moments stay as the last sound step left them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Stepper:
    def __init__(self, module: nn.Module, clip: float, weight_decay: float, average: float = 0.0) -> None:
        """`average`: the decay of a moving average of the weights, which `averaged` puts in their place; 0: none."""
        self.module, self.clip, self.average = module, clip, average
        self.weights: list[Tensor] = list(module.parameters())
        self.optimizer = torch.optim.AdamW(self.weights, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)
        self.switch: Any = self.optimizer  # found_inf, which torch's loss scaling uses, is not typed
        self.broken = torch.zeros((), device=self.weights[0].device)  # 1 after the first broken step
        self.sound = torch.zeros_like(self.broken)  # sound steps since the last `check`
        self.means = [weight.detach().clone() for weight in self.weights] if average else []
        self.steps = 0  # in the means

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        return [one.grad for one in self.weights if one.grad is not None]

    def step(self, rate: float) -> Tensor:
        """Update the weights. Return the norm of the gradients before clipping."""
        norm = nn.utils.clip_grad_norm_(self.weights, self.clip)
        self.broken = torch.maximum(self.broken, (~norm.isfinite()).float())
        self.sound += 1 - self.broken
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.switch.found_inf = self.broken
        self.optimizer.step()
        if self.means:
            self._add_to_means()
        return norm

    @torch.no_grad()
    def _add_to_means(self) -> None:
        """Add the weights to the means. The first steps count more, so that the initial weights are soon forgotten."""
        self.steps += 1
        decay = min(self.average, self.steps / (self.steps + 9))
        torch._foreach_lerp_(self.means, self.weights, 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the means in the place of the weights for a while."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, mean in zip(self.weights, self.means, strict=False):
            kept = weight.clone()
            weight.copy_(mean)
            mean.copy_(kept)

    def check(self) -> int | None:
        """Return how many steps were sound since the last call if one was broken, else None."""
        sound, broken = torch.stack([self.sound, self.broken]).tolist()
        self.sound.zero_()
        return int(sound) if broken else None

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, besides the weights."""
        return {"optimizer": self.optimizer.state_dict(), "means": self.means, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        for mean, held in zip(self.means, state["means"], strict=True):
            mean.copy_(held)
