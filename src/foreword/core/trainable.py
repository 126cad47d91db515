"""Trainable: the interface of a drafter with weights, as the training loop sees it. It says which rows of the target it
learns from, and gives a loss. The training loop reads the data, updates the weights and saves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.target import Target


class DraftVocabulary(Protocol):
    """The tokens that a drafter proposes, where these are not all."""

    bits: Tensor | None  # [vocabulary / 8, rounded up] uint8, the first token lowest; None: all tokens

    @property
    def count(self) -> int: ...

    def choose(self, bits: Tensor | None) -> None:
        """Propose only these tokens from now on."""


class Trainable(Protocol):
    """A drafter with weights of its own, which learns from what the target generated."""

    needs: Needs  # hidden, taps, logits it wants of the target
    module: nn.Module  # the weights; build(target) makes them once, on the target's device
    wide: Mapping[str, Any]  # how the weights follow a target that was widened
    vocabulary: DraftVocabulary | None  # tokens that it proposes; it learns from all
    config: dict[str, Any]  # what rebuilds the same module (sizes, options); JSON

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, 0 if there is nothing to learn from, and figures as 0-d tensors: accuracies by head ("top1/1", "top5/1",
        "top1/2", ...), and the number of rows that they are means of ("rows/1", ...).

        tokens [b, n]: sequences. mask [b, n] bool, on the host: which tokens the target generated. scores: of a full causal
        pass over them (hidden [b, n, H] before the final norm, taps, logits if needed).
        """
