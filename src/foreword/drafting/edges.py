"""Edges: how the token before changes what a row of a block predicts, without another pass.

All rows of a block are computed at once, so a row does not know which token is drafted before it. An edge corrects it
afterwards: a low-rank change of the row that the target's head reads, gated by the row itself. In training the token before
is the true one. In a round the changes are computed for every pair of neighbouring candidates, so that a tree follows the
likeliest paths, not the likeliest tokens of each place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foreword.core.sampling_table import SamplingRows
from foreword.core.target import Target
from foreword.drafting.heads import linear
from foreword.ops.rows import unit_rms
from foreword.ops.top import at_least_float32
from foreword.ops.transitions import after_live_nodes, likeliest_transitions

CANDIDATES = 16  # per place, of which those likeliest after a node are drafted


class Edges(nn.Module):
    """row + C (sigmoid(G row + g) * P e), where e is the embedding of the token before. C starts at 0."""

    def __init__(self, target: Target, rank: int) -> None:
        super().__init__()
        size = target.hidden_size
        self.gate, self.before = linear(target, size, rank), linear(target, size, rank, bias=False)
        self.after = linear(target, rank, size, bias=False)
        nn.init.zeros_(self.after.weight)

    def forward(self, rows: Tensor, before: Tensor) -> Tensor:
        """Condition normed rows [.., H] on the token before, by its embedding of unit RMS [.., H]."""
        return rows + self.after(self._mixed(rows, before))

    def changes(self, rows: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Return what forward adds to the products of rows [b, S, H] and head rows: [b, S, P, K].

        before [b, S, P, H]: embeddings of P tokens before each row. after [b, S, K, H]: rows of the head for K candidates.
        """
        return self._mixed(rows.unsqueeze(2), before) @ (after @ self.after.weight).transpose(-1, -2)

    def _mixed(self, rows: Tensor, before: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(rows)) * self.before(before)


@dataclass(frozen=True)
class Transitions:
    """The candidates of every place of a block, and those after each candidate of the place before."""

    candidates: Tensor  # [b, B, K]
    log_probs: Tensor  # [b, B, K]
    next_tokens: Tensor  # [b, B - 1, K, k]: from the second place on, best first
    next_log_probs: Tensor  # [b, B - 1, K, k]

    @staticmethod
    def of(
        edges: Edges,
        rows: Tensor,
        found: tuple[Tensor, Tensor],
        table: Tensor,
        target: Target,
        sampling: SamplingRows,
        k: int,
    ) -> Transitions:
        """Keep the k likeliest after each candidate.

        rows [b, B, H]: of the block, normed. found: their candidates and log-probabilities [b, B, K]. table [V, H]: the rows
        of the target's head.
        """
        candidates, log_probs = found
        head_rows, later = table[candidates], rows[:, 1:]
        after = head_rows[:, 1:]
        changes = at_least_float32(edges.changes(later, unit_rms(head_rows[:, :-1]), after))
        if target.after_head(changes) is not changes:  # logits are scaled or capped, so a change depends on the logit
            products = at_least_float32((after @ later.unsqueeze(-1)).transpose(-1, -2))  # [b, B - 1, 1, K]
            changes = target.after_head(products + changes) - target.after_head(products)
        temperature = sampling.temperature if sampling.kind.noise else None
        return Transitions(candidates, log_probs, *likeliest_transitions(changes, candidates, log_probs, temperature, k))

    def after(self, level: int, live: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        """`NextCandidates` of drafting/trees."""
        if level == 1:
            k = self.next_tokens.shape[3]
            return self.candidates[:, :1, :k], self.log_probs[:, :1, :k]
        place = level - 2
        return after_live_nodes(live, self.candidates[:, place], self.next_tokens[:, place], self.next_log_probs[:, place])
