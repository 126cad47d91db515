"""Guesser: a small language model that reads along with the target, and then its own guesses, level by level.

It is made of the target's first layers, or is another model with the same vocabulary. In: the text as `State` has it, and
guesses with the rows that they hang on. Out: rows for a head. Its cache holds what comes before the root, or less: what was
decided since it last guessed is read together with the root, in one pass of fixed shape. Within a round the root is the
first scratch row and every guess that is read one more; nothing of them is kept, so there is nothing to roll back.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from foreword.core.draft import Tree, hanging
from foreword.core.heads import norm_like
from foreword.core.sampling import SamplingRows, guesses
from foreword.core.state import Lanes, State
from foreword.core.target import Target
from foreword.core.trees import LEVEL_KERNELS
from foreword.core.vocabulary import Words
from foreword.errors import DrafterError, InputError
from foreword.model.cache import SlotCache
from foreword.model.model import Model
from foreword.model.stack import Rows, Stack

KERNELS = 6  # of a layer: four products, and attention, which takes two
FOLLOWED = 2  # rows


class FirstLayers(nn.Module):
    """Layers that start as the target's first ones, and a norm that starts as its last."""

    def __init__(self, target: Target, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers, self.norm = layers, norm_like(target)


class Guesser:
    module: FirstLayers
    stack: Stack

    def __init__(self, method: str, layers: int, other: Model | None = None) -> None:
        """`method` is whose errors speak. `other`: a model to guess with, in place of `layers` of the target."""
        if layers < 1:
            raise InputError(f"{method}: layers is {layers}; a model has at least 1")
        self.method, self.layers, self.other = method, layers, other
        self.words = Words()

    def bind(self, target: Target, slots: int, ahead: int, scratch: int) -> None:
        """`ahead`: how many guesses of a round may be right, and so how far the text may run ahead of the cache; `scratch`:
        how many rows a round's guesses may have. Bound again, as by another engine, it keeps what it learned."""
        self.target, self.ahead = target, ahead
        self.words.bind(target if self.other is None else self.other)
        if self.other is not None:
            check_other(self.method, self.other, target)
            self.stack = self.other.layer_stack
            self.stack.allocate(slots, target.context, scratch)
        elif not hasattr(self, "module"):
            check_layers(self.method, self.layers, target)
            self.stack = target.stack(slots, self.layers, init=range(self.layers), scratch=scratch)
            self.module = FirstLayers(target, self.stack.layers)
        else:
            self.stack.allocate(slots, target.context, scratch)

    def level_part(self, target: Target) -> float:
        """What a level of guesses reads, as a part of the target's pass over one row."""
        if self.other is not None:
            return target.part(sum(weight.numel() for weight in self.other.hf.parameters()))
        head = target.part(target.vocab_size * target.hidden_size)
        return self.words.part(target) + (1 - head) * self.layers / target.layers

    @property
    def level_kernels(self) -> int:
        """How many kernels a level of guesses is, on CUDA."""
        return LEVEL_KERNELS + KERNELS * (self.layers if self.other is None else self.other.layers)

    @property
    def cache(self) -> SlotCache:
        assert self.stack.cache is not None
        return self.stack.cache

    def embed(self, tokens: Tensor) -> Tensor:
        if self.other is None:
            return self.target.embed(tokens)
        return self.other.embed(tokens.clamp(max=self.other.vocab_size - 1))  # the target's padding may be longer

    def norm(self, rows: Tensor) -> Tensor:
        return self.module.norm(rows) if self.other is None else self.other.norm(rows)

    def guesses(self, rows: Tensor, position: Tensor | None, sampling: SamplingRows, k: int) -> tuple[Tensor, Tensor]:
        """As `Words.guesses`; another model's vocabulary, whose padding may be longer, ends where the target's does."""
        logits = self.words.head(rows)[..., : self.target.vocab_size]
        return guesses(logits, position, sampling, k, self.words.tokens)

    def begin(self, state: State) -> None:
        """Sequences enter. Of what a slot holds the cache may lack the last few rows: they are read with the prompt."""
        known = torch.minimum(self.cache.length[state.slots], state.length)
        self.stack.restart(state.lanes, known)

    def read(self, state: State, count: int) -> None:
        """The text grew by up to `count` tokens of the prompt."""
        self._catch_up(state, count + self.ahead + 1)

    def root(self, state: State) -> Branches:
        """What was decided since the last round, and the root."""
        rows, length, place = self._catch_up(state, self.ahead + 2)
        at_root = rows.gather(1, place.view(-1, 1, 1).expand(-1, 1, rows.shape[2]))
        return Branches(self, state.lanes, length, self.norm(at_root))

    def follow(self, state: State) -> None:
        """Where nothing is guessed: one row more than such a round decides, so that ever less is left unread."""
        base, length, tokens, _ = unread(state, self.cache, FOLLOWED)
        self.stack.walk(self.embed(tokens), Rows.behind(base, FOLLOWED, state.lanes))
        self.cache.rewind(state.lanes, torch.minimum(length, base + FOLLOWED))

    def over(self, tokens: Tensor) -> Tensor:
        """Whole texts [b, n] without a cache, as they are trained on: [b, n, H], before the norm."""
        return self.stack.over(self.embed(tokens))

    def _catch_up(self, state: State, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Read `count` rows of the text, from the first that is not cached on; those before the root are committed. The rows
        [b, count, H], how many come before the root [b], and which of the rows is the root's [b]. What stands behind the
        root is padding that no row looks at."""
        base, length, tokens, place = unread(state, self.cache, count)
        walked = self.stack.walk(self.embed(tokens), Rows.behind(base, count, state.lanes)).hidden
        self.cache.rewind(state.lanes, length)
        return walked, length, place


class Branches:
    """The rows of one round behind the text: the root, and the guesses that were read so far, level by level."""

    def __init__(self, guesser: Guesser, lanes: Lanes, length: Tensor, root: Tensor) -> None:
        self.guesser, self.lanes, self.length = guesser, lanes, length
        self.rows = root  # [b, w, H] of the level that was read last, behind the norm
        self.sees = Tree.chain(1, root.device).ancestors  # [b or 1, w, m] theirs
        self.widths: tuple[int, ...] = (1,)  # of all levels that were read

    def read(self, tokens: Tensor, parent: Tensor) -> Tensor:
        """Guesses [b, w] that hang on rows `parent` [b, w] of the level that was read last: [b, w, H]."""
        self.sees, self.widths = hanging(self.sees, parent), (*self.widths, tokens.shape[1])
        rows = Rows(self.length, _depth(self.widths, tokens.device), self.sees, self.lanes)
        self.rows = self.guesser.norm(self.guesser.stack.walk(self.guesser.embed(tokens), rows).hidden)
        return self.rows


@cache
def _depth(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """[1, m]: of rows that lie level by level. Made once, and it stays where it is: captured rounds read it."""
    return torch.tensor([[level for level, width in enumerate(widths) for _ in range(width)]], device=device)


def unread(state: State, held: SlotCache, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How many rows of the text are cached [b], how many come before the root [b], `count` tokens from the first that is not
    cached on [b, count], and which of them is the root [b]."""
    if state.slots.is_cuda:
        from foreword.kernels.catch_up import catch_up  # noqa: PLC0415  Triton is there only where CUDA is

        return catch_up(state, held.length, count)
    length = state.length
    base = torch.minimum(held.length[state.slots], length)  # a slot that only pads may have been cut
    column = (base.unsqueeze(1) + Tree.chain(count, base.device).depth).clamp(max=state.tokens.shape[1] - 1)
    tokens = state.tokens[state.slots.unsqueeze(1), column]
    return base, length, tokens, (length - base).clamp(max=count - 1)  # further only where nothing was read, as in a timing


def check_layers(method: str, layers: int, target: Target) -> None:
    if layers > target.layers:
        told = f"layers is {layers}, but {target.name} has {target.layers}"
        raise DrafterError(f"{method}: {told}; ask for no more")


def check_other(method: str, other: Model, target: Target) -> None:
    """Refuse a model that cannot guess for the target."""
    check_vocabulary(method, other, target)
    check_context(method, other, target)


def check_context(method: str, other: Model, target: Target) -> None:
    if other.max_context < target.context:
        told = f"{other.name} reads {other.max_context} tokens, the target's texts may have {target.context}"
        raise DrafterError(f"{method}: {told}; load the target with max_context={other.max_context}, or take another model")


def check_vocabulary(method: str, other: Model, target: Target) -> None:
    """Refuse a model that reads another vocabulary than the target. Where no tokenizer is known the sizes have to do."""
    if other.pieces is None or target.pieces is None:
        if other.vocab_size != target.vocab_size:
            told = f"{other.name} has {other.vocab_size} tokens and {target.name} has {target.vocab_size}"
            raise DrafterError(f"{method}: {told}; take a model with the target's vocabulary")
        return
    ours, theirs = target.pieces(), other.pieces()
    for token in range(max(len(ours), len(theirs))):
        one, two = (pieces[token] if token < len(pieces) else "" for pieces in (ours, theirs))  # "" is padding
        if one != two:
            told = f"token {token} is {one!r} to {target.name} and {two!r} to {other.name}"
            raise DrafterError(f"{method}: {told}; a model that guesses needs the target's vocabulary, token by token")
