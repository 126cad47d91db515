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

from foreword.core.choosing import candidates
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
        self._head: DraftHead | None = None

    @property
    def count(self) -> int:
        """The size of the draft vocabulary. It is known once the head is bound."""
        if self.tokens is not None:
            return self.tokens.shape[0]
        assert self._target is not None, "bind comes first"
        return self._target.vocab_size

    def read_cost(self, target: Target) -> float:
        """Return what reading the head for these tokens costs; a one-row pass of the target costs 1."""
        count = target.vocab_size if self.bits is None else int(unpacked(self.bits, target.vocab_size, target.name).sum())
        return target.read_cost(count * target.hidden_size)

    def choose(self, bits: Tensor | None) -> None:
        """Change the draft vocabulary. The same choice moves no tensor, since captured rounds read them in place."""
        same = bits is self.bits or (bits is not None and self.bits is not None and torch.equal(bits, self.bits))
        self.bits = bits
        if self._target is not None and not same:
            self.bind(self._target)

    def bind(self, target: Target) -> None:
        """Copy the target's head rows for the draft vocabulary."""
        self._target = target
        if self.bits is None:
            self.tokens = self._head = None
            return
        chosen = unpacked(self.bits, target.vocab_size, target.name)
        self.tokens = chosen.nonzero().squeeze(1).to(target.device)
        if self.count < LEAST:
            found = f"its draft vocabulary has {self.count} of the {target.vocab_size} tokens of {target.name}"
            raise DrafterError(f"{found}, but {LEAST} are needed; choose them again with `foreword draft-vocabulary`")
        self._head = target.draft_head_of(self.tokens)

    def head(self, rows: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        """Return logits over the draft vocabulary, after a norm if there is one: [.., W]."""
        if self._head is not None:
            return self._head(rows, norm)
        assert self._target is not None, "bind comes first"
        return self._target.draft_head(rows, norm)

    def candidates(
        self, rows: Tensor, position: Tensor | None, sampling: SamplingRows, k: int, norm: nn.RMSNorm | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the k best tokens after rows [b, N, H] and their log-probabilities: [b, N, k] twice. See
        `choosing.candidates`. Probabilities are normalised over the draft vocabulary."""
        return candidates(self.head(rows, norm), position, sampling, k, self.tokens)


def packed(chosen: Tensor) -> Tensor:
    """Pack a choice of tokens [V] bool into a bitmap [V / 8, rounded up] uint8."""
    eights = functional.pad(chosen.to(torch.uint8), (0, -len(chosen) % 8)).view(-1, 8)
    return (eights << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def unpacked(bits: Tensor, vocab_size: int, name: str) -> Tensor:
    """Unpack a bitmap into a choice of tokens [V] bool. A bitmap over another vocabulary is refused."""
    fits = bits.dtype == torch.uint8 and bits.dim() == 1 and len(bits) == -(-vocab_size // 8)
    chosen = ((bits.cpu().unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().bool() if fits else None
    if chosen is None or chosen[vocab_size:].any():
        found = f"its draft vocabulary is a bitmap of {bits.numel()} bytes, but {name} has {vocab_size} tokens"
        raise DrafterError(
            f"{found}; load the target that the drafter was trained for, or run `foreword draft-vocabulary` with its data"
        )
    return chosen[:vocab_size]
