"""The loss of draft heads over rows of logits, as torch operations.

In: logits [R, V], and as the wanted answer a label per row or a teacher's logits [R, V]. Out: the loss and the label's rank
per row, and in place of the logits their gradient. On CUDA, ops/training/cross_entropy.py takes the place of both functions,
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
    """The logsumexp of each row of logits [R, V], in float32 at least: [R]."""
    return _wide(logits).logsumexp(-1)


@accelerated("training.cross_entropy:lose", when=_has_kernel)
def lose(
    logits: Tensor, labels: Tensor, counts: Tensor, taught: tuple[Tensor, Tensor] | None, learns: bool
) -> tuple[Tensor, Tensor]:
    """Cross-entropies of logits [R, V] where `counts` [R], else 0; and how many logits exceed the label's: [R] twice.

    taught: a teacher's logits, whose softmax is the wanted answer, and their `log_mass`; without them the label is wanted.
    With `learns` the logits become the gradient of the sum of losses.
    """
    wide, label = _wide(logits), labels.unsqueeze(1)
    places = (wide > wide.gather(1, label)).sum(1)
    log_chances = wide.log_softmax(-1)
    if taught is None:
        lost, wanted = -log_chances.gather(1, label).squeeze(1), torch.zeros_like(log_chances).scatter_(1, label, 1)
    else:
        wanted = (_wide(taught[0]) - taught[1].unsqueeze(1)).exp_()
        lost = -(wanted * log_chances).sum(1)
    if learns:
        logits.copy_(log_chances.exp_().sub_(wanted).where(counts.unsqueeze(1), 0))
    return lost.where(counts, 0), places


def _wide(logits: Tensor) -> Tensor:
    """In float32 at least, which holds half precision exactly."""
    return logits if logits.dtype.itemsize >= 4 else logits.float()
