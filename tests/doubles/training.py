"""A small trainable drafter, and training data in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from doubles.drafters import LastHidden
from foreword.core.draft import Draft, Shape, Tree
from foreword.core.scores import Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead, packed


class TwoHeads(LastHidden):
    """A small Trainable: each head is a residual block on the last hidden state, followed by the target's own head."""

    def __init__(self, heads: int = 2) -> None:
        self.heads, self.config = heads, {"heads": heads}

    def build(self, target: Target) -> None:
        size = target.hidden_size
        self.module = nn.ModuleList(nn.Linear(size, size) for _ in range(self.heads)).to(target.device, target.dtype)

    def bind(self, target: Target, slots: int) -> None:
        super().bind(target, slots)
        self.shape = Shape(1 + self.heads, self.heads)

    def _logits(self, head: int, hidden: Tensor) -> Tensor:
        rows = self.target.norm(hidden)
        return self.target.head(rows + functional.silu(self.module[head](rows)))

    def propose(self, state: State) -> Draft:
        candidates = [self._logits(head, self.hidden[state.slots]).argmax(-1) for head in range(self.heads)]
        tokens = torch.stack([state.root, *candidates], dim=1)
        return Draft(tokens, Tree.chain(1 + self.heads), torch.full_like(state.root, 1 + self.heads))

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        total, figures = torch.zeros(()), {}
        noise = 1 + 0.01 * torch.randn(())  # a method may use random numbers: a resumed run must use the same
        for head in range(self.heads):
            ahead = head + 2  # the row before the root predicts what follows the root
            logits = self._logits(head, scores.require_hidden()[:, :-ahead])
            label, counts = tokens[:, ahead:], mask[:, ahead:]
            total = total + noise * functional.cross_entropy(logits[counts], label[counts])
            figures[f"top1/{head + 1}"] = (logits.argmax(-1) == label)[counts].double().mean()
            figures[f"rows/{head + 1}"] = counts.sum()
        return total, figures


@dataclass(frozen=True)
class SequenceList:
    """Training sequences in memory. Satisfies `TrainingData`."""

    sequences: list[tuple[Tensor, Tensor]]

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(tokens) for tokens, _ in self.sequences])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.sequences[index]


def vocabulary_of(target: Target, chosen: Tensor | None = None) -> VocabularyHead:
    """Return a draft vocabulary of the chosen tokens [V] bool, or of all tokens."""
    vocabulary = VocabularyHead()
    vocabulary.choose(None if chosen is None else packed(chosen))
    vocabulary.bind(target)
    return vocabulary
