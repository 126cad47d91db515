"""DRAFT: the words of a drafter, which are the tokens that it guesses among, and the target's head for these alone.

In: a bitmap over the vocabulary, or none for all of it; at `bind` the target, whose head's rows for them are copied. Out:
guesses, as tokens. A token that is no word is never guessed: the target then writes it without help. Verification reads the
whole head, so the text does not depend on the words.
Paper: FR-Spec (arXiv 2502.14856).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.core.sampling import SamplingRows, guesses
from foreword.core.target import RoughHead, Target
from foreword.errors import DrafterError

LEAST = 16  # words: no tree has more guesses behind a node, unless it is told to


class Words:
    def __init__(self) -> None:
        self.bits: Tensor | None = None  # [vocabulary / 8, rounded up] uint8, the first token lowest; None: all are words
        self.tokens: Tensor | None = None  # [W] their ids, in rising order; of all none is kept
        self._target: Target | None = None
        self._some: RoughHead | None = None

    @property
    def count(self) -> int:
        """Of those that were bound."""
        if self.tokens is not None:
            return self.tokens.shape[0]
        assert self._target is not None, "bind comes first"
        return self._target.vocab_size

    def part(self, target: Target) -> float:
        """What reading the head for them is of the target's pass over one row."""
        count = target.vocab_size if self.bits is None else int(unpacked(self.bits, target.vocab_size, target.name).sum())
        return target.part(count * target.hidden_size)

    def choose(self, bits: Tensor | None) -> None:
        """These are the words from now on. Where they are already, nothing moves: captured rounds read what is there."""
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
            raise DrafterError(f"{told}: choose them again with `foreword words`")
        self._some = target.rough_head_of(self.tokens)

    def head(self, rows: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        """Logits of the words to guess by, behind a norm if there is one: [.., W]."""
        if self._some is not None:
            return self._some(rows, norm)
        assert self._target is not None, "bind comes first"
        return self._target.rough_head(rows, norm)

    def guesses(
        self, rows: Tensor, position: Tensor | None, sampling: SamplingRows, k: int, norm: nn.RMSNorm | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k best tokens behind rows [b, N, H] and their log-chances, as `sampling.guesses` has them: twice [b, N, k].
        Chances are those among the words: that another token comes counts for nothing."""
        return guesses(self.head(rows, norm), position, sampling, k, self.tokens)


def packed(chosen: Tensor) -> Tensor:
    """[V] bool -> [V / 8, rounded up] uint8."""
    eights = functional.pad(chosen.to(torch.uint8), (0, -len(chosen) % 8)).view(-1, 8)
    return (eights << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def unpacked(bits: Tensor, vocab_size: int, name: str) -> Tensor:
    """[V] bool; a bitmap over another vocabulary is refused."""
    chosen = ((bits.cpu().unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().bool()
    if bits.dtype != torch.uint8 or bits.dim() != 1 or len(bits) != -(-vocab_size // 8) or chosen[vocab_size:].any():
        told = f"its words are {bits.numel()} bytes of a bitmap, but {name} has {vocab_size} tokens"
        raise DrafterError(f"{told}; load the target that the drafter was trained for, or `foreword words` with its data")
    return chosen[:vocab_size]
