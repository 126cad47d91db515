"""What comes back from the target, what is kept of it, and what the world gets to see."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """VERIFY's answer, for the N rows of a pass and the R rows grafted onto it.

    `hidden` is taken after the last layer and before the final norm; what was not asked for in `Needs` is empty, except
    the logits of a round, which the engine itself needs.
    """

    logits: Tensor | None = None  # [b, N, V] in the dtype of the model; `sampling.widened` where one computes with them
    hidden: Tensor | None = None  # [b, N, H]
    taps: dict[int, Tensor] = field(default_factory=dict)  # layer -> [b, N, H]
    grafted: Tensor | None = None  # [b, R, H], rows of all grafts in their order

    def require_logits(self) -> Tensor:
        assert self.logits is not None, "this pass was run without its head"
        return self.logits

    def require_hidden(self) -> Tensor:
        assert self.hidden is not None, "Needs(hidden=True) was not declared"
        return self.hidden


def along(rows: Tensor, path: Tensor) -> Tensor:
    """Of rows [b, N, H] those of a path [b, n], in its order: [b, n, H]."""
    return rows.gather(1, path.unsqueeze(-1).expand(-1, -1, rows.shape[2]))


@dataclass(frozen=True)
class Accepted:
    """ACCEPT's answer: the way from the root to the last row that the target agrees with.

    Rows `path[:, :count]` are committed, root first, and `next` is the target's own token after them: so a round decides
    exactly `count` tokens. Both are already cut where the text ends (end token, length). `count` 0: a frozen slot, or a NaN.
    """

    path: Tensor  # [b, D+1]
    count: Tensor  # [b]
    next: Tensor  # [b]

    @property
    def last(self) -> Tensor:
        """[b]: the deepest accepted row, the one that `next` was read from."""
        return self.path.gather(1, (self.count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)

    def along(self, rows: Tensor) -> Tensor:
        """Of a pass's rows [b, N, H] those of the path, in its order: [b, D+1, H]; the first `count` count."""
        return along(rows, self.path)

    @property
    def kept(self) -> Tensor:
        """[b, D+1] bool: which entries of `path` count."""
        return torch.arange(self.path.shape[1], device=self.path.device) < self.count.unsqueeze(1)


BLOCK_PARTS = ("tokens", "count", "drafted", "ended", "broken")


@dataclass(frozen=True)
class Emission:
    """What a round decided; `emit` reads it on the host."""

    tokens: Tensor  # [b, D+1] the first `count` entries are the new text
    count: Tensor  # [b]
    drafted: Tensor  # [b] candidates that were checked, the root not counted
    ended: Tensor  # [b] bool: an end token or a limit was reached in this round
    broken: Tensor  # [b] bool: the target answered NaN, so that nothing was decided
    logprobs: Tensor | None = None  # [b, D+1] of each emitted token, before penalties, temperature and filters
    top_tokens: Tensor | None = None  # [b, D+1, K] the likeliest alternatives
    top_logprobs: Tensor | None = None
    block: Tensor | None = None  # bytes in which the first five lie, so that they go to the host in one copy

    @staticmethod
    def in_a_block(lanes: int, places: int, device: torch.device) -> Emission:
        """Room for one."""
        return Emission._of_block(torch.empty(lanes * (8 * (places + 2) + 2), dtype=torch.uint8, device=device), lanes)

    @staticmethod
    def _of_block(block: Tensor, lanes: int) -> Emission:
        numbers, flags = block[: -2 * lanes].view(torch.long), block[-2 * lanes :].view(torch.bool)
        tokens, count, drafted = numbers.split([len(numbers) - 2 * lanes, lanes, lanes])
        return Emission(tokens.view(lanes, -1), count, drafted, flags[:lanes], flags[lanes:], block=block)

    def fetched(self) -> Emission:
        """The same on its way to the host: complete when the device has come this far, and nothing waits for it here."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        if self.block is not None:
            parts = {name: part for name, part in parts.items() if name not in BLOCK_PARTS}
        moved: dict[str, Any] = {n: part.to("cpu", non_blocking=True) for n, part in parts.items() if part is not None}
        if self.block is None:
            return replace(self, **moved)
        return replace(Emission._of_block(moved["block"], len(self.count)), **moved)
