"""DRAFT: the draft vocabulary, the tokens that a drafter chooses candidates from, and the target's head for these alone.

In: a bitmap over the vocabulary, or None for all of it; at `bind` the target, whose head rows for these tokens are copied.
Out: candidate tokens. A token outside the draft vocabulary is never drafted, so the target decides it alone. Verification
reads the whole head, so the output does not depend on the draft vocabulary.
Paper: FR-Spec (arXiv 2502.14856).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.core.choosing import guesses
from foreword.core.sampling_table import SamplingRows
from foreword.core.target import DraftHead, Target
from foreword.errors import DrafterError

LEAST = 16  # tokens: by default no tree has more candidates after a node


class VocabularyHead:
    """The draft vocabulary of one drafter."""

    def __init__(self) -> None:
        self.bits: Tensor | None = None  # [ceil(V / 8)] uint8, the first token in the lowest bit; None: all tokens
        self.tokens: Tensor | None = None  # [W] token ids in rising order; None: all tokens
        self._target: Target | None = None
        self._some: DraftHead | None = None

    @property
    def count(self) -> int:
        """The size of the draft vocabulary, once bound."""
        if self.tokens is not None:
            return self.tokens.shape[0]
        assert self._target is not None, "bind comes first"
        return self._target.vocab_size

    def part(self, target: Target) -> float:
        """The share of the target's one-row pass that reading the head for these tokens takes."""
        count = target.vocab_size if self.bits is None else int(unpacked(self.bits, target.vocab_size, target.name).sum())
        return target.part(count * target.hidden_size)

    def choose(self, bits: Tensor | None) -> None:
        """Change the draft vocabulary. If it is the same, nothing moves, since captured rounds read it in place."""
        same = bits is self.bits or (bits is not None and self.bits is not None and torch.equal(bits, self.bits))
        self.bits = bits
        if self._target is not None and not same:
            self.bind(self._target)

    def bind(self, target: Target) -> None:
        self._target = target
        if self.bits is None:
            self.tokens = self._some = None
            return
        chosen = unpacked(self.bits, target.vocab_size, target.name)
        self.tokens = chosen.nonzero().squeeze(1).to(target.device)
        if self.count < LEAST:
            told = f"its words are {self.count} of the {target.vocab_size} tokens of {target.name}; {LEAST} are needed"
            raise DrafterError(f"{told}: choose them again with `foreword draft-vocabulary`")
        self._some = target.draft_head_of(self.tokens)

    def head(self, rows: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        """Logits over the draft vocabulary, after a norm if there is one: [.., W]."""
        if self._some is not None:
            return self._some(rows, norm)
        assert self._target is not None, "bind comes first"
        return self._target.draft_head(rows, norm)

    def guesses(
        self, rows: Tensor, position: Tensor | None, sampling: SamplingRows, k: int, norm: nn.RMSNorm | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k best tokens after rows [b, N, H] and their log-probabilities, as in `sampling.guesses`: [b, N, k] twice.
        Probabilities are normalised over the draft vocabulary."""
        return guesses(self.head(rows, norm), position, sampling, k, self.tokens)


def packed(chosen: Tensor) -> Tensor:
    """[V] bool -> [V / 8, rounded up] uint8."""
    eights = functional.pad(chosen.to(torch.uint8), (0, -len(chosen) % 8)).view(-1, 8)
    return (eights << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def unpacked(bits: Tensor, vocab_size: int, name: str) -> Tensor:
    """[V] bool. A bitmap over another vocabulary is refused."""
    whole = bits.dtype == torch.uint8 and bits.dim() == 1 and len(bits) == -(-vocab_size // 8)
    chosen = ((bits.cpu().unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().bool() if whole else None
    if chosen is None or chosen[vocab_size:].any():
        told = f"its words are {bits.numel()} bytes of a bitmap, but {name} has {vocab_size} tokens"
        raise DrafterError(
            f"{told}; load the target that the drafter was trained for, or `foreword draft-vocabulary` with its data"
        )
    return chosen[:vocab_size]
