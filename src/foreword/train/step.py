"""One optimizer step: AdamW with clipped gradients, which skips gradients that are not finite.

The device decides whether a gradient is finite, through the optimizer's `found_inf`, so no step waits for the host; `check`
asks later. After the first broken step nothing changes: weights and moments stay as the last sound step left them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Stepper:
    def __init__(self, module: nn.Module, clip: float, weight_decay: float) -> None:
        self.module, self.clip = module, clip
        some = next(module.parameters())
        self.optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)
        self.switch: Any = self.optimizer  # found_inf, which torch's loss scaling uses, is not typed
        self.broken = torch.zeros((), device=some.device)  # 1 after the first broken step
        self.sound = torch.zeros((), device=some.device)  # sound steps since the last `check`

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        return [one.grad for one in self.module.parameters() if one.grad is not None]

    def step(self, rate: float) -> Tensor:
        """Update the weights. Return the norm of the gradients before clipping."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.broken = torch.maximum(self.broken, (~norm.isfinite()).float())
        self.sound += 1 - self.broken
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.switch.found_inf = self.broken
        self.optimizer.step()
        return norm

    def check(self) -> int | None:
        """Return how many steps were sound since the last call if one was broken, else None."""
        sound, broken = torch.stack([self.sound, self.broken]).tolist()
        self.sound.zero_()
        return int(sound) if broken else None
