"""DRAFT: what followed the same words before. The longest match of the text's ending is found earlier in the text,
and the tokens behind it are proposed as a chain.

Where the match runs into the text's end, the chain goes round: a loop of period p is continued as that loop. How far a
chain reaches depends on how long the match is and on what a row costs here. No training, no state but the text itself.
Paper: Saxena, Prompt Lookup Decoding (2023); also LLMA (arXiv 2304.04487).
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

MOST_ROWS = 16
# How often the first, second, .. token of a chain is kept, drafted or not: results/bench_cuda_48 at commit fa0b956.
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
        """Matches of `min_match` to `max_match` tokens count. `trust[m - 1]` is the chance that the token after a match of
        m tokens is right; once it is, the match is longer by one. With the machine's row cost that settles how far a
        chain reaches; the defaults suit the default model."""
        if not 1 <= min_match <= max_match:
            raise InputError(f"prompt_lookup: need 1 <= min_match <= max_match, got {min_match} and {max_match}")
        if len(trust) < max_match or not all(0 <= chance < 1 for chance in trust):
            raise InputError(f"prompt_lookup: trust needs {max_match} chances from 0 to below 1, got {trust}")
        self.wants_cost = rows is None
        self.rows, self.max_match, self.min_match, self.trust = rows, max_match, min_match, trust

    def bind(self, target: Target, slots: int) -> None:
        nodes = self.rows or MOST_ROWS
        self.shape = Shape(nodes, nodes - 1)
        self.target = target
        self._known: dict[int, tuple[Tree, Tensor]] = {}

    def propose(self, state: State) -> Draft:
        chain, sizes = self._settled(len(state.batch.ids))
        if state.slots.is_cuda:
            from foreword.ops.drafting.lookup import looked_up  # noqa: PLC0415  Triton is there only where CUDA is

            tokens, size = looked_up(state.tokens, state.slots, state.lengths, sizes, chain.nodes)
            return Draft(tokens, chain, size)
        return self._look_up(state, chain, sizes)

    def _look_up(self, state: State, chain: Tree, sizes: Tensor) -> Draft:
        """As torch operations."""
        text, end = state.tokens[state.slots], state.length  # [b, L], [b]
        text = text[:, : state.batch.span + 1]
        matched, place = self._longest_match(text, end)
        ahead = torch.arange(chain.nodes - 1, device=end.device)
        period = (end - place).unsqueeze(1)
        source = place.unsqueeze(1) + 1 + ahead % period
        tokens = torch.cat([state.root.unsqueeze(1), text.gather(1, source)], dim=1)
        return Draft(tokens, chain, sizes[matched])

    def _longest_match(self, text: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """How many tokens match [b], and where the match ends [b]: the longest, and of those the latest."""
        columns = torch.arange(text.shape[1], device=text.device)
        run = columns < end.unsqueeze(1)  # a match ends before the root
        matched = torch.zeros_like(text)
        for back in range(self.max_match):
            wanted = text.gather(1, (end - back).clamp(min=0).unsqueeze(1))
            same = (text == wanted).roll(back, dims=1) & (columns >= back) & (end >= back).unsqueeze(1)
            run = run & same
            matched += run
        best = (matched * text.shape[1] + columns).argmax(1, keepdim=True)
        longest = matched.gather(1, best).squeeze(1)
        # Without a match any place will do: the draft is the root alone. It must lie before the end, for the period.
        return longest, torch.minimum(best.squeeze(1), (end - 1).clamp(min=0)).where(end > 0, -1)

    def _settled(self, batch: int) -> tuple[Tree, Tensor]:
        """The chain of a round, and the rows of it that are used, by the length of the match [max_match + 1]; settled once
        per batch size."""
        if batch not in self._known:
            device = self.target.device
            rows, sizes = self._rows(batch, fixed=device.type == "cuda")
            self._known[batch] = Tree.chain(rows, device), torch.tensor(sizes, device=device)
        return self._known[batch]

    def _rows(self, batch: int, fixed: bool) -> tuple[int, list[int]]:
        """The same in numbers. Where rows are `fixed` as many are checked each time, used or not: as many as usually pay."""
        rows = self.rows
        if rows is None and fixed:
            rows = paying_rows(self.target, batch, list(accumulate(KEPT, initial=1.0)))
        counts = range(self.min_match, self.max_match + 1)
        sizes = [1] * self.min_match + [rows or paying_rows(self.target, batch, self._promise(match)) for match in counts]
        return rows or self.shape.nodes, sizes

    def _promise(self, match: int) -> list[float]:
        """Tokens that 1 .. nodes rows are expected to decide after a match: every right one makes the match longer."""
        chances = [self.trust[min(match + i, self.max_match) - 1] for i in range(self.shape.nodes - 1)]
        return list(accumulate(accumulate(chances, mul), initial=1.0))
