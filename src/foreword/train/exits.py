"""Figures of a looped model's exits: how good the head's predictions are after each repeat of the group of layers.

In: held-out sequences, and the states after each repeat. Out: the loss of each exit, how often it predicts the token that
the last one predicts, and after how many repeats the prediction stays. The last is also the number of rounds per token of a
pipeline that checks every exit, as far as the sequences are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foreword.core.needs import Needs
from foreword.drafting.lessons import chunks_of
from foreword.model.model import Model
from foreword.train.evaluate import autocast_for
from foreword.train.schedule import TrainingData, TrainingSettings, padded

Exits = Callable[[Tensor], Sequence[Tensor]]  # tokens [b, n] -> normed states [b, n, H] after each repeat


@dataclass(frozen=True)
class ExitFigures:
    """Means over the tokens that the original generated. Losses are cross-entropies in nats."""

    losses: list[float]  # by repeat
    agreements: list[float]  # share of the predictions that are those of the last repeat, by repeat
    settled: float  # repeats after which the prediction stays the same
    original: float  # the loss of the model that generated the sequences
    tokens: int

    @property
    def final(self) -> float:
        """The loss of the model."""
        return self.losses[-1]

    @property
    def first(self) -> float:
        """The loss if it were cut after its first repeat."""
        return self.losses[0]

    def to_dict(self) -> dict[str, Any]:
        found = {"final": self.final, "first": self.first, "original": self.original, "settled": self.settled}
        return found | {"losses": self.losses, "agreements": self.agreements, "tokens": self.tokens}


def exits_of(model: Model) -> Exits:
    """Return the exits of a looped model."""
    group = model.layers // model.repeats
    needs = Needs(taps=tuple(range(group, model.layers + 1, group)))

    def exits(tokens: Tensor) -> list[Tensor]:
        return [model.norm(state) for state in model.read(tokens, needs).taps.values()]

    return exits


@torch.no_grad()
def measure_exits(
    exits: Exits,
    head: Callable[[Tensor], Tensor],
    original: Model,
    data: TrainingData,
    settings: TrainingSettings,
    at_once: int,
) -> ExitFigures:
    """Measure exits on held-out sequences. `head`: the head that reads their states."""
    count = min(settings.texts_apart, len(data.lengths))
    order = data.lengths[:count].argsort(stable=True).tolist()
    sums = torch.zeros(0, dtype=torch.double)
    for first in range(0, count, at_once):
        tokens, mask = padded(data, order[first : first + at_once], settings.max_length, original.device)
        rows = functional.pad(mask[:, 1:], (0, 1)).flatten().nonzero().squeeze(1).to(tokens.device)  # before each of them
        with autocast_for(original):
            states = [state.flatten(0, 1)[rows] for state in exits(tokens)]
            own = original.norm(original.read(tokens, Needs(hidden=True)).require_hidden()).flatten(0, 1)[rows]
            found = _sums(states, head, own, original, tokens.flatten()[rows + 1])
        sums = found if not len(sums) else sums + found
    total, *means = [sums[0].item(), *(sums[1:] / sums[0]).tolist()]
    repeats = (len(means) - 2) // 2
    return ExitFigures(means[2 : 2 + repeats], means[2 + repeats :], means[0], means[1], int(total))


def _sums(
    states: Sequence[Tensor], head: Callable[[Tensor], Tensor], own: Tensor, original: Model, labels: Tensor
) -> Tensor:
    """Return sums over rows [R, H]: how many there are, repeats until they settle, the original's loss, then the losses and
    agreements of each repeat. Logits are computed for a few rows at a time."""
    sums = torch.zeros(3 + 2 * len(states), dtype=torch.double)
    for chunk in chunks_of(len(labels), original.vocab_size):
        logits = [head(state[chunk].to(original.dtype)).float() for state in states]
        picks = torch.stack([one.argmax(-1) for one in logits])  # [repeats, rows]
        agrees = picks == picks[-1]
        settled = len(states) + 1 - agrees.flip(0).int().cumprod(0).sum(0)
        losses = [_loss(one, labels[chunk]) for one in (original.head(own[chunk].to(original.dtype)).float(), *logits)]
        counted = [torch.ones_like(settled).sum(), settled.sum(), *losses, *agrees.sum(1)]
        sums += torch.stack([value.double() for value in counted]).cpu()
    return sums


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, reduction="sum")
