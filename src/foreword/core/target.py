"""Target: what a drafter may ask of the model that it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foreword.core.draft import Draft
from foreword.core.needs import Graft, Join, Joined, Needs, Skip
from foreword.core.scores import Scores
from foreword.core.state import Lanes


class RoughHead(Protocol):
    def __call__(self, hidden: Tensor, norm: nn.RMSNorm | None = None, /) -> Tensor: ...


class Target(Protocol):
    name: str
    hidden_size: int
    vocab_size: int
    layers: int
    attention_heads: int
    max_context: int  # positions it was trained for
    context: int  # tokens a text may have in this engine
    ends: Tensor  # [E] ids of the end tokens
    pieces: Callable[[], Sequence[str]] | None  # how a tokenizer spells every token, where one is known

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] ids to [..., H]."""

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm."""

    def head(self, hidden: Tensor) -> Tensor:
        """Normed hidden states to logits, in the dtype of the model; `sampling.widened` where one computes with them."""

    def rough_head(self, hidden: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        """Logits to guess by, never to decide by: those of `head`, or near them where that is quicker. A norm of the
        drafter's own may still have to come before."""

    def rough_head_of(self, tokens: Tensor) -> RoughHead:
        """The same for tokens [W] alone, from a copy of their rows as they are now: [.., W]."""

    def head_weight(self) -> Tensor:
        """[V, H]: what the head multiplies with. A row is how a token looks from behind the last layer."""

    def score(self, lanes: Lanes, draft: Draft, needs: Needs, skip: Skip | None = None, rows: range | None = None) -> Scores:
        """One pass over a tree, or over some of its rows while the scratch rows before them are kept."""

    def onward(self, lanes: Lanes, hidden: Tensor, layer: int, grafts: tuple[Graft, ...] = ()) -> Tensor:
        """Rows [b, n, H] as they would leave `layer`, a chain behind the committed text, through the layers above it, and
        what is grafted onto them: [b, n + R, H], before the final norm. Of the cache they write scratch rows only."""

    def beside(self, hidden: Tensor, layer: int, anchor: Tensor, joins: Sequence[Join]) -> Iterator[Joined]:
        """Whole texts [b, n, H] as they leave `layer`, walked on without a cache or gradients, and beside them the rows that
        join behind their anchors [b, A], with gradients: layer by layer, the first time before any other is walked."""

    def stack(self, slots: int, layers: int = 1, init: int | range | None = None, scratch: int = 64) -> Any:
        """New decoder layers of the target's kind, with a cache of their own, copied if `init` is given: from that layer, or
        each from one of a range."""

    def cost(self, rows: int, texts: int = 1) -> float:
        """What a pass over `rows` rows, those of so many texts together, costs on this machine, one row being 1.0."""

    def part(self, numbers: int) -> float:
        """What reading so many weights is of a pass over one row, which reads all of them."""

    def launches(self, kernels: int) -> float:
        """What so many small kernels, one behind the other in a captured round, are of a pass over one row."""
