"""Trainable: the promise a drafter with weights makes to the training loop. It says which rows of the target it learns from
and gives a loss; how data is read, how weights are stepped and where they are kept is not its affair.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.target import Target
from foreword.core.vocabulary import Words
from foreword.core.widening import Table


class Trainable(Protocol):
    """A drafter with weights of its own, that learns from what the target wrote."""

    needs: Needs  # hidden, taps, logits it wants of the target
    module: nn.Module  # the weights; made by bind(target, slots), on the target's device
    wide: Table  # how the weights follow a target that was widened
    words: Words | None  # tokens that it guesses among; it learns from all
    config: dict[str, Any]  # what makes the same module again (sizes, options); JSON

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        """tokens [b, n] of texts, mask [b, n] bool, on the host: written by the target; scores of a full causal pass over
        them (hidden [b, n, H] before the final norm, taps, logits if needed). Returns the loss, 0 if there is nothing to
        learn from, and figures as 0-d tensors: accuracies by head ("top1/1", "top5/1", "top1/2", ...), and over how many
        rows they are means ("rows/1", ...)."""
