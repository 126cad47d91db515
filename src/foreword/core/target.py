"""Target: the interface of the model, as a drafter sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from foreword.core.draft import Draft
from foreword.core.needs import Graft, Join, Joined, Needs, Skip
from foreword.core.scores import Scores
from foreword.core.state import Batch


class DraftHead(Protocol):
    def __call__(self, hidden: Tensor, norm: nn.RMSNorm | None = None, /) -> Tensor: ...


class Target(Protocol):
    name: str
    hidden_size: int
    vocab_size: int
    layers: int
    repeats: int  # how often its group of layers is applied; 1: it is no looped model
    attention_heads: int
    max_context: int  # positions it was trained for
    context: int  # tokens that a sequence may have in this engine
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
        """Normed hidden states to logits, in the dtype of the model. To compute with them, convert them by
        `ops.top.at_least_float32`."""

    def draft_head(self, hidden: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        """Logits for drafting, never for deciding: those of `head`, or approximate ones from int8 draft linears where that
        is faster. `norm` is a norm of the drafter's own that comes before the head."""

    def draft_head_of(self, tokens: Tensor) -> DraftHead:
        """The same for a draft vocabulary [W] alone, from a copy of its rows as they are now: [.., W]."""

    def after_head(self, products: Tensor) -> Tensor:
        """Turn products of normed states and rows of `head_weight` into logits: scaled and capped, in families that do."""

    def head_weight(self) -> Tensor:
        """[V, H]: the weight of the head. A row is the output embedding of a token."""

    def score(
        self,
        batch: Batch,
        draft: Draft,
        needs: Needs,
        skip: Skip | None = None,
        rows: range | None = None,
        logits: Literal["all", "none"] = "all",
    ) -> Scores:
        """Run one pass over a tree, or over some of its rows while the scratch rows before them are kept; with `skip`,
        without some half-layers."""

    def rerun(self, batch: Batch, tokens: Tensor, skip: Skip) -> Tensor:
        """Run the last committed tokens [b, n] of sequences once more, without some half-layers: [b, n, H], before the final
        norm. The rows before them are those of the whole target. The cache is left as it was."""

    def early(self, tokens: Tensor, rows: Any, layer: int) -> Tensor:
        """Run rows of a draft [b, n] through the first `layer` layers: [b, n, H]. `rows`, a `model.stack.Rows`, says where
        they stand and what they attend to. They write scratch rows of the cache only. A draft of these rows brings their
        states along (`Draft.early`), and the pass that verifies it runs the layers after `layer`."""

    def onward(self, batch: Batch, hidden: Tensor, layer: int, grafts: tuple[Graft, ...] = ()) -> Tensor:
        """Run rows [b, n, H] through the layers after `layer`, as a chain after the committed sequence, with the rows that
        are grafted onto them: [b, n + R, H], before the final norm. They write scratch rows of the cache only."""

    def alongside(self, hidden: Tensor, layer: int, anchor: Tensor, joins: Sequence[Join]) -> Iterator[Joined]:
        """Run whole sequences [b, n, H] through the layers after `layer`, without a cache or gradients, and alongside them
        the rows that join at their anchors [b, A], with gradients. Yields both: before the first layer, and after each."""

    def stack(
        self, slots: int, layers: int = 1, init: int | range | None = None, scratch: int = 64, mlp: bool = True
    ) -> Any:
        """New decoder layers of the target's kind, with a cache of their own, copied if `init` is given: from that layer, or
        each from one of a range. With `slots=0` the cache comes later, by `allocate(slots, context)`. Without `mlp` a layer
        is its attention alone."""

    def cost(self, rows: int, sequences: int = 1) -> float:
        """The cost on this machine of a pass over `rows` rows of `sequences` sequences together; a pass over one row is
        1.0."""

    def read_cost(self, weights: int) -> float:
        """The cost of reading `weights` weights. A pass over one row, which reads all weights, is 1.0."""

    def skip_cost(self, skip: Skip) -> float:
        """The cost of a pass over one row without some half-layers, by the weights that it reads. A whole one is 1.0."""

    def launch_cost(self, kernels: int) -> float:
        """The cost of that many small kernels in sequence in a recorded round. A pass over one row is 1.0."""
