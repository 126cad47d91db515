"""DRAFT: what followed the same tokens before. Find the longest match of the sequence's end earlier in the sequence, and
propose the tokens after it as a chain.

A match that overlaps the end is continued as a loop: a sequence that repeats with period p is drafted with period p. The
length of a chain depends on the length of the match and on what a row costs on this machine. No training, and no state but
the sequence itself. Paper: Saxena, Prompt Lookup Decoding (2023); also LLMA (arXiv 2304.04487).
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from foreword.core.draft import Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.trees import paying_rows
from foreword.errors import InputError
from foreword.ops.device import fixes_shapes
from foreword.ops.lookup import looked_up

MOST_ROWS = 16
# The share of rounds that accept a first, second, .. token of a chain, rounds that drafted none included:
# results/bench_cuda_48 at commit fa0b956.
KEPT = (0.246, 0.153, 0.119, 0.088, 0.073, 0.058, 0.047, 0.038, 0.035, 0.032, 0.029, 0.026, 0.024, 0.023, 0.022)


class PromptLookup(Drafter):
    paper = "Prompt Lookup Decoding, Saxena 2023; LLMA, arXiv 2304.04487"

    def __init__(
        self,
        rows: int | None = None,
        max_match: int = 5,
        min_match: int = 1,
        trust: tuple[float, ...] = (0.2, 0.55, 0.65, 0.8, 0.9),
    ) -> None:
        """Matches of `min_match` to `max_match` tokens count. `trust[m - 1]` is the probability that the token after a match
        of m tokens is right; each right token makes the match longer by one. Together with the row cost of this machine,
        that decides the length of a chain. The defaults suit the default model."""
        if not 1 <= min_match <= max_match:
            raise InputError(f"prompt_lookup: need 1 <= min_match <= max_match, got {min_match} and {max_match}")
        if len(trust) < max_match or not all(0 <= chance < 1 for chance in trust):
            raise InputError(f"prompt_lookup: trust needs {max_match} probabilities from 0 to below 1, got {trust}")
        self.wants_cost = rows is None
        self.rows, self.max_match, self.min_match, self.trust = rows, max_match, min_match, trust

    def bind(self, target: Target, slots: int) -> None:
        nodes = self.rows or MOST_ROWS
        self.shape = Shape(nodes, nodes - 1)
        self.target = target
        self._chains: dict[int, tuple[Tree, Tensor]] = {}

    def propose(self, state: State) -> Draft:
        chain, sizes = self._chain(len(state.batch.ids))
        tokens, size = looked_up(state.tokens, state.slots, state.lengths, sizes, chain.nodes, state.batch.span)
        return Draft(tokens, chain, size)

    def _chain(self, batch: int) -> tuple[Tree, Tensor]:
        """The chain of a round, and how many of its rows to draft by the length of the match [max_match + 1]. Decided once
        per batch size."""
        if batch not in self._chains:
            device = self.target.device
            rows, sizes = self._rows(batch, fixed=fixes_shapes(device))
            self._chains[batch] = Tree.chain(rows, device), torch.tensor(sizes, device=device)
        return self._chains[batch]

    def _rows(self, batch: int, fixed: bool) -> tuple[int, list[int]]:
        """The rows of a pass, and how many of them to draft by the length of the match. With `fixed` shapes a pass has the
        same rows whether they are used or not, so it gets as many as usually pay off."""
        rows = self.rows
        if rows is None and fixed:
            rows = paying_rows(self.target, batch, list(accumulate(KEPT, initial=1.0)))
        matches = range(self.min_match, self.max_match + 1)
        sizes = [rows or paying_rows(self.target, batch, self._expected(match)) for match in matches]
        return rows or self.shape.nodes, [1] * self.min_match + sizes

    def _expected(self, match: int) -> list[float]:
        """The tokens that 1, 2, .. rows are expected to decide after a match. Every right token makes the match longer."""
        chances = [self.trust[min(match + i, self.max_match) - 1] for i in range(self.shape.nodes - 1)]
        return list(accumulate(accumulate(chances, mul), initial=1.0))
