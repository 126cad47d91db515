"""Blocks: rows for the root and the B - 1 tokens after it, of which row k predicts the token k + 1 places after the root.

A token that is not known yet has a mask in its row. In a round all are masked first; later passes show some of what the
first one predicted. Training shows true tokens too: it hides a random share of a block, and part of the hidden ones is
replaced or left in place, so that a row does not trust what it sees. Shapes: [..] is [b] in a round and [b, A] in training.
Papers: GMLM (arXiv 2407.21046), DisCo (arXiv 2001.05136), D-PACE (arXiv 2605.18810).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.lessons import Anchors, Labels, LearnedHead, figures_of, row_losses
from foreword.ops.sending import sent_along

MASKED, REPLACED = 0.8, 0.1  # shares of the hidden tokens; the rest is left in place
SURE = 0.5  # in the weights of `paced`, every token is right at least this often


class BlockRows(NamedTuple):
    """The m rows of a pass over blocks: the B that predict, and then those that only hold a token, if there are any."""

    rows: Tensor  # [.., m, H], normalised
    depth: Tensor  # [m]: places after the root
    sees: Tensor  # [.., m, m] or [m, m]: the rows of the same block that each attends to


def as_slots(root: Tensor, predicted: Tensor) -> Tensor:
    """Return the tokens in the rows of a block, if the tokens after the root are those predicted [.., B]: [.., B]. The last
    one has no row."""
    return torch.cat([root.unsqueeze(-1), predicted[..., :-1]], dim=-1)


def ranks(confidence: Tensor) -> Tensor:
    """Return how many of [.., m] come before each: larger ones, and equal ones that stand earlier."""
    own, other, count = confidence.unsqueeze(-1), confidence.unsqueeze(-2), confidence.shape[-1]
    earlier = torch.ones(count, count, dtype=torch.bool, device=confidence.device).tril(-1)
    return ((other > own) | ((other == own) & earlier)).sum(-1)


def kept(tokens: Tensor, confidence: Tensor, count: int) -> Tensor:
    """Return which tokens after the root stay for the next pass: the `count` surest ones, except repetitions of the token
    before, which are the usual mistake of tokens that were predicted independently.

    tokens [.., B]: the root first. confidence [.., B - 1]: of the others. Returns [.., B] bool; the root always stays.
    """
    stays = (ranks(confidence) < count) & (tokens[..., 1:] != tokens[..., :-1])
    return functional.pad(stays, (1, 0), value=True)


def easier(confidence: Tensor) -> Tensor:
    """Return which tokens each prediction may use, in the order of the confidence [.., B] of the first pass: those that
    are surer. [.., B, B - 1] bool, for the tokens that have a row."""
    order = ranks(confidence)
    return order[..., :-1].unsqueeze(-2) < order.unsqueeze(-1)


# Training ----------------------------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """The blocks that training shows."""

    tokens: Tensor  # [b, A, B]: the root first
    shown: Tensor  # [b, A, B] bool: whether a row has its token or a mask
    counts: Tensor  # [b, A, B] bool: predictions to learn from


def all_masked(anchors: Anchors) -> Shown:
    """Show the roots alone, as the first pass of a round does."""
    tokens = as_slots(anchors.before, anchors.labels)
    shown = torch.zeros_like(tokens, dtype=torch.bool)
    shown[..., 0] = True
    return Shown(tokens, shown, anchors.counts)


def partly_shown(anchors: Anchors, share: float, vocabulary: int) -> Shown:
    """Show a random part of the tokens in a `share` of the blocks, and nothing but the root in the others."""
    batch, count, size = anchors.labels.shape
    few = (batch, count, size - 1)
    partly, fate = torch.rand(batch, count, 1) < share, torch.rand(few)
    hidden = (torch.rand(few) < torch.rand(batch, count, 1)) | ~partly
    drawn = (hidden, ~hidden | (partly & (fate >= MASKED)), hidden & partly & (fate >= 1 - REPLACED))
    noise = torch.randint(vocabulary, few)
    hidden, visible, replaced, noise = (sent_along(one, anchors.place.device) for one in (*drawn, noise))
    tokens, _, counts = all_masked(anchors)
    tokens = torch.cat([tokens[..., :1], torch.where(replaced, noise, tokens[..., 1:])], dim=-1)
    visible = functional.pad(visible & anchors.counts[..., :-1], (1, 0), value=True)
    return Shown(tokens, visible, counts & functional.pad(hidden, (0, 1), value=True))


def random_views(anchors: Anchors, share: float) -> Tensor:
    """Return which true tokens each prediction sees: a random part in a `share` of the blocks, none in the others, and
    never the token that it predicts. [b, A, B, B - 1] bool."""
    batch, count, size = anchors.labels.shape
    partly = torch.rand(batch, count, 1, 1) < share
    visible = (torch.rand(batch, count, size, size - 1) < torch.rand(batch, count, size, 1)) & partly
    visible &= ~torch.eye(size, size - 1, dtype=torch.bool)
    return sent_along(visible, anchors.place.device) & anchors.counts[..., :-1].unsqueeze(-2)


def paced(chances: Tensor, counts: Tensor) -> Tensor:
    """Return the weights of predictions [R, B]: how much of the expected number of accepted tokens depends on each.

    chances [R, B]: log-probabilities of the true tokens. counts [R, B]: predictions that are learned from; the others do
    not end a draft, and bring nothing.
    """
    right = (SURE + (1 - SURE) * chances.exp()).where(counts, 1)
    reached = right.cumprod(-1) * counts
    return reached.flip(-1).cumsum(-1).flip(-1) * counts


@dataclass(frozen=True)
class BlockLosses:
    """The loss of predictions at chosen anchors."""

    anchors: Anchors
    hidden: Tensor  # [b, n, H] of the target, before its final norm
    target: Target
    vocabulary: VocabularyHead  # the tokens that can be drafted
    labels: Labels

    def of(self, rows: Tensor, counts: Tensor, conditioned: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of rows [b, A, B, H] that the target's head reads, and figures by place. counts [b, A, B].

        conditioned [b, A, B - 1, H]: the rows from the second on, conditioned on the token before. They are learned too, and
        say how far a draft gets.
        """
        anchors, size = replace(self.anchors, counts=counts), rows.shape[2]
        learned = LearnedHead.of(self.target, self.vocabulary.tokens)
        found = []
        for head in range(1, size + 1):
            outputs = [anchors.outputs(head, rows[:, :, head - 1])]
            if conditioned is not None and head > 1:
                outputs.append(anchors.outputs(head, conditioned[:, :, head - 2]))
            found.append(row_losses(outputs, learned, self._teacher(head), with_chances=True))
        weights = paced(torch.stack([some[-1].chances for some in found], dim=-1), counts.flatten(0, 1))
        shares = (weights / weights.sum().clamp(min=1e-9)).unbind(-1)
        parts = [one.weighted(share) for some, share in zip(found, shares, strict=True) for one in some]
        figures: dict[str, Tensor] = {}
        for head, (first, *others) in enumerate(found, start=1):
            figures |= figures_of(head, first.ranks, first.output.counts)
            figures |= {f"edge/{head}": figures_of(head, one.ranks, one.output.counts)[f"top1/{head}"] for one in others}
        return torch.stack(parts).sum(), figures

    def _teacher(self, head: int) -> Tensor | None:
        return self.target.norm(self.anchors.teacher(head, self.hidden)) if self.labels == "soft" else None
