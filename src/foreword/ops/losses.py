"""The loss of draft heads over rows of logits, as torch operations.

In: logits [R, V], and what they should predict: a label per row, or a teacher's logits [R, V]. Out: the loss and the label's
rank per row; the gradient overwrites the logits. On CUDA, ops/training/cross_entropy.py takes the place of both functions,
except in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated


def _has_kernel(logits: Tensor, *others: Any) -> bool:
    return logits.dtype.itemsize <= 4


@accelerated("training.cross_entropy:log_mass", when=_has_kernel)
def log_mass(logits: Tensor) -> Tensor:
    """Return the logsumexp of each row of logits [R, V], in float32 at least: [R]."""
    return _wide(logits).logsumexp(-1)


@accelerated("training.cross_entropy:cross_entropies", when=_has_kernel)
def cross_entropies(
    logits: Tensor, labels: Tensor, counts: Tensor, teacher: tuple[Tensor, Tensor] | None, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return cross-entropies of logits [R, V] where `counts` [R], else 0, and how many logits exceed the label's: [R] twice.

    teacher: logits whose softmax should be predicted, and their `log_mass`; without them the label should be. With
    `with_gradient` the logits are overwritten with the gradient of the sum of losses.
    """
    wide, label = _wide(logits), labels.unsqueeze(1)
    ranks = (wide > wide.gather(1, label)).sum(1)
    log_probs = wide.log_softmax(-1)
    if teacher is None:
        loss, goal = -log_probs.gather(1, label).squeeze(1), torch.zeros_like(log_probs).scatter_(1, label, 1)
    else:
        goal = (_wide(teacher[0]) - teacher[1].unsqueeze(1)).exp_()
        loss = -(goal * log_probs).sum(1)
    if with_gradient:
        logits.copy_(log_probs.exp_().sub_(goal).where(counts.unsqueeze(1), 0))
    return loss.where(counts, 0), ranks


def _wide(logits: Tensor) -> Tensor:
    """Return logits in float32 at least, which holds half precision exactly."""
    return logits if logits.dtype.itemsize >= 4 else logits.float()
