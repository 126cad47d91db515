"""Model: embedding, Stack, norm and head of a transformers causal language model. The target is one, a draft model another.

`score` is the pass that verifies a draft (VERIFY). In: a Draft and the slots it is for. Out: Scores for every row. The cache
holds the rows before the root. A pass writes scratch rows only; the engine commits them.
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

from foreword.core.draft import Draft, Tree
from foreword.core.needs import Graft, Join, Joined, Needs, Skip
from foreword.core.scores import Scores
from foreword.core.state import Batch
from foreword.core.target import DraftHead
from foreword.errors import ForewordWarning
from foreword.model import attention, linears
from foreword.model.cache import SharedCacheMemory, SlotCache
from foreword.model.cost import CostCurve
from foreword.model.draft_linears import DraftLinears
from foreword.model.families import family_of
from foreword.model.family import Family
from foreword.model.stack import Rows, Stack

KERNEL_S = 3e-6  # seconds of a small kernel in a captured round, from a trace on an H200

if TYPE_CHECKING:
    from foreword.model.fingerprint import Fingerprint


@dataclass(frozen=True)
class WidenedFrom:
    """The original of a widened model. Both compute the same function."""

    times: int  # how many times as wide
    original: Fingerprint
    parameters: int  # of the widened model, counted as transformers does


class Model:
    """A `core.Target` on a transformers model."""

    slow = ""  # how transformers runs it alone, if it does: see `slow.py`

    def __init__(
        self,
        hf: PreTrainedModel,
        name: str | None = None,
        curve: CostCurve | None = None,
        widened_from: WidenedFrom | None = None,
        cache_memory: SharedCacheMemory | None = None,
        family: Family | None = None,
        ranks: int = 1,
    ) -> None:
        """With `cache_memory`, the caches are placed there; other models may share it. With `family`, the model is run as
        one of that, whatever its config says. `ranks`: over how many its layers are divided."""
        self.hf = hf
        self.device, self.dtype = hf.device, hf.dtype  # kept: transformers searches the modules for them each time
        self.family = family or family_of(hf.config)
        attention.install(hf)
        self._restore = finalize(self, attention.remove, hf)  # also if `release` is never called
        self._restore.atexit = False
        self.name = name or hf.config.name_or_path or hf.config.model_type
        self.layer_stack = Stack(hf, self.family, self.family.layers(hf), ranks)
        self._uncached = Stack(hf, self.family, self.family.layers(hf), ranks)  # the same layers without a cache
        self._draft_linears = DraftLinears(hf.lm_head)
        self.hidden_size: int = hf.config.hidden_size
        self.vocab_size: int = hf.config.vocab_size
        self.attention_heads: int = hf.config.num_attention_heads
        self.layers = len(self.layer_stack.layers)
        self.repeats = self.family.repeats(hf.config)
        self.ends = torch.tensor(end_tokens(hf, self.vocab_size), dtype=torch.long, device=self.device)
        self.max_context: int = hf.config.max_position_embeddings
        self.context = self.max_context
        self.curve = curve
        self.widened_from = widened_from
        self.cache_memory = cache_memory
        self.pieces: Callable[[], Sequence[str]] | None = None
        self.fingerprint: Fingerprint | None = None  # as it was last computed: weights may change

    def use_costs(self, curve: CostCurve | None) -> None:
        """Set what passes cost on this machine. If it is None, every pass costs 1.0."""
        self.curve = curve

    def use_pieces(self, pieces: Callable[[], Sequence[str]]) -> None:
        """Set how the tokenizer spells every token, for drafters that need it. `pieces` is called only when they do."""
        self.pieces = pieces

    def limit_context(self, context: int) -> None:
        """Set how many tokens a sequence may have. Drafters size their own caches by it before `allocate`."""
        self.context = context

    @property
    def ranks(self) -> int:
        """Over how many ranks the layers are divided."""
        return self.layer_stack.ranks

    @property
    def cache(self) -> SlotCache:
        assert self.layer_stack.cache is not None, "allocate() comes first"
        return self.layer_stack.cache

    def allocate(self, slots: int, context: int, scratch: int) -> SlotCache:
        self.context = context
        return self.layer_stack.allocate(slots, context, scratch, self.cache_memory)

    @contextmanager
    def temporary_cache(self, slots: int, context: int, scratch: int) -> Iterator[SlotCache]:
        """Use another cache inside this block, in memory of its own, and put the engine's back afterwards."""
        stack, before = self.layer_stack, (self.context, self.cache_memory)
        held = stack.cache, stack.fused, stack.rotary_tables  # the same objects: a captured round knows their addresses
        try:
            self.cache_memory = None
            yield self.allocate(slots, context, scratch)
        finally:
            stack.cache, stack.fused, stack.rotary_tables = held
            self.context, self.cache_memory = before

    def with_own_cache(self, cache_memory: SharedCacheMemory | None = None) -> Model:
        """Return another Model on the same weights, with a cache of its own."""
        return Model(self.hf, self.name, self.curve, self.widened_from, cache_memory, self.family, self.ranks)

    def release(self) -> None:
        """Free the cache and restore the transformers model: its own attention, and its training mode."""
        self.layer_stack.free()
        self.cache_memory = None
        self._restore()

    def dry_run(self) -> None:
        """Read one token, so that a layer with unsupported options is refused now and not during a request."""
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
        linear = DraftLinears(linears.select_outputs(self.hf.lm_head, tokens))

        def head(hidden: Tensor, norm: nn.RMSNorm | None = None, /) -> Tensor:
            return self.family.after_head(self.hf, linear(hidden, norm=norm))

        return head

    def after_head(self, products: Tensor) -> Tensor:
        return self.family.after_head(self.hf, products)

    def head_weight(self) -> Tensor:
        head: Any = self.hf.lm_head
        return (
            head.stock().weight if head.weight is None else head.weight
        ).detach()  # a packed head may keep no stock weight

    def cost(self, rows: int, sequences: int = 1) -> float:
        return 1.0 if self.curve is None else self.curve.relative(rows, sequences)

    def read_cost(self, weights: int) -> float:
        return weights * self.dtype.itemsize / linears.read_bytes(self.hf)

    def skip_cost(self, skip: Skip) -> float:
        layers: Any = self.layer_stack.layers
        halves = [
            *(self.family.attention(layers[layer]) for layer in skip.attention),
            *(module for layer in skip.mlp for module in self.family.mlp_modules(layers[layer])),
        ]
        return 1 - sum(map(linears.read_bytes, halves)) / linears.read_bytes(self.hf)

    def launch_cost(self, kernels: int) -> float:
        return 0.0 if self.curve is None else kernels * KERNEL_S / self.curve.at(1)

    def stack(
        self, slots: int, layers: int = 1, init: int | range | None = None, scratch: int = 64, mlp: bool = True
    ) -> Stack:
        stack = Stack.copied(self.hf, self.family, layers, init, mlp)
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
        """Run one pass over a tree, or over some of its rows while the scratch rows before them are kept. If the draft
        brings early states, the pass begins with them."""
        attention.route(self.hf)
        drafting = rows is not None or skip is not None  # neither a prompt chunk nor a draft that the engine verifies
        rows, early = range(draft.nodes) if rows is None else rows, draft.early
        if drafting:
            self.cache.check_room(rows.stop + needs.grafted_rows)
        scored = slice(rows.start, rows.stop)
        of_pass = Rows(
            base=batch.take(self.cache.length),
            depth=draft.tree.depth[:, : rows.stop],
            sees=draft.tree.ancestors[:, scored, : rows.stop],
            batch=batch,
            chain=draft.tree.is_chain,
        )
        hidden = self.embed(draft.tokens[:, scored]) if early is None else early.states[:, scored]
        start = 0 if early is None else early.layer
        walked = self.layer_stack.walk(hidden, of_pass, start, skip=skip, grafts=needs.grafts, taps=needs.taps)
        return Scores(
            # In the model's dtype: a greedy round only compares them, which needs no wider dtype.
            logits=self.head(self.norm(walked.hidden)) if logits == "all" else None,
            hidden=walked.hidden if needs.hidden else None,
            taps=walked.taps,
            grafted=walked.grafted,
        )

    def rerun(self, batch: Batch, tokens: Tensor, skip: Skip) -> Tensor:
        count = tokens.shape[1]
        draft = Draft(tokens, Tree.chain(count, self.device), torch.full_like(tokens[:, 0], count))
        with self.cache.without_last(batch, count):
            return self.score(batch, draft, Needs(hidden=True), skip=skip, logits="none").require_hidden()

    @torch.no_grad()
    def read(self, tokens: Tensor, needs: Needs) -> Scores:
        """Run a causal pass over sequences [b, n], without a cache, up to the last layer that `needs` asks for. Padding
        comes after a sequence, so none of its rows attends to it.

        The logits of all rows are large: a caller that needs those of a few rows should call `head` itself.
        """
        attention.route(self.hf)
        rows = Rows.whole_sequences(tokens.shape[1], self.device)
        stop = None if needs.hidden or needs.logits else max(needs.taps, default=0)
        walked = self._uncached.walk(self.embed(tokens), rows, stop=stop, taps=needs.taps)
        logits = self.head(self.norm(walked.hidden)) if needs.logits else None
        return Scores(logits=logits, hidden=walked.hidden if needs.hidden else None, taps=walked.taps)

    def early(self, tokens: Tensor, rows: Rows, layer: int) -> Tensor:
        attention.route(self.hf)
        return self.layer_stack.walk(self.embed(tokens), rows, stop=layer).hidden

    def onward(self, batch: Batch, hidden: Tensor, layer: int, grafts: tuple[Graft, ...] = ()) -> Tensor:
        attention.route(self.hf)
        rows = Rows.chain_after(batch.take(self.cache.length), hidden.shape[1], batch)
        return self.layer_stack.walk(hidden, rows, start=layer, grafts=grafts).rows

    def alongside(self, hidden: Tensor, layer: int, anchor: Tensor, joins: Sequence[Join]) -> Iterator[Joined]:
        attention.route(self.hf)
        return self._uncached.alongside(hidden, layer, anchor, joins)


def end_tokens(hf: PreTrainedModel, vocabulary: int) -> list[int]:
    """Return the ids that end a sequence. generation_config.json names one or a list; config.json is the older place. Ids
    outside the vocabulary are dropped with a warning: the model cannot write them, and is fine otherwise."""
    generation = getattr(hf, "generation_config", None)
    places = {
        "generation_config.json": getattr(generation, "eos_token_id", None),
        "config.json": getattr(hf.config, "eos_token_id", None),
    }

    def is_id(end: Any) -> bool:
        return type(end) is int and 0 <= end < vocabulary

    for place, named in places.items():
        if named is None:
            continue
        given = named if isinstance(named, list | tuple) else [named]
        ids = sorted({end for end in given if is_id(end)})
        if others := [end for end in given if not is_id(end)]:
            warnings.warn(
                f"{place}: eos_token_id names {', '.join(map(repr, others))}, but the ids of this model are whole numbers "
                f"from 0 to {vocabulary - 1}; no sequence ends there. Put the right ids into the file",
                ForewordWarning,
                stacklevel=3,
            )
        if ids or not others:
            return ids
    return []
