"""A small language model that reads the sequence along with the target, and then its own candidates, level by level.

It consists of the target's first layers, or it is another model with the same vocabulary. In: the sequence from `State`, and
candidates with the rows that they follow. Out: rows for a head. Its cache holds the rows before the root, or fewer. One pass
of fixed shape reads the tokens decided since its last draft, and the root. Within a round the root is the first scratch row,
and every candidate that is read adds one. None of them is kept, so nothing is rolled back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foreword.core.choosing import candidates
from foreword.core.sampling_table import SamplingRows
from foreword.core.state import Batch, State
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.heads import norm_like
from foreword.drafting.level_rows import LevelRows
from foreword.drafting.trees import LEVEL_KERNELS
from foreword.errors import DrafterError, InputError
from foreword.model.cache import SlotCache
from foreword.model.model import Model
from foreword.model.stack import Rows, Stack
from foreword.ops.unread import unread

KERNELS = 6  # per layer: four matrix products, and two for attention
FOLLOWED = 2  # rows read in a round that drafts nothing


class FirstLayers(nn.Module):
    """Layers that start as the target's first ones, and a norm that starts as its last."""

    def __init__(self, target: Target, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers, self.norm = layers, norm_like(target)


class SmallModel:
    """A small model and its cache."""

    module: FirstLayers
    stack: Stack

    def __init__(self, method: str, layers: int, other: Model | None = None) -> None:
        """method: the name in error messages. other: a model to draft with, in place of `layers` layers of the target."""
        if layers < 1:
            raise InputError(f"{method}: layers is {layers}; a model has at least 1")
        self.method, self.layers, self.other = method, layers, other
        self.vocabulary = VocabularyHead()

    def build(self, target: Target) -> None:
        """Copy the target's first layers, unless another model drafts."""
        if self.other is None:
            check_layers(self.method, self.layers, target)
            self.stack = target.stack(0, self.layers, init=range(self.layers))
            self.module = FirstLayers(target, self.stack.layers)

    def bind(self, target: Target, slots: int, ahead: int, scratch: int) -> None:
        """Allocate a cache. ahead: how many draft tokens of a round can be accepted, so how far the sequence can run ahead
        of the cache. scratch: how many rows the candidates of a round can have."""
        self.target, self.ahead = target, ahead
        self.vocabulary.bind(target if self.other is None else self.other)
        if self.other is not None:
            check_other(self.method, self.other, target)
            self.stack = self.other.layer_stack
        self.stack.allocate(slots, target.context, scratch)

    def level_cost(self, target: Target) -> float:
        """Return what reading the weights of one level costs; a one-row pass of the target costs 1."""
        if self.other is not None:
            return target.read_cost(sum(weight.numel() for weight in self.other.hf.parameters()))
        head = target.read_cost(target.vocab_size * target.hidden_size)
        return self.vocabulary.read_cost(target) + (1 - head) * self.layers / target.layers

    def level_kernels(self, target: Target) -> int:
        """Return how many kernels one level launches on CUDA."""
        return LEVEL_KERNELS + KERNELS * (self.layers if self.other is None else self.other.layers)

    @property
    def cache(self) -> SlotCache:
        assert self.stack.cache is not None
        return self.stack.cache

    def embed(self, tokens: Tensor) -> Tensor:
        if self.other is None:
            return self.target.embed(tokens)
        return self.other.embed(tokens.clamp(max=self.other.vocab_size - 1))  # the target's padded vocabulary may be longer

    def norm(self, rows: Tensor) -> Tensor:
        return self.module.norm(rows) if self.other is None else self.other.norm(rows)

    def candidates(self, rows: Tensor, position: Tensor | None, sampling: SamplingRows, k: int) -> tuple[Tensor, Tensor]:
        """Return `VocabularyHead.candidates`. If another model's vocabulary has more padding, cut it to the target's."""
        logits = self.vocabulary.head(rows)[..., : self.target.vocab_size]
        return candidates(logits, position, sampling, k, self.vocabulary.tokens)

    def copy(self, source: int, slot: int, rows: int) -> None:
        """Copy the first `rows` cached rows of a slot to another one, as far as they are cached."""
        self.stack.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        """Admit sequences. If a slot is reused, its last few rows may not be cached. They are read with the prompt."""
        known = torch.minimum(self.cache.length[state.slots], state.length)
        self.stack.restart(state.batch, known)

    def read(self, state: State, count: int) -> None:
        """Read up to `count` new tokens of the prompt."""
        self._catch_up(state, count + self.ahead + 1)

    def root(self, state: State) -> Branches:
        """Read the tokens decided since the last round, and the root."""
        rows, length, place = self._catch_up(state, self.ahead + 2)
        at_root = rows.gather(1, place.view(-1, 1, 1).expand(-1, 1, rows.shape[2]))
        return Branches(self, state.batch, length, self.norm(at_root))

    def follow(self, state: State) -> None:
        """Read along in a round that drafts nothing: one row more than the round decides, so that the backlog shrinks."""
        base, length, tokens, _ = unread(state, self.cache.length, FOLLOWED)
        self.stack.walk(self.embed(tokens), Rows.chain_after(base, FOLLOWED, state.batch))
        self.cache.rewind(state.batch, torch.minimum(length, base + FOLLOWED))

    def over(self, tokens: Tensor) -> Tensor:
        """Run over whole sequences [b, n] without a cache, for training: [b, n, H], before the norm."""
        return self.stack.walk_sequences(self.embed(tokens))

    def _catch_up(self, state: State, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Read `count` rows of the sequence from the first that is not cached, and commit those before the root.

        Returns the rows [b, count, H], how many rows come before the root [b], and which of the rows is the root's [b]. Rows
        after the root are padding that no row attends to.
        """
        base, length, tokens, place = unread(state, self.cache.length, count)
        walked = self.stack.walk(self.embed(tokens), Rows.chain_after(base, count, state.batch)).hidden
        self.cache.rewind(state.batch, length)
        return walked, length, place


class Branches:
    """The scratch rows of one round: the root, and the candidates that were read so far, level by level."""

    def __init__(self, model: SmallModel, batch: Batch, length: Tensor, root: Tensor) -> None:
        self.model, self.levels = model, LevelRows(batch, length)
        self.rows = root  # [b, w, H] of the level that was read last, after the norm

    def read(self, tokens: Tensor, parent: Tensor) -> Tensor:
        """Read candidates [b, w] that follow rows `parent` [b, w] of the level that was read last: [b, w, H]."""
        walked = self.model.stack.walk(self.model.embed(tokens), self.levels.add(parent)).hidden
        self.rows = self.model.norm(walked)
        return self.rows


def check_layers(method: str, layers: int, target: Target) -> None:
    if layers > target.layers:
        raise DrafterError(f"{method}: layers is {layers}, but {target.name} has {target.layers}; ask for no more")


def check_other(method: str, other: Model, target: Target) -> None:
    """Refuse a model that cannot draft for the target."""
    check_vocabulary(method, other, target)
    check_context(method, other, target)


def check_context(method: str, other: Model, target: Target) -> None:
    if other.max_context < target.context:
        found = f"{other.name} reads {other.max_context} tokens, but the target's sequences can have {target.context}"
        raise DrafterError(f"{method}: {found}; load the target with max_context={other.max_context}, or use another model")


def check_vocabulary(method: str, other: Model, target: Target) -> None:
    """Refuse a model whose vocabulary differs from the target's. Without tokenizers only the sizes are compared."""
    if other.pieces is None or target.pieces is None:
        if other.vocab_size != target.vocab_size:
            found = f"{other.name} has {other.vocab_size} tokens and {target.name} has {target.vocab_size}"
            raise DrafterError(f"{method}: {found}; use a model with the target's vocabulary")
        return
    ours, theirs = target.pieces(), other.pieces()
    for token in range(max(len(ours), len(theirs))):
        one, two = (pieces[token] if token < len(pieces) else "" for pieces in (ours, theirs))  # "" is padding
        if one != two:
            found = f"token {token} is {one!r} in {target.name} and {two!r} in {other.name}"
            raise DrafterError(f"{method}: {found}; a draft model needs the target's vocabulary, token by token")
