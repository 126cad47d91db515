"""DRAFT: what followed the same tokens before. Find the longest match of the sequence's end earlier in the sequence, or in
the text that the request predicts, and propose the tokens after it as a chain.

A match that overlaps the end is continued as a loop: a sequence that repeats with period p is drafted with period p. The
length of a chain depends on the length of the match and on what a row costs on this machine. No training, and no state but
the sequence itself. Paper: Saxena, Prompt Lookup Decoding (2023); also LLMA (arXiv 2304.04487).
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from foreword.core.draft import LOOKUP, PREDICTION, ROOT, Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.trees import paying_rows
from foreword.errors import InputError
from foreword.ops.device import fixes_shapes
from foreword.ops.lookup import Predictions, looked_up, looked_up_in_both

MOST_ROWS = 16
# The share of rounds that accept a first, second, .. token of a chain, rounds that drafted none included:
# results/bench_cuda_48 at commit fa0b956.
KEPT = (0.246, 0.153, 0.119, 0.088, 0.073, 0.058, 0.047, 0.038, 0.035, 0.032, 0.029, 0.026, 0.024, 0.023, 0.022)
# The probability that the token after a match of 1, 2, .. tokens in a prediction is right: results/prediction_edits.json.
PREDICTED = (0.2, 0.4, 0.5, 0.65, 0.98)


class Chains(NamedTuple):
    """The chains of rounds with one batch size. Each pair is of chains from the sequence, and of those from a prediction."""

    tree: Tree
    sizes: Tensor  # [2, max_match + 1] how many rows to draft, by the length of the match
    origins: Tensor  # [2, N] the origin of each row


class PromptLookup(Drafter):
    paper = "Prompt Lookup Decoding, Saxena 2023; LLMA, arXiv 2304.04487"
    copies = True
    predicts = True

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
        self._chains: dict[tuple[int, bool], Chains] = {}

    def propose(self, state: State) -> Draft:
        kind = state.sampling.kind
        tree, sizes, origins = self._chain(len(state.batch.ids), kind.predictions > 0)
        sequences = state.tokens, state.slots, state.lengths, sizes[0], tree.nodes, state.batch.span
        if not kind.predictions:
            tokens, size = looked_up(*sequences)
            return Draft(tokens, tree, size, origin=origins[:1])
        columns = state.table.columns
        predictions = Predictions(columns["predicted"], columns["predicted_span"], sizes[1], kind.predictions)
        tokens, size, is_predicted = looked_up_in_both(*sequences, predictions)
        return Draft(tokens, tree, size, origin=origins[is_predicted.long()])

    def _chain(self, batch: int, predicted: bool) -> Chains:
        """The chains of a round. Decided once per batch size. `predicted`: some requests of the round have a prediction."""
        if (batch, predicted) not in self._chains:
            device = self.target.device
            rows, sizes = self._rows(batch, fixes_shapes(device), predicted)
            origins = [[ROOT] + [origin] * (rows - 1) for origin in (LOOKUP, PREDICTION)]
            pairs = (torch.tensor(pair, device=device) for pair in (sizes, origins))
            self._chains[batch, predicted] = Chains(Tree.chain(rows, device), *pairs)
        return self._chains[batch, predicted]

    def _rows(self, batch: int, fixed: bool, predicted: bool = False) -> tuple[int, list[list[int]]]:
        """The rows of a pass, and how many of them to draft by the length of the match: in the sequence, and in a
        prediction. With `fixed` shapes a pass has the same rows whether they are used or not, so it gets as many as usually
        pay off. If an output may follow a prediction, it gets all."""
        rows = self.rows
        if rows is None and fixed:
            rows = self.shape.nodes if predicted else paying_rows(self.target, batch, list(accumulate(KEPT, initial=1.0)))
        sizes = [self._sizes(batch, rows, trust) for trust in (self.trust[: self.max_match], PREDICTED)]
        return rows or self.shape.nodes, sizes

    def _sizes(self, batch: int, rows: int | None, trust: tuple[float, ...]) -> list[int]:
        """How many rows to draft by the length of the match: `rows`, or as many as pay off."""
        matches = range(self.min_match, self.max_match + 1)
        sizes = [rows or paying_rows(self.target, batch, self._expected(match, trust)) for match in matches]
        return [1] * self.min_match + sizes

    def _expected(self, match: int, trust: tuple[float, ...]) -> list[float]:
        """The tokens that 1, 2, .. rows are expected to decide after a match. Every right token makes the match longer."""
        chances = [trust[min(match + i, len(trust)) - 1] for i in range(self.shape.nodes - 1)]
        return list(accumulate(accumulate(chances, mul), initial=1.0))
