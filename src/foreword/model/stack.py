"""Stack: decoder layers with a cache of their own, run as a whole or in part. The target has one; a drafter may have one.

In: hidden rows, and `Rows`, which gives their positions and which rows each attends to. Out: the rows after the last layer
run, with taps and grafted rows if asked for. The layers are those of transformers, called one by one, or fused layers that
compute the same. With a cache, the keys and values of the rows are written to its scratch rows. Without one, rows attend
only to each other, and gradients flow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foreword.core.draft import Tree
from foreword.core.needs import Graft, HalfKind, Join, Joined, Skip, on_device
from foreword.core.state import Batch
from foreword.model.attention import LayerPass, SequenceKV, has_kernel, mask_of, within_window
from foreword.model.cache import CacheShape, SharedCacheMemory, SlotCache
from foreword.model.family import AttentionSpec, Family, key_heads
from foreword.model.fused.cuda import CudaLayer
from foreword.model.fused.layers import fused_layers
from foreword.model.sharding import key_heads_of_rank, whole_layer
from foreword.ops.dispatch import kernels
from foreword.ranks.group import current

# Attention reads a multiple of this many keys, so that shapes repeat from round to round.
SPAN_STEP = 64


@dataclass(frozen=True)
class Rows:
    """The n rows of a pass, and the m scratch rows that they may attend to. The n rows are the last of the m.

    base [b]: committed rows before the scratch rows. depth [b or 1, m]: distance of each scratch row from `base`; a layer
    with a window needs that of all m. sees [b or 1, n, m]: the scratch rows that each row attends to. A pass over part of a
    tree leaves the scratch rows before its own in place.
    """

    base: Tensor
    depth: Tensor
    sees: Tensor
    batch: Batch | None = None
    chain: bool = False  # every row attends to itself and to all rows before it
    causal: bool = True  # no row attends to a later one; set it to False for a block whose rows attend to each other

    @staticmethod
    def whole_sequences(count: int, device: torch.device) -> Rows:
        """Return the rows of whole sequences of `count` tokens, with causal attention, the same for every sequence."""
        sees = torch.ones(1, count, count, dtype=torch.bool, device=device).tril()
        depth = torch.arange(count, device=device).unsqueeze(0)
        return Rows(torch.zeros(1, dtype=torch.long, device=device), depth, sees, chain=True)

    @staticmethod
    def chain_after(base: Tensor, count: int, batch: Batch) -> Rows:
        """Return a chain of `count` rows after the committed ones."""
        chain = Tree.chain(count, base.device)
        return Rows(base, chain.depth, chain.ancestors, batch, chain=True)

    @staticmethod
    def alongside(length: int, anchor: Tensor, joins: Sequence[Join]) -> Rows:
        """Return the rows that join sequences of `length` rows at the anchors [b, A], join by join."""
        count, device = anchor.shape[1], anchor.device
        position = torch.arange(length, device=device)
        ahead = [anchor + join.offset for join in joins]
        visible = tuple(int(i == j or j in one.sees) for i, one in enumerate(joins) for j in range(len(joins)))
        same_anchor = torch.eye(count, dtype=torch.bool, device=device)
        join_sees = on_device(visible, device).bool().view(len(joins), 1, -1, 1)
        joined = (join_sees & same_anchor.view(1, count, 1, -1)).flatten(2).flatten(0, 1)
        sequence = (position <= anchor.unsqueeze(2)).repeat(1, len(joins), 1)
        sees = torch.cat([sequence, joined.expand(anchor.shape[0], -1, -1)], dim=2)
        depth = torch.cat([position.expand(anchor.shape[0], -1), *ahead], dim=1)
        return Rows(torch.zeros(anchor.shape[0], dtype=torch.long, device=device), depth, sees)

    @staticmethod
    def with_blocks(length: int, anchor: Tensor, offset: Tensor, sees: Tensor) -> Rows:
        """Return the rows of whole sequences of `length` tokens, and after them a block of m rows for each anchor [b, A].

        offset [m]: how many places after its anchor a block row stands. sees [b or 1, A or 1, m, m]: the rows of its own
        block that it attends to. It also attends to its sequence up to the anchor. No row of a sequence attends to a block.
        """
        (batch, anchors), rows, device = anchor.shape, offset.shape[0], anchor.device
        position = torch.arange(length, device=device)
        depth = torch.cat([position.expand(batch, -1), (anchor.unsqueeze(2) + offset).flatten(1)], dim=1)
        whole = torch.zeros(batch, depth.shape[1], depth.shape[1], dtype=torch.bool, device=device)
        whole[:, :length, :length] = position.unsqueeze(1) >= position
        whole[:, length:, :length] = (position <= anchor.unsqueeze(2)).repeat_interleave(rows, dim=1)
        same = torch.eye(anchors, dtype=torch.bool, device=device).view(1, anchors, 1, anchors, 1)
        whole[:, length:, length:] = (same & sees.unsqueeze(3)).flatten(3).flatten(1, 2)
        return Rows(torch.zeros(batch, dtype=torch.long, device=device), depth, whole, causal=False)

    @property
    def count(self) -> int:
        return self.sees.shape[1]

    @property
    def first(self) -> int:
        """The index of the pass's first row among the scratch rows."""
        return self.sees.shape[2] - self.count

    @property
    def visible(self) -> Tensor:
        """`sees`, without later rows if the pass is causal. So a mask excludes what the kernel never reads."""
        return self.sees.tril(self.first) if self.causal and not self.chain else self.sees

    @property
    def position(self) -> Tensor:
        return self.base.unsqueeze(1) + self.depth[:, self.first :]

    def grafted(self, grafts: Sequence[Graft]) -> Rows:
        """Return these rows with those of all grafts after them. Real rows attend to no grafted row. A grafted row attends
        to what its anchor does, to the earlier rows of the same anchor, and to itself."""
        if not grafts:
            return self
        anchor, offset = anchors_and_offsets(grafts, self.base.device)
        depth = torch.cat([self.depth, self.depth[:, self.first + anchor] + offset], dim=1)
        batch, count, _ = self.sees.shape
        earlier = (anchor.unsqueeze(1) == anchor).tril().expand(batch, -1, -1)
        top = torch.cat([self.sees, self.sees.new_zeros(batch, count, len(anchor))], dim=2)
        bottom = torch.cat([self.sees[:, anchor], earlier], dim=2)
        return Rows(self.base, depth, torch.cat([top, bottom], dim=1), self.batch, causal=self.causal)

    def head(self, count: int) -> Rows:
        """Return the first `count` rows, which attend to none of the others."""
        if count == self.count:
            return self
        scratch = self.first + count
        return replace(self, depth=self.depth[:, :scratch], sees=self.sees[:, :count, :scratch])


@dataclass(frozen=True)
class Walked:
    """What a walk gives."""

    rows: Tensor  # [b, n + R, H]: the n rows of the pass, then the R grafted ones
    real: int  # n
    taps: dict[int, Tensor] = field(default_factory=dict)

    @property
    def hidden(self) -> Tensor:
        return self.rows[:, : self.real]

    @property
    def grafted(self) -> Tensor | None:
        return self.rows[:, self.real :] if self.rows.shape[1] > self.real else None


class Stack:
    """Decoder layers and, once allocated, their cache."""

    def __init__(self, model: PreTrainedModel, family: Family, layers: nn.ModuleList, ranks: int = 1) -> None:
        """`ranks`: over how many ranks the layers are divided."""
        self.model, self.ranks = model, ranks
        self.family = family
        self.layers = layers
        self.cache: SlotCache | None = None
        self.attention_specs = [family.attention_spec(layer) for layer in layers]
        self.windows, self.rotary_names = (
            {getattr(spec, name) for spec in self.attention_specs} for name in ("window", "rotary_table")
        )
        self.lacks = Skip.of(mlp=tuple(index for index, layer in enumerate(layers) if not family.mlp_modules(layer)))
        self.fused = fused_layers(layers) if family.fused else None
        self.rotary_tables: dict[str, Any] = {}  # cosine and sine at every position, by table

    @staticmethod
    def copied(model: PreTrainedModel, family: Family, layers: int, init: int | range | None, mlp: bool = True) -> Stack:
        """Return a stack of new layers of the model's kind: copies of layer `init`, copies of a range of layers, or, if it
        is None, layers initialised as transformers does. Without `mlp` they are attention halves. They are whole, though
        the model may be divided over ranks."""
        indices = init if isinstance(init, range) else [-1 if init is None else init] * layers
        assert len(indices) == layers, "a range names a layer for each"
        copies = [whole_layer(model, family.layers(model)[index], current()) for index in indices]
        if not mlp:
            for layer in copies:
                family.drop_mlp(layer)
        fresh = nn.ModuleList(copies).requires_grad_(True)
        if init is None:
            fresh.apply(model._init_weights)
        return Stack(model, family, fresh)

    def allocate(self, slots: int, context: int, scratch: int = 64, memory: SharedCacheMemory | None = None) -> SlotCache:
        """Give the stack a cache. Memory is checked before it is allocated; if the cache does not fit, the old one stays."""
        device = next(self.model.parameters()).device
        self.cache = SlotCache(self.cache_shape(), slots, context, scratch, device, memory)
        self.fused = fused_layers(self.layers) if self.family.fused else None  # new ones: the old ones view the old cache
        self.rotary_tables = self._rotary(torch.arange(self.cache.rows, device=self.cache.length.device).unsqueeze(0))
        return self.cache

    def free(self) -> None:
        self.cache = self.fused = None
        self.rotary_tables = {}

    def cache_shape(self) -> CacheShape:
        config = self.model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return CacheShape(len(self.layers), key_heads_of_rank(config, self.ranks), width, self.model.dtype)

    def read(self, hidden: Tensor, batch: Batch, count: Tensor, skip: Skip | None = None) -> Tensor:
        """Run rows [b, n, H] of a sequence as a chain after the cached ones, and commit the first `count` [b] of them."""
        assert self.cache is not None
        rows = Rows.chain_after(batch.take(self.cache.length), hidden.shape[1], batch)
        walked = self.walk(hidden, rows, skip=skip).hidden
        self.cache.advance(batch, count)
        return walked

    def copy(self, source: int, slot: int, rows: int) -> None:
        """Copy the first `rows` cached rows of a slot to another one."""
        assert self.cache is not None
        self.cache.copy(source, slot, rows)

    def restart(self, batch: Batch, length: Tensor) -> None:
        """Start sequences whose slots hold their first `length` [b] rows. Later rows are cleared: they may be NaN."""
        assert self.cache is not None
        self.cache.rewind(batch, length)
        for slot in batch.ids:
            self.cache.wipe_scratch(slot)

    def walk_sequences(self, hidden: Tensor, skip: Skip | None = None, rows: Rows | None = None) -> Tensor:
        """Run whole sequences [b, n, H] from their first row on, without a cache. This is how the layers are trained.
        `rows`: what attends to what, if it is not each sequence alone."""
        uncached = Stack(self.model, self.family, self.layers)
        rows = rows or Rows.whole_sequences(hidden.shape[1], hidden.device)
        return uncached.walk(hidden, rows, skip=skip).hidden

    def walk_joined(self, hidden: Tensor, anchor: Tensor, joins: Sequence[Join]) -> tuple[Tensor, ...]:
        """Run whole sequences [b, n, H] and the rows that join them at the anchors [b, A], without a cache. Return what each
        join has become: [b, A, H]. This is how layers are trained whose own rows of the sequence are read by other rows."""
        uncached = Stack(self.model, self.family, self.layers)
        *_, last = uncached.alongside(hidden, 0, anchor, joins, frozen=False)
        return last.rows

    def walk(
        self,
        hidden: Tensor,
        rows: Rows,
        start: int = 0,
        stop: int | None = None,
        skip: Skip | None = None,
        grafts: tuple[Graft, ...] = (),
        taps: tuple[int, ...] = (),
    ) -> Walked:
        """Run rows [b, n, H] through the layers after `start` up to and including `stop`."""
        stop = len(self.layers) if stop is None else stop
        if start == 0 and self.family.parts.positions:
            hidden = self.family.placed(self.model, hidden, rows.position)
        real, tapped = rows.count, {}
        # Make a new tensor object. No earlier walk handed on a norm for it, so this walk launches one: between the kernel
        # that computes positions, and the product that reads them before its turn.
        hidden = hidden[:]
        counts = {real + sum(graft.rows for graft in grafts if graft.layer <= layer) for layer in range(start, stop)}
        if self.cache is not None and not rows.chain:
            self.cache.check_room(rows.sees.shape[2] + sum(graft.rows for graft in grafts))
        views = self._views(rows, grafts, tuple(sorted(counts)), hidden.dtype)
        skip = self.lacks if skip is None else skip | self.lacks
        for layer in range(start, stop + 1):
            if layer in taps:
                tapped[layer] = hidden[:, :real]
            for graft in grafts:
                if graft.layer == layer:
                    hidden = graft.onto(hidden, real)
            if layer < stop:
                hidden = self._run_layer(layer, hidden, views[hidden.shape[1]], skip)
        return Walked(hidden, real, tapped)

    def alongside(
        self, hidden: Tensor, start: int, anchor: Tensor, joins: Sequence[Join], frozen: bool = True
    ) -> Iterator[Joined]:
        """Run whole sequences [b, n, H] through the layers after `start`, and the rows that join at the anchors [b, A].
        Yield both as they leave each layer. The rows have gradients; the sequences have them if they are not `frozen`."""
        kv, count = SequenceKV(), anchor.shape[1]
        sequences = Rows.whole_sequences(hidden.shape[1], hidden.device)
        if start == 0:
            hidden = self.family.placed(self.model, hidden, sequences.position)
        whole, joined = self._view(sequences, hidden.dtype), None
        whole = replace(whole, shared=whole.shared._replace(kv_out=kv))
        rows: tuple[Tensor, ...] = ()
        for layer in range(start, len(self.layers) + 1):
            for join in (join for join in joins if join.layer == layer):
                rows, joined = (*rows, join.make(hidden.gather(1, _row_index(anchor, hidden)), rows)), None
            yield Joined(layer, hidden, rows)
            if layer == len(self.layers):
                return
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
                hidden = self._run_layer(layer, hidden, whole, self.lacks)
            if rows:
                if joined is None:
                    joined = self._view(Rows.alongside(hidden.shape[1], anchor, joins[: len(rows)]), hidden.dtype)
                    joined = replace(joined, shared=joined.shared._replace(kv_in=kv))
                rows = self._run_layer(layer, torch.cat(rows, dim=1), joined, self.lacks).split(count, dim=1)

    def _run_layer(self, index: int, hidden: Tensor, view: _View, skip: Skip) -> Tensor:
        """Run a layer, one half of it, or neither."""
        if index in skip.attention and index in skip.mlp:
            return hidden
        half: HalfKind | None = "mlp" if index in skip.attention else "attention" if index in skip.mlp else None
        layer, fused = self.layers[index], None if self.fused is None else self.fused[index]
        if fused is not None and self.cache is not None:
            return fused(hidden, view.rotary[self.attention_specs[index].rotary_table], view.for_layer(index), half)
        if half == "mlp":
            return self.family.mlp_half(layer, hidden)
        if half == "attention":
            return self.family.attention_half(layer, hidden, **view.options(index))
        if isinstance(fused, CudaLayer) and view.causal and not torch.is_grad_enabled():
            table = view.rotary[self.attention_specs[index].rotary_table]
            return fused.whole_sequences(hidden, table, view.shared.kv_out)
        return layer(hidden, attention_mask=None, **view.options(index))

    def _views(self, rows: Rows, grafts: tuple[Graft, ...], counts: tuple[int, ...], dtype: torch.dtype) -> dict[int, _View]:
        """Return what layers share, by how many rows they run: the layers between two grafts have the same number."""
        if counts and self.cache is not None and has_kernel(self.cache):
            return self._views_by_kernel(rows, grafts, counts)
        whole = rows.grafted(grafts)
        return {count: self._view(whole.head(count), dtype) for count in counts}

    def _view(self, rows: Rows, dtype: torch.dtype) -> _View:
        """Return the positions, masks and cache places of rows."""
        rows = replace(rows, sees=rows.visible)
        seen = {window: within_window(rows.sees, rows.depth, window) for window in self.windows}
        if self.cache is None:
            causal = rows.chain and not any(spec.window or spec.softcap or spec.sinks for spec in self.attention_specs)
            masks = {} if causal else self._masks(torch.zeros_like(rows.base), rows, rows.sees.shape[2], dtype)
            shared = LayerPass(rows.base, rows.depth, rows.sees, causal=rows.causal)
            return _View(self.attention_specs, self._rotary(rows.position), rows, seen, masks, shared, causal=causal)
        assert rows.batch is not None
        rotary, places = self._rotary_and_places(rows)
        key_rows = min(-(-(rows.batch.span + rows.sees.shape[2]) // SPAN_STEP) * SPAN_STEP, self.cache.rows)
        shared = LayerPass(rows.base, rows.depth, rows.sees, causal=rows.causal, batch=rows.batch, places=places)
        shared = shared._replace(key_rows=key_rows)
        masks = self._masks(rows.base, rows, key_rows, dtype)
        return _View(self.attention_specs, rotary, rows, seen, masks, shared, self.cache)

    def _rotary_and_places(self, rows: Rows) -> tuple[dict[str, Any], Tensor]:
        """Return the rotary angles of rows, by table, and where their keys and values are stored."""
        assert self.cache is not None and rows.batch is not None
        position = rows.position.clamp(max=self.cache.rows - 1)  # padding may lie beyond
        rotary = {name: tuple(part[0, position] for part in table) for name, table in self.rotary_tables.items()}
        order = torch.arange(rows.first, rows.sees.shape[2], device=position.device)
        return rotary, self.cache.places(rows.batch, rows.base.unsqueeze(1) + order)

    def _views_by_kernel(self, rows: Rows, grafts: tuple[Graft, ...], counts: tuple[int, ...]) -> dict[int, _View]:
        assert self.cache is not None and rows.batch is not None
        by_kernel = kernels("layer.row_positions")
        device, heads, grafted = rows.base.device, self.cache.shape.heads, None
        if grafts:
            grafted = by_kernel.GraftedRows(*anchors_and_offsets(grafts, device), on_device(counts, device), counts)
        where = rows.base, rows.depth, rows.sees, rows.batch.slots, heads, grafted
        found = {name: by_kernel.row_positions(table, *where) for name, table in self.rotary_tables.items()}
        first = next(iter(found.values()))
        views = {}
        for count, places in zip(counts, first.places, strict=True):
            part = replace(rows, depth=first.depth, sees=first.sees).head(count)
            seen = {window: within_window(part.sees, part.depth, window) for window in self.windows}
            rotary = {name: (one.cosine[:, :count], one.sine[:, :count]) for name, one in found.items()}
            chain = rows.chain and not grafts
            shared = LayerPass(part.base, part.depth, part.sees, chain, rows.causal, batch=part.batch, places=places)
            views[count] = _View(self.attention_specs, rotary, part, seen, {}, shared, self.cache)
        return views

    def _rotary(self, position: Tensor) -> dict[str, Any]:
        """Return the rotary angles of positions [b, n], by table."""
        like = torch.empty(0, dtype=self.model.dtype, device=position.device)
        return {table: self.family.positions(self.model, like, position, table) for table in self.rotary_names}

    def _masks(self, base: Tensor, rows: Rows, key_rows: int, dtype: torch.dtype) -> dict[int, Tensor]:
        """Return a mask for each window among the layers."""
        config = self.model.config
        groups = config.num_attention_heads // key_heads(config)
        return {window: mask_of(base, rows.sees, key_rows, groups, dtype, window, rows.depth) for window in self.windows}

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.layers.parameters()


def anchors_and_offsets(grafts: Sequence[Graft], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the anchors [R] and offsets [R] of the rows of all grafts."""
    anchor, offset = (tuple(one for graft in grafts for one in getattr(graft, name)) for name in ("anchor", "offset"))
    return on_device(anchor, device), on_device(offset, device)


def _row_index(places: Tensor, rows: Tensor) -> Tensor:
    """Return places [b, A] as an index that gathers whole rows."""
    return places.unsqueeze(-1).expand(-1, -1, rows.shape[-1])


@dataclass(frozen=True)
class _View:
    """What layers that run the same rows share, and what each of them gets of it."""

    specs: list[AttentionSpec]  # by layer
    rotary: dict[str, Any]  # angles of the rows, by `AttentionSpec.rotary_table`
    rows: Rows
    seen: dict[int, Tensor]  # scratch rows that each row attends to, by `AttentionSpec.window`
    masks: dict[int, Tensor]  # the same as masks over all keys, by window, if torch computes attention
    shared: LayerPass
    cache: SlotCache | None = None
    causal: bool = False  # whole sequences with plain causal attention, which needs no mask

    def for_layer(self, layer: int) -> LayerPass:
        spec, cache = self.specs[layer], self.cache
        cached = None if cache is None else cache.layers[layer]
        seen, mask = self.seen[spec.window], self.masks.get(spec.window)
        return self.shared._replace(spec=spec, sees=seen, mask=mask, cache=cached)

    def options(self, layer: int) -> dict[str, Any]:
        """Return the keyword arguments for a layer of transformers."""
        angles = self.rotary[self.specs[layer].rotary_table]
        return {"position_embeddings": angles, "position_ids": self.rows.position, "foreword_pass": self.for_layer(layer)}
