"""One change of the weights: AdamW under a norm that gradients are cut to, and never by what is not a number.

Whether a gradient is finite is decided on the device, by the optimizer's own switch, so that no step waits for the host;
`check` asks later. From the first broken step on nothing moves: weights and moments are those of the last sound one.
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
        self.switch: Any = self.optimizer  # of which found_inf is the part that torch's own loss scaling uses
        self.broken = torch.zeros((), device=some.device)  # 1 from the first broken step on
        self.sound = torch.zeros((), device=some.device)  # steps made since they were asked for

    def forget(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        return [one.grad for one in self.module.parameters() if one.grad is not None]

    def step(self, rate: float) -> Tensor:
        """The norm of the gradients, before they were cut."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.broken = torch.maximum(self.broken, (~norm.isfinite()).float())
        self.sound += 1 - self.broken
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.switch.found_inf = self.broken
        self.optimizer.step()
        return norm

    def check(self) -> int | None:
        """How many steps were sound since the last time, if one was not."""
        sound, broken = torch.stack([self.sound, self.broken]).tolist()
        self.sound.zero_()
        return int(sound) if broken else None
