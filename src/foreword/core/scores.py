"""The results of a round: `Scores` of the target, `Accepted` rows, and the `Emission` that the host reads."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from foreword.ops.rows import along


@dataclass(frozen=True)
class Scores:
    """The answer of VERIFY, for the N rows of a pass and the R rows grafted onto it.

    `hidden` is taken after the last layer and before the final norm. Fields that `Needs` did not ask for are empty, except
    the logits of a round, which the engine itself needs.
    """

    logits: Tensor | None = None  # [b, N, V] in the dtype of the model; `ops.top.at_least_float32` widens them
    hidden: Tensor | None = None  # [b, N, H]
    taps: dict[int, Tensor] = field(default_factory=dict)  # layer -> [b, N, H]
    grafted: Tensor | None = None  # [b, R, H], rows of all grafts in their order

    def require_logits(self) -> Tensor:
        assert self.logits is not None, "this pass was run without its head"
        return self.logits

    def require_hidden(self) -> Tensor:
        assert self.hidden is not None, "Needs(hidden=True) was not declared"
        return self.hidden


@dataclass(frozen=True)
class Accepted:
    """The answer of ACCEPT: the path from the root to the last row that the target agrees with.

    Rows `path[:, :count]` are committed, root first, and `next` is the target's own token after them. So a round decides
    exactly `count` tokens. Both are already cut where the sequence ends (end token, length). `count` is 0 for a frozen slot,
    and after a NaN.
    """

    path: Tensor  # [b, D+1]
    count: Tensor  # [b]
    next: Tensor  # [b]

    @property
    def last(self) -> Tensor:
        """[b]: the deepest accepted row, whose logits gave `next`."""
        return self.path.gather(1, (self.count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)

    def along(self, rows: Tensor) -> Tensor:
        """Take the rows of the path from those of a pass [b, N, H], in its order: [b, D+1, H]. The first `count` are
        accepted."""
        return along(rows, self.path)

    @property
    def kept(self) -> Tensor:
        """[b, D+1] bool: which entries of `path` are accepted."""
        return torch.arange(self.path.shape[1], device=self.path.device) < self.count.unsqueeze(1)


BLOCK_PARTS = ("tokens", "count", "drafted", "ended", "broken")


@dataclass(frozen=True)
class Emission:
    """What a round decided. `emit` reads it on the host."""

    tokens: Tensor  # [b, D+1] the first `count` entries are new output
    count: Tensor  # [b]
    drafted: Tensor  # [b] candidates that were checked, the root not counted
    ended: Tensor  # [b] bool: an end token or a limit was reached in this round
    broken: Tensor  # [b] bool: the target answered NaN, so that nothing was decided
    logprobs: Tensor | None = None  # [b, D+1] of each emitted token, before penalties, temperature and filters
    top_tokens: Tensor | None = None  # [b, D+1, K] the likeliest alternatives
    top_logprobs: Tensor | None = None
    predicted: Tensor | None = None  # [b] how many of the first tokens were drafted from the request's prediction
    nodes: Tensor | None = None  # [b, N, 3] token, parent and origin of each row of the draft
    chances: Tensor | None = None  # [b, N] probability of each row's token after its parent, under the target itself
    path: Tensor | None = None  # [b, D+1] the accepted path: see `Accepted`
    block: Tensor | None = None  # the memory of the first five, so that they go to the host in one copy

    @staticmethod
    def in_a_block(batch: int, places: int, device: torch.device) -> Emission:
        """Allocate an emission in one block of memory, to be written."""
        return Emission._of_block(torch.empty(batch * (8 * (places + 2) + 2), dtype=torch.uint8, device=device), batch)

    @staticmethod
    def _of_block(block: Tensor, batch: int) -> Emission:
        numbers, flags = block[: -2 * batch].view(torch.long), block[-2 * batch :].view(torch.bool)
        tokens, count, drafted = numbers.split([len(numbers) - 2 * batch, batch, batch])
        return Emission(tokens.view(batch, -1), count, drafted, flags[:batch], flags[batch:], block=block)

    def fetched(self) -> Emission:
        """Start a copy to the host, and return it. It is complete when the device has come this far; this does not wait."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        if self.block is not None:
            parts = {name: part for name, part in parts.items() if name not in BLOCK_PARTS}
        moved: dict[str, Any] = {n: part.to("cpu", non_blocking=True) for n, part in parts.items() if part is not None}
        if self.block is None:
            return replace(self, **moved)
        return replace(Emission._of_block(moved["block"], len(self.count)), **moved)
