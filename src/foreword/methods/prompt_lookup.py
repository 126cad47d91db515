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
from foreword.errors import InputError


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
        nodes = self.rows or 16
        self.shape = Shape(nodes, nodes - 1)
        self.tree = Tree.chain(nodes, target.device)
        self.target = target
        self._sizes: dict[int, Tensor] = {}

    def propose(self, state: State) -> Draft:
        sizes = self._chain_sizes(len(state.lanes.ids))
        if state.slots.is_cuda:
            from foreword.kernels.lookup import looked_up  # noqa: PLC0415  Triton is there only where CUDA is

            tokens, size = looked_up(state.tokens, state.slots, state.lengths, sizes, self.shape.nodes)
            return Draft(tokens, self.tree, size)
        return self._look_up(state, sizes)

    def _look_up(self, state: State, sizes: Tensor) -> Draft:
        """As torch operations."""
        text, end = state.tokens[state.slots], state.length  # [b, L], [b]
        text = text[:, : state.lanes.span + 1]
        matched, place = self._longest_match(text, end)
        ahead = torch.arange(self.shape.nodes - 1, device=end.device)
        period = (end - place).unsqueeze(1)
        source = place.unsqueeze(1) + 1 + ahead % period
        tokens = torch.cat([state.root.unsqueeze(1), text.gather(1, source)], dim=1)
        return Draft(tokens, self.tree, sizes[matched])

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

    def _chain_sizes(self, batch: int) -> Tensor:
        """Rows worth checking, by the length of the match [max_match + 1]; settled once per batch size."""
        if batch not in self._sizes:
            rows = range(1, self.shape.nodes + 1)
            cost = [self.target.cost(batch * n, batch) for n in rows]
            sizes = [1]
            for match in range(1, self.max_match + 1):
                gain = [promised / spent for promised, spent in zip(self._promise(match), cost, strict=True)]
                wanted = self.rows or rows[gain.index(max(gain))]
                sizes.append(wanted if match >= self.min_match else 1)
            self._sizes[batch] = torch.tensor(sizes, device=self.tree.parent.device)
        return self._sizes[batch]

    def _promise(self, match: int) -> list[float]:
        """Tokens that 1 .. nodes rows are expected to decide after a match: every right one makes the match longer."""
        chances = [self.trust[min(match + i, self.max_match) - 1] for i in range(self.shape.nodes - 1)]
        return list(accumulate(accumulate(chances, mul), initial=1.0))
