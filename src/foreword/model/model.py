"""Model: embedding, Stack, norm and head of a transformers causal language model. The target is one, a draft model another.

In: a Draft and the slots it is for. Out: Scores for every row. The model's cache holds what comes before the root; a pass
writes scratch rows only, and the engine commits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import finalize

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foreword.core.draft import Draft
from foreword.core.needs import Graft, Join, Joined, Needs, Skip
from foreword.core.scores import Scores
from foreword.core.state import Batch
from foreword.core.target import DraftHead
from foreword.errors import ForewordWarning
from foreword.model import attention
from foreword.model import linears as pack
from foreword.model.cache import SharedCacheMemory, SlotCache
from foreword.model.cost import CostCurve
from foreword.model.draft_linears import DraftLinears
from foreword.model.families import family_of
from foreword.model.stack import Rows, Stack

KERNEL_S = 3e-6  # of a small kernel in a captured round, as a trace on an H200 shows it

if TYPE_CHECKING:
    from foreword.model.fingerprint import Fingerprint


@dataclass(frozen=True)
class WidenedFrom:
    """Of a model that is another one made wider, its function unchanged: how many times, and who the other one is."""

    times: int
    original: Fingerprint
    parameters: int  # of the wide one, counted as transformers does


class Model:
    """Satisfies `core.Target`."""

    def __init__(
        self,
        hf: PreTrainedModel,
        name: str | None = None,
        curve: CostCurve | None = None,
        grown: WidenedFrom | None = None,
        cache_memory: SharedCacheMemory | None = None,
    ) -> None:
        """With `cache_memory` the caches lie there, and those of other models may, too."""
        self.hf = hf
        self.device, self.dtype = hf.device, hf.dtype  # kept: transformers looks through the modules for them, every time
        self.family = family_of(hf.config)
        attention.install(hf)
        self._give_back = finalize(self, attention.remove, hf)  # also when nobody calls `release`
        self._give_back.atexit = False
        self.name = name or hf.config.name_or_path or hf.config.model_type
        self.layer_stack = Stack(hf, self.family, self.family.layers(hf))
        self._reader = Stack(hf, self.family, self.family.layers(hf))  # the same layers, and never a cache
        self._draft_linears = DraftLinears(hf.lm_head)
        self.hidden_size: int = hf.config.hidden_size
        self.vocab_size: int = hf.config.vocab_size
        self.attention_heads: int = hf.config.num_attention_heads
        self.layers = len(self.layer_stack.layers)
        self.ends = torch.tensor(_end_tokens(hf), dtype=torch.long, device=self.device)
        self.max_context: int = hf.config.max_position_embeddings
        self.context = self.max_context
        self.curve = curve
        self.grown = grown
        self.cache_memory = cache_memory
        self.pieces: Callable[[], Sequence[str]] | None = None

    def use_costs(self, curve: CostCurve | None) -> None:
        """Take what passes cost on this machine; None where that is not known, and every pass then counts 1.0."""
        self.curve = curve

    def use_pieces(self, pieces: Callable[[], Sequence[str]]) -> None:
        """Take how the tokenizer spells every token, for drafters that ask for it. It is called only when they do."""
        self.pieces = pieces

    def limit_context(self, context: int) -> None:
        """Say how many tokens a sequence may have. Drafters size their own caches by it, before `allocate`."""
        self.context = context

    @property
    def cache(self) -> SlotCache:
        assert self.layer_stack.cache is not None, "allocate() comes first"
        return self.layer_stack.cache

    def allocate(self, slots: int, context: int, scratch: int) -> SlotCache:
        self.context = context
        return self.layer_stack.allocate(slots, context, scratch, self.cache_memory)

    @contextmanager
    def aside(self, slots: int, context: int, scratch: int) -> Iterator[SlotCache]:
        """Another cache for a while, in memory of its own; the engine's is back in its place afterwards."""
        stack, before = self.layer_stack, (self.context, self.cache_memory)
        held = stack.cache, stack.fused, stack.turns  # the very ones: a captured round knows where they lie
        try:
            self.cache_memory = None
            yield self.allocate(slots, context, scratch)
        finally:
            stack.cache, stack.fused, stack.turns = held
            self.context, self.cache_memory = before

    def again(self, cache_memory: SharedCacheMemory | None = None) -> Model:
        """Another on the same weights, with a cache of its own."""
        return Model(self.hf, self.name, self.curve, self.grown, cache_memory)

    def release(self) -> None:
        """Give up the cache, and give the model back as it was: its own attention, and in training if it was."""
        self.layer_stack.free()
        self.cache_memory = None
        self._give_back()

    def rehearse(self) -> None:
        """Read one token, so that a layer which asks for what is not supported is refused now and not amid a request."""
        try:
            self.read(torch.zeros(1, 1, dtype=torch.long, device=self.device), Needs(logits=True))
        except BaseException:
            self.release()  # the caller never gets a Model to release
            raise

    def embed(self, tokens: Tensor) -> Tensor:
        return self.family.embed(self.hf, tokens)

    def norm(self, hidden: Tensor) -> Tensor:
        return self.family.norm(self.hf, hidden)

    def head(self, hidden: Tensor) -> Tensor:
        return self.family.head(self.hf, hidden)

    def draft_head(self, hidden: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        return self.family.after_head(self.hf, self._draft_linears(hidden, norm=norm))

    def draft_head_of(self, tokens: Tensor) -> DraftHead:
        some = DraftLinears(pack.some_of(self.hf.lm_head, tokens))

        def head(hidden: Tensor, norm: nn.RMSNorm | None = None, /) -> Tensor:
            return self.family.after_head(self.hf, some(hidden, norm=norm))

        return head

    def head_weight(self) -> Tensor:
        head: Any = self.hf.lm_head
        return (head.stock().weight if head.weight is None else head.weight).detach()  # a packed one may have given it up

    def cost(self, rows: int, texts: int = 1) -> float:
        return 1.0 if self.curve is None else self.curve.relative(rows, texts)

    def part(self, numbers: int) -> float:
        return numbers * self.dtype.itemsize / pack.read_bytes(self.hf)

    def launches(self, kernels: int) -> float:
        return 0.0 if self.curve is None else kernels * KERNEL_S / self.curve.at(1)

    def stack(self, slots: int, layers: int = 1, init: int | range | None = None, scratch: int = 64) -> Stack:
        stack = Stack.copied(self.hf, self.family, layers, init)
        if slots:
            stack.allocate(slots, self.context, scratch)
        return stack

    def score(
        self,
        batch: Batch,
        draft: Draft,
        needs: Needs,
        skip: Skip | None = None,
        rows: range | None = None,
        logits: Literal["all", "none"] = "all",
    ) -> Scores:
        """One pass over a tree, or over some rows of it with the scratch rows before them kept."""
        attention.route(self.hf)
        rows = range(draft.nodes) if rows is None else rows
        part = slice(rows.start, rows.stop)
        where = Rows(
            base=batch.take(self.cache.length),
            depth=draft.tree.depth[:, : rows.stop],
            sees=draft.tree.ancestors[:, part, : rows.stop],
            batch=batch,
            chain=draft.tree.is_chain,
        )
        walked = self.layer_stack.walk(
            self.embed(draft.tokens[:, part]), where, skip=skip, grafts=needs.grafts, taps=needs.taps
        )
        return Scores(
            # As they are: to compare them, which is all that a greedy round does, they need not be any wider.
            logits=self.head(self.norm(walked.hidden)) if logits == "all" else None,
            hidden=walked.hidden if needs.hidden else None,
            taps=walked.taps,
            grafted=walked.grafted,
        )

    @torch.no_grad()
    def read(self, tokens: Tensor, needs: Needs) -> Scores:
        """A causal pass over texts [b, n], without a cache, as far up as is asked for. Padding stands behind a text, where
        no row of it looks.

        The logits of all rows are large: a caller that wants those of some rows asks `head` itself.
        """
        attention.route(self.hf)
        rows = Rows.whole_sequences(tokens.shape[1], self.device)
        stop = None if needs.hidden or needs.logits else max(needs.taps, default=0)
        walked = self._reader.walk(self.embed(tokens), rows, stop=stop, taps=needs.taps)
        logits = self.head(self.norm(walked.hidden)) if needs.logits else None
        return Scores(logits=logits, hidden=walked.hidden if needs.hidden else None, taps=walked.taps)

    def onward(self, batch: Batch, hidden: Tensor, layer: int, grafts: tuple[Graft, ...] = ()) -> Tensor:
        attention.route(self.hf)
        rows = Rows.behind(batch.take(self.cache.length), hidden.shape[1], batch)
        return self.layer_stack.walk(hidden, rows, start=layer, grafts=grafts).rows

    def alongside(self, hidden: Tensor, layer: int, anchor: Tensor, joins: Sequence[Join]) -> Iterator[Joined]:
        attention.route(self.hf)
        return self._reader.alongside(hidden, layer, anchor, joins)


def _end_tokens(hf: PreTrainedModel) -> list[int]:
    """Ids that end a sequence: generation_config.json names one or a list; config.json is the older place. What is no id of
    the vocabulary is dropped with a warning: the model cannot write it, and the rest of the model is fine."""
    generation = getattr(hf, "generation_config", None)
    places = {"generation_config.json": getattr(generation, "eos_token_id", None), "config.json": hf.config.eos_token_id}

    def is_id(end: Any) -> bool:
        return type(end) is int and 0 <= end < hf.config.vocab_size

    for place, named in places.items():
        if named is None:
            continue
        given = named if isinstance(named, list | tuple) else [named]
        ids = sorted({end for end in given if is_id(end)})
        if others := [end for end in given if not is_id(end)]:
            warnings.warn(
                f"{place}: eos_token_id names {', '.join(map(repr, others))}, but the ids of this model are whole numbers "
                f"from 0 to {hf.config.vocab_size - 1}; no sequence ends there. Put the right ids into the file",
                ForewordWarning,
                stacklevel=3,
            )
        if ids or not others:
            return ids
    return []
