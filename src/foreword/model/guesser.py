"""Guesser: a small language model that reads along with the target, and then its own guesses, level by level.

In: the text as `State` has it, and guesses with the rows that they hang on. Out: rows for a head. Its cache holds what comes
before the root, or less: what was decided since it last guessed is read together with the root, in one pass of fixed shape.
Within a round the root is the first scratch row and every guess that is read one more; nothing of them is kept, so there is
nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foreword.core.draft import Tree
from foreword.core.state import State
from foreword.model.cache import SlotCache
from foreword.model.stack import Rows, Stack

Change = Callable[[Tensor], Tensor]


class Guesser:
    def __init__(
        self, stack: Stack, embed: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor], ahead: int
    ) -> None:
        """`ahead`: how many guesses of a round may be right, and so how far the text may run ahead of the cache."""
        self.stack, self.embed, self.norm, self.ahead = stack, embed, norm, ahead

    @property
    def cache(self) -> SlotCache:
        assert self.stack.cache is not None
        return self.stack.cache

    def begin(self, state: State) -> None:
        """Sequences enter. Of what a slot holds the cache may lack the last few rows: they are read with the prompt."""
        known = torch.minimum(self.cache.length[state.slots], state.length)
        self.stack.restart(state.lanes, known)

    def read(self, state: State, count: int) -> None:
        """The text grew by up to `count` tokens of the prompt."""
        self._catch_up(state, count + self.ahead + 1)

    def root(self, state: State) -> Branches:
        """What was decided since the last round, and the root."""
        rows, place = self._catch_up(state, self.ahead + 2)
        at_root = rows.gather(1, place.view(-1, 1, 1).expand(-1, 1, rows.shape[2]))
        return Branches(self, state, self.norm(at_root))

    def over(self, tokens: Tensor) -> Tensor:
        """Whole texts [b, n] without a cache, as they are trained on: [b, n, H], before the norm."""
        return self.stack.over(self.embed(tokens))

    def _catch_up(self, state: State, count: int) -> tuple[Tensor, Tensor]:
        """Read `count` rows of the text, from the first that is not cached on; those before the root are committed. The rows
        [b, count, H], and which of them is the root's [b]. What stands behind the root is padding that no row looks at."""
        base = torch.minimum(self.cache.length[state.slots], state.length)  # a slot that only pads may have been cut
        chain = Tree.chain(count, base.device)
        column = (base.unsqueeze(1) + chain.depth).clamp(max=state.tokens.shape[1] - 1)
        tokens = state.tokens[state.slots.unsqueeze(1), column]
        walked = self.stack.walk(self.embed(tokens), Rows(base, chain.depth, chain.ancestors, state.lanes)).hidden
        self.cache.rewind(state.lanes, state.length)
        return walked, (state.length - base).clamp(max=count - 1)  # further away only where nothing was read, as in a timing


class Branches:
    """The rows of one round behind the text: the root, and the guesses that were read so far, level by level."""

    def __init__(self, guesser: Guesser, state: State, root: Tensor) -> None:
        self.guesser, self.state = guesser, state
        self.rows = root  # [b, w, H] of the level that was read last, behind the norm
        self.sees = torch.ones(root.shape[0], 1, 1, dtype=torch.bool, device=root.device)  # [b, w, m] theirs
        self.depth = torch.zeros(1, 1, dtype=torch.long, device=root.device)  # [1, m]

    def read(self, tokens: Tensor, parent: Tensor) -> Tensor:
        """Guesses [b, w] that hang on rows `parent` [b, w] of the level that was read last: [b, w, H]."""
        width, place = tokens.shape[1], parent.unsqueeze(-1).expand(-1, -1, self.depth.shape[1])
        own = torch.arange(width, device=tokens.device)
        itself = (own == own.unsqueeze(1)).expand(tokens.shape[0], -1, -1)
        self.sees = torch.cat([self.sees.gather(1, place), itself], dim=2)
        self.depth = torch.cat([self.depth, (self.depth[:, -1:] + 1).expand(-1, width)], dim=1)
        rows = Rows(self.state.length, self.depth, self.sees, self.state.lanes)
        self.rows = self.guesser.norm(self.guesser.stack.walk(self.guesser.embed(tokens), rows).hidden)
        return self.rows
